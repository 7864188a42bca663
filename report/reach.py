"""Compute how far attacks got, on average and at worst, beside a guess, for every page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bract.config.client_names import AGGREGATE
from bract.report.order import mean, scores, severity, strength
from bract.schema.audit import Baseline, best_guess
from bract.schema.reach import LeakCounts, ReachRow, RoundLeaks
from bract.schema.report_rows import AttackRow, ImageFacts, ObservationFacts
from bract.schema.verdict import UNJUDGED, Level


def worst_upload(observations: Sequence[ObservationFacts]) -> int | None:
    """Return the position of the scored observation that leaked most, of any attack; else None."""
    scored = [i for i, o in enumerate(observations) if o.scored]
    return max(scored, key=lambda i: (*severity(observations[i]), -i), default=None)


def worst_client(attacks: Sequence[AttackRow]) -> AttackRow | None:
    """Return the row of the client that leaked most, under the attack that is strongest on it."""
    rows = [row for row in attacks if row.client is not None and row.scored]
    return max(rows, key=strength, default=None)


def reach_rows(
    headline: AttackRow | None,
    attacks: Sequence[AttackRow],
    observations: Sequence[ObservationFacts],
    level: Level,
) -> list[ReachRow]:
    """Return the average, and the worst client, upload and record, each beside its best baseline.

    Empty where nothing was scored, or nothing may be judged (`UNJUDGED`).

    Parameters
    ----------
    headline
        The strongest attack's row over all clients.
    """
    if headline is None or not headline.scored or level in UNJUDGED:
        return []
    rows = [_of_attack(headline, "all")]
    client, upload = worst_client(attacks), worst_upload(observations)
    if client is not None:
        rows.append(_of_attack(client, "client"))
    if upload is not None:
        rows.append(_of_upload(observations[upload]))
    return rows + _of_record(observations)


def round_leaks(observations: Sequence[ObservationFacts]) -> list[RoundLeaks]:
    """Return the rounds of what was attacked: of each upload the attack that got most of it.

    An upload that two attacks were tried on counts once; so does one that seeds repeat. Sums of
    several clients' updates are uploads of their own.
    """
    best: dict[tuple[int, str], ObservationFacts] = {}
    for one in observations:
        at = (one.round, one.client)
        if one.refused or not one.images:
            continue
        if at not in best or severity(one) > severity(best[at]):
            best[at] = one
    found = []
    for number in sorted({number for number, _ in best}):
        mine = [one for (round_of, _), one in best.items() if round_of == number]
        found.append(
            RoundLeaks(
                round=number,
                uploads=len(mine),
                images=sum(len(o.images) for o in mine),
                scored=sum(o.scored for o in mine),
                leaked=sum(o.leaked for o in mine),
                undecided=sum(o.undecided for o in mine),
                unjudged=sum(o.unjudged for o in mine),
                attacks=list(dict.fromkeys(f"{o.attack_name}, {o.tier}" for o in mine)),
            )
        )
    return found


def _of_attack(row: AttackRow, scope: str) -> ReachRow:
    return ReachRow.model_validate(
        {
            "scope": scope,
            "client": row.client,
            "attack_name": row.attack_name,
            "tier": row.tier,
            "input": row.input,
            "score": row.primary.mean,
            **_counts(row),
            **_guess(row.baselines),
        }
    )


def _of_upload(one: ObservationFacts) -> ReachRow:
    return ReachRow.model_validate(
        {
            "scope": "upload",
            "client": one.client,
            "round": one.round,
            "attack_name": one.attack_name,
            "tier": one.tier,
            "input": one.input,
            "score": mean(scores(one, "primary")),
            **_counts(one),
            **_guess(one.baselines),
        }
    )


def _of_record(observations: Sequence[ObservationFacts]) -> list[ReachRow]:
    """Return the record that came nearest to its original, those that leaked before others."""
    found = [(o, image) for o in observations for image in o.images if image.scores is not None]
    if not found:
        return []

    def nearest(entry: tuple[ObservationFacts, ImageFacts]) -> tuple[bool, float]:
        score = None if entry[1].scores is None else entry[1].scores.primary
        return bool(entry[1].leaked), -2.0 if score is None else score

    one, image = max(found, key=nearest)
    return [
        ReachRow.model_validate(
            {
                "scope": "record",
                "client": one.client,
                "round": one.round,
                "attack_name": one.attack_name,
                "tier": one.tier,
                "input": one.input,
                "score": None if image.scores is None else image.scores.primary,
                "scored": 1,
                "leaked": int(bool(image.leaked)),
                "undecided": int(not image.decided),
                "unjudged": int(not image.judged),
                **_guess(image.baselines),
            }
        )
    ]


def _guess(baselines: Mapping[str, Baseline]) -> dict[str, str | float]:
    best = best_guess(baselines)
    return {} if best is None else {"guess": best[0], "guess_score": best[1]}


def _counts(row: LeakCounts) -> dict[str, int]:
    return {
        "scored": row.scored,
        "leaked": row.leaked,
        "undecided": row.undecided,
        "unjudged": row.unjudged,
    }


def is_aggregate(row: ReachRow) -> bool:
    """Return whether a row is of a sum of several clients' updates."""
    return row.client == AGGREGATE
