"""Batch statistics of one step or several, read from a client's returned buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import (
    LocalTraining,
    local_training,
    loss_gradient,
)
from bract.attacks.problem.epoch_orders import batch_of, steps_per_epoch
from bract.attacks.problem.over_rounds import OverRounds
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.returned_buffers import (
    KINDS,
    impossible_statistics,
    observed_share,
    running_statistics,
)
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.problem.training_path import MOVED
from bract.captures.observation import Observation
from bract.updates.momentum import LISTED, velocities
from bract.updates.update import Tensors

MOST_STEPS = LISTED
"""A client that counts more steps is not believed; the last hundred alone show anyway."""


@dataclass(frozen=True)
class LocalStatistics:
    """Mean of the batch statistics of a client's local steps, later steps weighing more.

    A step k of K moves a running statistic by ``r <- (1 - m) r + m s_k``. So ``r_K = (1 - m)^K r_0
    + sum_k m (1 - m)^(K - 1 - k) s_k``, and r_0 and r_K give ``sum_k w_k s_k`` with ``w_k = m (1 -
    m)^(K - 1 - k) / (1 - (1 - m)^K)``, to the rounding of float32. Of one step these are the
    statistics of the client's batch.

    Attributes
    ----------
    layers
        By name of the layer, means and unbiased variances, each ``(channels,)``.
    momenta
        By name of the layer, m in (0, 1].
    steps
        K, at least 1.
    """

    layers: dict[str, tuple[Tensor, Tensor]]
    momenta: dict[str, float]
    steps: int

    def weights(self, layer: str) -> tuple[float, ...]:
        """Return ``w_0`` to ``w_{K-1}``, which sum to 1."""
        return step_weights(self.momenta[layer], self.steps)


def step_weights(momentum: float, steps: int) -> tuple[float, ...]:
    """Return what each of ``steps`` steps counts in their exponentially weighted mean."""
    whole = observed_share(momentum, steps)
    return tuple(momentum * (1.0 - momentum) ** (steps - 1 - k) / whole for k in range(steps))


def local_statistics(observation: Observation, target_model: TargetModel) -> LocalStatistics | None:
    """Return the statistics of the client's own batches from returned buffers, or None.

    That takes batch normalisation by the batch (norm_mode ``train``) with a momentum, buffers that
    were sent and returned with the number of batches that each layer counted, the same number in
    every layer, and values that training can leave (`impossible_statistics`).
    """
    if observation.declaration.norm_mode != "train":
        return None
    if impossible_statistics(observation, target_model) is not None:
        return None
    layers = running_statistics(observation, target_model)
    tracked = {name: one for name, one in layers.items() if any(kind in one.sent for kind in KINDS)}
    steps = {one.steps for one in tracked.values()}
    own = {name: one.of_batches() for name, one in tracked.items()}
    known = {name: found for name, found in own.items() if found is not None}
    counted = steps.pop() if len(steps) == 1 else None
    if len(known) < len(own) or counted is None or counted > MOST_STEPS:
        return None
    return LocalStatistics(known, {n: one.momentum for n, one in tracked.items()}, counted)


def simulated_statistics(
    problem: Problem,
    images: Tensor,
    known: Sequence[LocalStatistics],
    labels: Tensor | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the statistics of clients' buffers for candidate images.

    The batch statistics of each step's images, weighted as `LocalStatistics` has them. Where the
    steps are unrolled and labels are given, each step's model is the one to which the candidates
    themselves train it, differentiably, so that the true images meet the statistics to rounding;
    this costs a gradient for every step but the last. Elsewhere step k is taken to are on the line
    from the sent to the returned model, where a constant gradient (with the declared momentum)
    would have brought it: right to first order in the learning rate. A defended update gives no end
    of that line, so that all steps then share the model that was sent. Where the order of the
    images is not simulated (training that is not unrolled), every batch of one pass counts alike,
    at the mean of the way. Of several rounds attacked together they are the last one's.

    Parameters
    ----------
    images
        ``(L, B, C, H, W)`` in [0, 1].
    known
        Of each trial; of the same layers.
    labels
        ``(L, B, classes)`` probabilities, or None.

    Returns
    -------
    dict
        By layer means and unbiased variances, each ``(L, channels)``.
    """
    if len({_kind(case, own) for case, own in zip(problem.cases, known, strict=True)}) > 1:
        each = [
            simulated_statistics(
                problem.select([i]),
                images[i : i + 1],
                [own],
                None if labels is None else labels[i : i + 1],
            )
            for i, own in enumerate(known)
        ]
        return {
            layer: (torch.cat([e[layer][0] for e in each]), torch.cat([e[layer][1] for e in each]))
            for layer in each[0]
        }
    forward = problem.forward
    if isinstance(forward, OverRounds) and forward.assigned is not None:
        last = list(forward.assigned[-1])
        images, labels = images[:, last], None if labels is None else labels[:, last]
    inputs = problem.target_model.normalise(images)
    held = {n: v for n, v in problem.state.items() if not n.startswith(MOVED)}
    totals: dict[str, tuple[Tensor, Tensor]] = {}
    for here, weights, batch in _steps(problem, inputs, held, known[0], labels):
        seen = problem.target_model.batch_statistics(here, held, batch)
        for layer, weight in weights.items():
            mean, variance = (weight * value for value in seen[layer])
            if layer in totals:
                mean, variance = totals[layer][0] + mean, totals[layer][1] + variance
            totals[layer] = (mean, variance)
    return totals


