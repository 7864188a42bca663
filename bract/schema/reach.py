"""Tables of the report: how far attacks got, by scope and by round, and until when that holds."""

from __future__ import annotations

from typing import Literal

from bract.config.audit import Tier
from bract.schema.record import Number, Public, Record


class LeakCounts(Record):
    """Examples with scores, and what the rule says of them.

    ``leaked`` of the `judged` leaked. Of ``undecided`` ones not even a copy would have stood out;
    ``unjudged`` ones are of uploads that are not what their description says.
    """

    scored: Public[int] = 0
    leaked: Public[int] = 0
    undecided: Public[int] = 0
    unjudged: Public[int] = 0

    @property
    def judged(self) -> int:
        """Examples that leaked, or are known not to have leaked to these attacks."""
        return self.scored - self.undecided - self.unjudged


Scope = Literal["all", "client", "upload", "record"]


class ReachRow(LeakCounts):
    """Reach of attacks in one scope.

    Attributes
    ----------
    scope
        ``all``: the strongest attack over all clients; ``client``, ``upload`` and ``record``: the
        worst one of any attack.
    client, round
        Of the worst client, upload and record; None of the others.
    attack_name, tier
        The attack, and what its attacker knows.
    score
        Mean of the input's primary score (`measure`), of a record its own.
    guess, guess_score
        The best baseline of the same examples: a guess without the upload, by name, and its score;
        empty and None where none is known.
    """

    scope: Public[Scope]
    client: Public[str | None] = None
    round: Public[int | None] = None
    attack_name: Public[str]
    tier: Public[Tier]
    input: Public[str] = "image"
    score: Public[Number] = None
    guess: Public[str] = ""
    guess_score: Public[Number] = None


class RoundLeaks(LeakCounts):
    """One round: the worst of any attack on each of its uploads, summed.

    ``attacks`` are the attacks that were the worst on some upload.
    """

    round: Public[int]
    uploads: Public[int]
    images: Public[int]
    attacks: Public[list[str]] = []


class ExamineFacts(Record):
    """Days on which the run was examined, and by which it is to be examined again.

    Attributes
    ----------
    examined
        Day of the oldest result, ISO 8601; where none is dated, that of the last upload or of the
        training's end, which is earlier.
    months, due
        Months from there to the next examination, and that day.
    overdue
        Whether that day had passed when the page was written.
    """

    examined: Public[str | None] = None
    months: Public[int] = 12
    due: Public[str | None] = None
    overdue: Public[bool] = False
