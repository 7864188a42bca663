"""Parts of attacks: a descent on an objective, labels, and random initial values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bract.attacks.problem.objectives import (
    LayerWeighting,
    NoObjective,
    Objective,
    layer_weights,
)
from bract.attacks.problem.problem import Problem
from bract.attacks.solve.descent import Outcome, Run, Search, descend
from bract.attacks.solve.labels import infer_labels
from bract.attacks.solve.optimizers import BatchedOptimizer
from bract.attacks.solve.regularizers import Prior, natural_images
from bract.attacks.solve.targets import infer_targets
from bract.errors import BractError
from bract.updates.update import Tensors

_SPREAD = 0.1
"""Standard deviation around their mean of the starts of targets that are numbers."""


def minimise(
    problem: Problem,
    search: Search,
    optimizer: BatchedOptimizer,
    run: Run,
    *,
    objective: Objective,
    priors: Sequence[Prior] = (),
    weighting: LayerWeighting = "equal",
    unknowns: Tensors | None = None,
    kept: Tensors | None = None,
) -> Outcome:
    """Descend on ``objective`` plus ``priors``.

    Where the evidence has a likelihood, on ``-log p(target | images, labels) - log p(images)``
    instead (the adversary of Balunovic et al., ICLR 2022, approximated by the posterior's mode):
    `Evidence.likelihood` plus `NaturalImages` in the place of the attack's own priors, without
    weights of layers, `Tempered` where the model has kinks. Nothing but the prior is left where the
    objective matches nothing.

    Parameters
    ----------
    kept
        Variables of the search whose values at the best iterate are returned among the outcome's
        unknowns.
    """
    held = kept or {}
    weighted = problem.weighted(layer_weights(problem.target, weighting))
    if problem.likelihood is not None and not isinstance(objective, NoObjective):
        law = problem.likelihood
        smooth = problem.target_model.traits.smooth
        weighted, objective = problem, law if smooth else law.tempered()
        priors = [natural_images(priors)]

    def loss(images: Tensor, labels: Tensor, found: Tensors) -> Tensor:
        own = {name: value for name, value in found.items() if name not in held}
        simulated = weighted.simulate(images, labels, own)
        value = weighted.distance(objective, simulated)
        for prior in priors:
            value = value + prior(weighted, images)
        return value

    priors_at_work = [name for prior in priors if (name := prior.component(problem)) is not None]
    components = (objective.component, *search.components, *priors_at_work, *optimizer.components)
    found = descend(problem, search, optimizer, loss, run, (unknowns or {}) | held)
    return found.made_by("", *components)


def hard_labels(problem: Problem) -> Tensor:
    """Inferred labels as one-hot rows, ``(L, B, classes)``.

    After several unrolled steps each restart tries the next likely sequence. Targets that are
    numbers are ``(L, B, 1)``, and zeros under a loss without labels.
    """
    if not problem.target_model.loss.labelled:
        shape = (problem.trials, problem.image_shape[0], problem.classes)
        return torch.zeros(shape, device=problem.device, dtype=problem.dtype)
    if problem.target_model.loss.values:
        found = torch.stack([infer_targets(case) for case in problem.cases])
        return found.to(problem.device, problem.dtype)
    rows = [
        infer_labels(case, choice=restart).labels
        for case, restart in zip(problem.cases, problem.restarts, strict=True)
    ]
    labels = torch.stack(rows).to(problem.device)
    return torch.nn.functional.one_hot(labels, problem.classes).to(problem.dtype)


def searched_labels(problem: Problem, *, joint: bool) -> tuple[Tensor | None, Tensor]:
    """Return the labels that are read off, or None, and a start for those that are searched.

    Targets of a batch that are numbers are searched in any case: the last layer shows their mean.
    So are labels that are probabilities, of which it shows how far predictions are off.

    Parameters
    ----------
    joint
        Whether labels are searched with the images, from noise.
    """
    start = noise(problem, problem.image_shape[0], problem.classes)
    if joint or problem.target_model.loss.soft:
        return None, start
    known = hard_labels(problem)
    loss = problem.target_model.loss
    if loss.values and loss.labelled and problem.image_shape[0] > 1:
        return None, known + _SPREAD * start
    return known, start


def certain_labels(problem: Problem) -> Tensor | None:
    """Labels that need no search, as `hard_labels` gives them; None where they do.

    That of a single image is read, whatever the tier, from what the tier matches; those of a batch
    are searched, unless the evidence knows them or the model shows none.
    """
    one = problem.image_shape[0] == 1
    if not one and any(case.evidence.labels is None for case in problem.cases):
        return None
    try:
        return hard_labels(problem)
    except BractError:
        return None


def noise(problem: Problem, *shape: int) -> Tensor:
    """Standard normal ``(L, *shape)``, each trial from its own seed."""
    drawn = [torch.randn(*shape, generator=g) for g in problem.generators()]
    return torch.stack(drawn).to(problem.device, problem.dtype)
