"""Order of what attacks find on one update, for `best` and `auto` alike.

What an update determines of a layer says more than a match: images that come near it precede those
that match better. A reading whose certificate is weak (`Determined.sure`) says nothing, and its
images count by their match.
"""

from __future__ import annotations

from bract.attacks.registry import ATTACKS
from bract.attacks.result import Determined
from bract.attacks.solve.levenberg_marquardt import SOLVED

EXPLAINED = 0.01
"""Loss below which an image that a closed form reads off a model with kinks is kept. On images that
no benchmark scores such a loss meant 30 to 100 dB, where GRNN's images of 12 and 17 dB left 0.07;
from a smooth model an image is kept if it is `SOLVED`."""


def found(method: str, loss: float, known: Determined | None, *, smooth: bool) -> bool:
    """Return whether images of an attack are taken for the client's, by its loss.

    Parameters
    ----------
    known
        Certificate of the reading that it inverted; None where nothing was read. A weak one takes
        the attack's own limit (`Attacker.found_below`) from it.
    smooth
        Whether the model is.
    """
    kind = ATTACKS.get(method)
    if kind is None:
        return False
    if kind.found_below is not None:
        return loss < kind.found_below and (known is None or known.sure)
    return loss < (SOLVED if smooth else EXPLAINED)


def is_read(method: str, loss: float, known: Determined | None, *, smooth: bool) -> bool:
    """Return whether images come near what an update determines of a layer: see `found`.

    Near enough are those that are taken for the client's, and those below `Attacker.nearer`.
    """
    if known is None or not known.sure:
        return False
    nearer = ATTACKS[method].nearer if method in ATTACKS else None
    return found(method, loss, known, smooth=smooth) or (nearer is not None and loss < nearer)


def is_better(one: Determined, other: Determined | None) -> bool:
    """Return whether an update determines one reading better than another; any, than none."""
    return other is None or one.order > other.order
