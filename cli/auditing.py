"""``bract audit``: choose what to attack, attack it, say what came back."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from bract.attacks.engine import Progress
from bract.attacks.evidence import TIERS
from bract.cli.console import WorkProgress, say
from bract.cli.keygen import client_key
from bract.errors import BractError
from bract.registry import unknown
from bract.rundir import RunDirectory
from bract.server.audit import Audit, AuditChoice
from bract.server.captures import Captures


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
    truth: Path | None = None,
) -> list[AuditChoice]:
    """Lay the command line over the ``audit`` section of the run's configuration, tier by tier.

    Parameters
    ----------
    tier
        A tier, or ``all`` for every one that applies to the run; None takes the configuration's.

    Raises
    ------
    BractError
        If the tier is unknown, or the one that was asked for has no key.
    """
    run = RunDirectory.open(root)
    wanted = tier or run.config().audit.tier
    chosen = _tiers_that_apply(run, key) if wanted == "all" else [wanted]
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
            truth=truth,
        )
        for one in chosen
    ]


def _tiers_that_apply(run: RunDirectory, key: Path | None) -> list[str]:
    protocols = [capture.protocol for capture in Captures(run.captures).index]
    tiers = ["oblivious"]
    if any(p.defenses for p in protocols):
        tiers.append("adaptive")
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
    truth: Path | None = None,
) -> AuditChoice:
    """Lay the command line over the ``audit`` section of the run's configuration, for one tier.

    A ``budget`` (see `parse_budget`) takes the place of both limits of that section. Without
    ``key`` the colluding tier takes the first client's key of a run on this machine.

    Raises
    ------
    BractError
        If the tier is unknown, or has no key, or the budget cannot be read.
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
    steps, seconds = iterations or section.iterations, section.seconds
    if budget is not None:
        steps, seconds = parse_budget(budget)
        if steps is not None and iterations is not None:
            raise BractError(f"--budget {budget} and --iterations {iterations}: give one of them")
        steps = steps or iterations
    chosen_rounds = parse_rounds(rounds) if rounds else section.rounds
    chosen_clients = clients.split(",") if clients else section.clients
    return AuditChoice(
        attacks=tuple(attacks or section.attacks),
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
        truth=truth,
    )


def parse_budget(text: str) -> tuple[int | None, float | None]:
    """Read ``2000`` (iterations a restart), or ``90s``, ``5m``, ``1h`` (wall time an upload).

    Returns
    -------
    tuple
        Iterations and seconds; one of them is None.

    Raises
    ------
    BractError
        If the text is neither, or not above zero.
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


def parse_rounds(text: str) -> list[int]:
    """Read ``1,3`` or ``1-5`` or a mixture.

    Raises
    ------
    BractError
        If a part is neither a round nor a range of rounds.
    """
    rounds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if found is None:
            raise BractError(f"--rounds {text!r}: expected rounds such as 1,3 or 1-5")
        first = int(found[1])
        rounds += range(first, int(found[2] or first) + 1)
    return rounds


def audit_run(root: Path, choice: AuditChoice, *, resume: bool = False) -> list[dict[str, Any]]:
    """Run the audit with progress; return what is on disk for each chosen observation."""
    run = RunDirectory.open(root)
    # A model that is declared as package.module:callable lies in the folder of somebody's app.
    sys.path.insert(0, str(Path.cwd()))
    audit = Audit(run, choice, resume=resume)
    batches = audit.plan()
    total = sum(len(batch.captures) for batch in batches)
    if not total:
        say(f"{run.root}: nothing left to attack in the {choice.tier} tier")
    if "OMP_NUM_THREADS" not in os.environ:
        # The attacked models are small: threads that wait for each other cost more than they
        # give, and on a busy machine many times more.
        torch.set_num_threads(1)
    with WorkProgress(total, f"attack, {choice.tier}") as bar:
        for batch in batches:
            size = len(batch.captures)

            def show(progress: Progress, size: int = size) -> None:
                bar.within(progress.fraction * size, f"loss {progress.loss:.4f}")

            for facts in audit.execute([batch], show):
                bar.finish_item(describe(facts))
    return audit.results()


def describe(facts: dict[str, Any]) -> str:
    """Put one attacked observation in words."""
    who = f"{facts['attack']} on round {facts['round']}, {facts['client']}"
    if facts.get("method", facts["attack"]) != facts["attack"]:
        who = f"{who}, by {facts['method']}"
    if facts["refused"]:
        return f"{who}: not attacked: {facts['refused']}"
    scores = [image["scores"] for image in facts["images"] if image["scores"]]
    if not scores:
        return f"{who}: {len(facts['images'])} reconstructions, unscored (no truth kept)"
    best = max(scores, key=lambda row: row["ssim"])
    found = f"{len(scores)} images"
    if best["identified_top1"] is not None:
        found = f"{sum(row['identified_top1'] for row in scores)} of {found} identified"
    return (
        f"{who}: {found}, best SSIM {best['ssim']:.2f}, PSNR {best['psnr']:.1f} dB, "
        f"{facts['seconds']:.0f} s"
    )
