"""When an image is the one that a captured update fits: rounding, unique equations, and the whole
update."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bract.attacks.problem.case import Case
from bract.schema.audit import Certificate
from bract.updates.update import Tensors

TOLERANCE = 1e-2
"""Largest error of a pixel, in [0, 1], that a certified image may have."""

SAFETY = 10.0
"""Factor from how far an image moves under a few random errors to how far it is taken to be off: an
estimate for errors that are independent (Kenney and Laub 1994, small-sample condition estimates),
and no bound on the worst ones."""

DRAWS = 3
"""Random errors from which that is estimated."""

LARGEST_ROUNDING = 1e-3
"""Largest relative rounding of a tensor with which a residual within it says something."""

UNIT = 2.0**-24
"""Relative rounding of a float32 number, at most."""

ARITHMETIC = 64.0 * UNIT
"""Relative error of a gradient by its own arithmetic; true images left a quarter or less."""

_FAINT = 1e-3


def rounding(case: Case, name: str) -> float:
    """Return the relative error that float32 may leave in one tensor of a captured update.

    An update of one gradient has that of its own `ARITHMETIC`. One of local training is the
    difference of two models, each rounded in its own size, after every step.
    """
    seen, law = case.observation, case.law
    if not law.averaging:
        return ARITHMETIC
    held, update = (float(group[name].double().norm()) for group in (seen.parameters, seen.update))
    return ARITHMETIC + UNIT * law.counted * held / max(update, 1e-300)


def moved(tensors: Tensors, case: Case, seed: int) -> Tensors:
    """Return tensors with a Gaussian error of the size of `rounding`, each by its own size."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, value in tensors.items():
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        found[name] = value + rounding(case, name) * value.square().mean().sqrt() * drawn
    return found


def largest_error(image: Tensor, again: Callable[[int], Tensor | None]) -> float | None:
    """Return the error to expect at any pixel, from the same equations with other roundings.

    Parameters
    ----------
    again
        Returns the image from tensors `moved` under a seed, or None where they do not give one;
        then there is no error to state.
    """
    found = []
    for seed in range(DRAWS):
        other = again(seed)
        if other is None:
            return None
        found.append(float((image - other).abs().max()))
    return SAFETY * max(found)


def layer_residuals(simulated: Tensors, target: Tensors) -> Tensors:
    """Return the relative residual of each tensor by name, ``(L,)``.

    Of the whole update alone, tensors of small gradients, such as those next to the image, could
    be wrong unseen. A tensor counts as no smaller than a thousandth of the update, since gradients
    that cancel to zero are nothing but rounding.
    """
    size = torch.stack([_sizes(v) for v in target.values()]).norm(dim=0)
    return {
        name: _sizes(simulated[name] - value)
        / torch.maximum(_sizes(value), _FAINT * size).clamp_min(1e-300)
        for name, value in target.items()
    }


def is_whole(case: Case) -> bool:
    """Return whether the evidence is the captured update itself, every parameter's and nothing
    open.
    """
    evidence = case.evidence
    if case.rounds or evidence.buffers or evidence.likelihood is not None:
        return False
    if evidence.weights or any((evidence.alternatives, evidence.bounds, evidence.nuisance)):
        return False
    names, captured = case.target_model.parameter_names, case.observation.gradient()
    return all(
        name in evidence.target and torch.equal(evidence.target[name], captured[name])
        for name in names
    )


def certified(
    case: Case, *, count: int, residuals: Mapping[str, float], error: float, unknowns: Tensors
) -> Certificate | None:
    """Return the evidence that an image is the one that an update fits; None where there is none.

    Three things are needed. The equations that gave the image have one solution, and what float32
    may have changed in them moves no pixel by more than `TOLERANCE`; the attack knows both
    (`Recipe.error`). The image is what it simulates the client with, so that label and the rest
    of the model join in: every tensor of the captured update must come out to rounding. And the
    update is the captured one, not one that an adaptive attacker worked out.

    Capture and declaration are taken as true. With another number of images, another image may
    give the same update: at weights of zero, the mean of a batch of one class gives that of the
    batch. A batch is not certified, nor are rows or texts, whose values have no range of pixels.

    Parameters
    ----------
    count
        Images of the client.
    residuals
        By `layer_residuals`.
    """
    if count != 1 or case.observation.declaration.input != "image":
        return None
    if unknowns or not error <= TOLERANCE or not is_whole(case):
        return None
    allowed = {name: rounding(case, name) for name in residuals}
    if max(allowed.values()) > LARGEST_ROUNDING:
        return None
    if not all(value <= allowed[name] for name, value in residuals.items()):
        return None
    worst = max(residuals, key=lambda name: residuals[name] / allowed[name])
    return Certificate(error=error, residual=residuals[worst], rounding=allowed[worst])


def _sizes(values: Tensor) -> Tensor:
    """Return the norm of each trial's tensor, ``(L,)``."""
    found: Tensor = values.reshape(len(values), -1).norm(dim=1)
    return found
