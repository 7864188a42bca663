"""The server: the app and the capture hook.

The names below are imported when they are first used: this package alone loads neither torch nor
Flower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bract.lazy import lazily

if TYPE_CHECKING:
    from bract.server.disclosures import DisclosureRule
    from bract.server.hook import HonestButCurious
    from bract.server.listening import listen

__all__ = ["DisclosureRule", "HonestButCurious", "listen"]

_PLACES = {
    "DisclosureRule": "bract.server.disclosures",
    "HonestButCurious": "bract.server.hook",
    "listen": "bract.server.listening",
}

__getattr__ = lazily(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
