"""Facts about one attack on one observation: its images, their scores, and which of them leaked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from bract.attacks.registry import title_of
from bract.audit.captures import AGGREGATE
from bract.audit.scoring.leak import Decision, Score, best
from bract.report.facts.findings import findings
from bract.schema import AuditResult, ImageResult

Facts = dict[str, Any]

SCORES: tuple[Score, ...] = ("ssim", "psnr")


def observation_facts(
    root: Path, folder: str, audit: AuditResult, decisions: Sequence[Decision]
) -> Facts:
    """Return the facts of one audit file; picture paths become relative to ``root``.

    A picture outside the attack's own folder, or one that is not there, becomes None. Attacks on
    a round's aggregate, or on several rounds, are told apart from those on single uploads by
    ``attack``.

    Parameters
    ----------
    decisions
        Which of its images leaked, as `LeakRule.decide` has it for the run.
    """
    images = [
        _image_facts(root, folder, audit, image, decision)
        for image, decision in zip(audit.images, decisions, strict=True)
    ]
    leaked = sum(bool(image["leaked"]) for image in images)
    named, words = _together(audit)
    method = audit.method or audit.attack
    scored = [image for image in images if image["scores"]]
    return {
        "attack": audit.attack + named,
        "attack_name": title_of(audit.attack) + words,
        "chosen_attack": audit.chosen_attack or audit.attack,
        "method": method,
        "method_name": title_of(method),
        "components": audit.components,
        "tried": _tried(audit),
        "repeat": audit.repeat,
        "tier": audit.tier,
        "read_as": audit.read_as or audit.tier,
        "round": audit.round,
        "rounds": audit.rounds,
        "client": audit.client,
        "defenses": audit.defenses,
        "encryption": audit.encryption,
        "settings": audit.settings,
        "budget": audit.budget.model_dump(),
        "seed": audit.seed,
        "device": audit.device,
        "seconds": audit.seconds,
        "selection": audit.selection,
        "gradient_cosine": audit.gradient_cosine,
        "gradient_residual": audit.gradient_residual,
        "loss_curve": [[step, loss] for step, loss in audit.loss_curve],
        "refused": audit.refused,
        "failed": audit.failed,
        "notes": audit.notes,
        "images": images,
        "scored": len(scored),
        "leaked": leaked,
        "undecided": sum(not image["decided"] for image in images),
        "diagnosis": findings(audit, leaked=leaked, scored=len(scored)),
        "signals": audit.diagnosis.model_dump() if audit.diagnosis else None,
        "label_accuracy": audit.label_accuracy,
        "baselines": {name: b.model_dump() for name, b in audit.baselines.items()},
        "best_baseline": {
            "ssim": best(audit.baselines, "ssim"),
            "psnr": best(audit.baselines, "psnr"),
        },
    }


def _together(audit: AuditResult) -> tuple[str, str]:
    """Return what tells an attack on several uploads from one on a single one, and its words."""
    named = [AGGREGATE] if audit.members else []
    words = " on the aggregate" if audit.members else ""
    if audit.observer is not None:
        named, words = [audit.observer], f" by {audit.observer}, on the others' aggregate"
    if audit.rounds:
        count = len(audit.rounds)
        named.append(f"{count} round{'' if count == 1 else 's'}")
        words += f" over {named[-1]}"
    return "".join(f"@{name}" for name in named), words


def _tried(audit: AuditResult) -> list[str]:
    """Return the attacks that made a trial, and those that cannot be used."""
    made = [name for trial in audit.trials for name in (trial.attack, trial.method)]
    chosen = [audit.attack, audit.chosen_attack, audit.method]
    return [name for name in dict.fromkeys([*chosen, *made, *audit.not_applicable]) if name]


def _image_facts(
    root: Path,
    folder: str,
    audit: AuditResult,
    image: ImageResult,
    decision: Decision,
) -> Facts:
    scores = image.scores if audit.scored else None
    return {
        "index": image.index,
        "label": image.label,
        "label_confidence": image.label_confidence,
        "true_label": image.true_label,
        "reconstruction": _picture(root, folder, image.reconstruction),
        "original": _picture(root, folder, image.original),
        "scores": scores.model_dump() if scores else None,
        "oracle": image.oracle.model_dump() if image.oracle and audit.scored else None,
        "baseline": {name: best(image.baselines, name) for name in SCORES},
        "leaked": decision.reason is not None if scores and decision.decided else None,
        "leaked_by": decision.reason,
        "decided": decision.decided,
        "retrieval": image.retrieval.model_dump() if image.retrieval else None,
    }


def _picture(root: Path, folder: str, name: str | None) -> str | None:
    if not name:
        return None
    home = (root / "audit" / folder).resolve()
    path = (home / name).resolve()
    if not path.is_relative_to(home) or not path.is_file():
        return None
    return str(PurePosixPath("audit", folder, path.relative_to(home).as_posix()))
