"""The record of what a site has answered, and the request that it is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bract.client.accounting import Mechanism
from bract.disk import parse_record

TRAIN, QUERY = "train", "query"

WHAT = "the record of what this site answered"
FIX = "restore it. Who removes it forgets every limit"
"""How errors name the record, and what to do with a damaged one."""


@dataclass(frozen=True)
class Request:
    """One message, as far as it matters for what was answered.

    Attributes
    ----------
    kind
        Flower's message type: ``train``, ``evaluate``, ``evaluate.fused``.
    server_round
        The round that it names; None where it names none.
    digest
        Of its whole content.
    run, federation
        Flower's run id, and the name of the federation.
    config
        Digest of the run's configuration, which a run keeps.
    kept
        Digest of what a resumed run keeps of it, as `bract.config.agreed.AgreedRun` has it; empty
        for an app that is not bract's own.
    last_round
        The highest round that the run's configuration declares for this kind; None: undeclared.
    """

    kind: str
    server_round: int | None
    digest: str
    run: int
    federation: str
    config: str
    last_round: int | None = None
    kept: str = ""

    def __post_init__(self) -> None:
        """Give one kind one name: Flower passes ``train`` and ``train.default`` to one function."""
        object.__setattr__(self, "kind", self.kind.removesuffix(".default"))

    @property
    def key(self) -> str:
        """Name of the run in the record."""
        return f"{self.run}/{self.federation}"

    @property
    def trains(self) -> bool:
        """Return whether it asks for an update."""
        return self.kind.partition(".")[0] == TRAIN

    def counts_with(self, kind: str) -> bool:
        """Return whether limits count messages of a kind together with this one.

        Whatever an app's actions of training are called, each gives an update.
        """
        return kind == self.kind or (self.trains and kind.partition(".")[0] == TRAIN)

    @property
    def once(self) -> bool:
        """Return whether it is answered once a round; a query of an app's own is counted alone."""
        return self.kind.partition(".")[0] != QUERY


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Count = Annotated[int, Field(ge=0, lt=1 << 53)]


class Last(_Part):
    """The last answer of one kind in one run, and how many there were."""

    round: Count
    count: Count
    digest: str


class Run(_Part):
    """What one run was answered: its configuration's digest, and each kind's last answer.

    ``start_known``: this site compared the model that the run began with. ``kept``: digest of what
    a resumed run keeps of the configuration. ``guard``: step of the guard's ladder of the last
    update.
    """

    config: str
    kept: str = ""
    start_known: bool = False
    guard: Count = 0
    kinds: dict[str, Last] = Field(default_factory=dict)


class Answered(_Part):
    """Everything that a site has answered.

    Attributes
    ----------
    totals
        Answers by kind.
    mechanisms
        Updates by the noise on them, as `Mechanism.to_text` writes it.
    without_guarantee
        Updates that no noise covers.
    stops
        Updates that the guard skipped or refused.
    climbs
        Updates that it sent from a higher step than the run's last one.
    runs
        By `Request.key`.
    """

    schema_version: Literal[1] = 1
    totals: dict[str, Count] = Field(default_factory=dict)
    mechanisms: dict[str, Count] = Field(default_factory=dict)
    without_guarantee: Count = 0
    stops: Count = 0
    climbs: Count = 0
    runs: dict[str, Run] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _mechanisms_can_be_read(self) -> Answered:
        _mechanisms(self.mechanisms)
        return self

    @classmethod
    def parse(cls, text: str | bytes, *, source: str) -> Answered:
        """Read a record, its mechanisms too.

        Raises
        ------
        BractError
            If it is damaged.
        """
        return parse_record(cls, text, source=source, what=WHAT, fix=FIX)

    def add_all(self, earlier: Answered) -> None:
        """Add what an earlier record of the same site holds."""
        for mine, theirs in (
            (self.totals, earlier.totals),
            (self.mechanisms, earlier.mechanisms),
        ):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count
        self.without_guarantee += earlier.without_guarantee
        self.stops += earlier.stops
        self.climbs += earlier.climbs
        for name, run in earlier.runs.items():
            known = self.runs.setdefault(name, run)
            if known is run:
                continue
            known.start_known |= run.start_known and run.kept == known.kept
            known.guard = max(known.guard, run.guard)
            for kind, last in run.kinds.items():
                held = known.kinds.get(kind)
                count = last.count + (0 if held is None else held.count)
                latest = last if held is None or last.round > held.round else held
                known.kinds[kind] = latest.model_copy(update={"count": count})

    def configurations(self, request: Request) -> set[tuple[str, str]]:
        """Return name and configuration of what was answered under the request's run id."""
        return {
            (key, run.config)
            for key, run in self.runs.items()
            if key.partition("/")[0] == str(request.run)
        }

    def last(self, request: Request) -> Last | None:
        """Return the last answer of the request's kind in its run."""
        run = self.runs.get(request.key)
        return None if run is None else run.kinds.get(request.kind)

    def count_in_run(self, request: Request) -> int:
        """Return how many messages were answered in the request's run that count with it."""
        run = self.runs.get(request.key)
        kinds = {} if run is None else run.kinds
        return sum(last.count for kind, last in kinds.items() if request.counts_with(kind))

    def count_in_all(self, request: Request) -> int:
        """Return the same over all runs."""
        return sum(n for kind, n in self.totals.items() if request.counts_with(kind))

    def spent(self) -> dict[Mechanism, int]:
        """Return how many updates left under each mechanism."""
        return _mechanisms(self.mechanisms)

    def add(self, request: Request) -> None:
        """Count one more answer."""
        run = self.runs.setdefault(request.key, Run(config=request.config))
        last = run.kinds.get(request.kind)
        number = request.server_round
        if number is None:
            number = int(request.trains or not request.once) if last is None else last.round + 1
        count = 1 if last is None else last.count + 1
        run.kinds[request.kind] = Last(round=number, count=count, digest=request.digest)
        self.totals[request.kind] = self.totals.get(request.kind, 0) + 1

    def charge(self, request: Request, mechanism: Mechanism | None) -> None:
        """Count the noise on an update; nothing where the request asks for none."""
        if not request.trains:
            return
        if mechanism is None:
            self.without_guarantee += 1
        else:
            text = mechanism.to_text()
            self.mechanisms[text] = self.mechanisms.get(text, 0) + 1


def _mechanisms(counts: dict[str, int]) -> dict[Mechanism, int]:
    return {Mechanism.from_text(text): n for text, n in counts.items()}
