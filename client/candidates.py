"""Candidates of a membership audit, on the client's own disk: members, and records held out."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bract.disk.permissions import make_private_folder
from bract.disk.tensor_files import write_tensors
from bract.errors import BractError, one_line
from bract.inputs.base import content_bytes, joined, kept_examples

CANDIDATES = "candidates.safetensors"
"""Beside the truth: ``images`` or ``inputs``, ``labels``, and ``first_round``, int64 ``(N,)``, the
first round that a record was trained in, 0 where it was held out."""

MOST = 2000
"""Most members, and most held-out records, that are kept."""

Records = tuple[Tensor, Tensor]
"""Examples ``(N, ...)`` and int64 labels ``(N,)``."""

_log = logging.getLogger(__name__)


def keep_candidates(
    folder: Path,
    run: int,
    server_round: int,
    members: Records,
    held_out: Records,
    *,
    name: str = "images",
) -> None:
    """Add a round's members to the candidates of a run; the first round writes both kinds.

    Both are to be drawn alike, before training: the client's own data, of which a random part was
    held out. Members are kept as they are in the data, without augmentation. Nothing is written
    without held-out records, and a failure is logged: training goes on.

    Parameters
    ----------
    run
        Flower's number of the run; candidates of another run are replaced.
    name
        ``images`` in [0, 1], or ``inputs`` as the model takes them.
    """
    if not len(held_out[0]) or not len(members[0]):
        return
    try:
        known = _known(folder / CANDIDATES, run, name) or _first(held_out)
        _write(folder, run, _with(known, members, server_round), name)
    except (OSError, RuntimeError, ValueError, BractError, SafetensorError) as error:
        _log.warning("candidates of a membership audit are not kept: %s", one_line(error, 300))


def examples_of(loader: Iterable[Any]) -> Records:
    """Return the first `MOST` examples of a loader; none where an input recognises no batch."""
    parts: list[Records] = []
    for batch in loader:
        found = kept_examples(batch, parts[0][1][0] if parts else None)
        if found is None:
            break
        parts.append(found)
        if sum(len(labels) for _, labels in parts) >= MOST:
            break
    if not parts:
        return torch.empty(0), torch.empty(0, dtype=torch.int64)
    inputs, labels = (joined([part[i] for part in parts])[:MOST] for i in (0, 1))
    return inputs, labels


Known = tuple[Tensor, Tensor, Tensor]


def _known(path: Path, run: int, name: str) -> Known | None:
    """Return examples, labels and first rounds of this run; None without any."""
    if not path.is_file():
        return None
    with safe_open(str(path), framework="pt") as file:
        if (file.metadata() or {}).get("run") != str(run) or name not in set(file.keys()):
            return None
        examples, labels, first = (file.get_tensor(n) for n in (name, "labels", "first_round"))
        return examples, labels, first


def _first(held_out: Records) -> Known:
    examples, labels = (part[:MOST].detach().cpu() for part in held_out)
    return examples, labels, torch.zeros(len(labels), dtype=torch.int64)


def _with(known: Known, members: Records, server_round: int) -> Known:
    examples, labels, first = known
    seen = {content_bytes(one) for one in examples[first > 0]}
    room = MOST - len(seen)
    new = [i for i, one in enumerate(members[0].detach().cpu()) if content_bytes(one) not in seen][
        : max(0, room)
    ]
    rounds = torch.full((len(new),), server_round, dtype=torch.int64)
    return (
        joined([examples, members[0].detach().cpu()[new]]),
        joined([labels, members[1].detach().cpu()[new]]),
        torch.cat([first, rounds]),
    )


def _write(folder: Path, run: int, known: Known, name: str) -> None:
    examples, labels, first = known
    make_private_folder(folder)
    write_tensors(
        folder / CANDIDATES,
        {name: examples, "labels": labels, "first_round": first},
        private=True,
        about={"run": str(run)},
    )
