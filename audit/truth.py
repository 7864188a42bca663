"""Read what consenting clients kept of the rounds that they were captured in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bract.audit.captures import Capture
from bract.errors import BractError, one_line
from bract.inputs import Truth
from bract.inputs.base import input_of
from bract.names import check_name

_log = logging.getLogger(__name__)


def load_truth(folder: Path, capture: Capture) -> Truth | None:
    """Read what the client kept of this round; None, with a warning, where it is not readable.

    Of an aggregate it is what all its clients kept, or None where one of them kept nothing.
    """
    kept = [
        _load_client(folder, client, capture) for client in capture.members or (capture.client,)
    ]
    known = [truth for truth in kept if truth is not None]
    if len(known) < len(kept):
        return None
    return Truth(torch.cat([t.images for t in known]), torch.cat([t.labels for t in known]))


def check_truth(folder: Path, captures: Sequence[Capture]) -> None:
    """Refuse a folder that holds no truth of any of these captures' clients."""
    clients = sorted({client for c in captures for client in c.members or (c.client,)})
    if not any((folder / client).is_dir() for client in clients):
        raise BractError(
            f"{folder}: holds none of the folders {', '.join(clients)}; the truth of a client "
            "is in a folder of its name, which is the truth-dir of its node config, or is in "
            "the folder of bract.client.keep"
        )


def _load_client(folder: Path, client: str, capture: Capture) -> Truth | None:
    path = folder / check_name(client) / f"round-{capture.round:04d}.safetensors"
    if not path.is_file():
        return None
    try:
        content = load_file(path)
        return input_of(capture.declaration).read(content, capture.declaration)
    except (OSError, KeyError, TypeError, ValueError, BractError, SafetensorError) as error:
        reason = one_line(error, 200)
        _log.warning("%s: not readable (%s); %s is unscored", path, reason, capture.key)
        return None


def distinct(truths: Sequence[Truth]) -> Truth:
    """Return every example once, those of the first truth first, whatever round it was used in."""
    images: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    for truth in truths:
        for image, label in zip(truth.images, truth.labels, strict=True):
            if not any(torch.equal(image, known) for known in images):
                images.append(image)
                labels.append(label)
    return Truth(torch.stack(images), torch.stack(labels))
