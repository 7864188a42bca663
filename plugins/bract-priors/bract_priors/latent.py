"""Search among the images of a generator that was trained on public images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from bract.attacks import Case, Objective, Outcome, Problem, noise
from bract.attacks.problem.objectives import NoObjective
from bract.errors import BractError
from bract.updates.update import Tensors
from bract_priors.flow import Flow
from bract_priors.prior_facts import PriorKind
from bract_priors.trained_prior import Decoder, TrainedPrior

LATENT = "prior.latent"


def usable_prior(case: Case, kind: PriorKind | None = None) -> TrainedPrior:
    """Return the generator that the adversary trained on public images.

    Raises
    ------
    BractError
        If there is none, it is of another kind, or it makes other images than the client's.
    """
    declared = case.observation.declaration
    option = " --kind flow" if kind == "flow" else ""
    if case.public is None:
        raise BractError(
            f"{case.observation.key}: this attack searches a generator trained on public images; "
            f"train one with `bract prior train{option}`, and give it by --tier surrogate "
            "--prior FILE",
            code="prior-unsuited",
        )
    if not isinstance(case.public, TrainedPrior) or kind not in (None, case.public.kind):
        raise BractError(
            f"{case.observation.key}: this attack searches a prior of kind {kind or 'generator'}, "
            f"this one is of kind {case.public.kind}; train one with `bract prior train{option}`",
            code="prior-unsuited",
        )
    try:
        case.public.check(declared.image_shape, declared.classes)
    except BractError as error:
        raise BractError(f"{case.observation.key}: {error}", code=error.code) from error
    return case.public


class LatentSearch:
    """Candidate images as what a trained generator makes of free latents, or with free weights.

    Parameters
    ----------
    labels
        Rows ``(L, B, classes)``; a generator that knows classes is given them.
    latent
        Start, ``(L, B, n)``.
    weights
        Whether the generator's weights are the variables, one set a trial that begins where
        training ended, and the latents stay; else the latents are.
    """

    def __init__(
        self, problem: Problem, labels: Tensor, latent: Tensor, *, weights: bool = False
    ) -> None:
        prior = usable_prior(problem.cases[0])
        self._labels = labels
        self._rows = labels.to(latent) if prior.facts.classes else None
        self._decoder: Decoder | Flow = prior.decoder().to(problem.device, problem.dtype)
        self.latent = latent.detach().clone().requires_grad_(not weights)
        self.variables: Tensors = {LATENT: self.latent}
        self._free = weights
        if weights:
            self.variables = {
                f"prior.{name}": value.expand(problem.trials, *value.shape).clone().requires_grad_()
                for name, value in self._decoder.named_parameters()
            }

    @property
    def components(self) -> tuple[str, ...]:
        """The trained generator, what of it is free, and the source of labels."""
        free = ("generator weights",) if self._free else ()
        return ("trained generator", *free, "labels analytic")

    def decode(self) -> tuple[Tensor, Tensor]:
        """Return images and label rows."""
        if not self._free:
            return made_images(self._decoder, self.latent, self._rows), self._labels
        weights = {name.removeprefix("prior."): v for name, v in self.variables.items()}

        def one(own: Tensors, latent: Tensor, rows: Tensor | None) -> Tensor:
            made: Tensor = functional_call(self._decoder, own, (latent, rows))
            return made

        over = (0, 0, None if self._rows is None else 0)
        images: Tensor = torch.vmap(one, in_dims=over)(weights, self.latent, self._rows)
        return images, self._labels


@dataclass(frozen=True, eq=False)
class Relative:
    """An objective as a share of what it is at random latents, ``(L,)``.

    Cosine distances through a sigmoid network are a millionth of those through a ReLU network; a
    weight added to them, and Adam's eps, would mean another thing for each model.
    """

    component: ClassVar[str] = "matching relative to random latents"

    objective: Objective
    scale: Tensor

    def __call__(self, simulated: Tensors, captured: Tensors, weights: Tensors | None) -> Tensor:
        """Return the objective over its scale."""
        return self.objective(simulated, captured, weights) / self.scale

    def undone(self, outcome: Outcome) -> Outcome:
        """Return an outcome with losses in the objective's own scale."""
        curves = [
            [(step, value * scale) for step, value in curve]
            for curve, scale in zip(outcome.curves, self.scale.tolist(), strict=True)
        ]
        return replace(outcome, losses=outcome.losses * self.scale, curves=curves)


@dataclass(frozen=True, eq=False)
class Start:
    """Where a search of the latent begins.

    Attributes
    ----------
    latent
        Each trial's random latent of the lowest loss, ``(L, B, n)``.
    scale
        The median loss of all that were drawn, ``(L,)``; 1 where nothing is matched, or a
        likelihood, whose scale is nats.
    """

    latent: Tensor
    scale: Tensor


def likeliest_start(
    problem: Problem,
    labels: Tensor,
    count: int,
    objective: Objective,
    proposed: Tensor | None = None,
) -> Start:
    """Draw ``count`` random latents a trial, and match each and the proposed one once.

    Where the evidence has a likelihood, that takes the place of the objective.

    Parameters
    ----------
    proposed
        ``(L, B, n)``, or None.
    """
    matched = not isinstance(objective, NoObjective)
    own = problem.likelihood if matched else None
    prior = usable_prior(problem.cases[0])
    images = problem.image_shape[0]
    drawn = noise(problem, count, images, prior.facts.latent)
    if proposed is not None:
        drawn = torch.cat([drawn, proposed.to(drawn)[:, None]], dim=1)
    unknowns = {name: value.detach() for name, value in problem.unknowns().items()}
    decoder = prior.decoder().to(problem.device, problem.dtype)
    rows = labels.to(drawn) if prior.facts.classes else None
    found = []
    with torch.no_grad():
        for number in range(drawn.shape[1]):
            made = made_images(decoder, drawn[:, number], rows)
            found.append(
                problem.distance(own or objective, problem.simulate(made, labels, unknowns))
            )
    losses = torch.stack(found, dim=1).nan_to_num(float("inf"))
    scale = losses[:, :count].median(dim=1).values.clamp(1e-20, 1e20)
    if own is not None or not matched:
        scale = torch.ones_like(scale)
    latent = drawn[torch.arange(len(drawn), device=drawn.device), losses.argmin(dim=1)]
    return Start(latent, scale)


def made_images(decoder: Decoder | Flow, latent: Tensor, rows: Tensor | None) -> Tensor:
    """Return images ``(L, B, C, H, W)`` of latents ``(L, B, n)`` and label rows."""
    flat = None if rows is None else rows.flatten(0, 1)
    made: Tensor = decoder(latent.flatten(0, 1), flat)
    return made.view(*latent.shape[:2], *made.shape[1:])
