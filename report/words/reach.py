"""Put in words how far attacks got: the rows that all pages show alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bract.config.audit import Tier
from bract.errors import listed
from bract.report.reach import is_aggregate
from bract.report.words.formatting import (
    NOTHING,
    left_open,
    moment,
    noun_of,
    number,
    percent,
    plural,
)
from bract.schema.inputs import outline_of
from bract.schema.reach import ExamineFacts, ReachRow, RoundLeaks
from bract.schema.report import RunFacts

KNOWS: dict[Tier, str] = {
    "oblivious": "takes the uploads as they are",
    "adaptive": "knows the protection of the uploads and its settings",
    "surrogate": "also holds public examples like the clients' own",
    "colluding": "also holds one client's keys",
}
"""What the attacker of each tier does or has, after "an attacker who"."""

_GUESSES = {
    "class_mean": "the average {noun} of its class",
    "random_image": "any {noun} of the data set, at random",
    "random_signal": "any {noun} of the data set, at random",
    "random_row": "any {noun} of the data set, at random",
    "random_text": "any {noun} of the data set, at random",
    "prior_only": "what the attack assumes of any {noun}",
    "mode_and_mean": "the most frequent and average values",
    "nearest_public_row": "the nearest public {noun}",
    "prior_sample": "a sample of a generator trained on public {noun}s",
    "prior_nearest": "the nearest of many samples of a generator trained on public {noun}s",
}


@dataclass(frozen=True)
class ReachLine:
    """One row: of what, how many were reconstructed, the score, that of a guess, and by whom."""

    of: str
    leaked: str
    score: str
    guess: str
    by: str


def reach_lines(rows: Sequence[ReachRow], sent: Sequence[str] = ()) -> list[ReachLine]:
    """Return the rows in words, after one of what was ``sent`` openly, by its names."""
    alike = len({row.tier for row in rows}) < 2
    openly = ReachLine(f"Sent openly: {listed(sent, 5)}", "as sent", NOTHING, NOTHING, "no attack")
    return [*([openly] if sent else []), *_attacked(rows, alike)]


def _attacked(rows: Sequence[ReachRow], alike: bool) -> list[ReachLine]:
    return [
        ReachLine(
            of=_of(row),
            leaked=_leaked(row),
            score=_value(row, row.score),
            guess=_guess(row),
            by=row.attack_name if alike else f"{row.attack_name}, which {KNOWS[row.tier]}",
        )
        for row in rows
    ]


def reach_note(rows: Sequence[ReachRow], level: float) -> str:
    """Return what a reader of the rows must know; empty without rows.

    Parameters
    ----------
    level
        One minus the chance that a run is said to leak which does not.
    """
    if not rows:
        return ""
    noun = noun_of({row.input for row in rows})
    tiers = {row.tier for row in rows}
    whose = f", by an attacker who {KNOWS[tiers.pop()]}" if len(tiers) == 1 else ""
    return (
        f"Each row is of the attack that reconstructed most there{whose}. A guess without the "
        f"upload can look as alike, since a typical {noun} of a class is near to many: "
        f"{'an' if noun[0] in 'aeiou' else 'a'} {noun} counts as reconstructed only where it is "
        "nearer to its own original than chance explains, and averages mix it with failures. If "
        "nothing leaked, an audit would count a leak all the same in at most "
        f"{percent(1 - level)} of cases."
    )


def score_name(rows: Sequence[ReachRow]) -> str:
    """Return the name of the score of these rows; ``Score`` where they have several."""
    names = {outline_of(row.input).primary.name for row in rows}
    return names.pop() if len(names) == 1 else "Score"


def likeness(rows: Sequence[ReachRow]) -> str:
    """Return the name of the score for readers who know none of them."""
    scores = {outline_of(row.input).primary for row in rows}
    shares = all(score.unit == "%" for score in scores)
    if len(scores) == 1 and shares:
        return scores.pop().name.capitalize()
    return "Likeness to the original (1: the same, 0 or less: none)"


def _of(row: ReachRow) -> str:
    noun = noun_of([row.input])
    who = "the sum of all updates" if is_aggregate(row) else row.client
    return {
        "all": "All clients attacked, on average",
        "client": f"Worst client: {who}",
        "upload": f"Worst upload: {who}, round {row.round}",
        "record": f"Worst single {noun}: {who}, round {row.round}",
    }[row.scope]


def _leaked(row: ReachRow) -> str:
    if row.scope == "record":
        return "yes" if row.leaked else (["no", *left_open(row)][-1]).removeprefix("1 ")
    counted = [f"{row.leaked} of {row.judged}"] if row.judged else []
    return ", ".join([*counted, *left_open(row)])


def _value(row: ReachRow, score: float | None) -> str:
    unit = outline_of(row.input).primary.unit
    return percent(score) if unit == "%" else number(score)


def _guess(row: ReachRow) -> str:
    if not row.guess:
        return NOTHING
    known = _GUESSES.get(row.guess, "").format(noun=noun_of([row.input]))
    return f"{_value(row, row.guess_score)}: {known or row.guess.replace('_', ' ')}"


def by_round(row: RoundLeaks) -> str:
    """Return which attacks one round's counts are of."""
    each = "the upload" if row.uploads == 1 else f"each of {row.uploads} uploads"
    return f"under the strongest attack on {each}: {listed(row.attacks, 3)}"


def rounds_done(run: RunFacts) -> str:
    """Return ``3 rounds``, or ``3 of 5 rounds`` of a run that planned more."""
    if run.rounds_planned and run.rounds_planned != run.rounds_done:
        return f"{run.rounds_done} of {plural(run.rounds_planned, 'round')}"
    return plural(run.rounds_done, "round")


def examined_again(facts: ExamineFacts) -> str:
    """Return by when a run is to be examined again, and that a change makes it earlier."""
    if facts.due is None:
        return "Nothing was examined, so no day for a next examination follows."
    months = plural(facts.months, "month")
    late = " That day has passed." if facts.overdue else ""
    return (
        f"Examine again by {facts.due}, {months} after the oldest result here "
        f"({moment(facts.examined)}).{late} A change of the model, of the data in an upload or of "
        "its protection makes these findings stale earlier."
    )
