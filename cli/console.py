"""Output of the command: progress and words to stderr, results to stdout."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich.console import Console, ConsoleRenderable, RenderableType
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
from rich.table import Column
from rich.text import Text

from bract.errors import printable
from bract.parse.strict_json import dump_json

if TYPE_CHECKING:
    from bract.schema.metrics import MetricsRow

stderr = Console(stderr=True, highlight=False)
_printed = False
"""Whether this process has printed its JSON document."""

_document: TextIO | None = None
"""Stdout, while it is kept for that document."""

SILENCE = 50.0
"""Seconds after which a command that works off a terminal prints its progress."""


class _Printed(RichHandler):
    """Prints log records, whose texts may be another party's."""

    def render_message(self, record: logging.LogRecord, message: str) -> ConsoleRenderable:
        """Return the text of a record without what a terminal takes as a command."""
        return super().render_message(record, printable(message))


def set_up_logging(verbose: bool = False) -> None:
    """Send log records of bract to stderr."""
    handler = _Printed(console=stderr, show_path=False, show_time=False, markup=False)
    logger = logging.getLogger("bract")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.propagate = False


def say(text: str) -> None:
    """Print a line for the person, to stderr; nothing happens where stderr is closed.

    What a terminal takes as a command is replaced, since names may be another party's.
    """
    with suppress(OSError):
        stderr.print(printable(text), markup=False, soft_wrap=True)


def working(text: str) -> AbstractContextManager[object]:
    """Show the current step while the block runs: a spinner on a terminal, one line elsewhere."""
    if stderr.is_terminal:
        return stderr.status(printable(text))
    say(text)
    return nullcontext()


def print_json(content: Any) -> None:
    """Print one JSON document to stdout."""
    global _printed
    document().write(dump_json(content) + "\n")
    _printed = True


def document() -> TextIO:
    """Return the stream of the JSON document that the command line asks for."""
    return _document or sys.stdout


@contextmanager
def json_alone() -> Iterator[None]:
    """Keep stdout for the JSON document where one is asked for; other code prints to stderr."""
    global _document
    if not asks_for_json(sys.argv[1:]):
        yield
        return
    _document = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _document = None


def begin_output() -> None:
    """Begin a command: it has printed no JSON document yet."""
    global _printed
    _printed = False


def print_error(code: str, message: str) -> None:
    """Print an error to stdout as the JSON document of a command that was to print one.

    Nothing is printed without ``--format json`` on the command line, nor after the document of a
    command that ended with an error because of its result: a crossed gate, a failed check.
    """
    if not asks_for_json(sys.argv[1:]) or _printed:
        return
    with suppress(OSError):
        print_json({"error": {"code": code, "message": message}})


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON; also of one that cannot be parsed."""
    pairs = itertools.pairwise((*arguments, ""))
    return any("--format=json" in pair or pair == ("--format", "json") for pair in pairs)


class _TwoLines(Progress):
    """The bar and its numbers in one line, the state of the work in the next one.

    The numbers keep their place however narrow the terminal is; the words are cut instead.
    """

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the lines of every bar."""
        for task in self.tasks:
            yield self.make_tasks_table([task])
            if task.fields["state"]:
                yield Text(f"  {task.fields['state']}", no_wrap=True, overflow="ellipsis")


class _LiveBar:
    """A bar on a terminal; elsewhere a line now and then where nothing else was printed."""

    def __init__(self, what: str, total: int, *columns: ProgressColumn, done: int = 0) -> None:
        self._bar = _TwoLines(
            TextColumn(what),
            MofNCompleteColumn(),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            *columns,
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=stderr,
            expand=True,
            disable=not stderr.is_terminal,
        )
        self._what = what
        self._first = done
        self._task = self._bar.add_task("", total=total, completed=done, state="")
        self._begun = self._said = time.monotonic()
        self._stop = Event()
        self._reminder = Thread(target=self._remind, daemon=True)

    def __enter__(self) -> Self:
        self._bar.start()
        if not stderr.is_terminal:
            self._reminder.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        if stderr.is_terminal:  # elsewhere Rich 14.0 ends a bar that never began by an empty line
            self._bar.stop()

    def _show(self, completed: float, state: str) -> None:
        self._bar.update(self._task, completed=completed, state=state)

    def _line(self, text: str) -> None:
        """Print a line where there is no bar."""
        if not stderr.is_terminal:
            self._said = time.monotonic()
            say(text)

    def _remind(self) -> None:
        while not self._stop.wait(max(0.0, self._said + SILENCE - time.monotonic())):
            if time.monotonic() - self._said >= SILENCE:
                self._line(self._standing())

    def _standing(self) -> str:
        """Return the progress of the work: a bar in words."""
        (task,) = self._bar.tasks
        spent = time.monotonic() - self._begun
        total, new = task.total or 1.0, task.completed - self._first
        share = task.completed / total
        left = spent * (total - task.completed) / new if new > 0.01 * total else None
        rest = "" if left is None else f", about {duration(left)} left"
        state = f", {task.fields['state']}" if task.fields["state"] else ""
        return f"{self._what}: {share:.0%} after {duration(spent)}{rest}{state}"


class RoundProgress(_LiveBar):
    """Live progress of a federation: a bar on a terminal, one line a round elsewhere."""

    def __init__(self, rounds: int, done: int = 0) -> None:
        super().__init__("round", rounds, done=done)
        self.rounds = rounds

    def update(self, row: MetricsRow) -> None:
        """Show one row of ``metrics.jsonl``."""
        state = describe_round(row)
        self._show(row.round, state)
        self._line(f"round {row.round}/{self.rounds}: {state}")
        for failure in row.failures:
            say(f"round {row.round}: {failure.client} failed: {failure.reason}")
        for late in row.late:
            say(f"round {row.round}: {late.client}: {late.reason}; refused")


class WorkProgress(_LiveBar):
    """Progress over counted work: a bar on a terminal, one line an item elsewhere."""

    def __init__(self, total: int, what: str) -> None:
        super().__init__(what, total, TaskProgressColumn())
        self.total = total
        self.done = 0
        self._refused: Counter[str] = Counter()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        for reason, count in self._refused.items():
            if count > 1:
                say(f"{count} in all were not attacked: {reason}")

    def within(self, share: float, state: str) -> None:
        """Show how far the current items are, in items."""
        self._show(self.done + share, state)

    def finish_item(self, state: str, refused: str | None = None) -> None:
        """Count one item as done; of those ``refused`` for one reason the first has a line.

        How many more there were is said at the end.
        """
        self.done += 1
        self._show(self.done, state)
        if refused is not None:
            self._refused[refused] += 1
        if refused is None or self._refused[refused] == 1:
            self._line(f"{self.done}/{self.total} {state}")


def duration(seconds: float) -> str:
    """Put a duration in words: ``40 s``, ``7 min``, ``2.5 h``."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 100 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def describe_round(row: MetricsRow) -> str:
    """Put one row of ``metrics.jsonl`` in words."""
    parts = []
    if row.clients:
        parts.append(f"{len(row.clients)} clients")
    if row.evaluation is not None:
        found = row.evaluation
        loss = "not finite" if found.loss is None else f"{found.loss:.3f}"
        parts.append(f"{found.split} loss {loss}")
        if found.accuracy is not None:
            parts.append(f"{found.split} accuracy {found.accuracy:.1%}")
    if row.round and row.seconds is not None:
        parts.append(f"{row.seconds:.1f} s")
    return ", ".join(parts)
