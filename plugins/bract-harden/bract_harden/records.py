"""``harden.json``: what a search over a federation's settings found.

``python -m bract_harden docs/schema`` writes its JSON Schema.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue

from bract.schema import Number, Public, Record, VersionedRecord

Stage = Literal["crashed", "infeasible", "trained", "cheap", "middle", "full"]


class QuestionLeak(Record):
    """What one question found of one candidate, over all its federations.

    ``value`` is in [0, 1]: of a reconstruction the mean SSIM (or share of a row's features) of the
    strongest attacker, of other questions the number that their gate compares; ``leaked`` of the
    ``scored`` examples that could be judged. ``levels`` holds the
    question's own decision of each federation, ``attack`` the strongest attacker.
    """

    question: Public[str]
    value: Public[Number] = None
    low: Public[Number] = None
    high: Public[Number] = None
    levels: Public[list[str]] = []
    leaked: Public[int] = 0
    scored: Public[int] = 0
    leaked_high: Public[Number] = None
    attack: Public[str] = ""
    missed: Public[str] = ""


class Measure(Record):
    """One federation of a candidate.

    ``seconds`` is CPU time of a round for all clients and the server together, ``bytes`` one
    client's upload.
    """

    seed: Public[int]
    accuracy: Public[Number] = None
    seconds: Public[Number] = None
    bytes: Public[Number] = None
    leaks: Public[list[QuestionLeak]] = []


class Candidate(VersionedRecord):
    """One configuration of the space; ``stage`` is the strongest attack that it was held to.

    ``trained`` is one whose accuracy is too low to be attacked.

    ``was_good`` says that it was on the frontier before that attack, ``dropped`` why it is not any
    more. ``epsilon`` is what the account of its noise spends over all rounds.
    """

    kind: ClassVar[str] = "candidate"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: Public[str]
    title: Public[str] = ""
    setting: Public[dict[str, JsonValue]] = {}
    stage: Public[Stage]
    error: str | None = None
    measures: Public[list[Measure]] = []
    accuracy: Public[Number] = None
    accuracy_low: Public[Number] = None
    accuracy_high: Public[Number] = None
    leak: Public[Number] = None
    leaks: Public[list[QuestionLeak]] = []
    seconds: Public[Number] = None
    bytes: Public[Number] = None
    epsilon: Public[Number] = None
    cpu_seconds: Public[Number] = None
    dropped: Public[str] = ""
    violated: Public[list[str]] = []


class Hardening(VersionedRecord):
    """A whole search.

    ``control`` is the configuration as it was given, ``frontier`` the points that no other one
    beats in leakage, accuracy and cost together, each under the full attack. ``recommended`` is
    None where no point keeps the constraints; ``nearest`` is then the one that comes nearest.
    ``importance`` is the share of an objective's variance that follows from a setting alone.
    ``cpu_seconds`` are those of all federations and attacks, ``wall_seconds`` those of the search
    without the time between interruptions.
    """

    kind: ClassVar[str] = "hardening"
    remedy: ClassVar[str] = "run `bract harden` again"

    schema_version: Literal[1] = Field(default=1, alias="schema")
    bract: Public[str]
    written: Public[str]
    name: Public[str]
    sentence: Public[str]
    control: Public[str | None] = None
    frontier: Public[list[str]] = []
    recommended: Public[str | None] = None
    nearest: Public[str | None] = None
    candidates: Public[list[Candidate]] = []
    importance: Public[dict[str, dict[str, float]]] = {}
    constraints: Public[dict[str, Any]] = {}
    searched: Public[dict[str, Any]] = {}
    federations: Public[int] = 0
    cpu_seconds: Public[Number] = None
    wall_seconds: Public[Number] = None
    paragraph: Public[str] = ""
    notes: Public[list[str]] = []
