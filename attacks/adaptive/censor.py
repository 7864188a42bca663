"""Against CENSOR: every tensor tells the norm of the true one, and one direction that it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.adaptive.declared import declared
from bract.attacks.problem.evidence import ADAPTIVE, Evidence, Known
from bract.captures.observation import Observation
from bract.defenses.censor import Censor
from bract.errors import BractError
from bract.updates.update import Tensors

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


@ADAPTIVE.register("censor")
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
