"""What the command prints: progress and words to stderr, results to stdout."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bract.strict_json import dump_json

stderr = Console(stderr=True, highlight=False)


def set_up_logging(verbose: bool = False) -> None:
    """Send log records of bract to stderr."""
    handler = RichHandler(console=stderr, show_path=False, show_time=False, markup=False)
    logger = logging.getLogger("bract")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.propagate = False


def say(text: str) -> None:
    """Print a line for the person, to stderr."""
    stderr.print(text, markup=False, soft_wrap=True)


def working(text: str) -> AbstractContextManager[object]:
    """Show what is going on while the block runs: a spinner on a terminal, one line elsewhere."""
    if stderr.is_terminal:
        return stderr.status(text)
    say(text)
    return nullcontext()


def print_json(content: Any) -> None:
    """Print one JSON document to stdout."""
    sys.stdout.write(dump_json(content) + "\n")


class _LiveBar:
    """A bar on a terminal, and nothing elsewhere."""

    def __init__(self, what: str, total: int, *columns: ProgressColumn, done: int = 0) -> None:
        self._bar = Progress(
            TextColumn(what),
            MofNCompleteColumn(),
            BarColumn(),
            *columns,
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=stderr,
            disable=not stderr.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done, state="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def _show(self, completed: float, state: str) -> None:
        self._bar.update(self._task, completed=completed, state=state)


class RoundProgress(_LiveBar):
    """Live progress of a federation: a bar on a terminal, one line a round elsewhere."""

    def __init__(self, rounds: int, done: int = 0) -> None:
        super().__init__("round", rounds, done=done)
        self.rounds = rounds

    def update(self, row: dict[str, Any]) -> None:
        """Show one row of ``metrics.jsonl``."""
        state = describe_round(row)
        self._show(row["round"], state)
        if not stderr.is_terminal:
            say(f"round {row['round']}/{self.rounds}: {state}")
        for failure in row.get("failures", ()):
            say(f"round {row['round']}: {failure['client']} failed: {failure['reason']}")


class WorkProgress(_LiveBar):
    """Progress over counted work: a bar on a terminal, one line an item elsewhere."""

    def __init__(self, total: int, what: str) -> None:
        super().__init__(what, total, TaskProgressColumn())
        self.total = total
        self.done = 0

    def within(self, share: float, state: str) -> None:
        """Show how far the current items are, in items."""
        self._show(self.done + share, state)

    def finish_item(self, state: str) -> None:
        """Count one item as done."""
        self.done += 1
        self._show(self.done, state)
        if not stderr.is_terminal:
            say(f"{self.done}/{self.total} {state}")


def describe_round(row: dict[str, Any]) -> str:
    """Put one row of ``metrics.jsonl`` in words."""
    parts = []
    if row.get("clients"):
        parts.append(f"{len(row['clients'])} clients")
    if row.get("global"):
        split = row["global"].get("split", "test")
        parts.append(f"{split} loss {row['global']['loss']:.3f}")
        parts.append(f"{split} accuracy {row['global']['accuracy']:.1%}")
    if row.get("round"):
        parts.append(f"{row['seconds']:.1f} s")
    return ", ".join(parts)
