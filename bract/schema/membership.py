"""``audit/questions/membership/run.json``: whether records can be recognised as trained on."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bract.schema.audit import Answer
from bract.schema.record import Number, Public, Record


class RateScore(Record):
    """True positives at one rate of false positives.

    ``true_positives`` is the share of members above the threshold, with its Clopper-Pearson
    interval at 95 %; None with too few non-members for the rate. ``advantage_low``: a lower limit
    on true less false positives, at 95 % over all attackers and clients of the audit.
    """

    rate: Public[float]
    true_positives: Public[Number] = None
    low: Public[Number] = None
    high: Public[Number] = None
    advantage_low: Public[Number] = None


class AttackerScore(Record):
    """What one attacker reached on one client's candidates.

    ``round`` is None over rounds. The interval of the area under the ROC curve is DeLong's.
    """

    attacker: Public[str]
    title: Public[str]
    round: Public[int | None] = None
    auc: Public[Number] = None
    auc_low: Public[Number] = None
    auc_high: Public[Number] = None
    rates: Public[list[RateScore]] = []


class BlindScore(Record):
    """A classifier that sees no model: what candidates alone reveal of who is a member.

    ``chance`` is the probability of such an area under the curve were there no difference.
    """

    auc: Public[Number] = None
    chance: Public[Number] = None


class Detectable(Record):
    """The smallest effect that so many candidates show in four of five audits, at 95 %.

    ``advantage``: true less false positives, by the rate in per cent, of rates that have enough
    non-members.
    """

    auc: Public[Number] = None
    advantage: Public[dict[str, float]] = {}


class ShareScore(Record):
    """How well the shares of groups in a client's data are read from its updates alone.

    ``error`` is the total variation distance of estimated and true shares, in [0, 1], and
    ``prior_error`` that of the shares among the held-out records, which is a guess without any
    update. Names and shares are the site's.
    """

    attribute: str = ""
    groups: Public[int]
    error: Public[float]
    prior_error: Public[float]
    shares: list[float] = []
    estimated: list[float] = []


Observer = Literal["server", "client", "public"]
"""Who looks: the server at a client's uploads, a client at every global model, anyone at the final
one."""


class GroupScore(Record):
    """Result of the strongest form of an attacker on the candidates of one group.

    The interval of the area holds for all groups of the client together. Names and sizes are the
    site's.
    """

    attribute: str = ""
    group: int = 0
    members: int = 0
    non_members: int = 0
    attacker: Public[str]
    auc: Public[Number] = None
    auc_low: Public[Number] = None
    auc_high: Public[Number] = None


class ClientMembership(Record):
    """One client's candidates, and what every attacker reached on them.

    ``rounds`` are those whose uploads were looked at, or after which a global model was.
    ``chance`` is the probability that attackers who see nothing do as well, over all attackers and
    rates (`bract.audit.questions.membership.permuted_chance`). ``found``: whether that is too small
    to be chance, beside all other clients. ``unfair`` is the reason where the candidates differ
    without any model.
    """

    client: Public[str]
    observer: Public[Observer] = "server"
    members: Public[int]
    non_members: Public[int]
    rounds: Public[list[int]] = []
    chance: Public[Number] = None
    found: Public[bool] = False
    blind: Public[BlindScore] = BlindScore()
    unfair: Public[str | None] = None
    detectable: Public[Detectable] = Detectable()
    scores: Public[list[AttackerScore]] = []
    shares: Public[list[ShareScore]] = []
    groups: Public[list[GroupScore]] = []


class InfluenceScore(Record):
    """The final model with one client's updates on and off, on that client's candidates.

    Off are its updates of ``rounds``: the others' take their weight, as they were sent. ``moved_*``
    is the mean loss that a record gains by that, of members and of held-out records. The area under
    the curve tells the two apart by it, with DeLong's interval; ``chance`` is the probability of
    such an area if who is a member were drawn at random.
    """

    client: Public[str]
    rounds: Public[list[int]]
    members: Public[int]
    non_members: Public[int]
    moved_members: Public[Number] = None
    moved_others: Public[Number] = None
    auc: Public[Number] = None
    auc_low: Public[Number] = None
    auc_high: Public[Number] = None
    chance: Public[Number] = None


class MembershipAnswer(Answer):
    """Which clients' records can be recognised as trained on, over the chosen rounds.

    ``clients`` holds what the server reads in their uploads, ``models`` what anyone reads in the
    global models, and ``influence`` what the server reads in the final model by leaving a client's
    updates out of it; no verdict or gate rests on the last. ``left_out`` names observations,
    candidates and attackers that were not used, with the reason.
    """

    kind: ClassVar[str] = "membership"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    question: Public[str] = "membership"
    clients: Public[list[ClientMembership]] = []
    models: Public[list[ClientMembership]] = []
    influence: Public[list[InfluenceScore]] = []
    level: Public[float] = 0.95
    references: Public[int] = 0
    shadows: Public[int] = 0
    left_out: list[str] = []
    seconds: Public[Number] = None

    @property
    def every(self) -> list[ClientMembership]:
        """All that was looked at, by whatever observer."""
        return [*self.clients, *self.models]
