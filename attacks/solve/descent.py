"""One descent of L trials: the loop, its budget, its checkpoint, and each trial's best iterate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bract.attacks.problem.problem import Problem
from bract.attacks.result import Determined
from bract.attacks.solve.checkpoints import write_atomically
from bract.attacks.solve.optimizers import BatchedOptimizer, Evaluate
from bract.attacks.solve.recorded import Recorded
from bract.errors import BractError, RunFailedError, one_line
from bract.process import clock
from bract.updates.update import Tensors

_CURVE_POINTS = 200
_CHECKPOINT_SECONDS = 30.0
_REPORTED = 1.0
"""Seconds after which progress is reported, however many steps are between points of the curve."""


@dataclass(frozen=True)
class Plateau:
    """Stop when no trial's best loss fell by ``tolerance`` (relative) in ``patience`` steps."""

    patience: int = 500
    tolerance: float = 1e-3


class Search(Protocol):
    """Candidate images of L trials as functions of free variables."""

    variables: Tensors

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the search space and of the source of labels, for a record of what ran."""

    def decode(self) -> tuple[Tensor, Tensor]:
        """Return images ``(L, B, C, H, W)`` and label probabilities ``(L, B, classes)``."""


@dataclass(frozen=True)
class Recipe:
    """Method that made the images of one trial, and its parts.

    Attributes
    ----------
    method
        Name of the concrete method; empty where it is that of the attack.
    components
        Its parts, in the words of a report.
    error
        Largest error of a pixel that the rounding of the update leaves, where the equations that
        gave the images have one solution (`bract.attacks.problem.certificate`); None elsewhere.
    determined
        Certificate of the reading that was inverted; None where nothing was read of a layer.
    """

    method: str = ""
    components: tuple[str, ...] = ()
    error: float | None = None
    determined: Determined | None = None


@dataclass
class Outcome:
    """The best iterate of each of L trials: images, label probabilities and loss belong together.

    The first three are required, the others have a value that fits an attack without a search:
    ``Outcome(images=..., labels=hard_labels(problem), losses=...)``. The base class checks shapes
    and refuses an outcome that does not fit its problem.

    Attributes
    ----------
    images
        Float ``(L, B, C, H, W)`` in [0, 1], in pixels and not as the model sees them.
    labels
        Float ``(L, B, classes)``, rows that sum to 1; row b belongs to image b. `hard_labels` reads
        them from the update.
    losses
        Float ``(L,)``, by which the blind pick is chosen among restarts: the least wins. Infinite
        for a trial that found nothing.
    unknowns
        Tensors ``(L, ...)`` that were found with the images, by name.
    curves
        ``(iteration, best loss so far)`` of each trial.
    iterations
        Steps that were taken.
    recipes
        What made each trial's images; empty where only the attack's name is to be recorded.
    certainty
        The attacker's own trust in each part of an example, such as a column of a row,
        ``(L, B, parts)`` in [0, 1]; None where the method has none.
    """

    images: Tensor
    labels: Tensor
    losses: Tensor
    unknowns: Tensors = field(default_factory=dict)
    curves: list[list[tuple[int, float]]] = field(default_factory=list)
    iterations: int = 0
    recipes: list[Recipe] = field(default_factory=list)
    certainty: Tensor | None = None

    def __post_init__(self) -> None:
        self.curves = self.curves or [[] for _ in self.losses]

    def after(self, earlier: Outcome) -> Outcome:
        """Return the outcome of the same trials with the steps of an earlier stage before it."""
        curves = [
            before + [(earlier.iterations + step, loss) for step, loss in own]
            for before, own in zip(earlier.curves, self.curves, strict=True)
        ]
        return replace(self, curves=curves, iterations=earlier.iterations + self.iterations)

    def checked(self, problem: Problem) -> Outcome:
        """Return the outcome, whose tensors must have the shapes that a problem asks for.

        Raises
        ------
        BractError
            If one has not; it names the field, what was found and what is expected.
        """
        trials, (images, *_) = problem.trials, problem.image_shape
        for name, value, shape in (
            ("images", self.images, (trials, *problem.image_shape)),
            ("labels", self.labels, (trials, images, problem.classes)),
            ("losses", self.losses, (trials,)),
        ):
            found = tuple(getattr(value, "shape", ())) if isinstance(value, Tensor) else value
            if found != shape:
                raise BractError(
                    f"the attack's outcome has {name} {one_line(found, 60)}, expected a tensor of "
                    f"shape {shape}",
                    code="plugin-faulty",
                )
        for name, given in (("curves", self.curves), ("recipes", self.recipes)):
            if given and len(given) != trials:
                raise BractError(
                    f"the attack's outcome has {len(given)} {name}, expected one a trial: {trials}",
                    code="plugin-faulty",
                )
        return self

    def made_by(self, method: str, *components: str) -> Outcome:
        """Return the outcome with every trial's method named and components added."""
        before = self.recipes or [Recipe()] * len(self.losses)
        recipes = [
            replace(r, method=method, components=_distinct(r.components + components))
            for r in before
        ]
        return replace(self, recipes=recipes)

    def read_by(self, certificates: Sequence[Determined]) -> Outcome:
        """Return the outcome with the certificate of the reading that each trial inverts."""
        before = self.recipes or [Recipe()] * len(self.losses)
        pairs = zip(before, certificates, strict=True)
        return replace(self, recipes=[replace(r, determined=known) for r, known in pairs])

    @property
    def certificates(self) -> list[Determined | None]:
        """Certificates of the readings that the trials invert; None where nothing was read."""
        return [recipe.determined for recipe in self.recipes or [Recipe()] * len(self.losses)]

    def trial(self, row: int) -> Outcome:
        """Return one trial as an outcome of its own."""
        at = slice(row, row + 1)
        return Outcome(
            images=self.images[at],
            labels=self.labels[at],
            losses=self.losses[at],
            unknowns={name: value[at] for name, value in self.unknowns.items()},
            curves=self.curves[at],
            iterations=self.iterations,
            recipes=self.recipes[at],
            certainty=None if self.certainty is None else self.certainty[at],
        )

    def replaced(
        self, trials: Sequence[int], later: Outcome, rows: Sequence[int] | None = None
    ) -> Outcome:
        """Return the outcome with some trials as a later stage left them.

        Parameters
        ----------
        rows
            Rows of ``later``, one a trial; None takes them in order.
        """
        at, of = list(trials), list(range(len(trials)) if rows is None else rows)

        def put(old: Tensor, new: Tensor) -> Tensor:
            merged = old.clone()
            merged[at] = new[of].to(old)
            return merged

        curves, recipes = list(self.curves), list(self.recipes)
        for trial, row in zip(at, of, strict=True):
            later_curve = [(self.iterations + s, v) for s, v in later.curves[row]]
            curves[trial] = self.curves[trial] + later_curve
            recipes[trial] = later.recipes[row]
        return Outcome(
            images=put(self.images, later.images),
            labels=put(self.labels, later.labels),
            losses=put(self.losses.to(torch.float64), later.losses),
            unknowns={n: put(v, later.unknowns[n]) for n, v in self.unknowns.items()},
            curves=curves,
            iterations=self.iterations + later.iterations,
            recipes=recipes,
        )


@dataclass
class Run:
    """The limits of one descent and where it reports to.

    Attributes
    ----------
    iterations, seconds
        Limits; at least one is given.
    record
        Whether a GPU records evaluations and replays them (`Recorded`).
    keep
        Called with a problem and what returns its best iterates so far, in case it is cut off.
    """

    iterations: int | None
    seconds: float | None = None
    plateau: Plateau | None = None
    record: bool = True
    report: Callable[[float, float], None] | None = None
    checkpoint: Path | None = None
    span: tuple[float, float] = (0.0, 1.0)
    keep: Callable[[Problem, Callable[[], Outcome]], None] | None = None

    def part(self, name: str, start: float, end: float, iterations: int | None) -> Run:
        """The share of this run between two fractions of it, for one stage of several."""
        low, high = self.span
        width = high - low
        return Run(
            iterations=iterations,
            seconds=None if self.seconds is None else self.seconds * (end - start),
            plateau=self.plateau,
            record=self.record,
            report=self.report,
            checkpoint=(
                self.checkpoint.with_name(f"{self.checkpoint.name}.{name}")
                if self.checkpoint
                else None
            ),
            span=(low + width * start, low + width * end),
            keep=self.keep,
        )

    def share(self, step: int, elapsed: float) -> float:
        """Share of this part's limits that ``step`` steps or ``elapsed`` seconds have used."""
        shares = []
        if self.iterations is not None:
            shares.append(step / self.iterations)
        if self.seconds is not None:
            shares.append(elapsed / self.seconds if self.seconds > 0.0 else 1.0)
        return max(shares)

    def advance(self, progress: float, loss: float) -> None:
        """Report progress of this part, in [0, 1]."""
        if self.report is not None:
            low, high = self.span
            self.report(low + (high - low) * min(progress, 1.0), loss)


def descend(
    problem: Problem,
    search: Search,
    optimizer: BatchedOptimizer,
    loss: Callable[[Tensor, Tensor, Tensors], Tensor],
    run: Run,
    unknowns: Tensors,
) -> Outcome:
    """Minimise every trial's loss, keeping each trial's best iterate.

    ``loss`` maps images, label probabilities and unknowns to ``(L,)``.
    """
    tracker = _Best(problem)
    spent = 0.0
    step = 0
    if run.checkpoint is not None and run.checkpoint.exists():
        saved = torch.load(run.checkpoint, map_location=problem.device, weights_only=True)
        for name, value in (search.variables | unknowns).items():
            value.data.copy_(saved["variables"][name])
        optimizer.restore(saved["optimizer"])
        tracker.restore(saved["best"])
        step, spent = int(saved["step"]), float(saved["spent"])
    variables = list((search.variables | unknowns).values())
    if run.keep is not None:
        run.keep(problem, lambda: tracker.outcome(step))

    def once() -> Tensor:
        for variable in variables:
            variable.grad = None
        with torch.set_grad_enabled(not optimizer.derivative_free):
            images, labels = search.decode()
            losses = loss(images, labels, unknowns)
        if not optimizer.derivative_free:
            losses.sum().backward(inputs=variables)
        tracker.see(images, labels, losses, unknowns)
        return losses.detach()

    recorded = run.record and problem.device.type == "cuda" and not optimizer.derivative_free
    evaluate: Evaluate = Recorded(once, variables) if recorded else once
    begun = clock.now() - spent
    every = max(1, (run.iterations or 20000) // _CURVE_POINTS)
    saved_at, reported = clock.now(), spent
    reference, since = tracker.losses.clone(), step
    while True:
        elapsed = clock.now() - begun
        progress = run.share(step, elapsed)
        if progress >= 1.0:
            break
        optimizer.step(evaluate, progress)
        if step % every == 0:
            tracker.mark(step)
        if step % every == 0 or elapsed - reported >= _REPORTED:
            run.advance(progress, tracker.lowest())
            reported = elapsed
        step += 1
        if run.plateau is not None and step - since >= run.plateau.patience:
            if not bool((tracker.losses < reference * (1 - run.plateau.tolerance)).any()):
                break
            reference, since = tracker.losses.clone(), step
        if run.checkpoint is not None and clock.now() - saved_at > _CHECKPOINT_SECONDS:
            saved_at = clock.now()
            write_atomically(
                run.checkpoint,
                {
                    "variables": {n: v.detach() for n, v in (search.variables | unknowns).items()},
                    "optimizer": optimizer.state(),
                    "best": tracker.state(),
                    "step": step,
                    "spent": saved_at - begun,
                },
            )
    tracker.mark(step)
    run.advance(1.0, tracker.lowest())
    if run.checkpoint is not None:
        run.checkpoint.unlink(missing_ok=True)
    return tracker.outcome(step)


class _Best:
    """Each trial's best iterate so far: loss and images of the same evaluation.

    Its tensors stay where they are, as those must that a GPU writes to when it replays a step.
    """

    def __init__(self, problem: Problem) -> None:
        trials = problem.trials
        infinite = torch.full((trials,), float("inf"), dtype=torch.float64)
        self.losses = infinite.to(problem.device)
        self._images: Tensor | None = None
        self._labels: Tensor | None = None
        self._unknowns: Tensors = {}
        self._curves: list[list[tuple[int, float]]] = [[] for _ in range(trials)]

    def see(self, images: Tensor, labels: Tensor, losses: Tensor, unknowns: Tensors) -> None:
        images, labels = images.detach(), labels.detach()
        losses = torch.where(losses.isfinite(), losses.detach(), float("inf"))
        if self._images is None or self._labels is None:
            self._images, self._labels = images.nan_to_num(0.5).clone(), labels.clone()
            self._unknowns = {n: v.detach().clone() for n, v in unknowns.items()}
            self.losses.copy_(losses)
            return
        better = losses < self.losses
        kept = {"images": self._images, "labels": self._labels} | self._unknowns
        seen = {"images": images, "labels": labels} | unknowns
        self.losses.copy_(torch.where(better, losses.to(torch.float64), self.losses))
        for name, value in kept.items():
            value.copy_(torch.where(_column(better, value), seen[name].detach(), value))

    def lowest(self) -> float:
        return float(self.losses.min())

    def mark(self, step: int) -> None:
        for curve, value in zip(self._curves, self.losses.tolist(), strict=True):
            curve.append((step, value))

    def state(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "images": self._images,
            "labels": self._labels,
            "unknowns": self._unknowns,
            "curves": [[list(point) for point in curve] for curve in self._curves],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]
        self._images, self._labels = state["images"], state["labels"]
        self._unknowns = state["unknowns"]
        self._curves = [[(int(s), float(v)) for s, v in curve] for curve in state["curves"]]

    def outcome(self, step: int) -> Outcome:
        if self._images is None or self._labels is None:
            raise RunFailedError(
                "the budget ended before the first step; raise budget.seconds", code="budget-spent"
            )
        return Outcome(self._images, self._labels, self.losses, self._unknowns, self._curves, step)


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _column(flags: Tensor, like: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (like.dim() - 1))
