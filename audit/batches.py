"""Batch captures of one shape, as many as the device makes use of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bract.attacks.problem.client_model import images_in
from bract.audit.captures import Capture
from bract.errors import BractError

MOST = {"cpu": 8, "cuda": 256}
"""Most observations in one batch by kind of device: as many as an engine runs trials together."""

MEMORY = 4 * 2**30
"""Most bytes of captures in one batch; one that is larger still runs, alone."""


@dataclass(frozen=True)
class Batch:
    """Captures that run together: one attack, with one seed, on captures of one shape."""

    attack: str
    repeat: int
    captures: tuple[Capture, ...]


def together(
    captures: Sequence[Capture], *, device: str, max_images: int, most: int | None = None
) -> Iterator[tuple[Capture, ...]]:
    """Yield captures that run as one batch, whatever their rounds; no aggregate among clients.

    Parameters
    ----------
    device
        ``cpu`` or ``cuda``.
    max_images
        As in the audit's choice: updates of more examples look alike to an attack.
    most
        Most captures in one batch; None chooses by device.
    """
    limit = most or MOST.get(device, MOST["cpu"])
    shapes: dict[tuple[str, bool], list[Capture]] = {}
    for capture in captures:
        shapes.setdefault(_shape(capture, max_images), []).append(capture)
    for group in shapes.values():
        batch: list[Capture] = []
        held = 0
        for capture in group:
            size = _bytes(capture)
            if batch and (len(batch) >= limit or held + size > MEMORY):
                yield tuple(batch)
                batch, held = [], 0
            batch.append(capture)
            held += size
        yield tuple(batch)


def _shape(capture: Capture, max_images: int) -> tuple[str, bool]:
    declaration = capture.declaration
    declared = {k: v for k, v in declaration.to_dict().items() if k != "num_examples"}
    try:
        images = images_in(declaration, max_images)
    except BractError:
        images = 0
    return json.dumps([declared, images], sort_keys=True, default=str), bool(capture.members)


def _bytes(capture: Capture) -> int:
    return sum(
        path.stat().st_size
        for one in capture.rounds
        if one.folder is not None
        for path in one.folder.glob("*.safetensors")
    )
