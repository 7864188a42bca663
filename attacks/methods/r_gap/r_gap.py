"""The image of a single gradient by linear algebra alone, layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bract.attacks.base import Attack, Batches, Cost
from bract.attacks.methods.r_gap.block_equations import ROUNDING, logit_gradient
from bract.attacks.methods.r_gap.chain import Chain, chain_of
from bract.attacks.methods.r_gap.recursion import Recursion, recurse
from bract.attacks.options import Count
from bract.attacks.problem.case import Case
from bract.attacks.problem.certificate import is_whole, largest_error, moved, rounding
from bract.attacks.problem.dropout import MASK
from bract.attacks.problem.objectives import Cosine
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.reading.errors import require_exact, require_one_gradient
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Recipe, Run
from bract.attacks.solve.levenberg_marquardt import levenberg_marquardt
from bract.attacks.solve.matching import hard_labels
from bract.errors import BractError
from bract.process import clock
from bract.updates.update import Tensors

_TYPICAL = 0.15
"""Typical error of a coordinate as a share of its bound."""

MOST_FITTED = 2048
"""Most pixels that are fitted once more to unevenly known coordinates; time grows with their
cube."""

_FITTED = 12
_FAINT = 1e-3

_CHAINS: WeakKeyDictionary[TargetModel, Chain] = WeakKeyDictionary()
"""Chains that were traced, by the models that are attacked."""


@ATTACKS.register("r-gap")
@dataclass(frozen=True, kw_only=True)
class RGAP(Attack):
    """Recursive gradient attack on privacy (Zhu and Blaschko, ICLR 2021), for one image.

    From the logits back, what enters a layer is the solution of linear equations: it makes what
    leaves the layer, and the gradient of the layer's weights (`recursion`).
    It takes any model that is a chain of affine maps (convolutions, linear layers, average
    pooling, batch normalisation with fixed statistics) with ReLU, leaky ReLU, sigmoid, tanh, ELU
    or softplus between them, and a bias at the logits. Nothing is optimised, no start is drawn.

    Where a ReLU's zeros leave gaps, the published attack returns the solution of least norm. Here
    what was cut off counts as not above zero, inputs are in the range of the activation before, and
    pixels in [0, 1] are the ones of least total variation; gaps in a hidden layer are then filled
    once more from the image so found. An attack that does not arrive refuses.

    Where an adaptive attacker has the error of each coordinate (`Evidence.errors`), as behind
    AdaDefense, equations are weighed by it, and errors are carried from layer to layer. The loss'
    gradient at the logits then follows from the gradient of the last weights (`rank_one`), units
    in doubt are decided by the gradients of biases (`alive_units`), and an image of up to
    `MOST_FITTED` pixels is fitted to all layers at once.

    The equations do not need the gradient's length, which clipping changes: the loss is the squared
    distance of the two gradients after each is divided by its norm.

    Attributes
    ----------
    max_unknowns
        Most values of a layer's input that are solved for by factorisation, which gaps and nearly
        dependent equations need; time grows with their cube, memory with their square. Others go
        by conjugate gradients.
    """

    name: ClassVar[str] = "r-gap"
    title: ClassVar[str] = "R-GAP"
    family: ClassVar[str] = "closed-form reconstruction"
    closed_form: ClassVar[bool] = True
    batches: ClassVar[Batches] = "one"
    cost: ClassVar[Cost] = "tens of seconds"
    iterations: ClassVar[int] = 1

    max_unknowns: Count = 4096

    def require_model(self, case: Case) -> None:
        """Refuse models that are no chain of layers."""
        super().require_model(case)
        self._chain(case)

    def prepare(self, case: Case) -> Case:
        """Refuse batches, several steps, open evidence and other models."""
        case = super().prepare(case)
        key = case.observation.key
        require_one_gradient(case, self.name)
        if case.images != 1:
            raise BractError(
                f"{key}: {case.images} images in one update; r-gap needs one alone",
                code="attack-unsuited",
            )
        if case.evidence.weights is not None and not case.target_model.loss.is_plain:
            raise BractError(
                f"{key}: smoothed labels or weights of classes enter the loss; r-gap needs plain "
                "cross entropy where the update is not exact",
                code="attack-unsuited",
            )
        if any(name.startswith(MASK) for name in case.evidence.buffers):
            raise BractError(
                f"{key}: dropout hid inputs of a layer; r-gap needs all of them",
                code="attack-unsuited",
            )
        chain = self._chain(case)
        used = {name for block in chain.blocks for name in block.parameters}
        learned = [name for name in case.target_model.parameter_names if name in used]
        require_exact(case, learned, self.name, uneven_with_errors=True)
        try:
            logit_gradient(chain.blocks[-1], _state(case), _gradients(case), _trust(case))
        except BractError as error:
            raise BractError(f"{_model(case)}: {error}", code=error.code) from error
        return case

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Go back through the layers; restarts of one observation share the result."""
        images = torch.zeros((problem.trials, *problem.image_shape), dtype=torch.float64)
        done: dict[str, Recursion] = {}
        read: dict[str, Tensor] = {}
        begun = clock.now()
        for trial, case in enumerate(problem.cases):
            key = case.observation.key
            if key not in done:

                def report(share: float, trial: int = trial) -> None:
                    run.advance((trial + share) / problem.trials, 0.0)

                def due(trial: int = trial) -> None:
                    spent = clock.now() - begun
                    if run.seconds and spent > run.seconds * (trial + 1) / problem.trials:
                        raise BractError(
                            "its time is over; raise budget.seconds", code="budget-spent"
                        )

                done[key] = self._recursion(case, report, due)
                read[key] = self._fitted(problem.select([trial]), done[key].inputs, due)
            images[trial] = read[key]
        problem.target_model.model.to(problem.device)
        exact = problem.to(torch.float64)
        labels = hard_labels(problem).to(torch.float64)
        images = images.to(problem.device)
        simulated = exact.simulate(images, labels, exact.unknowns())
        losses = 2.0 * exact.distance(Cosine(), simulated).detach()
        errors: dict[str, float | None] = {}
        for case, loss in zip(problem.cases, losses.tolist(), strict=True):
            key = case.observation.key
            if key not in errors:
                errors[key] = self._error(case, done[key], loss)
        problem.target_model.model.to(problem.device)
        return Outcome(
            images=images,
            labels=labels,
            losses=losses,
            recipes=[
                _recipe(done[case.observation.key], errors[case.observation.key])
                for case in problem.cases
            ],
        )

    def _fitted(self, problem: Problem, inputs: Tensor, due: Callable[[], None]) -> Tensor:
        """Return the image ``(1, C, H, W)`` of inputs, fitted to what is known unevenly well.

        The recursion goes by one layer at a time, whose errors the next ones inherit. All layers
        together, each coordinate by its own error, then say more (`levenberg_marquardt`).
        """
        (case,) = problem.cases
        image = case.target_model.denormalise(inputs).clamp(0.0, 1.0)
        weights = _inverse_variances(case)
        if not weights or image.numel() > MOST_FITTED:
            return image
        due()
        exact = problem.to(torch.float64)
        exact = replace(exact, weights={n: w[None].to(problem.device) for n, w in weights.items()})
        fit = levenberg_marquardt(
            exact,
            image[None].to(problem.device),
            hard_labels(problem).to(torch.float64),
            exact.unknowns(),
            iterations=_FITTED,
        )
        return fit.images.cpu()

    def _error(self, case: Case, found: Recursion, loss: float) -> float | None:
        """Return how far off a pixel is taken to be, by recursions from other roundings.

        None where the equations leave something open, or the image does not reproduce the update.
        """
        most = max(rounding(case, name) for name in case.target_model.parameter_names)
        if not found.determined or not loss <= most**2 or not is_whole(case):
            return None
        pixels = case.target_model.denormalise

        def again(seed: int) -> Tensor | None:
            try:
                gradients = moved(_gradients(case), case, seed)
                other = self._recursion(case, gradients=gradients, near=found)
            except BractError:
                return None
            return pixels(other.inputs) if other.determined else None

        return largest_error(pixels(found.inputs), again)

    def _recursion(
        self,
        case: Case,
        report: Callable[[float], None] = lambda _: None,
        due: Callable[[], None] = lambda: None,
        gradients: Tensors | None = None,
        near: Recursion | None = None,
    ) -> Recursion:
        channels = case.target_model.image_shape[0]
        edges = torch.tensor([0.0, 1.0], dtype=torch.float64)
        low, high = case.target_model.normalise(edges.view(2, 1, 1, 1).expand(2, channels, 1, 1))
        try:
            return recurse(
                self._chain(case),
                _state(case),
                _gradients(case) if gradients is None else gradients,
                _trust(case),
                low=low,
                high=high,
                most=self.max_unknowns,
                report=report,
                due=due,
                near=near,
            )
        except BractError as error:
            raise BractError(f"{_model(case)}: {error}", code=error.code) from error

    def _chain(self, case: Case) -> Chain:
        known = _CHAINS.get(case.target_model)
        if known is None:
            known = _CHAINS[case.target_model] = self._traced(case)
        return known

    def _traced(self, case: Case) -> Chain:
        model = copy.deepcopy(case.target_model.model).cpu().double()
        try:
            return chain_of(model, _state(case), case.target_model.image_shape)
        except BractError as error:
            raise BractError(
                f"{_model(case)}: {error}; r-gap needs a chain of layers", code=error.code
            ) from error


