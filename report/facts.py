"""The facts of a report, computed once: read, rows, tables, verdict, words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bract import __version__
from bract.report.asked import question_facts
from bract.report.claims import claim_rows
from bract.report.depends import depend_rows, examine_facts
from bract.report.left import left_facts
from bract.report.origin import run_facts
from bract.report.reach import reach_rows, round_leaks
from bract.report.read import read_run
from bract.report.rows import observation_rows
from bract.report.tables import attack_rows, boosting_rows, client_rows, leakage_rows, round_rows
from bract.report.verdict import verdict, worst_observation
from bract.report.words.left import openly
from bract.report.words.provenance import (
    contradictions,
    guesses,
    left_out,
    missing_captures,
    unhandled_inputs,
)
from bract.report.words.threats import (
    attacked_captures,
    clipped_values,
    few_clients,
    threat_model,
    tiers_that_apply,
    untrusted_evidence,
    weak_seeds,
)
from bract.schema import Report
from bract.schema.report import FailureFacts, RefusedFacts, SkippedFile
from bract.schema.report_rows import AttackRow, ObservationFacts
from bract.scores.judging import Checked
from bract.scores.leaks import LeakRule, undecided


def gather(run_dir: Path, *, months: int | None = None) -> Report:
    """Return the facts of a run directory.

    Whatever a run directory lacks is missing from the facts too: an interrupted run, a run that
    was not attacked and one without originals all have a report. Picture paths are relative to
    ``run_dir``. Scores are those of the blind selection, with ``oracle`` for comparison.

    Parameters
    ----------
    months
        Months to the next examination; None takes the configuration's.
    """
    files = read_run(run_dir)
    rule = LeakRule.of(files.config)
    observations = observation_rows(files, rule)
    attacks = attack_rows(observations)
    left = left_facts(files)
    run = run_facts(files, observations)
    attacked = attacked_captures(files.captures, observations)
    checked = Checked.of([*observations, *files.answers])
    questions = question_facts(files.answers, checked)
    judgement = verdict(
        observations,
        attacks,
        left=len(files.captures) - attacked,
        captures=len(files.captures),
        applies=tiers_that_apply(files, observations),
        checked=checked,
        rule=rule,
        configured=files.config is not None,
        models=sorted({str(c.declaration.model) for c in files.captures if c.declaration.imports}),
        sent=openly(left),
        unread=files.unread,
    )
    return Report(
        bract=__version__,
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        run=run,
        config=files.config,
        config_sha256=files.config_sha256,
        verdict=judgement,
        worst=worst_observation(observations, judgement.headline),
        rounds=round_rows(files.metrics),
        boosting=boosting_rows(files.metrics),
        leakage=leakage_rows(observations),
        clients=client_rows(files, observations, attacks),
        attacks=attacks,
        observations=observations,
        captures=len(files.captures),
        attacked=attacked,
        reach=reach_rows(judgement.headline, attacks, observations, judgement.level),
        by_round=round_leaks(observations),
        examine=examine_facts(files, run, months),
        refused=[
            RefusedFacts(
                attack_name=o.attack_name,
                tier=o.tier,
                round=o.round,
                client=o.client,
                refused=o.refused,
            )
            for o in observations
            if o.refused
        ],
        failures=[
            FailureFacts(round=row.round, client=failure.client, reason=failure.reason)
            for row in files.metrics
            for failure in row.failures
        ],
        skipped=[SkippedFile(file=name, reason=reason) for name, reason in files.skipped],
        notes=[
            *guesses(files),
            *unhandled_inputs(files),
            *missing_captures(files),
            *left_out(files),
            *contradictions(files),
            *few_clients(files),
            *clipped_values(files),
            *weak_seeds(observations),
            *untrusted_evidence(observations),
            *_notes(observations, attacks),
        ],
        questions=questions,
        left=left,
        claims=claim_rows(files, observations),
        depends=depend_rows(files, observations, left),
        threat_model=threat_model(files, observations, left, questions),
    )


def _notes(observations: Sequence[ObservationFacts], attacks: Sequence[AttackRow]) -> list[str]:
    notes = list(dict.fromkeys(note for o in observations for note in o.notes))
    overall = [row for row in attacks if row.client is None]
    for tier in dict.fromkeys(row.tier for row in overall):
        names = [row.attack_name for row in overall if row.tier == tier and row.scored]
        if len(names) > 1:
            notes.append(
                f"{', '.join(names)} ran one by one in the {tier} tier, and the one that "
                "leaked most by the originals makes the verdict; an attacker cannot choose that "
                "way. The attack `auto` chooses among several without the originals."
            )
    for row in overall:
        where = f"{row.attack_name} ({row.tier})"
        if row.ssim.missing and row.features.mean is None and row.noun == "image":
            notes.append(
                f"{where}: {row.ssim.missing} scored images have no finite SSIM; they count "
                "as attacked, and are left out of the mean"
            )
        if row.undecided:
            notes.append(f"{where}: {undecided(row.undecided, row.scored, row.noun)}")
    return notes
