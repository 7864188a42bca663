"""Labels of tokens, from the output layer's gradient once the tokens are known."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from bract.attacks.problem.case import text_schema
from bract.attacks.problem.problem import Problem
from bract.attacks.reading.spectrum import Spectrum
from bract.data.tokens import UNLABELLED, ids_of
from bract.errors import BractError
from bract.models import tap
from bract.models.losses import label_rows
from bract.updates.update import Tensors

_LEAST = 0.5
"""Share of a text's largest slope from which on a token has a label: all that have one have equal
slopes, the others none."""

_ALIKE = 1e-5
"""Relative distance up to which tokens have the same features, as equal beginnings of texts have in
a causal model. They share the least-squares slope equally."""

_DEFICIENT = 1e-7
"""Singular values of tokens' features below this share of the largest are none."""


_MOST_UNKNOWNS = 1000
"""Tokens times tags up to which slopes of one sign are searched: seconds at that number."""


_FITS, _FAINT = 1e-4, 1e-12
"""Share of a token's row that is left where its text explains it, and singular values of normal
equations, relative to the largest, that are none."""

_AT_ONCE = 64
"""Copies of a text in one pass, each for the slope of one output."""


def infer_tags(problem: Problem, texts: Tensor, certain: Sequence[Sequence[Tensor]] = ()) -> Tensor:
    """Return the label of every token as rows ``(L, B, T * tags)``, zeros where it has none.

    The gradient of the output layer is ``S^T H``, with H the features of all tokens, which follow
    from the tokens, and S the slopes of the loss at their logits. While the tokens are linearly
    independent, S is the one least-squares solution. Under the mean cross entropy of each text's
    labelled tokens, the slope at a token of label y and prediction p is a multiple of
    ``p - e_y``, the same for all labelled tokens of a text, and zero where there is no label: y is
    the tag of the least slope. Of a gradient whose coordinates count by weights, as one that was
    inverted out of a defense, slopes are also fitted to what counts, and those labels are taken
    whose own gradient fits it best.

    Parameters
    ----------
    texts
        Examples ``(L, B, T, 1, 1)`` in [0, 1].
    certain
        By trial, known labels of the first texts, int64 ``(1, T)`` each: what these add to the
        gradient is subtracted, and their tokens need no equations.

    Raises
    ------
    BractError
        If the update lacks the output layer, or has more tokens than the layer has inputs.
    """
    found = [
        _of_trial(problem, trial, texts[trial], certain[trial] if certain else ())
        for trial in range(problem.trials)
    ]
    return torch.stack(found).to(problem.device, problem.dtype)


def tags_of_text(
    model: nn.Module,
    gradients: Mapping[str, Tensor],
    text: Tensor,
    *,
    embedding: str,
    tags: int,
) -> Tensor:
    """Return the label of every token of one text of a batch, whose other texts are unknown.

    What a text adds to the embedding's gradient is linear in the slopes of the loss at its logits.
    Rows of tokens that no other text has hold that alone, and are more equations than there are
    slopes: the rows that fit worst are left out one by one until the others fit. It is a guess
    until the text, with these labels, is seen to vanish from the update.

    Parameters
    ----------
    gradients
        By parameter, of the mean loss; that of ``embedding`` is read.
    text
        Token ids, int64 ``(T,)``.
    embedding
        Name of the token embedding's weight.

    Returns
    -------
    Tensor
        int64 ``(1, T)``, `UNLABELLED` where a token has no label.
    """
    slopes, logs = _by_output(model, text, embedding, tags)
    tokens = text.unique()
    rows = gradients[embedding][tokens].double()
    sizes = rows.norm(dim=1)
    systems, rights = [], []
    for token, row, size in zip(tokens, rows, sizes.clamp_min(1e-30), strict=True):
        systems.append(slopes[:, text == token].sum(dim=1).T / size)  # (width, T * tags)
        rights.append(row / size)
    kept = (sizes > 0.0).nonzero().flatten().tolist()
    squares = torch.stack([one.T @ one for one in systems])
    products = torch.stack([one.T @ right for one, right in zip(systems, rights, strict=True)])
    found = torch.zeros(len(logs) * tags, dtype=torch.float64)
    while kept:
        inverse: Tensor = torch.linalg.pinv(squares[kept].sum(dim=0), rtol=_FAINT, hermitian=True)
        found = inverse @ products[kept].sum(dim=0)
        left = [float((systems[i] @ found - rights[i]).norm()) for i in kept]
        worst = max(range(len(kept)), key=lambda n: left[n])
        if left[worst] < _FITS:
            break
        del kept[worst]
    weights = found.view(len(logs), tags)  # of the log-probabilities
    predicted = logs.exp()
    at_logits = weights - weights.sum(dim=1, keepdim=True) * predicted
    named = _rows(at_logits[None], predicted[None])[0]
    return torch.where(named.sum(dim=1) > 0, named.argmax(dim=1), UNLABELLED)[None]


