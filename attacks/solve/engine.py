"""Runs many restarts of many observations as one batch on a device."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bract.attacks.problem.case import Case
from bract.attacks.problem.certificate import certified, layer_residuals
from bract.attacks.problem.evidence import Evidence
from bract.attacks.problem.objectives import agreement, factor, layer_cosines
from bract.attacks.problem.over_rounds import of_last_round
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.result import Budget, CutOffError, Determined, Trial
from bract.attacks.solve.arithmetic import exact_arithmetic
from bract.attacks.solve.checkpoints import (
    captured,
    content_of,
    digest_of,
    made_by,
    write_atomically,
)
from bract.attacks.solve.descent import Outcome, Plateau, Recipe, Run
from bract.attacks.solve.own_statistics import OwnStatistics
from bract.attacks.solve.refinement import refine
from bract.attacks.solve.regularizers import NaturalImages
from bract.captures.observation import Observation
from bract.disk.permissions import make_private_folder
from bract.errors import BractError, RunFailedError, first_line, out_of_memory
from bract.process import clock
from bract.schema.audit import Certificate
from bract.updates.update import Tensors

_log = logging.getLogger(__name__)

CPU_TRIALS = 8
"""Trials in one batch on a CPU; more no longer pay (see experiments/attacks.py)."""

CUDA_TRIALS = 256

DESCENTS = 2
"""Last descents of a batch whose best iterates are kept where it is cut off."""


@dataclass(frozen=True)
class Progress:
    """Progress of an attack, for a progress bar.

    Attributes
    ----------
    fraction
        Share of the whole work that is done, in [0, 1].
    seconds, seconds_left
        Wall time so far, and the estimate for the rest.
    loss
        Lowest loss among the trials that run now.
    """

    fraction: float
    seconds: float
    seconds_left: float
    loss: float


BestSoFar = Callable[[], Outcome]
"""Return the best iterate of each trial so far."""

Solve = Callable[[Problem, Run], Outcome]
"""Attack every trial of a problem."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Device, batching, early stop and checkpoints of attacks.

    Attributes
    ----------
    device
        ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.
    trials
        Restarts and observations in one batch; None chooses by device. Where memory runs out,
        the batch is halved until it fits, down to a plain loop.
    record
        Whether a GPU records a descent's evaluation and replays it (a CUDA graph), so that small
        kernels need no launch each. False is for comparison.
    plateau
        Early stop; None runs the whole budget.
    checkpoint
        Folder for partial results; a second run with the same settings continues from it.
    progress
        Called a few hundred times a batch.
    """

    device: str = "cpu"
    trials: int | None = None
    record: bool = True
    plateau: Plateau | None = None
    checkpoint: Path | None = None
    progress: Callable[[Progress], None] | None = None

    def torch_device(self) -> torch.device:
        """Resolve ``auto`` and check that the device is there."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise BractError(
                f"device {self.device!r}: {first_line(error)}", code="device-missing"
            ) from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise BractError(
                f"device {self.device!r}: {torch.cuda.device_count()} CUDA devices found; "
                "use cpu or auto",
                code="device-missing",
            )
        return device

    def run(
        self,
        solve: Solve,
        cases: Sequence[Case],
        *,
        budget: Budget,
        default_iterations: int,
        seed: int,
        identity: str,
        together: bool = False,
    ) -> list[list[Trial]]:
        """Attack cases of one shape, once for each of the budget's restarts; one list a case.

        Parameters
        ----------
        identity
            Names attack, hyper-parameters and tier; a checkpoint is used for the same identity
            and the same evidence only.
        together
            Whether all restarts of a case run in one batch, whatever the batch's size: the attack
            lets them see each other, and what they find must not depend on what fits.
        """
        device = self.torch_device()
        starts = budget.restart_numbers
        pending = [(case, r) for case in cases for r in starts]
        unit = len(starts) if together else 1
        size = self.trials or (CPU_TRIALS if device.type == "cpu" else CUDA_TRIALS)
        size = max(1, size // unit) * unit
        iterations = budget.iterations
        if iterations is None and budget.seconds is None:
            iterations = default_iterations
        started = clock.now()
        solved: list[Trial] = []
        total = len(pending)
        while pending:
            chunk = pending[:size]
            store = self._store(identity, chunk, budget, seed, iterations)
            if store is not None and (done := store.with_suffix(".done")).exists():
                solved += [_read(entry) for entry in torch.load(done, weights_only=True)]
                pending = pending[len(chunk) :]
                continue
            running: deque[tuple[Problem, BestSoFar]] = deque(maxlen=DESCENTS)
            run = Run(
                iterations=iterations,
                keep=partial(_noted, running),
                seconds=budget.seconds and budget.seconds * len(chunk) / len(starts),
                record=self.record,
                plateau=self.plateau,
                report=self._reporter(started, len(solved), len(chunk), total),
                checkpoint=store,
            )
            begun = clock.now()
            try:
                with exact_arithmetic():
                    problem = Problem.stack(chunk, seed=seed, device=device)
                    outcome = solve(problem, run)
                    match = _match(problem, outcome)
            except CutOffError as cut:
                for number, trial in enumerate(solved):
                    cut.trials.setdefault(number // len(starts), []).append(trial)
                spent = (clock.now() - begun) / len(chunk)
                places = {id(case): number for number, case in enumerate(cases)}
                for part, best in running:
                    for trial, case in zip(_so_far(part, best, spent), part.cases, strict=False):
                        if id(case) in places:
                            cut.trials.setdefault(places[id(case)], []).append(trial)
                raise
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                if len(chunk) == unit:
                    raise RunFailedError(
                        _too_large(chunk[0][0], unit, device), code="out-of-memory"
                    ) from error
                size = (len(chunk) // unit + 1) // 2 * unit
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            share = (clock.now() - begun) / len(chunk)
            finished = _take_apart(problem, outcome, match, seconds=share)
            if store is not None:
                write_atomically(
                    store.with_suffix(".done"), [_written(entry) for entry in finished]
                )
            solved += finished
            pending = pending[len(chunk) :]
        r = len(starts)
        return [solved[i * r : (i + 1) * r] for i in range(len(cases))]

    def within(self, low: float, high: float, begun: float) -> Engine:
        """Return an engine that reports its progress as a part of a longer work.

        Parameters
        ----------
        low, high
            Shares of the whole, in [0, 1], between which this part is.
        begun
            When the whole began, by `clock.now`.
        """
        callback = self.progress
        if callback is None:
            return self

        def report(progress: Progress) -> None:
            fraction = low + (high - low) * progress.fraction
            callback(_progress(fraction, clock.now() - begun, progress.loss))

        return replace(self, progress=report)

    def report_done(self, begun: float, loss: float) -> None:
        """Report that a work that began at a time of `clock.now` needs nothing more."""
        if self.progress is not None:
            self.progress(_progress(1.0, clock.now() - begun, loss))

    def refine(
        self,
        observation: Observation,
        target_model: TargetModel,
        evidence: Evidence,
        *,
        seconds: float | None = None,
        latest: float | None = None,
        tier: str = "",
        needs: frozenset[str] | None = None,
    ) -> Evidence:
        """Run the stages of an evidence on the device.

        Parameters
        ----------
        seconds
            Most wall time, but for a first stage without which nothing can be matched.
        latest
            Wall time after which such a stage is broken off too.
        tier, needs
            What the adversary knows and reads; part of the checkpoint's identity.
        """
        store = None
        if self.checkpoint is not None:
            make_private_folder(self.checkpoint)
            declared = observation.declaration.to_dict()
            read = () if needs is None else (sorted(needs),)
            settled = ("evidence", tier, observation.key, declared, *read, *made_by())
            seen = captured(observation) | {"update": observation.update}
            store = self.checkpoint / f"{digest_of(settled, seen)}.evidence"
        begun = clock.now()
        run = Run(
            iterations=None,
            seconds=seconds,
            report=self._reporter(begun, 0, 1, 1),
            checkpoint=store,
        )
        with exact_arithmetic():
            device = self.torch_device()
            return refine(observation, target_model, evidence, run, device, latest=latest)

    def _store(
        self,
        identity: str,
        chunk: Sequence[tuple[Case, int]],
        budget: Budget,
        seed: int,
        iterations: int | None,
    ) -> Path | None:
        if self.checkpoint is None:
            return None
        # Half-made reconstructions are personal data too.
        make_private_folder(self.checkpoint)
        names = [(case.observation.key, r, content_of(case)) for case, r in chunk]
        limits = [seed, iterations, budget.seconds, budget.max_images, repr(self.plateau)]
        text = json.dumps([identity, names, limits, made_by()])
        return self.checkpoint / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.part"

    def _reporter(
        self, started: float, done: int, now: int, total: int
    ) -> Callable[[float, float], None] | None:
        callback = self.progress
        if callback is None:
            return None

        def report(fraction: float, loss: float) -> None:
            share = (done + now * fraction) / total
            callback(_progress(share, clock.now() - started, loss))

        return report


def _too_large(case: Case, restarts: int, device: torch.device) -> str:
    key = case.observation.key
    if restarts == 1:
        return (
            f"{key}: one restart does not fit into the memory of {device}; lower "
            "budget.max_images or use another device"
        )
    return (
        f"{key}: the {restarts} restarts, which this attack runs together, do not fit into the "
        f"memory of {device}; lower budget.restarts or budget.max_images, or use another device"
    )


def _progress(fraction: float, seconds: float, loss: float) -> Progress:
    left = seconds * (1 - fraction) / fraction if fraction > 0 else math.inf
    return Progress(fraction, seconds, left, loss)


def _noted(running: deque[tuple[Problem, BestSoFar]], problem: Problem, best: BestSoFar) -> None:
    running.append((problem, best))


def _so_far(problem: Problem, best: BestSoFar, seconds: float) -> list[Trial]:
    """Return the trials of a descent that was cut off; empty before its first step."""
    try:
        with exact_arithmetic():
            outcome = best()
            match = _match(problem, outcome)
    except (BractError, RuntimeError) as error:
        _log.info("nothing kept of a descent that was cut off: %s", error)
        return []
    return _take_apart(problem, outcome, match, seconds=seconds)


def _take_apart(
    problem: Problem,
    outcome: Outcome,
    match: _Match,
    *,
    seconds: float,
) -> list[Trial]:
    recipes = outcome.recipes or [Recipe()] * problem.trials
    return [
        Trial(
            images=outcome.images[i].float().clamp(0.0, 1.0).cpu(),
            label_probabilities=outcome.labels[i].float().cpu(),
            loss=loss if math.isfinite(loss) else math.inf,
            restart=problem.restarts[i],
            method=recipes[i].method,
            components=tuple(dict.fromkeys((*recipes[i].components, *problem.cases[i].components))),
            unknowns={n: v[i].detach().float().cpu() for n, v in outcome.unknowns.items()},
            cosine=float(match.cosine[i]),
            residual=float(match.residual[i]),
            layers={name: float(cosines[i]) for name, cosines in match.layers.items()},
            scale=scale if math.isfinite(scale := float(match.scale[i])) else None,
            nats=None if match.nats is None else float(match.nats[i]),
            statistics=None if match.statistics is None else float(match.statistics[i]),
            certainty=None if outcome.certainty is None else outcome.certainty[i].float().cpu(),
            certificate=_certificate(problem, outcome, match, recipes[i].error, i),
            determined=recipes[i].determined,
            loss_curve=outcome.curves[i],
            iterations=outcome.iterations,
            seconds=seconds,
        )
        for i, loss in enumerate(outcome.losses.tolist())
    ]


def _written(trial: Trial) -> dict[str, Any]:
    """Return a finished trial as plain values and tensors, which a checkpoint may hold."""
    proof, known = trial.certificate, trial.determined
    return vars(trial) | {
        "certificate": None if proof is None else proof.to_dict(),
        "determined": None if known is None else asdict(known),
    }


def _read(entry: dict[str, Any]) -> Trial:
    proof, known = entry["certificate"], entry["determined"]
    given = {
        "certificate": None if proof is None else Certificate.model_validate(proof),
        "determined": None if known is None else Determined(**known),
    }
    return Trial(**entry | given)


def _certificate(
    problem: Problem, outcome: Outcome, match: _Match, error: float | None, trial: int
) -> Certificate | None:
    if error is None:
        return None
    return certified(
        problem.cases[trial],
        count=outcome.images.shape[1],
        residuals={name: float(value[trial]) for name, value in match.residuals.items()},
        error=error,
        unknowns=outcome.unknowns,
    )


@dataclass(frozen=True)
class _Match:
    """How the images of each trial fit what was captured, each ``(L,)``; see `Trial`.

    ``residuals`` are relative ones by tensor.
    """

    cosine: Tensor
    residual: Tensor
    layers: Tensors
    scale: Tensor
    nats: Tensor | None
    statistics: Tensor | None
    residuals: Tensors


def _match(problem: Problem, outcome: Outcome) -> _Match:
    exact = problem.to(torch.float64)
    images = outcome.images.to(torch.float64).clamp(0.0, 1.0)
    simulated = exact.simulate(
        images,
        outcome.labels.to(torch.float64),
        {n: v.detach().to(torch.float64) for n, v in outcome.unknowns.items()},
    )
    detached = {name: value.detach() for name, value in simulated.items()}
    reading = exact.reading(detached)
    cosine, residual = agreement(detached, reading, exact.weights)
    own = OwnStatistics.of(exact)
    statistics = None
    if own is not None and own.decisive(pixels=images[0].numel()):
        with torch.no_grad():
            statistics = own.error(exact, images, outcome.labels.to(torch.float64))
    nats = None
    if exact.likelihood is not None:
        nats = exact.distance(exact.likelihood, detached) + NaturalImages()(exact, images)
    case = exact.cases[0]
    made, target = of_last_round(case, detached), of_last_round(case, exact.target)
    layers = layer_cosines(made, target)
    weights = exact.weights and of_last_round(case, exact.weights)
    scale = factor(made, target, weights)
    return _Match(
        cosine, residual, layers, scale, nats, statistics, layer_residuals(detached, reading)
    )
