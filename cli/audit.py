"""``bract audit``: choose what to attack, attack it, print what was reconstructed."""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bract.attacks import Progress
from bract.attacks.problem.evidence import has_attacker
from bract.attacks.problem.public_prior import load_prior
from bract.attacks.registry import attacks_only_for
from bract.audit.allowance import Allowance
from bract.audit.audit import Audit
from bract.audit.audit_pool import AuditPool
from bract.audit.captures import Captures
from bract.audit.questions import QUESTIONS
from bract.audit.worker import few_threads
from bract.cli import signals
from bract.cli.audit_workers import workers_of
from bract.cli.console import WorkProgress, duration, say
from bract.config import FederationConfig, build_config
from bract.config.audit import TIERS, Tier
from bract.config.config import AuditConfig, AuditRequest
from bract.errors import BractError
from bract.registry import unknown
from bract.rundir import RunDirectory
from bract.runtime.key_files import client_key
from bract.schema import Answer

LONGER = 1.3
"""Factor over its budget from which the first attack makes the estimate anew."""


def audit_requests(
    root: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    tier: str | None = None,
    key: Path | None = None,
    prior: Path | None = None,
    truth: Path | None = None,
    models: Iterable[str] = (),
    final: Path | None = None,
) -> list[AuditRequest]:
    """Overlay the ``audit`` section of the run's configuration; return one request a tier.

    Parameters
    ----------
    settings
        Keys of that section, and their values.
    tier
        A tier, or ``all`` for every one that applies to the run; None takes the section's.
    key
        Key file of one client. None takes the first client's of an encrypted run on this machine.
    models
        References ``package.module:callable`` that the captures may declare; the audit imports
        and calls them.
    final
        File of the final global model.
    """
    if final is not None and not final.is_file():
        raise BractError(
            f"--final {final}: no such file; expected the final global model as safetensors, or as "
            "torch.save(model.state_dict(), FILE) writes it",
            code="file-missing",
        )
    run = RunDirectory.open(root)
    config = run.config()
    section = _overlaid(config, settings or {})
    wanted = tier or section.tier
    if wanted not in (*TIERS, "all"):
        raise BractError(unknown("tier", wanted, [*TIERS, "all"]), code="unknown-name")
    threshold = config.encryption.threshold
    own = client_key(run.keys, 0, threshold)
    held = key or (own if own.is_file() else None)
    tiers = [t for t in TIERS if t == wanted]
    if wanted == "all":
        tiers = _tiers_that_apply(run, held, prior)
        if key is not None and "colluding" not in tiers:
            raise BractError("--key: no captured upload is encrypted; leave it out", code="usage")
    else:
        _check_files(wanted, key, held, prior)
    # What was asked for by name holds in every tier.
    named = "attacks" in (settings or {})
    generator = load_prior(prior).kind if prior and "surrogate" in tiers else None
    surrogate = attacks_only_for("surrogate", generator)
    return [
        AuditRequest(
            **section.model_dump(exclude={"tier", "attacks"}),
            attacks=surrogate if one == "surrogate" and not named else section.attacks,
            seed=config.seed,
            tier=one,
            key=held if one == "colluding" else None,
            prior=prior if one == "surrogate" else None,
            truth=truth,
            models=sorted(set(models)),
            final=final,
        )
        for one in tiers
    ]


def configured(root: Path) -> AuditConfig:
    """Return the audit section that the run was made with."""
    return RunDirectory.open(root).config().audit


def _overlaid(config: FederationConfig, settings: Mapping[str, Any]) -> AuditConfig:
    """Return the audit section with some keys replaced, checked as the configuration's is."""
    given = {name: value for name, value in settings.items() if value is not None}
    content = config.audit.model_dump(mode="json")
    if given.keys() & {"iterations", "seconds", "total_seconds"}:
        content |= {"iterations": None, "seconds": None, "total_seconds": None}
    return build_config({"audit": content | given}, source="the command line").audit


def _check_files(tier: str, key: Path | None, held: Path | None, prior: Path | None) -> None:
    """Refuse a tier without the file that its attacker holds, and a file of another tier."""
    if tier == "colluding" and held is None:
        raise BractError(
            "--tier colluding: the attacker holds one client's key; name its file with --key",
            code="usage",
        )
    if tier != "colluding" and key is not None:
        raise BractError(f"--key goes with --tier colluding, not with {tier}", code="usage")
    if tier == "surrogate" and prior is None:
        raise BractError(
            "--tier surrogate: the attacker holds public images; name the generator that `bract "
            "prior train` made of them with --prior",
            code="usage",
        )
    if tier != "surrogate" and prior is not None:
        raise BractError(f"--prior goes with --tier surrogate, not with {tier}", code="usage")


def _tiers_that_apply(run: RunDirectory, key: Path | None, prior: Path | None) -> list[Tier]:
    declared = [capture.declaration for capture in Captures.of_run(run).index]
    applies: dict[Tier, bool] = {
        "oblivious": True,
        "adaptive": any(d.defenses and has_attacker(_names(d.defenses)) for d in declared),
        "surrogate": prior is not None,
        "colluding": key is not None and any(d.encryption != "none" for d in declared),
    }
    return [tier for tier in TIERS if applies[tier]]


def _names(defenses: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(entry.get("name")) for entry in defenses]


def parse_budget(text: str, *, each: bool = False) -> dict[str, int | float]:
    """Read ``2000`` (iterations a restart), or ``90s``, ``5m``, ``1h`` (wall time in all).

    Parameters
    ----------
    each
        Whether a time is each upload's rather than the whole audit's.

    Returns
    -------
    dict
        ``iterations``, ``total_seconds`` or ``seconds``, as keys of the audit section.
    """
    found = re.fullmatch(r"\s*(\d+|\d*\.\d+)\s*(s|m|h)?\s*", text)
    value = float(found[1]) if found else 0.0
    if found is None or not value or (not found[2] and not found[1].isdigit()):
        raise BractError(
            f"--budget {text!r}: expected iterations such as 2000, or a time such as 90s, 5m or 1h",
            code="usage",
        )
    if found[2]:
        key = "seconds" if each else "total_seconds"
        return {key: value * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[2]]}
    return {"iterations": int(found[1])}


def parse_clients(text: str) -> list[str]:
    """Read ``client-0,client-1``; blanks around a name do not count."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise BractError(
            f"--clients {text!r}: expected names such as client-0,client-1", code="usage"
        )
    return names


def parse_rounds(text: str) -> list[int]:
    """Read ``1,3`` or ``1-5`` or a mixture."""
    rounds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if found is None:
            raise BractError(f"--rounds {text!r}: expected rounds such as 1,3 or 1-5", code="usage")
        first = int(found[1])
        rounds += range(first, int(found[2] or first) + 1)
    return rounds


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
