"""Labels from the last layer's gradient: exact for one example, counts for batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from bract.attacks.problem.case import UNROLL, Case
from bract.attacks.problem.client_model import LocalTraining, local_training, step_settings
from bract.attacks.problem.epoch_orders import steps_per_epoch
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.problem.training_path import TrainingPath, knows_steps, mean_gradient
from bract.attacks.solve.expectation import class_gradients
from bract.attacks.solve.label_sequences import LastLayer, PathLayer, label_sequences
from bract.attacks.solve.uneven_counts import uneven_counts
from bract.errors import BractError
from bract.models import tap
from bract.models.losses import Loss
from bract.updates.step_law import LINEAR
from bract.updates.update import Tensors

_PROBES = 64
_REFINEMENTS = 3


@dataclass(frozen=True, kw_only=True)
class InferredLabels:
    """Labels of an update as the last layer shows them.

    Attributes
    ----------
    labels
        int64 ``(B,)``; sorted after one step, whose gradient does not determine which image is
        which.
    counts
        float64 ``(classes,)``, estimated examples of each class before rounding; they sum to B.
    exact
        Whether a single example's label was read from the one negative coordinate.
    source
        ``bias`` or ``weight``: the tensor that was read.
    """

    labels: Tensor
    counts: Tensor
    exact: bool
    source: Literal["bias", "weight", "evidence"]


def infer_labels(case: Case, *, choice: int = 0) -> InferredLabels:
    """Infer the labels of an update.

    One example under cross entropy: the bias gradient of the last layer is ``p - y``, negative at
    the true class alone (iDLG, Zhao et al. 2020, eq. 3). Where noise or another defense leaves more
    or fewer negative coordinates than one, the label is that under which random images have the
    last layer's gradient of the highest cosine (`class_gradients`): with Gaussian noise of one
    deviation and a common unknown scale, the likeliest. Several: with ``P[k]`` the mean prediction
    for examples of class k, the bias gradient is ``(P^T - I) n / N``, linear in the counts n; the
    predictions are estimated from probe inputs and, for classes that are present, from the features
    ``dW[k] / db[k]`` (iLRG, Ma et al. 2023). Steps that are unrolled one by one are searched for
    the sequence of labels (`bract.attacks.solve.label_sequences`); after longer training the
    midpoint of the trajectory replaces the parameters, and what momentum, FedProx and weight decay
    made of the mean gradient is undone first (`TrainingPath.mean_gradient`); of Adam, whose steps
    are no sum of gradients, the sequence is searched however long the training was. Several rounds
    of the same images are read one by one, and their counts averaged.

    Parameters
    ----------
    choice
        Number of the restart. Over several epochs it selects in which order the client took its
        images (`LocalTraining.order`); where those are used up, or there is nothing to choose, the
        next likely sequence of labels is taken, counted round and round.
    """
    if case.rounds and case.evidence.labels is None:
        return _over_rounds(case)
    if case.evidence.labels is not None:
        known = case.evidence.labels.to(torch.int64).sort().values
        counts = torch.bincount(known, minlength=case.target_model.classes).to(torch.float64)
        return InferredLabels(labels=known, counts=counts, exact=True, source="evidence")
    weight_name, bias_name = last_layer(case.target_model)
    target = case.evidence.target
    weight = target.get(weight_name)
    bias = target.get(bias_name) if bias_name else None
    if bias is None and weight is None:
        raise BractError(
            f"{case.observation.key}: labels need the gradient of {weight_name}, the last layer",
            code="attack-evidence",
        )
    raw = (bias, weight)
    bias, weight = (
        None if v is None else mean_gradient(case.forward, v, case.observation.parameters[n].to(v))
        for n, v in ((str(bias_name), bias), (weight_name, weight))
    )
    if bias is not None:
        slope = bias.to(torch.float64)
    elif weight is not None:
        slope = weight.to(torch.float64).sum(dim=1)
    source: Literal["bias", "weight"] = "bias" if bias is not None else "weight"
    if case.images == 1:
        exact = int((slope < 0).sum()) == 1
        label = slope.argmin().cpu() if exact else _nearest_class(case)
        return InferredLabels(
            labels=label[None],
            counts=nn.functional.one_hot(label, len(slope)).to(torch.float64),
            exact=exact,
            source=source,
        )
    if bias is None:
        counts = _counts_by_weight(case, slope.cpu(), weight_name)
    else:
        counts = _counts(case, slope.cpu(), weight, weight_name, bias_name)
    labels = _whole_labels(case, counts.cpu())
    training = local_training(case.forward)
    linear = training is not None and training.optimizer in LINEAR
    normalised = _normalised_steps(case)
    if bias is not None and normalised is not None:
        labels = _along_path(case, normalised, slope.cpu(), labels, choice)
        counts = torch.bincount(labels, minlength=len(slope)).to(torch.float64)
    elif raw[0] is not None and raw[1] is not None and training is not None and linear:
        labels = _sequence(case, training, raw[0].double(), raw[1], labels, choice)
        counts = torch.bincount(labels, minlength=len(slope)).to(torch.float64)
    return InferredLabels(
        labels=labels,
        counts=counts.cpu(),
        exact=False,
        source=source,
    )


def last_layer(target_model: TargetModel) -> tuple[str, str | None]:
    """Names of the weight and bias of the linear layer that makes the logits.

    Raises
    ------
    BractError
        If there is none, or every token has a label (`bract.attacks.methods.token_span.tags`).
    """
    if target_model.loss.per_token:
        raise BractError(
            f"model {target_model.declaration.model!r} labels every token; labels of tokens are "
            "read together with the tokens, by token-span",
            code="attack-unsuited",
        )
    found = [
        (name, module)
        for name, module in target_model.model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == target_model.declaration.classes
    ]
    if not found:
        raise BractError(
            f"model {target_model.declaration.model!r} has no linear layer with "
            f"{target_model.declaration.classes} outputs; its labels cannot be read from the "
            "gradient",
            code="attack-unsuited",
        )
    name, module = found[-1]
    prefix = f"{name}." if name else ""
    return f"{prefix}weight", None if module.bias is None else f"{prefix}bias"


def _nearest_class(case: Case) -> Tensor:
    """The class whose expected last-layer gradient has the highest cosine with the target's."""
    target = case.evidence.target
    names = [name for name in last_layer(case.target_model) if name in target]
    seen = torch.cat([target[name].flatten().cpu() for name in names]).to(torch.float64)
    cpu = torch.device("cpu")
    expected = class_gradients(case.observation, case.target_model, cpu, only=names)
    rows = torch.stack([torch.cat([g[name].flatten() for name in names]) for g in expected])
    cosines: Tensor = rows @ seen / rows.norm(dim=1).clamp_min(1e-300)
    return cosines.argmax()


