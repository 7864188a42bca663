"""Exact inputs where a fully connected layer with a bias sees the image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.base import Attack, Batches, Cost
from bract.attacks.problem.case import Case
from bract.attacks.problem.certificate import rounding
from bract.attacks.problem.linear_layers import entering
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Recipe, Run
from bract.attacks.solve.matching import hard_labels
from bract.captures.observation import Observation
from bract.errors import BractError

_AGREE = 1e-5
_SUPPORT = 0.02
_APART = 1e-2
_OUTSIDE = 0.05
_FAINT = 1e-6


@ATTACKS.register("analytic")
@dataclass(frozen=True, kw_only=True)
class Analytic(Attack):
    """Read the image off the first layer's gradient; no optimisation.

    Row i of the weight gradient of ``y = W x + b`` is ``db[i] * x`` for one example, so ``x = sum_i
    db[i] dW[i] / sum_i db[i]^2`` (Phong et al. 2018, section 3), whatever follows the layer and
    however many plain SGD steps were taken on that one example. In a batch, a neuron that only one
    example excites gives that example away; such a row is believed when others agree with it and
    its pixels are in [0, 1], those with most support first. An attack with nothing exact to show
    refuses.
    """

    name: ClassVar[str] = "analytic"
    title: ClassVar[str] = "Analytic"
    family: ClassVar[str] = "closed-form reconstruction"
    closed_form: ClassVar[bool] = True
    batches: ClassVar[Batches] = "any"
    inputs: ClassVar[tuple[str, ...]] = ("image", "table", "signal")
    cost: ClassVar[Cost] = "instant"
    iterations: ClassVar[int] = 1

    def require_model(self, case: Case) -> None:
        """Refuse models whose first layer is not fully connected."""
        super().require_model(case)
        names = input_layer(case.target_model, case.observation)
        if missing := [n for n in names if n not in case.evidence.target]:
            raise BractError(
                f"{case.observation.key}: the evidence lacks {', '.join(missing)}",
                code="attack-evidence",
            )

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Recover what can be recovered; the other images of a batch stay grey."""
        case = problem.cases[0]
        weight, bias = input_layer(case.target_model, case.observation)
        images = torch.full(
            (problem.trials, *problem.image_shape), 0.5, device=problem.device, dtype=problem.dtype
        )
        recipes = []
        for trial in range(problem.trials):
            rows, slope = problem.target[weight][trial], problem.target[bias][trial]
            found = _inputs(problem, rows, slope)
            if not len(found):
                raise BractError(
                    f"{problem.cases[trial].observation.key}: every neuron of {weight} mixes "
                    "several examples; nothing can be read off exactly",
                    code="attack-unsolved",
                )
            count = min(len(found), problem.image_shape[0])
            images[trial, :count] = found[:count]
            whole = count == problem.image_shape[0]
            error = _error(problem, trial, found, (weight, bias)) if whole else None
            recipes.append(Recipe("", ("closed form", "labels analytic"), error))
        labels = hard_labels(problem)
        run.advance(1.0, 0.0)
        return Outcome(
            images=images,
            labels=labels,
            losses=problem.residuals(images, labels),
            recipes=recipes,
        )


def input_layer(target_model: TargetModel, observation: Observation) -> tuple[str, str]:
    """Names of weight and bias of the linear layer that sees the flattened image."""
    shape = target_model.image_shape
    probe = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0))
    seen = entering(target_model, observation, probe)
    found = [name for name, value in seen.items() if torch.equal(value.flatten(), probe.flatten())]
    for name in found:
        prefix = f"{name}." if name else ""
        if f"{prefix}bias" in target_model.parameter_names:
            return f"{prefix}weight", f"{prefix}bias"
    raise BractError(
        f"{observation.key}: in model {target_model.declaration.model!r} no fully connected "
        "layer with a "
        "bias sees the image; nothing can be read off exactly",
        code="attack-unsuited",
    )


def _inputs(problem: Problem, weight: Tensor, bias: Tensor) -> Tensor:
    count, *shape = problem.image_shape
    rows, slope = weight.to(torch.float64), bias.to(torch.float64)
    if count == 1:
        flat = (slope[:, None] * rows).sum(dim=0, keepdim=True) / slope.square().sum()
        return _to_pixels(problem, flat, shape)
    strong = slope.abs() > _FAINT * slope.abs().max()
    candidates = _to_pixels(problem, rows[strong] / slope[strong, None], shape).flatten(1)
    inside = ((candidates > -_OUTSIDE) & (candidates < 1 + _OUTSIDE)).all(dim=1)
    candidates = candidates[inside]
    agreeing = torch.cdist(candidates, candidates, p=float("inf")) < _AGREE
    votes = agreeing.sum(dim=1)
    exact: list[Tensor] = []
    for row in votes.argsort(descending=True).tolist():
        if int(votes[row]) < max(3, _SUPPORT * len(rows)):
            break
        if all(float((candidates[row] - other).abs().max()) > _APART for other in exact):
            exact.append(candidates[agreeing[row]].mean(dim=0))
    if not exact:
        return candidates.new_empty(0, *shape)
    return torch.stack(exact).view(-1, *shape).to(problem.dtype)


def _error(problem: Problem, trial: int, found: Tensor, names: tuple[str, str]) -> float | None:
    """Return how far rounding of the two gradients can move a pixel at most; None for a batch.

    ``x = sum_i db[i] dW[i] / |db|^2`` moves by no more than ``(|ddW| + 2 |x| |ddb|) / |db|``. That
    several images are the only ones is not shown by rows that agree.
    """
    if len(found) > 1:
        return None
    case = problem.cases[trial]
    rows, slope = (problem.target[name][trial].double() for name in names)
    seen = problem.target_model.normalise(found.double())
    apart = [
        rounding(case, name) * float(value.norm())
        for name, value in zip(names, (rows, slope), strict=True)
    ]
    size = float(slope.norm())
    grey = problem.target_model.denormalise(torch.zeros_like(seen))
    step = float((problem.target_model.denormalise(torch.ones_like(seen)) - grey).abs().max())
    most = apart[0] + 2.0 * float(seen.abs().max()) * apart[1]
    return step * most / size if size else None


def _to_pixels(problem: Problem, flat: Tensor, shape: list[int]) -> Tensor:
    return problem.target_model.denormalise(flat.view(-1, *shape)).to(problem.dtype)
