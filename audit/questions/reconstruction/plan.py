"""Plan attacks: which captures run as one batch, and of which little is expected."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from bract.attacks import ATTACKS, Case
from bract.attacks.problem.client_model import images_in
from bract.attacks.problem.identifiability import identifiability
from bract.attacks.solve.labels import infer_labels
from bract.audit.captures import Capture
from bract.config.config import AuditRequest
from bract.errors import BractError, out_of_memory
from bract.inputs import INPUTS
from bract.schema.audit import InformationEstimate
from bract.seeds import derive_seed

_log = logging.getLogger(__name__)

MOST = {"cpu": 8, "cuda": 256}
"""Most observations in one batch by kind of device: as many as an engine runs trials together."""

MEMORY = 4 * 2**30
"""Most bytes of captures in one batch; one that is larger still runs, alone."""


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
            size = stored_bytes(capture)
            if batch and (len(batch) >= limit or held + size > MEMORY):
                yield tuple(batch)
                batch, held = [], 0
            batch.append(capture)
            held += size
        yield tuple(batch)


def in_turns(captures: Iterable[Capture], seed: int | None) -> list[Capture]:
    """Order captures so that the first of them, however many, are a sample of them all.

    Those of the fewest examples come first, which take the least time and of which most comes back.
    Among equals each round has its turn, and which of its clients comes next is drawn from ``seed``
    and the client's name. An audit whose time ends before its uploads do so says something about
    all rounds, not about the first ones. Without a seed equals keep their order, as for an audit
    that ends with its uploads.
    """
    if seed is None:
        return sorted(captures, key=_examples)
    drawn = sorted(captures, key=lambda c: derive_seed(seed, "turn", c.round, c.client))
    turns: Counter[tuple[float, int]] = Counter()
    ranked = []
    for capture in drawn:
        few = _examples(capture)
        ranked.append((few, turns[few, capture.round], capture.round, capture))
        turns[few, capture.round] += 1
    return [capture for *_, capture in sorted(ranked, key=lambda one: one[:3])]


def _examples(capture: Capture) -> float:
    """Return the examples behind an upload, infinite where none are declared."""
    count = capture.declaration.num_examples
    return math.inf if count is None else float(count)


def _shape(capture: Capture, max_images: int) -> tuple[str, bool]:
    declaration = capture.declaration
    declared = {k: v for k, v in declaration.to_dict().items() if k != "num_examples"}
    try:
        images = images_in(declaration, max_images)
    except BractError:
        images = 0
    return json.dumps([declared, images], sort_keys=True, default=str), bool(capture.members)


def stored_bytes(capture: Capture) -> int:
    """Return the bytes of the tensors that a capture is read from."""
    return sum(
        path.stat().st_size
        for one in capture.rounds
        if one.folder is not None
        for path in one.folder.glob("*.safetensors")
    )


def infeasible(capture: Capture, request: AuditRequest, attack: str) -> str | None:
    """Return why nothing can be expected of an attack on an upload; None where it may succeed.

    Known from the declaration alone: ciphertexts without a key, more images in one update than
    are looked for, or too little declared to look for any.
    """
    declaration = capture.declaration
    if declaration.encryption != "none" and request.tier != "colluding":
        return "ciphertexts, and the attacker holds no key"
    if not declaration.model:
        return "no model is declared"
    try:
        images = images_in(declaration, 1 << 31)
    except BractError as error:
        return str(error)
    if images > request.max_images and ATTACKS[attack].batches != "any":
        return (
            f"{images} images went into one update, and {request.max_images} are looked for "
            "(audit.max_images); expect nothing readable, but from closed forms and from the last "
            "layer of long training"
        )
    return None


class Estimates:
    """Identifiability of cases, each as if it were the only one: cases that cannot differ share it.

    Results must not depend on which uploads an audit, or a worker of one, has seen before.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Any, InformationEstimate | None]] = []

    def of(self, case: Case) -> InformationEstimate | None:
        """Return how near to its images a case's upload may lead; None where that is unknown."""
        evidence, observation = case.evidence, case.observation
        if not INPUTS[observation.declaration.input].neighbours:
            return None
        try:
            labels = infer_labels(case).labels
        except BractError:
            labels = None
        if evidence.bounds is not None or evidence.weights is not None:
            return _estimate(case, labels)
        shown = None if labels is None else labels.tolist()
        zeros = [int((value == 0.0).sum()) for value in evidence.target.values()]
        defenses = observation.declaration.defenses
        key = (observation.round, case.tier, case.shape, defenses, shown, zeros)
        for known, found in self._known:
            if known == key:
                return found
        estimate = _estimate(case, labels)
        self._known.append((key, estimate))
        return estimate


def _estimate(case: Case, labels: Tensor | None) -> InformationEstimate | None:
    try:
        found = identifiability(case, labels=labels)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            _log.info("%s: no estimate: %s", case.observation.key, error)
        return None
    return InformationEstimate(
        psnr=found.psnr, prior_psnr=found.prior_psnr, numbers=found.numbers, pixels=found.pixels
    )
