"""The facts of a leakage report: what ``report.json`` holds and ``report.html`` shows."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bract import __version__
from bract.audit.scoring.leak import LeakRule, undecided
from bract.report.facts.observations import observation_facts
from bract.report.facts.provenance import contradictions, guesses, left_out, missing_captures
from bract.report.facts.reading import RunFiles, read_run
from bract.report.facts.summary import (
    attack_rows,
    boosting_rows,
    client_rows,
    leakage_rows,
    natural,
    total,
)
from bract.report.facts.threats import (
    clipped_values,
    few_clients,
    threat_model,
    tiers_that_apply,
    untrusted_evidence,
    weak_seeds,
)
from bract.report.facts.verdict import verdict, worst_observation
from bract.schema import Report

Facts = dict[str, Any]


def gather(run_dir: Path) -> Report:
    """Return the facts of a run directory.

    Whatever a run directory lacks is missing from the facts too: an interrupted run, a run that
    nobody attacked and one without originals all have a report. Picture paths are relative to
    ``run_dir``. Scores are those of the blind selection; ``oracle`` stands beside them.

    Raises
    ------
    BractError
        If ``run_dir`` is no run directory.
    SchemaError
        If a file in it has another schema version than this one reads.
    """
    files = read_run(run_dir)
    rule = LeakRule.of(files.config)
    decisions = rule.decide([audit for _, audit in files.audits])
    observations = [
        observation_facts(run_dir, folder, audit, decided)
        for (folder, audit), decided in zip(files.audits, decisions, strict=True)
    ]
    observations.sort(key=_order)
    attacks = attack_rows(observations)
    judgement = verdict(
        observations,
        attacks,
        captures=len(files.captures),
        applies=tiers_that_apply(files, observations),
        rule=rule,
        configured=files.config is not None,
    )
    facts = {
        "bract": __version__,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": _run_facts(files, observations),
        "config": files.config,
        "config_sha256": files.config_sha256,
        "verdict": judgement,
        "worst": worst_observation(observations, judgement["headline"]),
        "rounds": _round_facts(files),
        "boosting": boosting_rows(files.metrics),
        "leakage": leakage_rows(observations),
        "clients": client_rows(files, observations, attacks),
        "attacks": attacks,
        "observations": observations,
        "captures": len(files.captures),
        "refused": [
            {key: o[key] for key in ("attack_name", "tier", "round", "client", "refused")}
            for o in observations
            if o["refused"]
        ],
        "failures": [
            {"round": row.round, "client": failure.client, "reason": failure.reason}
            for row in files.metrics
            for failure in row.failures
        ],
        "skipped": [{"file": name, "reason": reason} for name, reason in files.skipped],
        "notes": [
            *guesses(files),
            *missing_captures(files),
            *left_out(files),
            *contradictions(files),
            *few_clients(files),
            *clipped_values(files),
            *weak_seeds(observations),
            *untrusted_evidence(observations),
            *_notes(observations, attacks),
        ],
        "threat_model": threat_model(files, observations),
    }
    return Report.model_validate(facts)


def _order(observation: Facts) -> tuple[Any, ...]:
    where = (observation["round"], natural(observation["client"]), observation["repeat"])
    return (observation["attack"], observation["tier"], *where)


def _run_facts(files: RunFiles, observations: list[Facts]) -> Facts:
    run, config = files.run, files.config
    trained = [row.round for row in files.metrics if row.round > 0]
    seeds = sorted({o["seed"] for o in observations if o["seed"] is not None})
    return {
        "name": (run and run.name) or (config and config.name) or files.root.resolve().name,
        "status": run.status if run else "unknown",
        "rounds_done": max(trained, default=0),
        "rounds_planned": config.rounds if config else None,
        "started": _when(run.started) if run else None,
        "finished": _when(run.finished) if run else None,
        "training_seconds": total(row.seconds for row in files.metrics),
        "audit_seconds": total(o["seconds"] for o in observations),
        "device": run.device if run else None,
        "audit_devices": sorted({o["device"] for o in observations if o["device"]}),
        "command": run.command if run else None,
        "flower_run_id": run.flower_run_id if run else None,
        "versions": run.versions if run else {},
        "seed": config.seed if config else None,
        "audit_seeds": seeds,
    }


def _when(moment: float | None) -> str | None:
    if moment is None:
        return None
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def _round_facts(files: RunFiles) -> list[Facts]:
    return [
        {
            "round": row.round,
            "seconds": row.seconds,
            "loss": row.evaluation.loss if row.evaluation else None,
            "accuracy": row.evaluation.accuracy if row.evaluation else None,
            "clients": {name: client.model_dump() for name, client in row.clients.items()},
            "failures": len(row.failures),
        }
        for row in files.metrics
    ]


def _notes(observations: list[Facts], attacks: list[Facts]) -> list[str]:
    notes = list(dict.fromkeys(note for o in observations for note in o["notes"]))
    overall = [row for row in attacks if row["client"] is None]
    for tier in dict.fromkeys(row["tier"] for row in overall):
        names = [row["attack_name"] for row in overall if row["tier"] == tier and row["scored"]]
        if len(names) > 1:
            notes.append(
                f"{', '.join(names)} ran one by one in the {tier} tier, and the one whose results "
                "are nearest to the originals makes the verdict; an attacker cannot choose that "
                "way. The attack `auto` chooses among several without the originals."
            )
    for row in attacks:
        where = f"{row['attack_name']} ({row['tier']})"
        if row["client"] is None and row["ssim"]["missing"]:
            notes.append(
                f"{where}: {row['ssim']['missing']} scored images have no finite SSIM; they count "
                "as attacked, and are left out of the mean"
            )
        if row["client"] is None and row["undecided"]:
            notes.append(f"{where}: {undecided(row['undecided'], row['scored'])}")
    return notes
