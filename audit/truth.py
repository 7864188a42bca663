"""Read what consenting clients kept of the rounds that they were captured in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bract.audit.captures import Capture
from bract.captures.stores import is_run_name
from bract.config.client_names import check_name
from bract.errors import BractError, one_line
from bract.inputs import Truth
from bract.inputs.base import input_of

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
    rows = [t.targets for t in known if t.targets is not None]
    return Truth(
        torch.cat([t.images for t in known]),
        torch.cat([t.labels for t in known]),
        torch.cat(rows) if len(rows) == len(known) else None,
    )


def check_truth(folder: Path, captures: Sequence[Capture]) -> None:
    """Refuse a folder that holds no truth of any of these captures' clients."""
    clients = sorted({client for c in captures for client in c.members or (c.client,)})
    homes = (truth_path(folder, m, c).parent for c in captures for m in c.members or (c.client,))
    if not any(home.is_dir() for home in homes):
        raise BractError(
            f"{folder}: holds none of the folders {', '.join(clients)}; the truth of a client "
            "is in a folder of its name, which is the truth-dir of its node config, or is in "
            "the folder of bract.client.keep",
            code="truth-lacking",
        )


def run_truth(folder: Path, captures: Sequence[Capture]) -> Path:
    """Return what clients kept of the captures' run: its own folder, where there is one."""
    runs = {c.run_id for c in captures if c.run_id is not None}
    own = [folder / run for run in runs if is_run_name(run)]
    return own[0] if len(own) == 1 and own[0].is_dir() else folder


def truth_path(folder: Path, client: str, capture: Capture) -> Path:
    """Return the file in which a client keeps a round."""
    home = run_truth(folder, [capture])
    return home / check_name(client) / f"round-{capture.round:04d}.safetensors"


def _load_client(folder: Path, client: str, capture: Capture) -> Truth | None:
    path = truth_path(folder, client, capture)
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
