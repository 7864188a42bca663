"""Before an audit: how long it takes, what is infeasible, and whether to begin."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import typer

from bract.audit.audit import Audit
from bract.audit.forecast import forecast
from bract.audit.worker import few_threads
from bract.cli.console import duration, say, stderr, working
from bract.disk.files import readable_size
from bract.errors import RunFailedError
from bract.report.words.formatting import plural

ASK_FROM = 60.0
"""Estimated seconds from which `bract audit` asks before it begins."""


def approve(audits: list[Audit], *, ask: bool, measure: bool = True, workers: int = 1) -> None:
    """Print how long the audits take and what is infeasible; on a terminal ask where it is much.

    Off a terminal nothing is ever asked: the estimate is printed and the work begins.

    Parameters
    ----------
    ask
        False (``--yes``) does not ask either.
    measure
        Whether the time is estimated, by a moment of attacking in this process.
    workers
        Processes that share the work.

    A no is a `RunFailedError`; nothing has been attacked or removed then.
    """
    few_threads()
    with working("estimating the work") if measure else nullcontext():
        found = forecast(audits, measure=measure)
    if not found.attacks:
        return
    seconds = None if found.seconds is None else found.seconds / workers
    took = "" if seconds is None else f", about {duration(seconds)}"
    attacks = plural(found.attacks, "attack")
    where = f" on {found.device}" if measure else ""
    say(f"{attacks} on {plural(found.uploads, 'upload')}{took}{where}")
    if found.memory is not None:
        together = plural(found.trials, "trial")
        say(f"memory: about {readable_size(found.memory)} for {together} together")
    for group in found.infeasible:
        named = ", ".join(group.uploads[:3]) + (", ..." if len(group.uploads) > 3 else "")
        say(f"infeasible: {plural(len(group.uploads), 'upload')} ({named}): {group.reason}")
    much = found.infeasible or (seconds or 0.0) > ASK_FROM
    if not (ask and much and at_a_terminal()):
        return
    say("less work: --clients, --rounds, --attack, --budget; no question: --yes")
    if not typer.confirm("Go on?", default=True, err=True):
        raise RunFailedError("nothing was attacked")


def at_a_terminal() -> bool:
    """Return whether a person can read a question and answer it."""
    return sys.stdin.isatty() and stderr.is_terminal