def _by_output(model: nn.Module, text: Tensor, embedding: str, tags: int) -> tuple[Tensor, Tensor]:
    """Return what one text's outputs add to its embeddings' gradient, and its log-probabilities.

    Returns
    -------
    tuple
        float64 ``(T * tags, T, width)``, by output and position, and ``(T, tags)``.
    """
    entered: list[Tensor] = []

    def watch(_: str, vectors: Tensor) -> Tensor:
        entered.append(vectors.detach().requires_grad_())
        return entered[-1]

    outputs, found, logs = len(text) * tags, [], torch.zeros(0)
    with tap.leaving(model, [embedding.rpartition(".")[0]], watch), torch.enable_grad():
        for begin in range(0, outputs, _AT_ONCE):
            each = torch.arange(begin, min(begin + _AT_ONCE, outputs))
            logs = model(text.expand(len(each), -1))
            picked = logs.gather(1, each[:, None]).sum()
            (own,) = torch.autograd.grad(picked, entered[-1])
            found.append(own.double())
    return torch.cat(found), logs[0].detach().double().view(-1, tags)


def known_rows(labels: Sequence[Tensor], length: int, problem: Problem) -> Tensor:
    """Return known labels of texts, int64 ``(1, T)`` each, as float64 rows ``(N, classes)``."""
    every = torch.full((len(labels), length), UNLABELLED)
    for row, own in zip(every, labels, strict=True):
        row[: own.shape[1]] = own[0]
    return label_rows(every, problem.classes, problem.target_model.loss).double()


def _of_trial(
    problem: Problem, trial: int, texts: Tensor, certain: Sequence[Tensor] = ()
) -> Tensor:
    count, length = texts.shape[:2]
    tags = problem.classes // length
    target = {n: v[trial].detach().cpu().double() for n, v in problem.target.items()}
    name, head = _output_layer(problem, tags, target)
    own = {n: v[trial].detach().cpu().float() for n, v in problem.parameters.items()}
    features, predicted = _forward(problem, name, own, texts.cpu().float())
    schema = text_schema(problem.cases[trial])
    known: Tensor = known_rows(certain, length, problem).unflatten(1, (length, tags))
    there = ids_of(texts.cpu(), schema) != schema.padding
    there[: len(known)] = False
    kept = there.flatten()
    inputs, gradient = features.flatten(0, 1)[kept], target[f"{name}.weight"]
    if f"{name}.bias" in target:
        inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
        gradient = torch.cat([gradient, target[f"{name}.bias"][:, None]], dim=1)
    inputs = inputs.double()
    if len(known):
        first = features[: len(known)].double()
        if f"{name}.bias" in target:
            first = torch.cat([first, first.new_ones(len(known), length, 1)], dim=2)
        gradient = gradient - torch.einsum("btk,btd->kd", _slopes(known, predicted, count), first)
        if not bool(kept.any()):
            return known.flatten(1)
    slopes = _solved(inputs, gradient, problem.cases[trial].observation.key, head)

    def rows_of(slopes: Tensor) -> Tensor:
        every = torch.zeros(count * length, tags, dtype=torch.float64)
        every[kept] = slopes
        found = _rows(every.view(count, length, tags), predicted)
        found[: len(known)] = known
        return found

    trust = _trust(problem, trial, name, gradient)
    if trust is None:
        return rows_of(slopes).flatten(1)
    guesses = list(_guesses(inputs, gradient, trust, predicted.flatten(0, 1)[kept]))
    if not len(known):
        shared = _alike(inputs).double()
        shared /= shared.sum(dim=1, keepdim=True)
        of_rows = _of_embedding(problem, trial, own, ids_of(texts.cpu(), schema), there)
        guesses += [shared @ one for one in of_rows]
    readings = [rows_of(own) for own in (slopes, *guesses)]
    every = torch.zeros(count * length, inputs.shape[1], dtype=torch.float64)
    every[kept] = inputs
    at = every.view(count, length, -1)
    return min(readings, key=lambda r: _misfit(r, predicted, at, gradient, trust)).flatten(1)


