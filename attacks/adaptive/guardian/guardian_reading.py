"""Read the update off Guardian's delta, at given scalars of its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bract.attacks.adaptive.guardian.guardian_map import GuardianMap, Path, walk
from bract.attacks.problem.evidence import Evidence
from bract.attacks.reading.spectrum import Spectrum
from bract.defenses import Guardian

_DIRECTIONS = 12
_NUDGE = 1e-6
_FLAT = 0.02


@dataclass(frozen=True)
class Group:
    """Coordinates that one run of the optimizer coupled, what was sent of them, and the bound.

    Attributes
    ----------
    kept
        Places in ``part`` of the coordinates that are read, int64; None reads all.
    stride
        Scalars of an expected update are those of every so many-th coordinate; 1 takes all.
    """

    part: slice
    sent: Tensor
    epsilon: float
    kept: Tensor | None = None
    stride: int = 1

    def walked(self, hyper: Guardian, g: Tensor) -> Path:
        """Return the scalars of an update ``(D,)`` of the whole part, which is not zero."""
        drawn = g[:: self.stride]
        return walk(drawn, hyper, self.epsilon, len(g) / len(drawn))[1]

    def own(self, values: Tensor) -> Tensor:
        """Return those of values ``(..., D)`` of the whole part that are read."""
        return values if self.kept is None else values[..., self.kept]

    @property
    def places(self) -> Tensor:
        """Places in the whole update of the coordinates that are read, int64."""
        every = torch.arange(self.part.start, self.part.stop, device=self.sent.device)
        return self.own(every)


@dataclass(frozen=True)
class Reading:
    """The reading of one group at given scalars, of those D coordinates that are read.

    Attributes
    ----------
    g, others
        Likeliest update ``(D,)`` and all that fit ``(branches, D)``, each float64.
    error
        Bound on the error of g from a float32 client's rounding, ``(D,)``.
    directions
        Where g moves when the scalars do, orthonormal ``(R, D)``.
    nothing
        Share of the coordinates that come from no gradient.
    apart
        How far g's own scalars are from those that were used, relatively.
    """

    g: Tensor
    others: Tensor
    error: Tensor
    directions: Tensor
    nothing: float
    apart: float


def read(
    hyper: Guardian,
    group: Group,
    path: Path,
    expected: Tensor,
    check: Callable[[], None] = lambda: None,
) -> Reading:
    """Invert one group at given scalars, choosing the reading nearest to ``expected``.

    Parameters
    ----------
    expected
        An update of all coordinates of the group; those that are not read are taken from it.
    check
        Called between steps, to break off by raising.
    """
    whole, expected = expected, group.own(expected)
    sent = unscaled(hyper, group, path)
    slack = 1e-5 * float(sent.abs().max())
    delta = group.own(sent)
    mapped = GuardianMap(hyper, path)
    found = mapped.inverses(delta, slack, check)
    nothing = found.isnan().all(dim=0)
    pick = (found - expected).abs().nan_to_num(math.inf).argmin(dim=0)
    g = torch.where(nothing, expected, found.gather(0, pick[None])[0])
    at = mapped(g)
    steep = at.slope.abs() > _FLAT * at.slope.abs().median()
    error = torch.where(steep & ~nothing, at.rounding / at.slope.abs(), math.inf)
    error = torch.where(delta == 0, 0.0, error)
    moves = []
    for nudged in _nudged(path):
        check()
        moved = group.own(unscaled(hyper, group, nudged)) - delta
        moved = moved - (GuardianMap(hyper, nudged)(g).value - at.value)
        moves.append(torch.where(steep & (delta != 0), moved / at.slope / _NUDGE, 0.0))
    open_ = Spectrum.of(torch.stack(moves))
    check()
    if group.kept is not None:
        whole = whole.clone()
        whole[group.kept] = g
    else:
        whole = g
    own = group.walked(hyper, whole) if bool(whole[:: group.stride].any()) else path
    return Reading(
        g=g,
        others=found,
        error=error,
        directions=open_.right[: open_.rank(share=1e-5, most=_DIRECTIONS)],
        nothing=float(nothing.double().mean()),
        apart=own.apart(path),
    )


Assemble = Callable[[list[Reading]], Evidence]
"""Make an evidence of readings, one a group."""


def read_all(
    hyper: Guardian,
    groups: Sequence[Group],
    expected: Tensor,
    check: Callable[[], None] = lambda: None,
) -> list[Reading]:
    """Read every group at the scalars of one expected update ``(D,)``; ``check`` as in `read`."""
    return [
        read(hyper, group, path_of(hyper, group, expected), expected[group.part], check)
        for group in groups
    ]


def unscaled(hyper: Guardian, group: Group, path: Path) -> Tensor:
    """The sent tensors, as they were before their length was restored."""
    if hyper.length == "bound":
        return group.sent
    return group.sent * (path.length / float(group.sent.norm()))


def path_of(hyper: Guardian, group: Group, expected: Tensor) -> Path:
    """The scalars of an expected update, which is given the true length where that is known."""
    g = expected[group.part]
    if hyper.length == "gradient":
        g = g * (float(group.sent.norm()) / max(float(g.norm()), 1e-300))
    return group.walked(hyper, g)


def _nudged(path: Path) -> list[Path]:
    """The path with each scalar that varies raised by a share of `_NUDGE`."""
    found = [replace(path, length=path.length * (1.0 + _NUDGE))]
    for k, step in enumerate(path.steps):
        for i, value in enumerate(step):
            if value in (0.0, 1.0) or (k == 0 and i < 2):
                continue
            scalars = list(step)
            scalars[i] = value * (1.0 + _NUDGE)
            moved = (scalars[0], scalars[1], scalars[2], scalars[3])
            found.append(replace(path, steps=(*path.steps[:k], moved, *path.steps[k + 1 :])))
    return found
