"""Follow a run at a SuperLink on another machine, over nothing but Flower's stream of its log."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from bract.cli.console import RoundProgress, say
from bract.cli.remote.connection import Control, LostError, UnreachableError
from bract.errors import RunFailedError, RunStoppedError, one_line
from bract.protocol.progress import Progress, ProgressReader
from bract.schema.metrics import FailureRow, LateRow, MetricsRow

PATIENCE = 300.0
"""Seconds for which a SuperLink that does not answer any more is asked again."""

AGAIN = 2.0
"""Seconds between two attempts."""

_ROUND = re.compile(r"\[ROUND (\d{1,9})/(\d{1,9})\]\s*", re.ASCII)
"""How Flower's log begins a round."""

_log = logging.getLogger(__name__)


@dataclass
class Followed:
    """The reports received of a run.

    Attributes
    ----------
    run_id
        Flower's number of it.
    folder
        The run directory on the server's machine, if it was reported.
    rows
        The rows of `metrics.jsonl` there.
    ending
        The last report of the server app.
    tail
        The last lines of its log.
    """

    run_id: int
    folder: str = ""
    rows: list[MetricsRow] = field(default_factory=list)
    ending: Progress | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=12))

    def to_dict(self) -> dict[str, Any]:
        """Return it for ``--format json``."""
        return {
            "run_id": str(self.run_id),
            "status": "finished",
            "run": self.folder,
            "metrics": [row.to_dict() for row in self.rows],
        }


def follow(control: Control, run_id: int) -> Followed:
    """Show a run's progress from its beginning to its end.

    Raises
    ------
    RunFailedError
        If the run failed or was stopped, with the server's reason; `LostError` if the SuperLink
        does not answer for `PATIENCE` seconds.
    """
    found = Followed(run_id)
    reader = ProgressReader()
    with ExitStack() as stack:
        show: Callable[[MetricsRow], None] | None = None
        for text in _log_of(control, run_id):
            for one in reader.feed(text):
                if isinstance(one, str):
                    _note(found, one)
                elif one.event == "training":
                    found.folder = one_line(one.run or "", 500)
                    progress = RoundProgress(one.rounds or 1)
                    show = stack.enter_context(progress).update
                elif one.event == "round" and one.row is not None:
                    found.rows.append(_plain(one.row))
                    if show is not None:
                        show(found.rows[-1])
                elif one.event in ("finished", "failed"):
                    found.ending = one
    _judge(control, found)
    return found


def _note(found: Followed, line: str) -> None:
    """Keep a line of log; show where captures go, which round begins, and who is waited for."""
    found.tail.append(one_line(line, 300))
    _log.debug("%s", found.tail[-1])
    _, captures, where = line.partition("bract: captures go to ")
    if captures:
        say(f"at the server, captures go to {one_line(where, 300)}")
    begun = _ROUND.search(line)
    if begun:
        say(f"round {begun[1]}/{begun[2]} begins")
    _, waiting, who = line.partition("waiting for clients: ")
    if waiting:
        say(waiting + one_line(who, 300))


def _log_of(control: Control, run_id: int) -> Iterator[str]:
    """Return a run's log until its end, over connections that break."""
    after, lost = 0.0, None
    while True:
        try:
            for text, when in control.log(run_id, after):
                after, lost = max(after, when), None
                yield text
            ended = control.standing(run_id).ended
            if ended:
                # What was pushed while the stream ended.
                for text, _ in control.log(run_id, after):
                    yield text
                return
            lost = None
        except UnreachableError as error:
            now = time.monotonic()
            if lost is None:
                lost = now
                say(f"{error}; asking again for {PATIENCE:.0f} s")
            elif now - lost > PATIENCE:
                raise LostError(f"{error}; run {run_id} may go on there") from error
        time.sleep(AGAIN)


def _judge(control: Control, found: Followed) -> None:
    """Raise unless the run came to its end."""
    standing = control.standing(found.run_id)
    if found.ending is not None and found.ending.event == "failed":
        raise RunFailedError(
            f"run {found.run_id} failed: {one_line(found.ending.error or 'no reason given', 2000)}"
            + (f" (at the server: {found.folder})" if found.folder else "")
        )
    if standing.ending == "stopped":
        done = max((row.round for row in found.rows), default=0)
        raise RunStoppedError(found.run_id, done)
    if standing.ending == "completed":
        return
    last = next((line for line in reversed(found.tail) if line.strip()), "its log is empty")
    raise RunFailedError(
        f"run {found.run_id} {standing.ending or 'ended'}: {standing.details or last}; see the log "
        "of the SuperLink there; bract must be installed in its environment"
    )


def _plain(row: MetricsRow) -> MetricsRow:
    """Return a row whose words a terminal can show."""
    failures = [
        FailureRow(client=one_line(f.client, 80), reason=one_line(f.reason, 500))
        for f in row.failures
    ]
    late = [
        LateRow(client=one_line(a.client, 80), round=a.round, reason=one_line(a.reason, 500))
        for a in row.late
    ]
    return row.model_copy(update={"failures": failures, "late": late})