def _kind(case: Case, known: LocalStatistics) -> tuple[object, ...]:
    """Return what must be the same for trials to be simulated side by side."""
    declared = case.observation.declaration
    batch = (declared.batch_size, declared.momentum, bool(declared.defenses))
    return (known.steps, tuple(known.momenta.items()), *batch)


_Step = tuple[Tensors, dict[str, float], Tensor]
"""Parameters, what the step counts by layer, and the inputs of its batch."""


def _steps(
    problem: Problem,
    inputs: Tensor,
    held: Tensors,
    known: LocalStatistics,
    labels: Tensor | None,
) -> Iterator[_Step]:
    weights = {layer: known.weights(layer) for layer in known.layers}
    if known.steps == 1:
        yield problem.parameters, dict.fromkeys(weights, 1.0), inputs
        return
    declared = problem.cases[0].observation.declaration
    shares = _shares(known.steps, declared.momentum)
    training = local_training(problem.forward)
    if training is not None and training.steps == known.steps:
        rows = inputs.new_zeros(*inputs.shape[:2], 1) if labels is None else labels
        batch, _ = training.batches(inputs, rows, problem.buffers)
        if labels is None:
            way = [_on_the_line(problem, share) for share in shares]
        else:
            way = _trained(problem, training, inputs, held, labels)
        for k, here in enumerate(way):
            yield here, {layer: row[k] for layer, row in weights.items()}, batch(k)[0]
        return
    count = inputs.shape[1]
    size = min(declared.batch_size or count, count)
    passes = steps_per_epoch(count, size)
    rows_of_shares = [sum(s * w for s, w in zip(shares, r, strict=True)) for r in weights.values()]
    here = _on_the_line(problem, sum(rows_of_shares) / len(weights))
    for step in range(passes):
        taken = batch_of(step, count, size)
        counted = dict.fromkeys(weights, 1.0 / passes)
        yield here, counted, inputs[:, taken.start : taken.stop]


def _trained(
    problem: Problem, training: LocalTraining, inputs: Tensor, held: Tensors, labels: Tensor
) -> list[Tensors]:
    """Return the parameters at which each step of the candidates' training begins."""
    batch, _ = training.batches(inputs, labels, problem.buffers)
    way: list[Tensors] = []

    def gradient(step: int, current: Tensors) -> Tensors:
        way.append(current)
        return loss_gradient(problem.target_model, current, held, *batch(step))

    last = replace(training, steps=training.steps - 1).trajectory(problem.parameters, gradient)
    return [*way, last]


def _shares(steps: int, momentum: float) -> list[float]:
    """Share of the whole way at which each step begins, under a constant gradient."""
    way = [0.0, *accumulate(velocities(momentum, steps))]
    return [part / way[-1] for part in way[:-1]]


def _on_the_line(problem: Problem, share: float) -> Tensors:
    """Parameters at a share of the way to where training ended, where no defense hides that."""
    cases: tuple[Case, ...] = problem.cases
    if not share or any(case.observation.declaration.defenses for case in cases):
        return problem.parameters
    return {
        name: value - share * torch.stack([c.observation.update[name] for c in cases]).to(value)
        for name, value in problem.parameters.items()
    }
