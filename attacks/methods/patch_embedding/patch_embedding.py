"""Every patch of one image through a vision transformer, by one least-squares solve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.base import Attack, Batches, Cost
from bract.attacks.methods.patch_embedding.linear_system import (
    OpenSystem,
    Solution,
    solve_patches,
)
from bract.attacks.problem.case import Case
from bract.attacks.problem.certificate import largest_error, moved
from bract.attacks.problem.linear_layers import PatchLayers, Projection, patch_layers
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Plateau, Recipe, Run
from bract.attacks.solve.lbfgs import BatchedLBFGS
from bract.attacks.solve.matching import hard_labels, minimise
from bract.errors import BractError
from bract.updates.update import Tensors

EXACT = 1e-9
"""Relative squared residual of the equations below which their values are taken as exact. float32
leaves 1e-14 to 1e-12, a defense that the tier does not know 1e-3 and more."""

SMOOTHNESS = tuple(10.0**-k for k in range(2, 13))
"""Weights of smooth images that are tried where the values are not exact."""

_UNTRUSTED = 0.01
"""Error, as a share of the root mean square, that stands for the one that halves trust."""

_LEAST = 1e-5
"""Least error of a value, as the same share."""

_REWEIGHTED = 2

DESCENT = 300
"""Most steps of L-BFGS on the whole update, where values were left open."""

_PATIENCE, _FALL = 10, 0.01
"""Steps within which the loss must fall by this share, or the descent ends."""

_DAMPING = 1e-4
"""Share of the largest eigenvalue below which a direction is not stretched further; of 1e-2, 1e-4
and 1e-6 the best on two photographs that choose."""


@ATTACKS.register("patch-embedding")
@dataclass(frozen=True, kw_only=True)
class PatchEmbedding(Attack):
    """Solve for the patches of one image, in order, where positions are learned.

    The gradient of a learned position is the loss's gradient at its patch's token, and that of the
    patch projection is the sum over patches of the one times the other: linear equations for the
    patches (`linear_system`). Lu et al. (CVPR 2022, APRIL) solve the same for the attention of a
    first block without normalisation; these equations hold whatever follows the tokens, also
    behind a locked normalisation, and for the sum over any number of plain SGD steps on one image.
    The layers are found on probes (`bract.attacks.problem.linear_layers`).

    Where the values are exact the loss is the equations' relative squared residual. Where a
    defense left them open (trust below one, bounds, noise) the equations count by what their
    values leave open, with smooth images where they say little; how smooth is chosen by the match
    of the whole update, which then is the loss, and which L-BFGS lowers from there, over patches
    in the units of the equations. A factor common to all values, as clipping has,
    changes nothing.
    """

    name: ClassVar[str] = "patch-embedding"
    title: ClassVar[str] = "Patch embedding"
    family: ClassVar[str] = "closed-form reconstruction"
    closed_form: ClassVar[bool] = True
    batches: ClassVar[Batches] = "one"
    cost: ClassVar[Cost] = "seconds"
    iterations: ClassVar[int] = 1
    found_below: ClassVar[float | None] = EXACT

    @property
    def matches(self) -> bool:
        """No unknowns of the client enter the equations, so none are searched."""
        return False

    def require_model(self, case: Case) -> None:
        """Refuse models without patches to which a learned parameter is added."""
        super().require_model(case)
        patch_layers(case.target_model, case.observation)

    def prepare(self, case: Case) -> Case:
        """Refuse batches, models without learned positions, and updates that hold neither."""
        case = super().prepare(case)
        key = case.observation.key
        if case.images != 1:
            raise BractError(
                f"{key}: {case.images} images in one update, whose positions share one gradient; "
                "patch-embedding needs one image",
                code="attack-unsuited",
            )
        if case.law.optimizer != "sgd" and not case.law.one_step:
            raise BractError(
                f"{key}: several steps of {case.observation.declaration.optimizer} mix the "
                "patches' gradients; patch-embedding needs plain SGD",
                code="attack-unsuited",
            )
        layers = patch_layers(case.target_model, case.observation)
        for name in (layers.position.name, layers.projection.weight):
            if name not in case.evidence.target:
                raise BractError(f"{key}: the evidence lacks {name}", code="attack-evidence")
            gradient = case.evidence.target[name]
            if name == layers.position.name:
                gradient = layers.position.gradient(gradient)
            if not bool(gradient.any()):
                raise BractError(
                    f"{key}: the gradient of {name} is zero at every patch: it is pruned, frozen, "
                    "or behind an output layer of zeros, as fresh transformers may have; attack a "
                    "later round, or use april",
                    code="attack-evidence",
                )
        return case

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Solve each observation once; its restarts share the image."""
        exact = problem.to(torch.float64)
        images = torch.zeros(
            (problem.trials, *problem.image_shape), dtype=torch.float64, device=problem.device
        )
        labels = hard_labels(exact)
        losses = torch.zeros(problem.trials, dtype=torch.float64, device=problem.device)
        recipes: list[Recipe] = []
        done: dict[str, int] = {}
        for trial, case in enumerate(problem.cases):
            first = done.setdefault(case.observation.key, trial)
            if first != trial:
                images[trial], losses[trial] = images[first], losses[first]
                recipes.append(recipes[first])
                continue
            layers = patch_layers(case.target_model, case.observation)
            problem.target_model.model.to(problem.device)
            one = _OneImage(exact.select([trial]), layers, labels[trial : trial + 1])
            share = run.part(
                f"image-{trial}", trial / problem.trials, (trial + 1) / problem.trials, DESCENT
            )
            images[trial, 0], losses[trial], recipe = one.found(share)
            recipes.append(recipe)
            run.advance((trial + 1) / problem.trials, float(losses[trial]))
        return Outcome(
            images=images,
            labels=labels,
            losses=losses,
            unknowns=problem.unknowns(),
            curves=[[] for _ in range(problem.trials)],
            iterations=0,
            recipes=recipes,
        )


