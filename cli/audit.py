"""``bract audit``: choose what to attack, attack it, print the result."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from bract.attacks.registry import attacks_only_for
from bract.attacks.solve.engine import Progress
from bract.audit.audit import Audit
from bract.audit.captures import Captures
from bract.audit.choice import AuditChoice
from bract.audit.worker import few_threads
from bract.cli import signals
from bract.cli.audit_workers import Crew
from bract.cli.console import WorkProgress, say
from bract.cli.keygen import client_key
from bract.errors import BractError
from bract.registry import unknown
from bract.rundir import RunDirectory
from bract.schema import EXACT_DB, TIERS, AuditResult


def choose_audits(
    root: Path,
    attacks: list[str] | None = None,
    clients: str | None = None,
    rounds: str | None = None,
    restarts: int | None = None,
    iterations: int | None = None,
    device: str | None = None,
    *,
    budget: str | None = None,
    repeats: int | None = None,
    tier: str | None = None,
    key: Path | None = None,
    prior: Path | None = None,
    truth: Path | None = None,
    models: Iterable[str] = (),
) -> list[AuditChoice]:
    """Merge the command line into the ``audit`` section of the run's configuration, tier by tier.

    Parameters
    ----------
    tier
        A tier, or ``all`` for every one that applies to the run; None takes the configuration's.
    models
        References ``package.module:callable`` that the captures may declare; the audit imports
        and calls them.
    """
    run = RunDirectory.open(root)
    wanted = tier or run.config().audit.tier
    chosen = _tiers_that_apply(run, key, prior) if wanted == "all" else [wanted]
    return [
        choose_audit(
            root,
            attacks,
            clients,
            rounds,
            restarts,
            iterations,
            device,
            budget=budget,
            repeats=repeats,
            tier=one,
            key=key if wanted != "all" or one == "colluding" else None,
            prior=prior if wanted != "all" or one == "surrogate" else None,
            truth=truth,
            models=models,
        )
        for one in chosen
    ]


def _tiers_that_apply(run: RunDirectory, key: Path | None, prior: Path | None) -> list[str]:
    protocols = [capture.declaration for capture in Captures.of_run(run).index]
    tiers = ["oblivious"]
    if any(p.defenses for p in protocols):
        tiers.append("adaptive")
    if prior is not None:
        tiers.append("surrogate")
    threshold = run.config().encryption.threshold
    at_hand = key is not None or client_key(run.keys, 0, threshold).is_file()
    if at_hand and any(p.encryption != "none" for p in protocols):
        tiers.append("colluding")
    elif key is not None:
        raise BractError("--key: no captured upload is encrypted; leave it out")
    return tiers


def choose_audit(
    root: Path,
    attacks: list[str] | None = None,
    clients: str | None = None,
    rounds: str | None = None,
    restarts: int | None = None,
    iterations: int | None = None,
    device: str | None = None,
    *,
    budget: str | None = None,
    repeats: int | None = None,
    tier: str = "oblivious",
    key: Path | None = None,
    prior: Path | None = None,
    truth: Path | None = None,
    models: Iterable[str] = (),
) -> AuditChoice:
    """Merge the command line into the ``audit`` section of the run's configuration, for one tier.

    A ``budget`` (see `parse_budget`) takes the place of both limits of that section. Without
    ``key`` the colluding tier takes the first client's key of a run on this machine.
    """
    run = RunDirectory.open(root)
    config = run.config()
    section = config.audit
    if tier not in TIERS:
        raise BractError(unknown("tier", tier, [*TIERS, "all"]))
    if tier == "colluding" and key is None:
        key = client_key(run.keys, 0, config.encryption.threshold)
        if not key.is_file():
            raise BractError(
                "--tier colluding: the attacker holds one client's key; name its file with --key"
            )
    if tier != "colluding" and key is not None:
        raise BractError(f"--key goes with --tier colluding, not with {tier}")
    if tier == "surrogate" and prior is None:
        raise BractError(
            "--tier surrogate: the attacker holds public images; name the generator that `bract "
            "prior train` made of them with --prior"
        )
    if tier != "surrogate" and prior is not None:
        raise BractError(f"--prior goes with --tier surrogate, not with {tier}")
    steps, seconds = iterations or section.iterations, section.seconds
    if budget is not None:
        steps, seconds = parse_budget(budget)
        if steps is not None and iterations is not None:
            raise BractError(f"--budget {budget} and --iterations {iterations}: give one of them")
        steps = steps or iterations
    chosen_rounds = parse_rounds(rounds) if rounds else section.rounds
    chosen_clients = parse_clients(clients) if clients else section.clients
    own = attacks_only_for("surrogate") if tier == "surrogate" else section.attacks
    return AuditChoice(
        attacks=tuple(attacks or own),
        rounds=None if chosen_rounds is None else frozenset(chosen_rounds),
        clients=None if chosen_clients is None else frozenset(chosen_clients),
        iterations=steps,
        seconds=seconds,
        restarts=restarts or section.restarts,
        repeats=repeats or section.repeats,
        max_images=section.max_images,
        device=device or section.device,
        seed=config.seed,
        tier=tier,
        key=key,
        prior=prior,
        truth=truth,
        skip_hopeless=section.skip_hopeless,
        models=frozenset(models),
    )


def parse_budget(text: str) -> tuple[int | None, float | None]:
    """Read ``2000`` (iterations a restart), or ``90s``, ``5m``, ``1h`` (wall time an upload).

    Returns
    -------
    tuple
        Iterations and seconds; one of them is None.
    """
    found = re.fullmatch(r"\s*(\d+|\d*\.\d+)\s*(s|m|h)?\s*", text)
    value = float(found[1]) if found else 0.0
    if found is None or not value or (not found[2] and not found[1].isdigit()):
        raise BractError(
            f"--budget {text!r}: expected iterations such as 2000, or a time such as 90s, 5m or 1h"
        )
    if found[2]:
        return None, value * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[2]]
    return int(found[1]), None


def parse_clients(text: str) -> list[str]:
    """Read ``client-0,client-1``; blanks around a name do not count."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise BractError(f"--clients {text!r}: expected names such as client-0,client-1")
    return names