def _model(case: Case) -> str:
    return f"{case.observation.key}: model {case.target_model.declaration.model!r}"


def _state(case: Case) -> Tensors:
    seen, target_model = case.observation, case.target_model
    state = {name: seen.parameters[name] for name in target_model.parameter_names}
    state |= {name: seen.buffers[name] for name in target_model.buffer_names}
    return {name: _exact(value) for name, value in state.items()}


def _gradients(case: Case) -> Tensors:
    return {
        name: _exact(case.evidence.target[name])
        for name in case.target_model.parameter_names
        if name in case.evidence.target
    }


def _shares(case: Case) -> dict[str, tuple[Tensor, float]]:
    """Return errors of coordinates by name, and the root mean square that `ROUNDING` is of."""
    errors, known = case.evidence.errors or {}, set(case.target_model.parameter_names)
    found = {}
    for name in known & set(errors):
        error, value = _exact(errors[name]), _exact(case.evidence.target[name])
        certain = value[error.isfinite()]
        size = float(certain.square().mean().sqrt()) if len(certain) else 0.0
        found[name] = (_TYPICAL * error, max(size, 1e-300))
    return found


def _trust(case: Case) -> Tensors:
    """Return weights of coordinates by their errors; empty where rounding alone is left."""
    return {
        name: 1.0 / (1.0 + (error / (ROUNDING * size)).square())
        for name, (error, size) in _shares(case).items()
    }


def _inverse_variances(case: Case) -> Tensors:
    """Return the inverse of each coordinate's variance, the largest one 1."""
    shares = _shares(case)
    least = _FAINT * max((size for _, size in shares.values()), default=1.0)
    found = {
        name: 1.0 / (error.square() + (ROUNDING * max(size, least)) ** 2)
        for name, (error, size) in shares.items()
    }
    most = max((float(value.max()) for value in found.values()), default=1.0)
    return {name: value / most for name, value in found.items()}


def _exact(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value


def _recipe(found: Recursion, error: float | None) -> Recipe:
    parts = ["closed form", "layer by layer"]
    if found.filled:
        open_ = next(iter(found.gaps.values()))
        parts.append(f"{open_:.0%} of the image's dimensions by bounds and total variation")
    return Recipe("", (*parts, "labels analytic"), error)
