"""One row an attacked observation: the audit's result, which images leaked, and why no more did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from bract.config.client_names import AGGREGATE
from bract.report.findings import findings
from bract.report.order import natural
from bract.report.read import RunFiles
from bract.schema import AuditResult
from bract.schema.audit import ImageResult
from bract.schema.report_rows import ImageFacts, ObservationFacts, SsimPsnr
from bract.scores.leaks import Decision, LeakRule, best, least


def observation_rows(files: RunFiles, rule: LeakRule) -> list[ObservationFacts]:
    """Return the rows of a run by attack, tier, round and client, judged together by the rule."""
    decisions = rule.decide([audit for _, audit in files.audits])
    rows = [
        observation_row(files.root, folder, audit, decided)
        for (folder, audit), decided in zip(files.audits, decisions, strict=True)
    ]
    return sorted(rows, key=lambda o: (o.attack, o.tier, o.round, natural(o.client), o.repeat))


def observation_row(
    root: Path, folder: str, audit: AuditResult, decisions: Sequence[Decision]
) -> ObservationFacts:
    """Extend one audit result; picture paths become relative to ``root``.

    A picture outside the attack's own folder, or one that is not there, becomes None. Attacks on
    a round's aggregate, or on several rounds, are distinguished from those on single uploads by
    ``attack``.

    Parameters
    ----------
    decisions
        Which of its images leaked.
    """
    home = PurePosixPath("audit", folder)
    found = (root / home).resolve()
    images = [
        _image(found, home, audit, image, decision)
        for image, decision in zip(audit.images, decisions, strict=True)
    ]
    scored = sum(image.scores is not None for image in images)
    leaked = sum(bool(image.leaked) for image in images)
    named, words = _together(audit)
    method = audit.method or audit.attack
    changed = {
        "attack": audit.attack + named,
        "attack_name": _title(audit, audit.attack) + words,
        "chosen_attack": audit.chosen_attack or audit.attack,
        "method": method,
        "method_name": _title(audit, method),
        "tried": _tried(audit),
        "read_as": audit.read_as or audit.tier,
        "images": images,
        "scored": scored,
        "leaked": leaked,
        "undecided": sum(not image.decided for image in images),
        "unjudged": sum(not image.judged for image in images),
        "diagnosis": findings(audit, leaked=leaked, scored=scored),
        "best_baseline": _best(audit),
    }
    return ObservationFacts.model_construct(**vars(audit) | changed)


def _together(audit: AuditResult) -> tuple[str, str]:
    """Return the suffix that marks an attack on several uploads, and its words."""
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
    """Return the attacks that made a trial, lent it their objective, or cannot be used."""
    made = [name for trial in audit.trials for name in (trial.attack, trial.method)]
    chosen = [audit.attack, audit.chosen_attack, audit.method]
    parts = [n for n, title in audit.titles.items() if title.lower() in audit.components]
    return [name for name in dict.fromkeys([*chosen, *made, *parts, *audit.not_applicable]) if name]


def _title(audit: AuditResult, name: str) -> str:
    return audit.titles.get(name, name)


def _image(
    found: Path, home: PurePosixPath, audit: AuditResult, image: ImageResult, decision: Decision
) -> ImageFacts:
    scores = image.scores if audit.scored else None
    changed = {
        "scores": scores,
        "oracle": image.oracle if audit.scored else None,
        "reconstruction": _picture(found, home, image.reconstruction),
        "original": _picture(found, home, image.original),
        "baseline": _best(image),
        "leaked": decision.reason is not None
        if scores and decision.decided and decision.judged
        else None,
        "leaked_by": decision.reason,
        "decided": decision.decided,
        "judged": decision.judged,
    }
    return ImageFacts.model_construct(**vars(image) | changed)


def _best(scored: AuditResult | ImageResult) -> SsimPsnr:
    return SsimPsnr(
        ssim=best(scored.baselines, "ssim"),
        psnr=best(scored.baselines, "psnr"),
        features=best(scored.baselines, "features"),
        correlation=best(scored.baselines, "correlation"),
        nrmse=least(scored.baselines, "nrmse"),
    )


def _picture(found: Path, home: PurePosixPath, name: str | None) -> str | None:
    """Return a picture's path below the run; ``found`` is where its folder ``home`` really lies."""
    if not name:
        return None
    path = (found / name).resolve()
    if not path.is_relative_to(found) or not path.is_file():
        return None
    return str(home / path.relative_to(found).as_posix())
