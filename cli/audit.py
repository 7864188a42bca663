"""``bract audit``: attack what a run captured, print and judge what was reconstructed."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bract.attacks import Progress
from bract.audit.allowance import Allowance
from bract.audit.audit import Audit
from bract.audit.audit_pool import AuditPool
from bract.audit.questions import QUESTIONS
from bract.audit.worker import few_threads
from bract.cli import signals
from bract.cli.approval import approve
from bract.cli.audit_requests import AuditOptions, audit_requests
from bract.cli.audit_workers import asked_for, count_for, workers_of
from bract.cli.console import WorkProgress, duration, print_json, say
from bract.cli.gate import Gate, check_alarms, check_attacked, check_tiers, hold, rule_of
from bract.config.config import AuditRequest
from bract.rundir import RunDirectory
from bract.schema import Answer

LONGER = 1.3
"""Factor over its budget from which the first attack makes the estimate anew."""


def audit_command(
    root: Path,
    options: AuditOptions,
    *,
    ray: str | None = None,
    resume: bool = False,
    ask: bool = True,
    limits: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Attack what the options choose, print the answers, and hold limits against them.

    Parameters
    ----------
    ray
        Address of a Ray cluster that attacks; None is this machine.
    ask
        Whether to ask on a terminal before long or infeasible work.
    limits
        Texts of ``--fail-on``, as `Gate.parse` reads them.

    Raises
    ------
    LeakageError
        If a limit is crossed, or had nothing to judge.
    NothingAttackedError
        If every attack was refused.
    PrivacyAlarmError
        If a measured epsilon is above the account's.
    """
    gates = [Gate.parse(text) for text in limits]
    requests = options.requests(root)
    asked = asked_for(ray, requests[0])
    if asked is not None:
        # This process only plans and checks; Ray decides what the workers compute on.
        # They attack; the other questions are asked without --ray.
        workers_ask = {"device": "cpu", "questions": requests[0].questions or ["reconstruction"]}
        requests = [request.model_copy(update=workers_ask) for request in requests]
    check_tiers(gates, [request.tier for request in requests])
    with auditing(root):
        audits = open_audits(root, requests, resume=resume, shared=asked is None)
        approve(audits, ask=ask, measure=asked is None, workers=count_for(audits))
        with workers_of(audits, asked) as workers:
            answers = [answer for audit in audits for answer in execute(audit, workers)]
    if as_json:
        print_json([answer.to_dict() for answer in answers])
    say(f"done: {root}/audit; next: bract report {root}")
    check_alarms(answers)
    hold(gates, answers, rule_of(root))
    check_attacked(answers, root)


def audit_all_tiers(root: Path, settings: Mapping[str, Any], *, models: Iterable[str] = ()) -> None:
    """Run every audit that applies to a run directory, without a line for each attack.

    What an earlier call did is not done again.

    Parameters
    ----------
    settings, models
        As `audit_requests` takes them.
    """
    run = RunDirectory(root)
    logging.getLogger("bract.audit").setLevel(logging.ERROR)
    audit = None
    with run.claim():
        for request in audit_requests(root, settings, tier="all", models=models):
            # An estimate that decides nothing would cost as much as an attack.
            request = request.model_copy(update={"estimate": False})
            audit = Audit(run, request, resume=True, like=audit)
            for _ in audit.execute(audit.plan()):
                pass


def audit_run(root: Path, request: AuditRequest, *, resume: bool = False) -> list[Answer]:
    """Run the audit with progress; return what is on disk for each chosen observation."""
    with auditing(root):
        audits = open_audits(root, [request], resume=resume)
        with workers_of(audits) as workers:
            return execute(audits[0], workers)


@contextlib.contextmanager
def auditing(root: Path) -> Iterator[None]:
    """Be the only command that works on the run; if a signal ends the block, print what is kept.

    Another command that trains, audits or reports the run is a `LockedError`.
    """
    again = signals.resumed("audit", shlex.join(["bract", "audit", str(root), "--resume"]))
    run, what = RunDirectory.open(root), f"audit of {root}; what was attacked is kept"
    with run.claim(), run.reading(), signals.explained(what, again):
        yield


def open_audit(
    root: Path,
    request: AuditRequest,
    *,
    resume: bool = False,
    allowance: Allowance | None = None,
) -> Audit:
    """Check a request against the run; nothing is attacked or removed yet."""
    # A model that is declared as package.module:callable is in the folder of its own app.
    here = str(Path.cwd())
    if sys.path[0] != here:
        sys.path.insert(0, here)
    return Audit(RunDirectory.open(root), request, resume=resume, allowance=allowance)


def open_audits(
    root: Path, requests: Iterable[AuditRequest], *, resume: bool = False, shared: bool = True
) -> list[Audit]:
    """Open an audit for each request, which share the time of the whole, where it has one.

    Parameters
    ----------
    shared
        Whether this machine runs them all. Elsewhere, and where ``audit.workers`` asks for several
        processes, each attack has its even share from the start.
    """
    requests = list(requests)
    opened = [open_audit(root, request, resume=resume) for request in requests]
    total = opened[0].request.total_seconds if opened else None
    if total is None:
        return opened
    left = sum(len(b.captures) for a in opened for b in a.plan()) if resume else 0
    allowance = Allowance(total, left or sum(audit.attacks for audit in opened))
    if shared and opened[0].request.workers in (None, 1):
        return [open_audit(root, r, resume=resume, allowance=allowance) for r in requests]
    even = {"seconds": allowance.share}
    fixed = [audit.request.model_copy(update=even) for audit in opened]
    return [open_audit(root, request, resume=resume) for request in fixed]


def execute(audit: Audit, workers: AuditPool | None = None) -> list[Answer]:
    """Attack what is left, with progress; return what is on disk for each chosen observation.

    ``workers`` attack; None is this process, which asks the other questions in any case.
    """
    tier = audit.request.tier
    batches = audit.plan(None if workers is None else workers.device)
    total = sum(len(batch.captures) for batch in batches)
    if not total:
        say(f"{audit.run.root}: nothing left to attack in the {tier} tier")
    few_threads()
    with WorkProgress(total, f"attack, {tier}") as bar:
        if workers is not None:
            attacks = [batch for batch in batches if batch.question == "reconstruction"]
            batches = [batch for batch in batches if batch.question != "reconstruction"]
            audit.begin(attacks)
            for result in workers.execute(audit, attacks, bar.within):
                bar.finish_item(describe(result), result.refused)
                signals.check()
        begun = time.monotonic()
        for number, batch in enumerate(batches):
            size = len(batch.captures)
            if number == 1 and workers is None:
                _learn(audit, (time.monotonic() - begun) / max(1, bar.done), total - bar.done)

            def show(progress: Progress, size: int = size) -> None:
                bar.within(progress.fraction * size, f"loss {progress.loss:.4f}")

            for result in audit.execute([batch], show):
                bar.finish_item(describe(result), result.refused)
                signals.check()
    return audit.answers()


def _learn(audit: Audit, took: float, left: int) -> None:
    """Say how long the rest takes, where the first attack took far longer than its budget."""
    planned = audit.request.seconds
    if planned is not None and took > LONGER * planned:
        say(
            f"the first attack took {duration(took)} with a budget of {duration(planned)}: about "
            f"{duration(took * left)} are left"
        )


def describe(answer: Answer) -> str:
    """Put one answer in words."""
    return QUESTIONS[answer.question].in_a_line(answer)