@dataclass(frozen=True)
class _OneImage:
    """The equations of one trial, in float64."""

    problem: Problem
    layers: PatchLayers
    labels: Tensor

    def found(self, run: Run) -> tuple[Tensor, float, Recipe]:
        """Return the image ``(C, H, W)``, its loss, and what made it."""
        projection, position = self.layers.projection, self.layers.position
        slopes = position.gradient(self.problem.target[position.name][0])
        weight = self.problem.target[projection.weight][0].flatten(1)
        solution = solve_patches(slopes, weight)
        _, *shape = self.problem.image_shape
        seen = projection.images(solution.patches, (shape[0], shape[1], shape[2]))
        image = self.problem.target_model.denormalise(seen)
        if solution.determined and solution.residual < EXACT:
            recipe = _recipe(solution, "patches by least squares")
            return image, solution.residual, replace(recipe, error=self._error(image))
        loss = self._loss(image)
        smooth, better = self._smoothed(slopes, weight)
        if better < loss:
            image, loss = smooth, better
        parts = ["patches by weighted least squares", "smooth image"]
        open_values = self.problem.likelihood is None and loss >= EXACT
        if open_values and self.problem.target_model.traits.smooth:
            near, lower = self._descended(image, slopes, run)
            if lower < loss:
                image, loss = near, lower
                parts.append("descent on the whole update")
        return image, loss, _recipe(solution, *parts)

    def _error(self, image: Tensor) -> float | None:
        """Return how far off a pixel is taken to be, by solutions from other roundings.

        None where a pixel is in no patch, or another system is not determined.
        """
        projection, position = self.layers.projection, self.layers.position
        case = self.problem.cases[0]
        if len(projection.pixels[projection.pixels >= 0].unique()) < image.numel():
            return None
        target = {n: self.problem.target[n][0] for n in (position.name, projection.weight)}
        channels, height, width = image.shape

        def again(seed: int) -> Tensor | None:
            other = moved(target, case, seed)
            solution = solve_patches(
                position.gradient(other[position.name]), other[projection.weight].flatten(1)
            )
            if not solution.determined:
                return None
            seen = projection.images(solution.patches, (channels, height, width))
            return self.problem.target_model.denormalise(seen)

        return largest_error(image, again)

    def _descended(self, image: Tensor, slopes: Tensor, run: Run) -> tuple[Tensor, float]:
        """Return the image near `image` at which the whole update matches best, and its loss.

        In float32, whose rounding is far below what a defense leaves open.
        """
        problem = self.problem.to(torch.float32)
        search = _PatchSearch(self.layers.projection, image, slopes, self.labels)
        found = minimise(
            problem,
            search,
            BatchedLBFGS(search.variables),
            replace(run, plateau=Plateau(_PATIENCE, _FALL)),
            objective=RelativeError(),
        )
        near = found.images[0, 0].to(torch.float64)
        return near, self._loss(near)

    def _smoothed(self, slopes: Tensor, weight: Tensor) -> tuple[Tensor, float]:
        """Return the image of the smoothness at which the whole update matches best."""
        system = self._open_system(slopes, weight)
        counted = system.counted()
        image: Tensor | None = None
        for _ in range(_REWEIGHTED):
            image = system.solve(SMOOTHNESS[len(SMOOTHNESS) // 2], counted, image)
            counted = system.counted(system.patches(image.clamp(0.0, 1.0)))
        found: list[tuple[float, Tensor]] = []
        for smoothness in SMOOTHNESS:
            image = system.solve(smoothness, counted, image)
            found.append((self._loss(image), image))
        lowest, best = min(found, key=lambda one: one[0])
        return best, lowest

    def _open_system(self, slopes: Tensor, weight: Tensor) -> OpenSystem:
        projection, position = self.layers.projection, self.layers.position
        uncertain = _variances(self.problem)
        model, (_, channels, height, width) = self.problem.target_model, self.problem.image_shape
        flat = torch.zeros(channels, height, width, dtype=slopes.dtype, device=slopes.device)
        zero = model.normalise(flat)
        std = 1.0 / (model.normalise(flat + 1.0) - zero)
        places = projection.pixels[0].clamp_min(0).to(slopes.device)
        return OpenSystem(
            slopes=slopes,
            weight=weight,
            slope_variance=position.gradient(uncertain[position.name]) / position.factor,
            weight_variance=uncertain[projection.weight].flatten(1),
            mean=-(zero * std).flatten()[places],
            std=std.flatten()[places],
            projection=projection,
            shape=(channels, height, width),
        )

    def _loss(self, image: Tensor) -> float:
        return float(self.problem.residuals(image.clamp(0.0, 1.0)[None, None], self.labels))


class _PatchSearch:
    """Patches near those of an image, in units in which the equations fix all of them alike.

    With ``G G^T = V diag(v) V^T`` the patches are ``X + V diag(v + d)^(-1/2) V^T Z``: what the
    equations hardly fix moves far for a small step of Z, and the descent is well conditioned.

    Parameters
    ----------
    image
        ``(C, H, W)`` in [0, 1], float64.
    slopes
        G ``(N, D)``, float64.
    labels
        One-hot rows ``(1, 1, classes)``.
    """

    components = ("patches", "labels analytic")

    def __init__(
        self, projection: Projection, image: Tensor, slopes: Tensor, labels: Tensor
    ) -> None:
        values, vectors = torch.linalg.eigh(slopes @ slopes.T)
        scales = (values.clamp_min(0.0) + _DAMPING * values.amax()).rsqrt() * values.amax().sqrt()
        self._scaled = ((vectors * scales) @ vectors.T).float()
        self._projection, self._labels = projection, labels
        _, height, width = image.shape
        self._shape = (image.shape[0], height, width)
        self._start = projection.patches(image.clamp(0.0, 1.0)[None, None]).float()
        # Pixels of no patch stay as they are.
        self._rest = (
            image.float()
            - projection.images(projection.patches(image[None, None]), self._shape)[0, 0].float()
        )
        self.variables: Tensors = {"patches": torch.zeros_like(self._start, requires_grad=True)}

    def decode(self) -> tuple[Tensor, Tensor]:
        """Return the image ``(1, 1, C, H, W)`` and its label."""
        patches = self._start + self._scaled @ self.variables["patches"]
        return self._projection.images(patches, self._shape) + self._rest, self._labels


def _variances(problem: Problem) -> Tensors:
    """Variance of each value of the target of one trial, from its trust and bounds."""
    found = {}
    whole = torch.cat([value[0].flatten() for value in problem.target.values()])
    size = whole.square().mean()
    halving = _UNTRUSTED**2 * size
    for name, value in problem.target.items():
        variance = torch.zeros_like(value[0])
        if problem.weights is not None and name in problem.weights:
            variance = halving * (1.0 / problem.weights[name][0].clamp(1e-12, 1.0) - 1.0)
        if problem.bounds is not None and name in problem.bounds:
            variance = variance + problem.bounds[name][0].square() / 3.0
        found[name] = variance + _LEAST**2 * size
    return found


def _recipe(solution: Solution, *parts: str) -> Recipe:
    return Recipe(
        "",
        (
            "closed form",
            *parts,
            f"rank {solution.rank} of {solution.unknowns}, condition {solution.condition:.1e}",
            "labels analytic",
        ),
    )
