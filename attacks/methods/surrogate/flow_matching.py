"""Search the noise of a flow trained on public images, then pixels that the flow denoises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bract.attacks.methods.surrogate.ggl import GGL, search_latent, without_latent
from bract.attacks.methods.surrogate.latent import Relative, usable_prior
from bract.attacks.problem.flow import Flow
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.matching import hard_labels, minimise
from bract.attacks.solve.optimizers import FirstOrder, FirstOrderSettings
from bract.attacks.solve.pixels import PixelSearch
from bract.schema.prior import PriorKind


@ATTACKS.register("flow")
@dataclass(frozen=True, kw_only=True)
class FlowInversion(GGL):
    """Gradient matching with a flow as the denoiser (after Baglin, Zhu and Hadfield, 2026).
    """

    name: ClassVar[str] = "flow"
    title: ClassVar[str] = "Flow prior"
    generator: ClassVar[PriorKind | None] = "flow"
    iterations: ClassVar[int] = 600

    search: Literal["cma", "adam"] = "adam"
    lr: float = 0.05
    defense: Literal["simulate", "undo", "auto"] = "auto"
    latent_share: float = 0.5
    pixels_lr: float = 0.02
    denoise: float = 0.1
    since: float = 0.5

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Search the noise, then the pixels."""
        share = 1.0 if problem.likelihood is not None else self.latent_share
        total = run.iterations
        first = None if total is None else max(1, round(share * total))
        rough = search_latent(self, problem, run.part("latent", 0.0, share, first))
        if not self.matches or share == 1.0:
            return without_latent(rough)
        begun = replace(problem, starts=without_latent(rough).unknowns or None)
        relative = Relative(self.objective, rough.losses.to(problem.dtype).clamp_min(1e-20))
        labels = hard_labels(problem)
        search = PixelSearch(problem, problem.target_model.normalise(rough.images), labels)
        unknowns = begun.unknowns()
        fine = minimise(
            problem,
            search,
            FirstOrder(
                search.variables | unknowns,
                FirstOrderSettings(kind="adam", lr=self.pixels_lr, schedule="cosine"),
                project=search.box,
            ),
            run.part("pixels", share, 1.0, None if total is None else max(1, total - (first or 0))),
            objective=relative,
            priors=[FlowPrior.of(problem, labels, self.denoise, self.since)],
            unknowns=unknowns,
        )
        return relative.undone(fine).after(rough)


@dataclass(frozen=True, kw_only=True)
class FlowPrior:
    """Distance of images to what a flow makes of them after some noise is mixed in."""

    flow: Flow
    rows: Tensor | None
    weight: float
    since: float
    generators: list[torch.Generator]

    @classmethod
    def of(cls, problem: Problem, labels: Tensor, weight: float, since: float) -> FlowPrior:
        prior = usable_prior(problem.cases[0])
        flow = prior.decoder().to(problem.device, problem.dtype)
        rows = labels.flatten(0, 1).to(problem.dtype) if prior.facts.classes else None
        return cls(flow=flow, rows=rows, weight=weight, since=since, generators=problem.generators())

    def component(self, problem: Problem) -> str | None:
        del problem
        return "flow denoiser"

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        trials, batch = images.shape[:2]
        noise = torch.stack([torch.randn(images.shape[1:], generator=g) for g in self.generators])
        times = torch.stack([torch.rand(batch, generator=g) for g in self.generators])
        noise, times = noise.to(images).flatten(0, 1), times.to(images).flatten()
        times = self.since + (0.99 - self.since) * times
        ends = 2.0 * images.flatten(0, 1) - 1.0
        with torch.no_grad():
            points = torch.lerp(noise, ends, times.view(-1, 1, 1, 1))
            velocity = self.flow.velocity(points, times, self.rows)
            made = points + (1.0 - times).view(-1, 1, 1, 1) * velocity
        apart = (ends - made).square().flatten(1).mean(dim=1)
        found = self.weight * apart.view(trials, batch).sum(dim=1)
        return found - found.detach()