def _over_rounds(case: Case) -> InferredLabels:
    """Average the counts that every round shows."""
    found = [infer_labels(c) for c in case.rounds]
    counts = torch.stack([f.counts for f in found]).mean(dim=0)
    return InferredLabels(
        labels=_round_counts(counts, case.images),
        counts=counts,
        exact=all(f.exact for f in found),
        source=found[-1].source,
    )


def _counts(
    case: Case, slope: Tensor, weight: Tensor | None, weight_name: str, bias_name: str | None
) -> Tensor:
    parameters = _midpoint(case)
    probe = _probe_predictions(case, parameters).to(torch.float64)
    predictions = probe.expand(len(slope), -1).clone()
    loss = case.target_model.loss
    counts = _solve_counts(predictions, slope, case.images, loss)
    if weight is None or bias_name is None:
        return counts
    last_weight = parameters[weight_name].to(torch.float64)
    last_bias = parameters[bias_name].to(torch.float64)
    for _ in range(_REFINEMENTS):
        present = (counts > 0.5) & (slope < 0)
        for k in present.nonzero().flatten().tolist():
            features = weight[k].to(torch.float64).cpu() / slope[k]
            predictions[k] = (last_weight @ features + last_bias).softmax(dim=0)
        counts = _solve_counts(predictions, slope, case.images, loss)
    return counts


def _counts_by_weight(case: Case, slope: Tensor, weight_name: str) -> Tensor:
    """Return the counts where the last layer has no bias, from its weight's rows.

    The sum of row k is ``sum_i (p_ik - y_ik) |h_i| / N``, with ``|h_i|`` the sum of what enters the
    layer: with its mean over probe inputs, N times it over that mean is ``N p_k - n_k``.
    """
    parameters = _midpoint(case)
    entering = float(_probe_features(case, parameters, weight_name).sum(dim=1).mean())
    slope = slope if entering > 0.0 else -slope
    negative = -slope / max(abs(entering), 1e-30)
    counts = (_probe_predictions(case, parameters).double() + negative).clamp_min(0.0)
    return case.images * counts / counts.sum().clamp_min(1e-30)


def _sequence(
    case: Case, training: LocalTraining, slope: Tensor, weight: Tensor, initial: Tensor, choice: int
) -> Tensor:
    weight_name, bias_name = last_layer(case.target_model)
    parameters = case.observation.parameters
    features = (slope @ weight.to(torch.float64)) / slope.square().sum().clamp_min(1e-30)
    logits = parameters[weight_name].to(features) @ features
    if bias_name is not None:
        logits = logits + parameters[bias_name].to(features)
    order, choice = training.order(case.images, choice)
    # The last layer shows no norm of a whole gradient.
    training = replace(training, max_grad_norm=None, max_grad_value=None)
    square, loss = float(features.square().sum()), case.target_model.loss
    sequences = label_sequences(
        layer=LastLayer(logits.cpu(), square, slope.cpu(), training, order, loss),
        images=case.images,
        initial=initial,
    )
    return sequences[choice % len(sequences)]