def parse_rounds(text: str) -> list[int]:
    """Read ``1,3`` or ``1-5`` or a mixture."""
    rounds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if found is None:
            raise BractError(f"--rounds {text!r}: expected rounds such as 1,3 or 1-5")
        first = int(found[1])
        rounds += range(first, int(found[2] or first) + 1)
    return rounds


def audit_run(root: Path, choice: AuditChoice, *, resume: bool = False) -> list[AuditResult]:
    """Run the audit with progress; return what is on disk for each chosen observation."""
    with auditing(root):
        return execute(open_audit(root, choice, resume=resume))


@contextlib.contextmanager
def auditing(root: Path) -> Iterator[None]:
    """Be the only command that works on the run; if a signal ends the block, print what is kept.

    Raises
    ------
    LockedError
        If another command trains, audits or reports the run.
    """
    again = signals.resumed("audit", shlex.join(["bract", "audit", str(root), "--resume"]))
    run, what = RunDirectory.open(root), f"audit of {root}; what was attacked is kept"
    with run.claim(), run.reading(), signals.explained(what, again):
        yield


def open_audit(root: Path, choice: AuditChoice, *, resume: bool = False) -> Audit:
    """Check a choice against the run; nothing is attacked or removed yet."""
    # A model that is declared as package.module:callable is in the folder of a third-party app.
    sys.path.insert(0, str(Path.cwd()))
    return Audit(RunDirectory.open(root), choice, resume=resume)


def execute(audit: Audit, crew: Crew | None = None) -> list[AuditResult]:
    """Attack what is left, with progress; return what is on disk for each chosen observation.

    ``crew`` are the workers that attack; None is this process.
    """
    tier = audit.choice.tier
    batches = audit.plan(None if crew is None else crew.cluster.device)
    total = sum(len(batch.captures) for batch in batches)
    if not total:
        say(f"{audit.run.root}: nothing left to attack in the {tier} tier")
    few_threads()
    with WorkProgress(total, f"attack, {tier}") as bar:
        if crew is not None:
            for result in crew.execute(audit, batches, bar.within):
                bar.finish_item(describe(result))
                signals.check()
            return audit.results()
        for batch in batches:
            size = len(batch.captures)

            def show(progress: Progress, size: int = size) -> None:
                bar.within(progress.fraction * size, f"loss {progress.loss:.4f}")

            for result in audit.execute([batch], show):
                bar.finish_item(describe(result))
                signals.check()
    return audit.results()


def describe(result: AuditResult) -> str:
    """Put one attacked observation in words."""
    who = f"{result.attack} on round {result.round}, {result.client}"
    if result.method not in (None, result.attack):
        who = f"{who}, by {result.method}"
    if result.refused:
        return f"{who}: not attacked: {result.refused}"
    scores = [image.scores for image in result.images if image.scores]
    if not scores:
        return f"{who}: {len(result.images)} reconstructions, unscored (no truth kept)"
    found = f"{len(scores)} images"
    known = [(row.ssim, row.psnr) for row in scores if None not in (row.ssim, row.psnr)]
    if not known:
        return f"{who}: {found}, none of them with finite scores"
    ssim, psnr = max(known)
    identified = [row.identified_top1 for row in scores if row.identified_top1 is not None]
    if identified:
        found = f"{sum(identified)} of {found} identified"
    capped = " (the cap)" if psnr is not None and psnr >= EXACT_DB else ""
    best = f"best SSIM {ssim:.2f}, PSNR {psnr:.1f} dB{capped}"
    return f"{who}: {found}, {best}, {result.seconds or 0.0:.0f} s"