def _output_layer(problem: Problem, tags: int, target: Tensors) -> tuple[str, nn.Linear]:
    """Return the name of the trained linear layer that makes the logits, and the layer."""
    found = [
        (name, module)
        for name, module in problem.target_model.model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == tags
        and f"{name}.weight" in target
    ]
    if not found:
        raise BractError(
            f"{problem.cases[0].observation.key}: labels of tokens need the gradient of the output "
            f"layer, a linear one with {tags} outputs; train it, or declare the clients' model",
            code="attack-evidence",
        )
    return found[-1]


@torch.no_grad()
def _forward(problem: Problem, name: str, own: Tensors, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output layer's inputs ``(B, T, width)``, and probabilities ``(B, T, tags)``."""
    model = _with_parameters(problem, own)
    seen: list[Tensor] = []
    with tap.entering(model, [name], lambda _, value: seen.append(value)):
        outputs = model(problem.target_model.normalise(texts))
    return seen[-1], outputs.unflatten(-1, (texts.shape[1], -1)).double().exp()


def _solved(inputs: Tensor, gradient: Tensor, key: str, head: nn.Linear) -> Tensor:
    """Return S ``(N, tags)`` with ``S^T H`` nearest to the gradient, for H ``(N, width)``."""
    rank = Spectrum.of(inputs).rank(share=_DEFICIENT)
    distinct = int((_alike(inputs).int().tril(-1).sum(dim=1) == 0).sum())
    if rank < distinct:
        raise BractError(
            f"{key}: {distinct} tokens have features of rank {rank} at the output layer, which "
            f"has {head.in_features} inputs, so their labels cannot be told apart; attack an "
            "update of fewer tokens",
            code="attack-unsolved",
        )
    inverse: Tensor = torch.linalg.pinv(inputs.T, rtol=_DEFICIENT)
    return inverse @ gradient.T


def _alike(inputs: Tensor) -> Tensor:
    """Return which rows ``(N, width)`` are the same but for rounding, bool ``(N, N)``."""
    near: Tensor = torch.cdist(inputs, inputs) <= _ALIKE * inputs.norm(dim=1)
    return near


def _trust(problem: Problem, trial: int, name: str, gradient: Tensor) -> Tensor | None:
    """Return the weights of the gradient's coordinates; None where all count alike."""
    weights = problem.weights or {}
    own = [
        weights[n][trial].cpu().double() for n in (f"{name}.weight", f"{name}.bias") if n in weights
    ]
    if not own:
        return None
    return torch.cat([value.reshape(len(gradient), -1) for value in own], dim=1)


def _guesses(
    inputs: Tensor, gradient: Tensor, trust: Tensor, predicted: Tensor
) -> Iterator[Tensor]:
    """Yield slopes ``(N, tags)`` that fit the coordinates which count.

    Beyond the inversion of a defense some coordinates are known and others are not. The first
    slopes are each tag's least-squares solution over its own. They may be too few for that; the
    second ones are ``(sum z) p - z`` with ``z >= 0``, as those of a cross entropy are.
    """
    root = trust.clamp_min(0.0).sqrt()
    each = [
        torch.linalg.pinv((inputs * r).T, rtol=_DEFICIENT) @ (r * g)
        for r, g in zip(root, gradient, strict=True)
    ]
    yield torch.stack(each, dim=1)
    count, tags = predicted.shape
    if count * tags > _MOST_UNKNOWNS:
        return
    from scipy.optimize import nnls

    outer = predicted[:, :, None] - torch.eye(tags, dtype=predicted.dtype)  # slope by z
    used = [r > 0 for r in root]
    equations = torch.cat(
        [
            ((inputs * r)[:, keep].T[:, :, None] * outer[:, k][None]).flatten(1)
            for k, (r, keep) in enumerate(zip(root, used, strict=True))
        ]
    )
    right = torch.cat([(r * g)[keep] for r, g, keep in zip(root, gradient, used, strict=True)])
    try:
        found, _ = nnls(equations.numpy(), right.numpy())
    except RuntimeError:  # it did not converge
        return
    z = torch.from_numpy(np.asarray(found)).view(count, tags)
    yield z.sum(dim=1, keepdim=True) * predicted - z


def _of_embedding(
    problem: Problem, trial: int, own: Tensors, ids: Tensor, there: Tensor
) -> list[Tensor]:
    """Return slopes ``(N, tags)`` that fit the rows of the embedding's gradient; none without it.

    Few coordinates of the output layer's gradient may be known, as of one that was inverted out of
    a defense which hides the large ones. What every output adds to the rows of the embedding is
    linear in the slope of the loss at its log-probability, and these slopes are not positive. Rows
    are many more equations than there are outputs.

    Parameters
    ----------
    own
        Parameters of the network, float32.
    ids, there
        Token ids and whether they are no padding, ``(B, T)``.
    """
    model = _with_parameters(problem, own)
    vocabulary, weights = text_schema(problem.cases[trial]).vocabulary, problem.weights or {}
    names = (f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding))
    shapes = {name: problem.target[name].shape[1:] for name in names if name in weights}
    name = next((name for name, shape in shapes.items() if shape[0] >= vocabulary), None)
    tags = problem.classes // ids.shape[1]
    if name is None or int(there.sum()) * tags > _MOST_UNKNOWNS:
        return []
    texts = [row[kept] for row, kept in zip(ids, there, strict=True) if bool(kept.any())]
    parts = [_by_output(model, text, name, tags) for text in texts]
    outputs = sum(len(slopes) for slopes, _ in parts)
    square = torch.zeros(outputs, outputs, dtype=torch.float64)
    product = torch.zeros(outputs, dtype=torch.float64)
    for token in torch.cat(texts).unique():
        adds = [s[:, t == token].sum(dim=1) for (s, _), t in zip(parts, texts, strict=True)]
        root = weights[name][trial, token].cpu().double().clamp_min(0.0).sqrt()
        equations = -torch.cat(adds) * root
        square += equations @ equations.T
        product += equations @ (problem.target[name][trial, token].cpu().double() * root)
    weighed = _not_negative(square, product)
    if weighed is None:
        return []
    found, first = [], 0
    for slopes, logs in parts:
        at_logs = -weighed[first : first + len(slopes)].view(-1, tags)
        found.append(at_logs - at_logs.sum(dim=1, keepdim=True) * logs.exp())
        first += len(slopes)
    return [torch.cat(found)]


