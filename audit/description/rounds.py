"""Hold the model of the next round against the updates, as these were read.

A server that averages sends ``w_{r+1} = w_r - server_lr * sum_i p_i update_i`` next. No data of a
client is needed to compare the two: an update that was read with the opposite sign, or from another
record, moves the model otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bract.audit.captures import Captures
from bract.audit.description.draft import Draft
from bract.captures.observation import Observation
from bract.errors import BractError

MOST = 64
"""Uploads of a round that are averaged; with more of them this is not looked at."""

SAME = 0.999
"""Cosine of both steps from which on one is the other."""

RATE = 0.01
"""Most that the lengths may differ where the server takes the mean as it is."""

UNLIKE = 0.1
"""Cosine below which the model has little of the updates: also a server's optimizer has more."""

OPPOSITE = -0.5
"""Cosine below which the model went the other way."""


def check_server_step(draft: Draft) -> str | None:
    """Compare the step of the server after the first captured round with the mean of the updates.

    Returns
    -------
    str or None
        What is wrong if the model went the other way, unless what clients kept shows that it is
        the server that does so, as one that takes updates as they come: the updates are read with
        the opposite sign.
    """
    found = _steps(draft.captures)
    if found is None:
        return None
    number, moved, mean = found
    cosine = float(moved @ mean / (moved.norm() * mean.norm()))
    rate = float(moved @ mean / mean.square().sum())
    if cosine >= SAME:
        how = "" if abs(rate - 1.0) <= RATE else f", times {rate:.3g}"
        draft.confirmed.append(
            f"the model sent in round {number + 1} is round {number}'s less the mean of its "
            f"updates{how} (cosine {cosine:.6f}): they are read as the server reads them"
        )
    elif cosine < OPPOSITE:
        return (
            f"the model sent in round {number + 1} went against the mean of round {number}'s "
            f"captured updates (cosine {cosine:.3f})"
        )
    elif cosine < UNLIKE:
        draft.doubts.append(
            f"the model sent in round {number + 1} does not follow from round {number}'s updates "
            f"(cosine {cosine:.3f} with their mean): another record may be what the server uses"
        )
    return None


def _steps(captures: Captures) -> tuple[int, Tensor, Tensor] | None:
    """Return the first round with a next one, the server's step after it and the mean update."""
    by_round: dict[int, list[int]] = {}
    for place, capture in enumerate(captures.index):
        by_round.setdefault(capture.round, []).append(place)
    number = next((r for r in sorted(by_round) if r + 1 in by_round), None)
    if number is None or len(by_round[number]) > MOST:
        return None
    try:
        now = [captures.load(captures.index[place]) for place in by_round[number]]
        later = captures.load(captures.index[by_round[number + 1][0]])
    except BractError:
        return None
    names = [
        name
        for name, value in now[0].parameters.items()
        if value.is_floating_point()
        and _same_shape(name, value, later)
        and all(name in one.update and _same_shape(name, value, one) for one in now)
    ]
    if not names or any(one.declaration.defenses or one.ciphertexts for one in now):
        return None
    moved = _flat([now[0].parameters[n].double() - later.parameters[n].double() for n in names])
    weights = [one.declaration.num_examples or 1 for one in now]
    mean = torch.zeros_like(moved)
    for weight, one in zip(weights, now, strict=True):
        mean += weight / sum(weights) * _flat([one.update[n].double() for n in names])
    if not bool(moved.any()) or not bool(mean.any()) or not bool((moved + mean).isfinite().all()):
        return None
    return number, moved, mean


def _same_shape(name: str, value: Tensor, other: Observation) -> bool:
    return name in other.parameters and other.parameters[name].shape == value.shape


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
