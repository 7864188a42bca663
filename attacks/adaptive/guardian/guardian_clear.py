"""Firm up Guardian's scalars with the coordinates of delta that only one gradient explains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bract.attacks.adaptive.guardian.guardian_map import GuardianMap, Path
from bract.attacks.adaptive.guardian.guardian_reading import (
    Group,
    path_of,
    unscaled,
)
from bract.attacks.problem.evidence import Evidence, Fitting
from bract.defenses import Guardian
from bract.updates.update import Tensors, unflatten

_FIRST_ERROR, _LEAST_ERROR = 0.02, 1e-5
_FASTEST = 4.0
"""Relative error of delta at the first scalars, the least that is assumed, and by how much a round
may lower it: random images under the right label had scalars 0.013 away on photographs that
choose."""

_SMALLEST = 1.0
"""Delta below which that error counts as that of a value this large, in steps of ``lr``."""

_TRUSTED = 0.05
"""Error, as a share of the update's root mean square, that halves the trust in a coordinate."""

_ROUNDS, _STEPS = 4, 100
_FIRM = 1e-3


def firm_up(
    hyper: Guardian,
    groups: list[Group],
    fit: Fitting,
    labels: Sequence[int],
    expected: Tensor,
    *,
    flat: Callable[[Tensors], Tensor],
    scale: float,
    like: Tensors,
    unknowns: int,
) -> Tensor | None:
    """Return the gradient ``(D,)`` of images that are fitted to the clear coordinates.

    Where ``|delta|`` is above every turning point but the outermost, one gradient explains it.
    These coordinates are few, but the largest. An image is fitted to them alone by L-BFGS, its
    gradient has better scalars, and these make more coordinates clear.

    Parameters
    ----------
    expected
        A first gradient, in the update's scale.
    flat
        Puts a gradient by name into one vector in the update's scale.
    scale
        Factor from the update to what is simulated.
    like
        Tensors of the names and shapes of the update.
    unknowns
        Pixels that are sought.

    Returns
    -------
    Tensor or None
        None where fewer coordinates are clear than pixels are sought.
    """
    images: Tensor | None = None
    error = _FIRST_ERROR
    before: list[Path] = []
    for _ in range(_ROUNDS):
        paths = [path_of(hyper, group, expected) for group in groups]
        if before:
            moved = max(_moved(hyper, *both) for both in zip(before, paths, strict=True))
            error = min(max(moved, error / _FASTEST, _LEAST_ERROR), _FIRST_ERROR)
        target, weights = torch.zeros_like(expected), torch.zeros_like(expected)
        for group, path in zip(groups, paths, strict=True):
            target[group.part], weights[group.part] = _clear(hyper, group, path, error)
        if int((weights > 0).sum()) < unknowns:
            return None
        evidence = Evidence(
            target=unflatten((target * scale).cpu(), like),
            weights=unflatten(weights.cpu(), like),
        )
        images, gradient = fit.descend(evidence, labels, images, _STEPS)
        expected, before = flat(gradient), paths
        if error < _FIRM or fit.over:
            break
    return expected


def _clear(hyper: Guardian, group: Group, path: Path, error: float) -> tuple[Tensor, Tensor]:
    """Return what the clear coordinates of a group come from, and the trust in each, 0 if unclear.

    Parameters
    ----------
    error
        Relative error of the map from g to delta.
    """
    delta = unscaled(hyper, group, path)
    mapped = GuardianMap(hyper, path)
    clear = (delta.abs() > mapped.turning * (1.0 + 2.0 * error)).nonzero().flatten()
    sent = delta[clear]
    # The table ends just above |g|.
    found = mapped.inverses(sent).nan_to_num(0.0).sum(dim=0)
    at = mapped(found)
    slack = 2.0 * error * sent.abs().clamp_min(_SMALLEST * hyper.lr)
    off = (slack + at.rounding) / at.slope.abs().clamp_min(1e-12)
    size = _TRUSTED * float(group.sent.norm()) / len(delta) ** 0.5
    target, weights = torch.zeros_like(delta), torch.zeros_like(delta)
    target[clear] = found
    weights[clear] = torch.where(found == 0, 0.0, 1.0 / (1.0 + (off / size).square()))
    return target, weights


def _moved(hyper: Guardian, one: Path, other: Path) -> float:
    """Return the largest relative difference of the deltas that two paths make of one g."""
    low, high = torch.tensor([1e-2 * hyper.lr, min(one.norm, other.norm)]).log10().tolist()
    g = torch.logspace(low, high, 400, dtype=torch.float64)
    first, then = (GuardianMap(hyper, path)(g).value for path in (one, other))
    least = _SMALLEST * hyper.lr
    return float(((first - then).abs() / then.abs().clamp_min(least)).max())