def _not_negative(square: Tensor, product: Tensor) -> Tensor | None:
    """Return z >= 0 of least ``|A z - b|`` from ``A^T A`` and ``A^T b``; None where none is found.

    Directions that no equation reaches are left out.
    """
    from scipy.optimize import nnls

    values, vectors = torch.linalg.eigh(square)
    kept = values > _FAINT * values.max()
    root = values[kept].sqrt()
    right = (vectors[:, kept].T @ product) / root
    try:
        found, _ = nnls((root[:, None] * vectors[:, kept].T).numpy(), right.numpy())
    except RuntimeError:  # it did not converge
        return None
    return torch.from_numpy(np.asarray(found))


def _with_parameters(problem: Problem, own: Tensors) -> nn.Module:
    """Return a copy of the network with these parameters."""
    model = copy.deepcopy(problem.target_model.model).cpu().float().eval()
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            value.copy_(own[parameter])
    return model


def _misfit(
    rows: Tensor, predicted: Tensor, inputs: Tensor, gradient: Tensor, trust: Tensor
) -> float:
    """Return how far labels are from the gradient, with one scale a text that fits best.

    Parameters
    ----------
    rows, predicted
        ``(B, T, tags)``.
    inputs
        ``(B, T, width)``, zero at padding.
    gradient, trust
        ``(tags, width)``.
    """
    slopes = (predicted - rows) * rows.sum(dim=-1, keepdim=True)
    root = trust.clamp_min(0.0).sqrt()
    each = (torch.einsum("btk,btd->bkd", slopes, inputs) * root).flatten(1).T
    right = (gradient * root).flatten()[:, None]
    scales = torch.linalg.pinv(each) @ right
    return float((each @ scales - right).norm())


def _slopes(known: Tensor, predicted: Tensor, count: int) -> Tensor:
    """Return the loss' slopes at the logits of the first texts, whose labels are known."""
    labelled = known.sum(dim=2, keepdim=True)
    each = count * labelled.sum(dim=1, keepdim=True).clamp_min(1.0)
    return (predicted[: len(known)] - known) * labelled / each


def _rows(slopes: Tensor, predicted: Tensor) -> Tensor:
    """Return one-hot rows ``(B, T, tags)``, zero without a label, of slopes and probabilities."""
    label = slopes.argmin(dim=-1)
    chosen = nn.functional.one_hot(label, slopes.shape[-1]).double()
    direction = predicted - chosen
    share = (slopes * direction).sum(-1) / direction.square().sum(-1).clamp_min(1e-30)
    labelled = share > _LEAST * share.amax(dim=-1, keepdim=True)
    return chosen * labelled[..., None]
