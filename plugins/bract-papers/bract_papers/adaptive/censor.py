"""Against CENSOR: every tensor tells the norm of the true one, and one direction that it lacks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks import Evidence, Known, declared
from bract.attacks.adaptive.chains import alone, named, parts_of_first
from bract.attacks.adaptive.noise import clipping
from bract.attacks.adaptive.simulated_defense import defended_by
from bract.attacks.problem.evidence import CHAINS
from bract.captures.observation import Observation
from bract.defenses import Noise, read_settings
from bract.errors import BractError
from bract.updates.update import Tensors
from bract_papers.defenses.censor import Censor

_LOOSE = 0.3
"""Deviation that a norm and a cosine are granted where pruning or noise changed both."""

SLACK = 0.01
"""Deviation that a norm, or a cosine, is granted: what rounding and a search leave."""


@dataclass(frozen=True)
class OrthogonalLikelihood:
    """``-log p(u | g)`` of a u drawn evenly from what is orthogonal to g and has its norm.

    The law lives on a surface: for each tensor ``|u| = |g|`` and ``u.g = 0``, two equations. Both
    are softened to normal laws of the relative norm and the cosine.

    Attributes
    ----------
    slack
        Their deviation.
    """

    slack: float = SLACK
    component: ClassVar[str] = "orthogonality and norms"

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return nats ``(L,)``."""
        del weights
        total = None
        for name, found in simulated.items():
            rows = found.flatten(1)
            target = captured[name].flatten(1).expand_as(rows)
            own = rows.square().sum(1).clamp_min(1e-30).sqrt()
            size = target.square().sum(1).clamp_min(1e-30).sqrt()
            cosine = (rows * target).sum(1) / (own * size)
            term = (own / size).log().square() + cosine.square()
            total = term if total is None else total + term
        assert total is not None
        return total / (2.0 * self.slack**2)

    def tempered(self) -> OrthogonalLikelihood:
        """Return the law itself, which has its slack."""
        return self

    def draw(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Return noise of the shape of ``like`` whose size is that of an upload's coordinates."""
        noise = torch.randn(like.shape, generator=generator).to(like)
        return noise * like.square().mean().sqrt()


def match_norms_and_orthogonality(observation: Observation, known: Known) -> Evidence:
    """State what CENSOR leaves of a gradient: its norm, and a direction orthogonal to it.

    Each tensor of the upload gives two equations about the gradient of a candidate, so an upload
    of P tensors determines an image of more than 2 P pixels only with a prior. That the candidate
    with the lowest loss was chosen, of a few, is not used. Labels cannot be read off such an
    upload; they are searched for, or guessed.

    Raises
    ------
    BractError
        If a tensor of several values is zero, which CENSOR sends of no gradient but zero.
    """
    del known
    hyper = declared(Censor, observation)
    wanted = observation.gradient()
    target = {n: wanted[n] for n in observation.parameters if wanted[n].numel() > 1}
    empty = [name for name, value in target.items() if not bool(value.any())]
    if len(empty) == len(target):
        raise BractError(
            f"{observation.key}: the update is zero; correct declaration.defenses",
            code="declaration-wrong",
        )
    target = {name: value for name, value in target.items() if name not in empty}
    return Evidence(
        target=target,
        likelihood=OrthogonalLikelihood(),
        notes={
            "defense": "censor",
            "method": "matched norms and orthogonality, tensor by tensor",
            "equations": 2 * len(target),
            "trials": hyper.trials,
        },
    )


@CHAINS.register("censor then pruning")
@CHAINS.register("censor then noise")
def censored_and_changed(observation: Observation, known: Known) -> Evidence:
    """CENSOR, then pruning or noise: norms and orthogonality, as far as these leave them.

    CENSOR keeps each tensor's norm, so clipping shortens the candidate's gradient as the upload.
    """
    found = match_norms_and_orthogonality(alone(observation, 0), known)
    last = observation.declaration.defenses[1]
    if last["name"] == "noise":
        parts = clipping(read_settings(Noise, last), observation.law.to_gradient)
        found = replace(found, adapt=defended_by(*parts))
    return named(replace(found, likelihood=OrthogonalLikelihood(_LOOSE)), observation)


@CHAINS.register("pruning then censor")
@CHAINS.register("noise then censor")
def before_censor(observation: Observation, known: Known) -> Evidence:
    """Pruning, or clipping and noise, then CENSOR: its input is simulated, without the noise."""
    found = match_norms_and_orthogonality(alone(observation, 1), known)
    parts, law = parts_of_first(observation)
    found = replace(found, adapt=defended_by(*parts))
    if law is not None:
        found = replace(found, likelihood=OrthogonalLikelihood(_LOOSE))
    return named(found, observation)
