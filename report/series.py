"""A run's figures by round, by name, for other tools to draw: no picture and no label."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bract.schema import Report
from bract.schema.metrics import ClientRow
from bract.schema.report_rows import LeakageRow


class Figure(NamedTuple):
    """One value of one series, at one round."""

    name: str
    round: int
    value: float


_LONGEST_PART = 64
_LAST_ROUND = 2**31 - 1

_OF_CLIENTS = ("train_loss", "validation_accuracy", "seconds", "weight")
_OF_LEAKAGE = ("ssim_mean", "ssim_best", "psnr_mean", "leaked", "scored")


def figures_by_round(report: Report) -> Iterator[Figure]:
    """Return every figure of a report that has a round.

    Names have parts between slashes, of letters, digits and ``_ - .``: ``global/accuracy``,
    ``clients/client-0/train_loss``, ``leakage/auto-oblivious/client-0/ssim_mean``. What is not
    known is left out, and so are rounds that no tool counts.
    """
    yield from (f for f in _figures(report) if 0 <= f.round <= _LAST_ROUND)


def _figures(report: Report) -> Iterator[Figure]:
    clients = _parts(
        {found.client for found in report.leakage}.union(*(row.clients for row in report.rounds))
    )
    for row in report.rounds:
        yield from _known("global", row.round, {"accuracy": row.accuracy, "loss": row.loss})
        yield from _known("round", row.round, {"seconds": row.seconds, "failures": row.failures})
        for client, trained in row.clients.items():
            yield from _known(f"clients/{clients[client]}", row.round, _of(trained))
    for found in report.leakage:
        attack = part_of_name(f"{found.attack}-{found.tier}")
        yield from _known(f"leakage/{attack}/{clients[found.client]}", found.round, _of(found))
    for question in report.questions:
        for one in question.figures:
            where = "/".join(map(part_of_name, (question.question, one.tier, one.client)))
            yield from _known(where, one.round, {part_of_name(one.name): one.value})


def settings(report: Report) -> dict[str, str]:
    """Return the configuration, flat: ``strategy.name`` and so on; empty where there is none."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif value is not None:
            flat[prefix] = str(value)

    walk("", report.config.model_dump(mode="json") if report.config else {})
    return flat


def _of(row: ClientRow | LeakageRow) -> dict[str, float | None]:
    if isinstance(row, ClientRow):
        return {name: getattr(row, name) for name in _OF_CLIENTS}
    found = {name: getattr(row, name) for name in _OF_LEAKAGE}
    # What was not judged is no zero.
    return found if row.judged else found | {"leaked": None}


def _known(group: str, number: int, values: dict[str, float | None]) -> Iterator[Figure]:
    for name, value in values.items():
        if value is not None:
            yield Figure(f"{group}/{name}", number, float(value))


def part_of_name(name: str) -> str:
    """Return a name as one part of a path: at most 64 letters, digits and ``_ - .``."""
    part = re.sub(r"[^A-Za-z0-9_.-]", "_", name[:_LONGEST_PART])
    return part if part.strip(".") else part.replace(".", "_") or "_"


def _parts(names: Iterable[str]) -> dict[str, str]:
    """Return each name as a part of a path, all of them different."""
    parts: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(names):
        part = part_of_name(name)
        if part in taken:
            digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
            part = f"{part[: _LONGEST_PART - 9]}-{digest[:8]}"
        taken.add(part)
        parts[name] = part
    return parts
