"""Other orders of a sequence, as LAMP draws them."""

from __future__ import annotations

import torch
from torch import Tensor


def another_order(length: int, generator: torch.Generator) -> Tensor:
    """Return places of a sequence in another order, int64 ``(length,)``.

    One of four changes, drawn at random (Balunovic et al. 2022, section 4.2): two tokens swap, a
    token moves, a run of tokens moves, or what is before a place goes behind what is after it.
    """

    def draw(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    places = list(range(length))
    kind = draw(4)
    if kind == 0:
        i, j = draw(length), draw(length)
        places[i], places[j] = places[j], places[i]
    elif kind == 3:
        at = draw(length)
        places = places[at:] + places[:at]
    else:
        begin = draw(length)
        size = 1 if kind == 1 else 1 + draw(length - begin)
        run, rest = places[begin : begin + size], places[:begin] + places[begin + size :]
        at = draw(len(rest) + 1)
        places = rest[:at] + run + rest[at:]
    return torch.tensor(places)
