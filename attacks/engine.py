"""Runs many restarts of many observations as one batch on a device."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bract.attacks.descent import Outcome, Plateau, Run, write_atomically
from bract.attacks.objectives import agreement
from bract.attacks.problem import Case, Problem
from bract.attacks.reconstruction import Budget
from bract.errors import BractError, RunFailedError
from bract.update import Tensors

CPU_LANES = 8
"""Lanes in one batch on a CPU; more no longer pay (see benchmarks/attacks.py)."""

CUDA_LANES = 256


@dataclass(frozen=True)
class Progress:
    """How far an attack is, for a progress bar.

    Attributes
    ----------
    fraction
        Share of the whole work that is done, in [0, 1].
    seconds, seconds_left
        Wall time so far, and the estimate for the rest.
    loss
        Lowest loss among the lanes that run now.
    """

    fraction: float
    seconds: float
    seconds_left: float
    loss: float


@dataclass(frozen=True)
class Solved:
    """One lane's result, on the CPU."""

    images: Tensor
    labels: Tensor
    loss: float
    curve: list[tuple[int, float]]
    iterations: int
    seconds: float
    cosine: float
    residual: float


Solve = Callable[[Problem, Run], Outcome]
"""Attack every lane of a problem."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Where and how attacks run.

    Attributes
    ----------
    device
        ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.
    lanes
        Restarts and observations in one batch; None chooses by device. Where memory runs out,
        the batch is halved until it fits, down to a plain loop.
    plateau
        Early stop; None runs the whole budget.
    checkpoint
        Folder for partial results; a second run with the same settings continues from it.
    progress
        Called a few hundred times a batch.
    """

    device: str = "cpu"
    lanes: int | None = None
    plateau: Plateau | None = None
    checkpoint: Path | None = None
    progress: Callable[[Progress], None] | None = None

    def torch_device(self) -> torch.device:
        """Resolve ``auto`` and check that the device is there.

        Raises
        ------
        BractError
            If a CUDA device is asked for and there is none.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise BractError(f"device {self.device!r}: {str(error).splitlines()[0]}") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise BractError(
                f"device {self.device!r}: {torch.cuda.device_count()} CUDA devices found; "
                "use cpu or auto"
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
    ) -> list[list[Solved]]:
        """Attack cases of one shape, once for each of the budget's starts; one list a case.

        Parameters
        ----------
        identity
            Names attack, hyper-parameters and tier; a checkpoint is used for the same identity
            and the same evidence only.
        """
        device = self.torch_device()
        starts = budget.chosen_starts
        pending = [(case, r) for case in cases for r in starts]
        size = self.lanes or (CPU_LANES if device.type == "cpu" else CUDA_LANES)
        iterations = budget.iterations
        if iterations is None and budget.seconds is None:
            iterations = default_iterations
        started = time.perf_counter()
        solved: list[Solved] = []
        total = len(pending)
        while pending:
            chunk = pending[:size]
            store = self._store(identity, chunk, budget, seed, iterations)
            if store is not None and (done := store.with_suffix(".done")).exists():
                solved += [Solved(**entry) for entry in torch.load(done, weights_only=True)]
                pending = pending[len(chunk) :]
                continue
            run = Run(
                iterations=iterations,
                seconds=budget.seconds and budget.seconds * len(chunk) / len(starts),
                plateau=self.plateau,
                report=self._reporter(started, len(solved), len(chunk), total),
                checkpoint=store,
            )
            begun = time.perf_counter()
            try:
                with _exact_arithmetic():
                    problem = Problem.stack(chunk, seed=seed, device=device)
                    outcome = solve(problem, run)
                    cosine, residual = _match(problem, outcome)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
                if len(chunk) == 1:
                    raise RunFailedError(
                        f"{chunk[0][0].observation.key}: one restart does not fit into the memory "
                        f"of {device}; lower budget.max_images or use another device"
                    ) from error
                size = (len(chunk) + 1) // 2
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            share = (time.perf_counter() - begun) / len(chunk)
            finished = _take_apart(outcome, cosine, residual, seconds=share)
            if store is not None:
                write_atomically(store.with_suffix(".done"), [vars(entry) for entry in finished])
            solved += finished
            pending = pending[len(chunk) :]
        r = len(starts)
        return [solved[i * r : (i + 1) * r] for i in range(len(cases))]

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
        self.checkpoint.mkdir(parents=True, exist_ok=True, mode=0o700)
        names = [(case.observation.key, r, _content(case)) for case, r in chunk]
        limits = [seed, iterations, budget.seconds, budget.max_images, repr(self.plateau)]
        text = json.dumps([identity, names, limits])
        return self.checkpoint / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.part"

    def _reporter(
        self, started: float, done: int, now: int, total: int
    ) -> Callable[[float, float], None] | None:
        callback = self.progress
        if callback is None:
            return None

        def report(fraction: float, loss: float) -> None:
            share = (done + now * fraction) / total
            seconds = time.perf_counter() - started
            left = seconds * (1 - share) / share if share > 0 else float("inf")
            callback(Progress(share, seconds, left, loss))

        return report


def _content(case: Case) -> str:
    """Everything of a case that the result depends on."""
    seen, evidence = case.observation, case.evidence
    settled = (
        case.images,
        evidence.unknown_factor,
        seen.protocol.to_dict(),
        repr(case.forward),
    )
    digest = hashlib.sha256(repr(settled).encode())
    groups: dict[str, Tensors] = {
        "parameters": seen.parameters,
        "buffers": seen.buffers,
        "returned buffers": seen.returned_buffers,
        "target": evidence.target,
        "weights": evidence.weights or {},
        "alternatives": evidence.alternatives or {},
        "nuisance": evidence.nuisance or {},
        "known buffers": evidence.buffers,
        "labels": {} if evidence.labels is None else {"": evidence.labels},
    }
    for group, tensors in groups.items():
        for name, value in tensors.items():
            digest.update(f"{group}/{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _take_apart(
    outcome: Outcome, cosine: Tensor, residual: Tensor, *, seconds: float
) -> list[Solved]:
    return [
        Solved(
            images=outcome.images[i].float().clamp(0.0, 1.0).cpu(),
            labels=outcome.labels[i].float().cpu(),
            loss=loss if math.isfinite(loss) else math.inf,
            curve=outcome.curves[i],
            iterations=outcome.iterations,
            seconds=seconds,
            cosine=float(cosine[i]),
            residual=float(residual[i]),
        )
        for i, loss in enumerate(outcome.losses.tolist())
    ]


def _match(problem: Problem, outcome: Outcome) -> tuple[Tensor, Tensor]:
    exact = problem.to(torch.float64)
    simulated = exact.simulate(
        outcome.images.to(torch.float64).clamp(0.0, 1.0),
        outcome.labels.to(torch.float64),
        {n: v.detach().to(torch.float64) for n, v in outcome.unknowns.items()},
    )
    detached = {name: value.detach() for name, value in simulated.items()}
    return agreement(detached, exact.reading(detached), exact.weights)


def _out_of_memory(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(
        sign in text for sign in ("out of memory", "can't allocate memory", "not enough memory")
    )


@contextlib.contextmanager
def _exact_arithmetic() -> Iterator[None]:
    """Full float32 products and deterministic kernels: matching needs every bit of a gradient."""
    matmul = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=False
        ):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul
