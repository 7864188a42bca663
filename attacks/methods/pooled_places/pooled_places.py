"""Find the places that max pooling took, the maps that entered, and the image behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from bract.attacks.base import Batches, Cost
from bract.attacks.methods.grnn.generator import makes_size
from bract.attacks.methods.grnn.grnn import GRNN
from bract.attacks.methods.inverting import InvertingAttack
from bract.attacks.methods.pooled_places.blocks import Block, Blocks, pooled_blocks
from bract.attacks.methods.pooled_places.cooling import Cooling, Smoothness, Solution, cooled
from bract.attacks.methods.pooled_places.equations import Equations
from bract.attacks.methods.pooled_places.smoothness import Tied
from bract.attacks.options import Count
from bract.attacks.problem.case import Case
from bract.attacks.problem.certificate import rounding
from bract.attacks.problem.problem import Problem
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.errors import Errors, require_exact, require_one_gradient
from bract.attacks.reading.reading import ReadingBudget
from bract.attacks.registry import ATTACKS
from bract.attacks.result import Determined
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.labels import infer_labels
from bract.attacks.solve.levenberg_marquardt import SOLVED
from bract.attacks.solve.matching import hard_labels
from bract.errors import BractError
from bract.process import clock
from bract.updates.update import Tensors

NEARER = 1e-2
"""Loss below which images come before those of attacks that guess: the places behind them are
proven, and through sigmoids the whole gradient of an image at 10 dB may leave less than 1e-6."""

COOLINGS = (Cooling(4.0, 0.7, 40), Cooling(3.0, 0.85, 80))
"""Schedules that are tried in turn for the maps inside. On images and networks that no benchmark
scores the first found all places of two maps of three, the second those of the rest."""

IMAGE_COOLINGS = (
    (Cooling(4.0, 0.85, 60), (10.0, 0.75)),
    (Cooling(4.0, 0.8, 40), (1e-2, 0.7)),
)
"""Schedules for the image without colours, each from the last one's, with the weight of total
variation and its factor from step to step."""

FROM_START = Cooling(1.0, 0.7, 24)
"""The same from GRNN's image."""

_VARIATION = 1e-5
"""Weight of total variation from there on; where equations are fewer than pixels it stays."""

_GREY_SHARE, _GRNN_SHARE = 0.3, 0.9
_EXPLAINED = 4.0

MOST_BYTES = 1 << 30
"""Most memory of the equations of one block."""

_FEWEST_STEPS = 20
_STEP, _FASTEST = 0.05, 2e10
"""Seconds of a step of a small map, and operations a second, in double precision, of a fast core.
A search that cannot end in its budget is not begun: its seconds are another attack's."""


@ATTACKS.register("pooled-places")
@dataclass(frozen=True, kw_only=True)
class PooledPlaces(InvertingAttack):
    """Solve for what entered each convolution with its places of max pooling, down to the image.

    One image's gradient of the first linear layer tells the features that entered it, to rounding,
    and the loss' gradient of them (Phong et al. 2018, section 3). Before it are blocks: a
    convolution, a monotone activation, max pooling. The features give the highest output of each
    cell; which of its places has it is not told. Given the places, the convolution's gradient and
    its outputs there are linear in the map that entered, with more equations than a map inside a
    LeNet has values. Places and map are sought together (`Equations`), by damped Gauss-Newton steps
    whose shares of places narrow (`cooled`), from what a grey image makes enter. What is left at
    rounding proves a map and its places, without the truth; else the attack refuses.

    The image is sought in the same way from the map of the first convolution. Of an image without
    colours the equations are more than the pixels, of one in colour fewer: it is sought without
    colours first, and where that does not explain the update, from GRNN's image, with a little
    total variation.

    The method is bract's own. A loss is the relative squared residual of the whole gradient.

    Attributes
    ----------
    max_unknowns
        Most values of a map, and most pixels, that are solved for; a step takes time with their
        cube and memory with ``O * H * W`` times their number.
    """

    name: ClassVar[str] = "pooled-places"
    title: ClassVar[str] = "Pooled places"
    family: ClassVar[str] = "layer-by-layer reconstruction"
    batches: ClassVar[Batches] = "one"
    cost: ClassVar[Cost] = "tens of seconds"
    found_below: ClassVar[float | None] = SOLVED
    nearer: ClassVar[float | None] = NEARER
    iterations: ClassVar[int] = sum(cooling.steps for cooling in COOLINGS)

    max_unknowns: Count = 4096

    def for_best(self, problem: Problem) -> Self | None:
        """Return the attack for single images without noise, through a model with kinks."""
        smooth = problem.target_model.traits.smooth
        return None if smooth or problem.image_shape[0] > 1 else super().for_best(problem)

    def require_model(self, case: Case) -> None:
        """Refuse models without max pooling before a linear layer, and maps that are too large."""
        super().require_model(case)
        blocks = pooled_blocks(case)
        largest = max(math.prod(block.entered) for block in blocks.each)
        if largest > self.max_unknowns:
            raise BractError(
                f"{case.observation.key}: {largest} values to solve for, more than max_unknowns "
                f"({self.max_unknowns})",
                code="attack-unsuited",
            )
        if len(blocks.each) < 2:
            raise BractError(
                f"{case.observation.key}: one convolution is before the linear layer, so that no "
                "map inside proves its places; take another attack",
                code="attack-unsuited",
            )
        needed = max(_Size.of(case, block).bytes for block in blocks.each)
        if needed > MOST_BYTES:
            raise BractError(
                f"{case.observation.key}: the equations of a block take {needed / 2**30:.1f} GiB "
                f"of memory, at most {MOST_BYTES / 2**30:.0f} are taken",
                code="attack-unsuited",
            )

    def prepare(self, case: Case) -> Case:
        """Refuse batches, and what is no exact gradient of one image."""
        case = super().prepare(case)
        if case.images > 1:
            raise BractError(
                f"{case.observation.key}: {case.images} images, whose features add up in one "
                "gradient; pooled-places takes one",
                code="attack-unsuited",
            )
        require_one_gradient(case, self.name)
        require_exact(case, pooled_blocks(case).names, self.name)
        return case

    def entered(self, case: Case, budget: ReadingBudget) -> Entered:
        """Return what left the first block, with all places behind it proven."""
        blocks = pooled_blocks(case)
        reached, slopes, left = _features(case, blocks)
        allowed = _allowed(case, blocks)
        if left > allowed:
            raise BractError(
                f"{case.observation.key}: the gradient of {blocks.dense.layer} is that of several "
                "rows, so that what entered it is not read",
                code="attack-unsolved",
            )
        bounds, count = _bounds(case, blocks), len(reached)
        for block in blocks.each:
            _require_time(case, _Size.of(case, block), budget.seconds)
        due, grey = _due(budget.seconds), _grey(case, blocks)
        for number in range(len(blocks.each) - 1, 0, -1):
            equations = _equations(case, blocks.each[number], reached, slopes)
            solution = _solved(equations, grey[number], bounds[number], allowed, budget, due)
            if solution.left > allowed:
                raise BractError(
                    f"{case.observation.key}: the places that max pooling took behind "
                    f"{blocks.each[number].layer} were not found: {solution.left:.1e} of the "
                    f"equations is left, rounding leaves {allowed:.1e}",
                    code="attack-unsolved",
                )
            left, count = max(left, solution.left), equations.count
            reached, slopes = solution.values, equations.entered_slopes(solution.values)
            budget.advance(1.0 - number / len(blocks.each), solution.left)
        site = blocks.each[1].site if len(blocks.each) > 1 else blocks.dense
        return Entered(
            site=site,
            values=reached[None],
            labels=infer_labels(case).labels.cpu(),
            errors=Errors.of(case, blocks.names),
            certificate=Determined(count, left, allowed),
            component="places of max pooling",
        )

    def inverted(self, problem: Problem, run: Run, read: Sequence[Entered]) -> Outcome:
        """Find the image that makes this leave the first block."""
        due, each = _due(run.seconds), list[_Image]()
        for case, one in zip(problem.cases, read, strict=True):
            assert one.values is not None
            each.append(_Image.of(case, one.values[0]))
        found = [one.from_grey(run.iterations, due) for one in each]
        rough = [trial for trial, one in enumerate(each) if found[trial].left > one.allowed]
        steps = max(one.steps for one in found)
        left = None if run.iterations is None else run.iterations - steps - FROM_START.steps
        if (
            rough
            and makes_size(*problem.image_shape[2:])
            and not due()
            and (left is None or left > 0)
        ):
            part = run.part("start", _GREY_SHARE, _GRNN_SHARE, left)
            made = GRNN().solve(problem.select(rough), part)
            steps += made.iterations + FROM_START.steps
            for trial, start in zip(rough, made.images, strict=True):
                inputs = problem.target_model.normalise(start[0].cpu().double()).flatten()
                again = each[trial].from_start(inputs, due)
                found[trial] = min(found[trial], again, key=lambda one: one.left)
        problem.target_model.model.to(problem.device)
        inputs = torch.stack([one.values for one in found]).view(
            problem.trials, *problem.image_shape
        )
        images = problem.target_model.denormalise(inputs).clamp(0.0, 1.0)
        images, labels = images.to(problem.device, problem.dtype), hard_labels(problem)
        losses = problem.residuals(images, labels).to(torch.float64)
        run.advance(1.0, float(losses.min()))
        return Outcome(
            images=images,
            labels=labels,
            losses=losses,
            unknowns={n: v.detach() for n, v in problem.unknowns().items()},
            curves=[[(steps, loss)] for loss in losses.tolist()],
            iterations=steps,
        ).made_by("", read[0].component, "layer by layer", "labels analytic")


@dataclass(frozen=True)
class _Image:
    """The search for one image by what left the first block."""

    case: Case
    equations: Equations
    bounds: tuple[Tensor, Tensor]
    allowed: float

    @classmethod
    def of(cls, case: Case, reached: Tensor) -> _Image:
        blocks = pooled_blocks(case)
        equations = _equations(case, blocks.each[0], reached, _slopes(case, blocks, reached))
        return cls(case, equations, _bounds(case, blocks)[0], _allowed(case, blocks))

    def from_grey(self, iterations: int | None, due: Callable[[], bool]) -> Solution:
        """Return the model's input ``(C * H * W,)``, of an image without colours where it has some.

        A grey image in several channels has fewer pixels than equations.
        """
        low, high = self.bounds
        channels, height, width = self.case.target_model.image_shape
        shape, flat = (1, height, width), torch.zeros(height * width, dtype=torch.float64)
        black, white = (end.view(channels, -1)[:, 0] for end in (low, high))
        tied = Tied(self.equations, white - black, black)
        found, steps = Solution(flat + 0.5, math.inf, 0), 0
        for cooling, (weight, factor) in IMAGE_COOLINGS:
            most = cooling.steps if iterations is None else min(cooling.steps, iterations - steps)
            if most < 1 or due() or found.left <= self.allowed:
                break
            prior, tried = Smoothness(shape, weight, factor), replace(cooling, steps=most)
            last = self._cooled(tied, found.values, (flat, flat + 1.0), tried, prior, due)
            steps += last.steps
            found = min(found, last, key=lambda one: one.left)
        return Solution(tied.whole(found.values), found.left, steps)

    def from_start(self, start: Tensor, due: Callable[[], bool]) -> Solution:
        """Return the model's input by a start of it, in colour."""
        least = 0.0 if self.equations.count >= len(start) else _VARIATION
        shape = self.case.target_model.image_shape
        prior = Smoothness(shape, _VARIATION, FROM_START.factor, least)
        return self._cooled(self.equations, start, self.bounds, FROM_START, prior, due)

    def _cooled(
        self,
        equations: Equations | Tied,
        start: Tensor,
        bounds: tuple[Tensor, Tensor],
        cooling: Cooling,
        prior: Smoothness,
        due: Callable[[], bool],
    ) -> Solution:
        return cooled(
            equations, start, bounds, cooling, enough=self.allowed, smoothness=prior, due=due
        )


def _features(case: Case, blocks: Blocks) -> tuple[Tensor, Tensor, float]:
    """Return what entered the linear layer, the loss' gradient of it, and what is left."""
    rows, slope = (case.evidence.target[name].cpu().double() for name in blocks.dense.names)
    values = slope @ rows / slope.square().sum().clamp_min(1e-300)
    left = float((rows - slope[:, None] * values).norm() / rows.norm().clamp_min(1e-300))
    return values, slope @ _state(case)[blocks.dense.weight], left


def _slopes(case: Case, blocks: Blocks, reached: Tensor) -> Tensor:
    """Return the loss' gradient of what left the first block."""
    _, slopes, _ = _features(case, blocks)
    values = reached.clone().requires_grad_()
    made = values
    for block in blocks.each[1:]:
        made = _left(case, block, made)
    (found,) = torch.autograd.grad(made, values, slopes)
    return found


