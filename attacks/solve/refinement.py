"""Stages that improve an evidence before anything is matched with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import forward_model
from bract.attacks.problem.evidence import Evidence
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.solve.checkpoints import write_atomically
from bract.attacks.solve.descent import Run
from bract.attacks.solve.lbfgs import BatchedLBFGS
from bract.attacks.solve.levenberg_marquardt import levenberg_marquardt
from bract.attacks.solve.matching import minimise
from bract.attacks.solve.optimizers import FirstOrder, FirstOrderSettings
from bract.attacks.solve.pixels import PixelSearch
from bract.captures.observation import Observation
from bract.errors import BractError
from bract.process import clock
from bract.updates.update import Tensors

_UNROLL = 16
_LR = 0.05
_SPREAD, _LATER_SPREAD = 0.05, 0.3
"""Chosen for images that only predict a gradient: 120 steps suffice."""

LATE = 5.0
"""Seconds by which a first stage may overrun the whole budget."""

MOST_PIXELS = 3072
"""Most pixels that an evidence is sharpened with; time grows with their cube."""


def refine(
    observation: Observation,
    target_model: TargetModel,
    evidence: Evidence,
    run: Run,
    device: torch.device,
    *,
    latest: float | None = None,
) -> Evidence:
    """Run the stages of an evidence within the limits of ``run``.

    The first stage runs whatever the limit where nothing can be matched without it; later ones only
    while there is time, which ``notes["refinement"]`` records where it ended them. The evidence
    after each stage is kept in ``run.checkpoint``, from which a second call goes on.

    Parameters
    ----------
    latest
        Seconds of the whole budget, after which a first stage is broken off too (`Fitting.check`);
        None lets it end.
    """
    refinement = evidence.refine
    if refinement is None:
        return evidence
    begun, stage, spent, lowest = clock.now(), 0, 0.0, math.inf

    def shifted(fraction: float, loss: float) -> None:
        nonlocal lowest
        lowest = loss
        if report is not None:
            report(fraction, loss)

    report, run = run.report, replace(run, report=shifted)
    if run.checkpoint is not None and run.checkpoint.exists():
        evidence, stage, spent = _restored(run.checkpoint, evidence)
    while (improve := evidence.refine) is not None:
        elapsed = clock.now() - begun + spent
        left = None if run.seconds is None else run.seconds - elapsed
        if evidence.target and left is not None and left <= 0.0:
            note = {"refinement": f"ended by the budget after {stage} stages"}
            evidence = replace(evidence, refine=None, notes=evidence.notes | note)
            break
        low, high = (min(1.0, n / refinement.stages) for n in (stage, stage + 1))
        part = run.part(f"stage-{stage}", low, high, None)
        deadline = None if left is None else clock.now() + left
        part = replace(part, seconds=left)
        end = None if latest is None else begun + latest + LATE
        fitting = _Fitting(observation, target_model, part, device, deadline, end)
        evidence = improve(evidence, fitting)
        stage += 1
        run.advance(high, lowest)
        if run.checkpoint is not None:
            spent_by_now = clock.now() - begun + spent
            write_atomically(run.checkpoint, _kept(evidence, stage, spent_by_now))
    return evidence


@dataclass(frozen=True)
class _Fitting:
    """As `bract.attacks.problem.evidence.Fitting`, within one stage's share of the run."""

    observation: Observation
    target_model: TargetModel
    run: Run
    device: torch.device
    deadline: float | None = None
    end: float | None = None

    @property
    def over(self) -> bool:
        return self.deadline is not None and clock.now() > self.deadline

    def check(self) -> None:
        if self.end is not None and clock.now() > self.end:
            raise BractError(
                f"{self.observation.key}: reading what the defense hides took longer than the "
                "budget, and nothing can be matched without it; allow more seconds",
                code="budget-spent",
            )

    def __call__(self, evidence: Evidence, labels: Sequence[int], steps: int) -> Tensors:
        images = self.images(evidence, labels, steps)
        return self._gradient(self._problem(evidence, labels, 0), images, labels)

    def images(
        self, evidence: Evidence, labels: Sequence[int], steps: int, *, start: int = 0
    ) -> Tensor:
        problem = self._problem(evidence, labels, start)
        begun = _grey(problem, _LATER_SPREAD if start else _SPREAD)
        inputs = self.target_model.normalise(begun.to(self.device))
        search = PixelSearch(problem, inputs, self._rows(problem, labels))
        optimizer = FirstOrder(
            search.variables,
            FirstOrderSettings(kind="adam", lr=_LR, schedule="cosine"),
            project=search.box,
        )
        found = minimise(
            problem,
            search,
            optimizer,
            replace(self.run, iterations=steps),
            objective=RelativeError(),
        )
        return found.images

    def descend(
        self, evidence: Evidence, labels: Sequence[int], images: Tensor | None, steps: int
    ) -> tuple[Tensor, Tensors]:
        problem = self._problem(evidence, labels, 0)
        begun = _grey(problem, _SPREAD) if images is None else images.float().clamp(0.0, 1.0)
        inputs = self.target_model.normalise(begun.to(self.device))
        search = PixelSearch(problem, inputs, self._rows(problem, labels))
        found = minimise(
            problem,
            search,
            BatchedLBFGS(search.variables),
            replace(self.run, iterations=steps),
            objective=RelativeError(),
        )
        return found.images, self._gradient(problem, found.images, labels)

    def sharpen(
        self, evidence: Evidence, labels: Sequence[int], images: Tensor, steps: int
    ) -> tuple[Tensor, Tensors] | None:
        if images.numel() > MOST_PIXELS or not self.target_model.traits.smooth:
            return None
        problem = self._problem(evidence, labels, 0).to(torch.float64)
        found = levenberg_marquardt(
            problem,
            images.double().clamp(0.0, 1.0),
            self._rows(problem, labels),
            {},
            iterations=steps,
            deadline=self.deadline,
        )
        return found.images[None], self._gradient(problem, found.images[None], labels)

    def _problem(self, evidence: Evidence, labels: Sequence[int], start: int) -> Problem:
        forward = forward_model(self.observation.declaration, images=len(labels), unroll=_UNROLL)
        case = Case(self.observation, self.target_model, evidence, forward, len(labels))
        return Problem.stack([(case, start)], seed=0, device=self.device)

    def _rows(self, problem: Problem, labels: Sequence[int]) -> Tensor:
        rows = torch.nn.functional.one_hot(torch.tensor([list(labels)]), problem.classes)
        return rows.to(self.device, problem.dtype)

    def _gradient(self, problem: Problem, images: Tensor, labels: Sequence[int]) -> Tensors:
        simulated = problem.simulate(images, self._rows(problem, labels), {})
        return {n: v[0].detach().double() for n, v in simulated.items()}


def _grey(problem: Problem, spread: float) -> Tensor:
    grey = torch.full((1, *problem.image_shape), 0.5)
    return grey + spread * torch.randn(grey.shape, generator=problem.generators()[0])


_TENSORS = ("target", "weights", "alternatives", "nuisance", "bounds", "buffers", "labels")
_PLAIN = ("unknown_factor", "notes")


def _kept(evidence: Evidence, stage: int, spent: float) -> dict[str, Any]:
    fields = {name: getattr(evidence, name) for name in (*_TENSORS, *_PLAIN)}
    done = evidence.refine is None
    return {"evidence": fields, "done": done, "stage": stage, "spent": spent}


def _restored(path: Path, evidence: Evidence) -> tuple[Evidence, int, float]:
    saved = torch.load(path, weights_only=True)
    further = None if saved["done"] else evidence.refine
    restored = replace(evidence, **saved["evidence"], refine=further)
    return restored, int(saved["stage"]), float(saved["spent"])
