"""``bract watch``: the growing page in a browser, and a line or a table in the terminal."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.live import Live
from rich.table import Table

from bract.cli.console import document, say, stderr
from bract.cli.page_server import PageServer
from bract.errors import BractError
from bract.report.facts import gather
from bract.report.page.render import render
from bract.report.words.attack_text import hurried
from bract.report.words.formatting import counted, plural
from bract.rundir import RunDirectory
from bract.schema import Report
from bract.schema.inputs import is_redacted
from bract.schema.verdict import UNJUDGED

LOOK = 1.0
"""Seconds between two looks at the run's files."""

REFRESH = 10
"""Seconds after which the page loads itself anew, while the run goes on."""


@dataclass(frozen=True)
class Standing:
    """The state of a run.

    ``accuracy`` is the global model's after the last round; ``leaked`` of ``scored`` images are
    counted by the verdict's attack. ``audit`` is the live audit's status, None where none ran;
    ``queue`` counts the uploads that wait for it, ``current`` is the one it attacks. ``questions``
    are the titles of other questions that were answered, with what their rule decides. ``level`` is
    the verdict's: at ``misdescribed`` and ``unconfirmed`` no count is a result. ``counted``
    puts the counts in words, those that are undecided or not judged among them.
    """

    run: str
    status: str
    round: int
    rounds: int | None
    accuracy: float | None
    leaked: int
    scored: int
    captures: int
    audit: str | None = None
    done: int = 0
    queue: int = 0
    skipped: int = 0
    current: str | None = None
    error: str | None = None
    questions: tuple[str, ...] = ()
    level: str = ""
    counted: str = ""

    @property
    def going_on(self) -> bool:
        """Return whether more is to come."""
        return self.status not in ("finished", "failed", "interrupted", "stopped")

    @property
    def progress(self) -> str:
        """``round 3 of 10``."""
        return f"round {self.round}" + (f" of {self.rounds}" if self.rounds else "")

    @property
    def leak(self) -> str:
        """Return the leakage so far, in words."""
        if self.level in UNJUDGED:
            return f"no verdict: {self.level}"
        if not self.scored:
            return "nothing scored yet"
        return self.counted

    @property
    def work(self) -> str:
        """The state of the live audit, in words."""
        if self.audit is None:
            return "no live audit"
        parts = [f"{plural(self.done, 'upload')} attacked", f"{self.queue} waiting"]
        if self.skipped:
            parts.append(f"{self.skipped} skipped")
        doing = f"now {self.current}" if self.current else self.audit
        return f"{', '.join(parts)}; {doing}"

    def text(self) -> str:
        """Return one line."""
        parts = [self.status, self.progress]
        if self.accuracy is not None:
            parts.append(f"accuracy {self.accuracy:.1%}")
        return ", ".join([*parts, self.leak, *self.questions, self.work])


class Watched:
    """A run's page and standing, made anew when a file of the run has changed.

    Parameters
    ----------
    redact
        Leave every image out of the page; None: where the input is withheld.
    """

    def __init__(self, run: RunDirectory, *, redact: bool | None) -> None:
        self.run = run
        self.redact = redact
        self._lock = threading.Lock()
        self._seen: object = None
        self._report: Report | None = None

    def standing(self) -> Standing:
        """Return the state of the run now."""
        report = self._current()
        facts, headline = report.run, report.verdict.headline
        live = self.run.live()
        accuracies = [row.accuracy for row in report.rounds if row.accuracy is not None]
        return Standing(
            run=facts.name,
            status=facts.status,
            round=max([facts.rounds_done, *(o.round for o in report.observations)]),
            rounds=facts.rounds_planned,
            accuracy=accuracies[-1] if accuracies else None,
            leaked=headline.leaked if headline else 0,
            scored=headline.scored if headline else 0,
            captures=report.captures,
            audit=live.status if live else None,
            done=live.done if live else 0,
            queue=live.queue if live else 0,
            skipped=live.skipped if live else 0,
            current=live.current if live else None,
            error=live.error if live else None,
            questions=tuple(f"{q.title}: {q.level}" for q in report.questions if q.level),
            level=report.verdict.level,
            counted=f"{hurried(headline)}{counted(headline, headline.noun)}" if headline else "",
        )

    def page(self) -> tuple[str, bool]:
        """Return the page, and whether it may grow."""
        standing = self.standing()
        report = self._current()
        if is_redacted(self.redact, {facts.input for facts in report.observations}):
            report = report.redact()
        return render(self.run.root, report, live=standing.text()), standing.going_on

    def _current(self) -> Report:
        with self._lock:
            seen = self._signature()
            if self._report is None or seen != self._seen:
                self._report, self._seen = gather(self.run.root), seen
            return self._report

    def _signature(self) -> object:
        """Return what changes when a result, a round or a capture is added."""
        run = self.run
        paths = [run.state_path, run.metrics_path, run.config_path, run.captures, run.audit]
        for folder in (run.captures, run.audit):
            with suppress(OSError):
                paths += folder.iterdir()
        found = []
        for path in paths:
            with suppress(OSError):
                found.append((path, path.stat().st_mtime_ns))
        return found


def watch_run(root: Path, *, redact: bool | None, once: bool, as_json: bool) -> None:
    """Serve a run's page on this machine and print its state, until a signal ends it.

    Parameters
    ----------
    once
        Print the state, and end.
    as_json
        Print one line of JSON to stdout at each change.
    """
    # What is watched shall not wait for the watcher.
    with suppress(OSError):
        os.nice(10)
    watched = Watched(RunDirectory.open(root), redact=redact)
    standing = watched.standing()
    if once:
        _tell(standing, as_json)
        return
    with PageServer(watched.page, refresh=REFRESH) as server:
        say(f"page: {server.address}")
        say("anyone with this address on this machine sees the page; Ctrl-C ends it")
        _tell(standing, as_json)
        if not stderr.is_terminal or as_json:
            while True:
                time.sleep(LOOK)
                standing = _report_changes(watched, standing, as_json)
        with Live(_table(standing, server.address), console=stderr, auto_refresh=False) as live:
            while True:
                time.sleep(LOOK)
                standing = _looked(watched, standing)
                live.update(_table(standing, server.address), refresh=True)


def _report_changes(watched: Watched, before: Standing, as_json: bool) -> Standing:
    now = _looked(watched, before)
    if now != before:
        _tell(now, as_json)
    return now


def _looked(watched: Watched, before: Standing) -> Standing:
    """Return the state; while the files cannot be read, the previous one."""
    try:
        return watched.standing()
    except BractError:
        return before


def _tell(standing: Standing, as_json: bool) -> None:
    if as_json:
        document().write(json.dumps(asdict(standing)) + "\n")
        document().flush()
    else:
        say(standing.text())


def _table(standing: Standing, address: str) -> Table:
    table = Table.grid(padding=(0, 2))
    accuracy = "–" if standing.accuracy is None else f"{standing.accuracy:.1%}"
    rows = [
        ("run", f"{standing.run}, {standing.status}"),
        ("rounds", standing.progress.removeprefix("round ")),
        ("accuracy", accuracy),
        ("leak so far", standing.leak),
        ("live audit", standing.work),
        ("page", address),
    ]
    if standing.error:
        rows.insert(-1, ("last error", standing.error))
    for name, value in rows:
        table.add_row(f"[bold]{name}[/bold]", value.replace("[", r"\["))
    return table