def _left(case: Case, block: Block, entered: Tensor) -> Tensor:
    """Return what leaves a block, flat."""
    state = _state(case)
    weight, bias = (state[name] for name in block.site.names)
    made = F.conv2d(entered.view(1, *block.entered), weight, bias, block.stride, block.padding)
    return block.activation.forward(F.max_pool2d(made, block.window)).flatten()


def _grey(case: Case, blocks: Blocks) -> list[Tensor]:
    """Return what a grey image makes enter each block, flat."""
    image = torch.full(case.target_model.image_shape, 0.5, dtype=torch.float64)
    found = [case.target_model.normalise(image).flatten()]
    for block in blocks.each[:-1]:
        found.append(_left(case, block, found[-1]))
    return found


def _bounds(case: Case, blocks: Blocks) -> list[tuple[Tensor, Tensor]]:
    """Return lowest and highest values of what may enter each block, for pixels in [0, 1]."""
    shape, state = case.target_model.image_shape, _state(case)
    ends = (torch.full(shape, end, dtype=torch.float64) for end in (0.0, 1.0))
    low, high = (case.target_model.normalise(end).flatten() for end in ends)
    found = [(low, high)]
    for block in blocks.each[:-1]:
        weight, bias = (state[name] for name in block.site.names)
        at = [end.view(1, *block.entered) for end in (low, high)]
        made = []
        for lower, upper in (at, at[::-1]):
            up, down = (
                F.conv2d(given, part, None, block.stride, block.padding)
                for given, part in ((lower, weight.clamp_min(0.0)), (upper, weight.clamp_max(0.0)))
            )
            pooled = F.max_pool2d(up + down + bias[:, None, None], block.window)
            made.append(block.activation.forward(pooled).flatten())
        low, high = made
        found.append((low, high))
    return found


def _equations(case: Case, block: Block, pooled: Tensor, slopes: Tensor) -> Equations:
    """Return the equations of a block for what left it and the loss' gradient of it."""
    state = _state(case)
    weight, bias = (state[name] for name in block.site.names)
    gradient = case.evidence.target[block.site.weight].cpu().double()
    return Equations.of(block, weight, bias, gradient, pooled, slopes)


def _solved(
    equations: Equations,
    start: Tensor,
    bounds: tuple[Tensor, Tensor],
    allowed: float,
    budget: ReadingBudget,
    due: Callable[[], bool],
) -> Solution:
    """Return the best of the schedules' solutions; the first that is exact."""
    best, steps = Solution(start, equations.left(start), 0), budget.iterations
    for cooling in COOLINGS:
        most = cooling.steps if steps is None else min(cooling.steps, steps)
        if most < 1 or due():
            break
        tried = Cooling(cooling.widest, cooling.factor, most)
        solution = cooled(equations, start, bounds, tried, enough=allowed, due=due)
        steps = None if steps is None else steps - solution.steps
        best = min(best, solution, key=lambda one: one.left)
        if best.left <= allowed:
            break
    return best


@dataclass(frozen=True)
class _Size:
    """Numbers of equations and unknowns of a block, and the bytes of its maps."""

    equations: int
    values: int
    bytes: int

    @classmethod
    def of(cls, case: Case, block: Block) -> _Size:
        weight = _state(case)[block.site.weight]
        _, height, width = block.entered
        places = math.ceil(height / block.stride[0]) * math.ceil(width / block.stride[1])
        values = math.prod(block.entered)
        equations = weight.numel() + len(weight) * places // block.window**2
        return cls(equations, values, 8 * len(weight) * places * values)


def _require_time(case: Case, size: _Size, seconds: float | None) -> None:
    """Refuse a search of which a fast core could not take the fewest steps that found places."""
    least = _FEWEST_STEPS * (_STEP + 2.0 * size.equations * size.values**2 / _FASTEST)
    if seconds is not None and seconds < least:
        raise BractError(
            f"{case.observation.key}: {seconds:.2g} s are too few for {size.equations} equations "
            f"in {size.values} values, which take {least:.2g} s or more; raise budget.seconds",
            code="budget-spent",
        )


def _due(seconds: float | None) -> Callable[[], bool]:
    """Return what tells whether so many seconds have passed."""
    begun = clock.now()
    return lambda: seconds is not None and clock.now() - begun >= seconds


def _allowed(case: Case, blocks: Blocks) -> float:
    """Return the share of the equations that rounding may leave."""
    return _EXPLAINED * max(rounding(case, name) for name in blocks.names)


def _state(case: Case) -> Tensors:
    return case.target_model.captured(case.observation, torch.float64)
