"""``audit/questions/epsilon/run.json``: how much the uploads reveal at most, and at least."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from bract.schema.audit import Answer
from bract.schema.record import Number, Public, Record


class ClientEpsilon(Record):
    """Epsilon of one client, measured by its canaries and by its account.

    ``low`` holds for any mechanism, ``low_gaussian`` if the noise is Gaussian as declared; both at
    95 % over all clients. ``estimate`` is the one-shot estimate, no bound; ``estimate_last`` the
    same from the first and the last global model alone, without any upload. ``high`` is the
    account's epsilon for what a coin changes: all rounds for records, one round for canary updates.
    ``last_round``: the last of the measured ``rounds``.
    ``most``: the largest ``low`` that so many canaries can show.
    ``alarm``: a lower bound is above the upper one. ``refused``: why nothing was measured.
    """

    client: Public[str]
    kind: Public[str] = ""
    canaries: Public[int] = 0
    guesses: Public[int] = 0
    right: Public[int] = 0
    rounds: Public[int] = 0
    last_round: Public[int] = 0
    low: Public[Number] = None
    low_gaussian: Public[Number] = None
    estimate: Public[Number] = None
    estimate_last: Public[Number] = None
    high: Public[Number] = None
    most: Public[Number] = None
    alarm: Public[bool] = False
    refused: str | None = None


class EpsilonAnswer(Answer):
    """What canaries and accounts say of the epsilon of each client's uploads, at one delta."""

    kind: ClassVar[str] = "epsilon"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    question: Public[str] = "epsilon"
    delta: Public[float] = 1e-5
    level: Public[float] = 0.95
    clients: Public[list[ClientEpsilon]] = []
    left_out: list[str] = []
