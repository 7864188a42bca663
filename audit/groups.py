"""Several rounds of one client, attacked together: which captures, and the truth of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bract.audit.captures import Capture
from bract.audit.scoring.scoring import Truth


def over_rounds(captures: Sequence[Capture], count: int) -> list[Capture]:
    """Gather each client's captures by ``count`` rounds; aggregates, by who is in them.

    Counted from a client's last round, so that its first group may be smaller. A group goes by the
    name of its last capture, which holds the others as `Capture.earlier`.
    """
    if count == 1:
        return list(captures)
    found: list[Capture] = []
    for whose in dict.fromkeys((c.client, c.members) for c in captures):
        mine = [c for c in captures if (c.client, c.members) == whose]
        mine.sort(key=lambda c: c.round)
        for end in range(len(mine), 0, -count):
            group = mine[max(0, end - count) : end]
            found.append(replace(group[-1], earlier=tuple(group[:-1])))
    return found


def distinct(truths: Sequence[Truth]) -> Truth:
    """Return every image once, those of the first truth first, whatever round it was used in."""
    images: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    for truth in truths:
        for image, label in zip(truth.images, truth.labels, strict=True):
            if not any(torch.equal(image, known) for known in images):
                images.append(image)
                labels.append(label)
    return Truth(torch.stack(images), torch.stack(labels))
