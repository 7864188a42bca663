"""Read what entered a layer, and the slopes behind its ReLU, as factors of its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bract.attacks.methods.spear.low_rank import Subspace, factors
from bract.attacks.methods.spear.noisy_factors import Layer
from bract.attacks.methods.spear.noisy_search import NoisySearch
from bract.attacks.methods.spear.sparse_directions import SparseSearch
from bract.attacks.problem.case import Case
from bract.attacks.problem.linear_layers import FirstLayer
from bract.attacks.problem.site import Site
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.errors import Errors
from bract.attacks.reading.reading import ReadingBudget
from bract.attacks.result import Determined
from bract.errors import BractError
from bract.process import clock

_FULL_RANK = 1e-2

_ROUNDING = 3.0
"""Rounding of an update of several steps, in that outside its rank: what a step rounds is not as
white as the rest."""

_UNEXPLAINED = 3.0
"""Squared error over the noise's above which nothing is returned."""

_PATIENCE, _LONGER = 40, 150
"""Rounds without a better set of factors after which a search ends, under noise and over steps."""


@dataclass(frozen=True, kw_only=True)
class Factors(Entered):
    """Inputs of a layer and slopes of its outputs, whose product is the layer's gradient.

    Attributes
    ----------
    rounds
        Rounds that the search took.
    agreeing
        Rows of slopes that are zero where what entered switches units off; None of a search that
        ended with all rows.
    """

    rounds: int
    agreeing: int | None = None


def subspace_of(case: Case, site: Site) -> Subspace:
    """Decompose the gradient of weight and bias side by side.

    Raises
    ------
    BractError
        If noise drowns all of it, or it has more dimensions than the case has examples.
    """
    joint, images = site.rows(case.evidence.target), case.images
    key, deviation = case.observation.key, case.evidence.deviation
    if deviation is not None:
        space = Subspace.under(joint, images, deviation)
        if not space.rank:
            raise BractError(
                f"{key}: noise of deviation {deviation:.3g} drowns every singular value of the "
                f"gradient of {site.weight}",
                code="attack-evidence",
            )
        return space
    space = Subspace.of(joint, images)
    left = float(space.rest / joint.norm().clamp_min(1e-300))
    if left > _FULL_RANK or not space.rank:
        raise BractError(
            f"{key}: {left:.1%} of the gradient of {site.weight} are outside the "
            f"rank that {images} images make (at most {_FULL_RANK:.0%} of rounding is expected): "
            "noise, a defense, another optimizer, or more images than declared",
            code="attack-evidence",
        )
    if not case.law.one_step:
        return Subspace.under(joint, space.rank, _ROUNDING * space.deviation)
    return space


def read_sparse(case: Case, site: Site, budget: ReadingBudget) -> Factors:
    """Read all factors of a layer behind which a ReLU is, one batch's gradient without noise.

    Raises
    ------
    BractError
        If the gradient has another rank, or the budget ends before every row is found.
    """
    space = subspace_of(case, site)
    generator = torch.Generator().manual_seed(budget.seed)
    search = SparseSearch(space, site.rows(case.observation.parameters), generator)
    begun = clock.now()
    for found in search.rounds():
        budget.advance(found / space.rank, 1.0 - found / space.rank)
        spent = clock.now() - begun
        if budget.iterations is not None and search.rounds_done >= budget.iterations:
            break
        if budget.seconds is not None and spent >= budget.seconds:
            break
    if not search.done:
        raise BractError(
            f"{case.observation.key}: {len(search.found)} of {space.rank} examples found in "
            f"{search.rounds_done} iterations; raise the budget, or the batch is too large for a "
            f"layer of {len(space.live)} units",
            code="budget-spent",
        )
    values, rows = factors(space, search.found)
    slopes = rows.new_zeros(len(rows), len(space.live))
    slopes[:, space.live] = rows
    left = float(space.rest / space.rows.norm().clamp_min(1e-300))
    return Factors(
        site=site,
        values=values,
        slopes=slopes,
        errors=Errors.of(case, site.names),
        certificate=Determined(values.numel(), left, _FULL_RANK),
        component="sparse factors",
        rounds=search.rounds_done,
    )


def read_blurred(case: Case, layer: FirstLayer, budget: ReadingBudget) -> Factors:
    """Read factors under noise, or of the sum of several steps, where zeros are blurred.

    Raises
    ------
    BractError
        If no factors were found that leave about the noise.
    """
    begun, better, least = clock.now(), 0, float("inf")

    def over() -> bool:
        return budget.seconds is not None and clock.now() - begun >= budget.seconds

    search = _noisy_search(case, layer, budget.seed, over)
    patience = _PATIENCE if case.evidence.deviation is not None else _LONGER
    for good in search.rounds():
        budget.advance(good / search.space.rank, 1.0 - good / search.space.rank)
        if search.best is not None and search.best.cost < least:
            better, least = search.rounds_done, search.best.cost
        if search.rounds_done - better > patience:
            break
        if budget.iterations is not None and search.rounds_done >= budget.iterations:
            break
        if over():
            break
    best = search.best
    if best is None or not best.misfit < _UNEXPLAINED:
        left = "none" if best is None else f"{best.misfit:.3g} times the noise's"
        raise BractError(
            f"{case.observation.key}: no {search.space.rank} examples found that explain the "
            f"gradient of {layer.site.weight} in {search.rounds_done} iterations (squared error: "
            f"{left}); raise the budget, or noise or local steps leave too few zeros",
            code="budget-spent",
        )
    entering = best.inputs @ search.space.right
    # The bias' column is 1 of every example, which fixes the scale.
    values, slopes = entering[:, :-1] / entering[:, -1:], best.rows * entering[:, -1:]
    return Factors(
        site=layer.site,
        values=values,
        slopes=slopes,
        errors=Errors.of(case, layer.site.names),
        certificate=Determined(values.numel(), best.misfit, _UNEXPLAINED if search.done else 0.0),
        component="sparse factors" if case.law.one_step else "sparse factors of a sum",
        rounds=search.rounds_done,
        agreeing=search.sure,
    )


def _noisy_search(
    case: Case, layer: FirstLayer, seed: int, stop: Callable[[], bool]
) -> NoisySearch:
    """Set the search up at the weights half-way through the client's training."""
    parameters, several = case.observation.parameters, not case.law.one_step
    forward = layer.site.rows(parameters)
    if several and not case.observation.declaration.defenses:
        forward = forward - 0.5 * layer.site.rows(case.observation.update)
    space, model = subspace_of(case, layer.site), case.target_model
    low, high = (
        model.normalise(torch.full((1, *model.image_shape), end)).flatten() for end in (0.0, 1.0)
    )
    if layer.matrix is not None:
        up, down = layer.matrix.clamp_min(0.0), layer.matrix.clamp_max(0.0)
        low, high = low.double(), high.double()
        low, high = (
            layer.offset + up @ low + down @ high,
            layer.offset + up @ high + down @ low,
        )
    return NoisySearch(
        space,
        Layer(
            outputs=forward @ space.right.T,
            length=float(forward.square().sum(dim=1).mean().sqrt()),
            low=low.cpu().double(),
            high=high.cpu().double(),
            switching=several,
        ),
        torch.Generator().manual_seed(seed),
        stop=stop,
    )
