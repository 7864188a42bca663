"""What each capture says without its model: examples, steps that batch normalisation counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bract.audit.captures import Capture, Captures
from bract.audit.uncaptured import read_missed
from bract.captures.observation import Observation, ObservationStore
from bract.errors import BractError, one_line
from bract.schema.described_work import planned_steps

COUNTER = "num_batches_tracked"
"""Last part of the name of PyTorch's count of batches in every batch normalisation."""

USUAL_BATCHES = (1, 2, 4, 8, 10, 16, 20, 25, 32, 50, 64, 100, 128, 200, 256, 512, 1024)
MOST_EPOCHS = 20


@dataclass(frozen=True)
class CaptureFacts:
    """One capture.

    Attributes
    ----------
    steps
        Batches that batch normalisation counted while the client trained; 0 where it ran in
        evaluation mode, None where nothing counted.
    absent
        Names of what was sent and not returned.
    unmoved
        Names of parameters that came back as they were sent.
    """

    capture: Capture
    examples: int | None
    steps: int | None
    absent: tuple[str, ...] = ()
    unmoved: tuple[str, ...] = ()


def read_facts(root: Path) -> tuple[list[CaptureFacts], list[str]]:
    """Read what usable captures below ``root`` say, by round and client, and why others are none.

    No description is laid over them, and no code that they name is trusted.

    Raises
    ------
    BractError
        If none is usable.
    """
    refused: list[str] = []
    found: list[CaptureFacts] = []
    unmoved: list[CaptureFacts] = []
    for capture in Captures(root).index:
        try:
            observation = read_tensors(root, capture)
            observation.check()
        except BractError as error:
            refused.append(str(error))
            continue
        reading = observation.provenance.get("reading") or {}
        facts = CaptureFacts(
            capture,
            capture.declaration.num_examples,
            counted_steps(observation),
            tuple(reading.get("absent", ())),
            tuple(name for name, value in observation.update.items() if not bool(value.any())),
        )
        (unmoved if is_unmoved(observation) else found).append(facts)
    if not found and not unmoved:
        refused += [
            f"the hook wrote none of round {m.round}: {m.reason}" for m in read_missed(root)
        ]
        reason = f": {one_line(refused[0], 500)}" if refused else ""
        raise BractError(f"{root}: no capture can be described{reason}", code="captures-none")
    # Where no client moves anything, the model or its loss is why, and is looked at.
    if found:
        refused += [f"{one.capture.key}: the client returned what it was sent" for one in unmoved]
    return found or unmoved, refused


def is_unmoved(observation: Observation) -> bool:
    """Return whether an upload moves nothing, so that nothing can be read off it."""
    return not any(bool(value.any()) for value in observation.update.values())


def read_tensors(root: Path, capture: Capture) -> Observation:
    """Read one capture's tensors, whatever model it names."""
    assert capture.folder is not None
    return ObservationStore(root).load(capture.folder)


def counted_steps(observation: Observation) -> int | None:
    """Return how often batch normalisation was run in training mode; None where none counts."""
    counts = [
        int(after) - int(observation.buffers[name])
        for name, after in observation.returned_buffers.items()
        if name.rpartition(".")[2] == COUNTER
        and name in observation.buffers
        and after.numel() == 1
        and bool(after.isfinite())
    ]
    # Layers may run several times a step, and a frozen one not at all.
    moved = [count for count in counts if count > 0]
    return min(moved) if moved else 0 if counts else None


def batch_and_epochs(
    facts: Sequence[CaptureFacts],
    *,
    batch_size: int | None = None,
    epochs: int | None = None,
    drop_last: bool = False,
) -> tuple[int, int] | None:
    """Return a batch size and epochs that explain every counted step; None where none do.

    Of several, the fewest epochs win, then a usual batch size, then the largest.
    """
    known = [(f.examples, f.steps) for f in facts if f.examples and f.steps]
    if not known:
        return None
    largest = max(examples for examples, _ in known)
    batches = [batch_size] if batch_size else range(1, largest + 1)
    tried = [epochs] if epochs else range(1, MOST_EPOCHS + 1)
    for count in tried:
        fitting = [
            batch
            for batch in batches
            if all(planned_steps(n, batch, count, drop_last) == steps for n, steps in known)
        ]
        if fitting:
            usual = [batch for batch in fitting if batch in USUAL_BATCHES]
            return max(usual or fitting), count
    return None