def _normalised_steps(case: Case) -> LocalTraining | None:
    """The steps of an optimizer whose directions are no sum of gradients, or None."""
    p = case.observation.declaration
    if not knows_steps(case.observation) or case.law.linear:
        return None
    size = min(p.batch_size or case.images, case.images)
    epoch = steps_per_epoch(case.images, size)
    steps = min(case.law.counted, max(UNROLL, epoch))
    whole = steps == case.law.steps
    settings = step_settings(p) | ({} if whole else {"momenta": ()})
    return LocalTraining(
        steps=steps,
        batch_size=size,
        lr=1.0,
        lr_factors=p.lr_factors if whole else (),
        **settings,
    )


def _along_path(
    case: Case, training: LocalTraining, slope: Tensor, initial: Tensor, choice: int
) -> Tensor:
    """The sequence of labels, with the predictions of probe inputs on the way of the training."""
    ends = [_probe_predictions(case, _on_the_way(case, share)) for share in (0.0, 1.0)]
    order, choice = training.order(case.images, choice)
    sequences = label_sequences(
        layer=PathLayer(
            *(ends[0].double(), ends[1].double(), slope, training, order), case.target_model.loss
        ),
        images=case.images,
        initial=initial,
    )
    return sequences[choice % len(sequences)]


def _midpoint(case: Case) -> Tensors:
    if isinstance(case.forward, TrainingPath):
        return _on_the_way(case, case.forward.share)
    half = 0.5 if case.law.averaging else 0.0
    return _on_the_way(case, half)


def _on_the_way(case: Case, share: float) -> Tensors:
    observation = case.observation
    return {
        name: (value - share * observation.update[name]).cpu()
        for name, value in observation.parameters.items()
    }


def _probes(case: Case) -> Tensor:
    shape, text = case.target_model.image_shape, case.observation.declaration.text
    drawn = torch.Generator().manual_seed(0)
    if text is None:
        return torch.randn(_PROBES, *shape, generator=drawn)
    # A text of padding alone has no mean.
    ids = torch.randint(1, max(2, text.vocabulary), (_PROBES, *shape), generator=drawn)
    return ((ids + text.padding) % text.vocabulary).float()


def _probe_predictions(case: Case, parameters: Tensors) -> Tensor:
    case.target_model.model.cpu()
    with torch.no_grad():
        logits = case.target_model(
            {name: value[None] for name, value in parameters.items()},
            {n: case.observation.buffers[n].cpu()[None] for n in case.target_model.buffer_names},
            _probes(case)[None],
        )
    return logits[0].softmax(dim=-1).mean(dim=0)


def _probe_features(case: Case, parameters: Tensors, weight_name: str) -> Tensor:
    """Return what enters the last layer, ``(probes, features)``."""
    model = case.target_model.model.cpu()
    layer = weight_name.rpartition(".")[0]
    held = {n: case.observation.buffers[n].cpu() for n in case.target_model.buffer_names}
    run = partial(functional_call, model, parameters | held, (_probes(case),))
    with torch.no_grad():
        return tap.inputs(run, model, [layer])[layer].flatten(1)


def _solve_counts(predictions: Tensor, slope: Tensor, examples: int, loss: Loss) -> Tensor:
    """Non-negative n with ``(P^T - I) n = N slope`` and ``sum n = N``, by least squares.

    Smoothed labels are ``(1 - s) I + s / C`` in the place of ``I``; weights of classes are in n,
    and are taken out of it.
    """
    from scipy.optimize import nnls

    classes = len(slope)
    matrix = torch.cat(
        [predictions.T - loss.targets(torch.eye(classes).double()).T, torch.ones(1, classes)]
    )
    right = torch.cat([examples * slope, torch.tensor([float(examples)], dtype=torch.float64)])
    solution, _ = nnls(matrix.numpy(), right.numpy())
    counts = torch.from_numpy(np.asarray(solution))
    if not loss.class_weights:
        return counts
    counts = counts / torch.tensor(loss.class_weights).double().clamp_min(1e-12)
    return examples * counts / counts.sum().clamp_min(1e-30)


def _whole_labels(case: Case, counts: Tensor) -> Tensor:
    """Return whole numbers of each class as sorted labels.

    Turns in smaller batches are told from their shares where all steps count alike.
    """
    declared, path = case.observation.declaration, case.forward
    if isinstance(path, TrainingPath) and path.uneven and path.steps_alike:
        assert declared.batch_size is not None
        shares = counts * case.images / counts.sum().clamp_min(1e-30)
        found = uneven_counts(shares, case.images, declared.batch_size, case.law.counted)
        if found is not None:
            return torch.repeat_interleave(torch.arange(len(found)), found)
    return _round_counts(counts, case.images)


def _round_counts(counts: Tensor, examples: int) -> Tensor:
    """Whole numbers by largest remainder, as sorted labels ``(examples,)``."""
    if not float(counts.sum()) > 0.0:
        counts = torch.ones_like(counts)  # nothing is known of them
    scaled = counts * examples / counts.sum().clamp_min(1e-30)
    whole = scaled.floor()
    rest = examples - int(whole.sum())
    order = (scaled - whole).argsort(descending=True)
    whole[order[:rest]] += 1
    return torch.repeat_interleave(torch.arange(len(counts)), whole.to(torch.int64))
