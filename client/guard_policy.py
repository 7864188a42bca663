"""The guard of a site as its policy file configures it: limit, time, ladder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bract.client.defenses import DefenseChain, build_defenses
from bract.defenses import DEFENSES
from bract.defenses.entries import read_defense
from bract.errors import BractError

Number = Annotated[float, Field(allow_inf_nan=False)]
ScoreName = Literal[
    "psnr", "ssim", "mse", "features", "precision", "rouge_l", "correlation", "nrmse"
]
"""Fields of `bract.schema.audit.Scores` that a limit may name."""

LOWER_IS_NEARER = frozenset({"mse", "nrmse"})
"""Those of them that are smaller the nearer a reconstruction is."""

BATCH = "batch"
"""Name of a step that trains on larger batches, in the place of a defense's."""

SKIP = "skip"
"""The step that sends an update of zeros."""

_SKIP: Literal["skip"] = "skip"


@dataclass(frozen=True)
class Step:
    """One step of a ladder.

    Attributes
    ----------
    name
        As the site's log has it.
    chain
        Defenses of the update that the run's own left; empty changes nothing.
    batch
        Examples of a batch that is trained on instead; None keeps the run's.
    skips
        Whether an update of zeros is sent, which needs no judging.
    entries
        The chain as the policy writes it.
    """

    name: str
    chain: DefenseChain = field(default_factory=DefenseChain)
    batch: int | None = None
    skips: bool = False
    entries: tuple[Mapping[str, Any], ...] = ()

    def adds_to(self, other: Step) -> bool:
        """Return whether this step does anything else than another one."""
        return (self.batch, self.chain.public()) != (other.batch, other.chain.public())

    def added(self, further: Step) -> Step:
        """Return this step made stronger by a further one.

        What this step does stays: a larger batch, and each defense that the further one does not
        set at least as strong. So an update that passed is not exchanged for a weaker one.

        Raises
        ------
        BractError
            If defenses of both cannot follow each other.
        """
        sizes = [one.batch for one in (self, further) if one.batch is not None]
        held = {entry["name"]: entry for entry in self.entries}
        for entry in further.entries:
            known = held.setdefault(entry["name"], entry)
            if read_defense(entry).at_least(read_defense(known)):
                held[entry["name"]] = entry
        entries = list(held.values())
        entries.sort(key=lambda entry: read_defense(entry).stage)
        words = [f"batches of {max(sizes)}"] if sizes else []
        return Step(
            ", ".join([*words, *map(_in_words, entries)]),
            build_defenses(entries),
            batch=max(sizes, default=None),
            entries=tuple(entries),
        )


AS_IT_IS = Step("as it is")
"""The first step, judged first: the update as the run's own defenses leave it."""


class GuardPolicy(BaseModel):
    """A site's attack on its own updates before they leave.

    Attributes
    ----------
    limit
        ``leaked`` by the rule of an audit, or the value of one score from which an example counts
        as readable, such as ``{psnr: 20}``.
    seconds
        Processor time of all attacks on one update; on a busy machine the wall's is longer, four
        times at most.
    ladder
        What is tried in order where an update is above the limit, until one is not: a defense, or
        a list of them, on top of the run's own; ``{name: batch, size: 64}`` trains on larger
        batches (bract's own client alone); ``skip``, at the end, sends zeros. An update that no
        step helps is refused.
    margin
        Steps by which an update that was read leaves further than the first that is below the
        limit, on top of it: who has more time than the guard reads more. Near the end of the
        ladder there are fewer, at the last step none; ``skip`` is no margin.
    max_stops
        Most updates, over all runs, that are skipped or refused; from then on every training
        message is refused. Without ``state-dir`` it is of one run. None sets no bound.
    max_climbs
        Most climbs to a higher step, over all runs; from then on each update begins at the
        highest one. Without ``state-dir`` it is of one run. None sets no bound.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    limit: Literal["leaked"] | Annotated[dict[ScoreName, Number], Field(max_length=1)] = "leaked"
    seconds: Annotated[float, Field(ge=0.1, le=3600.0)] = 2.0
    ladder: list[Literal["skip"] | dict[str, Any] | list[dict[str, Any]]] = Field(
        default_factory=list
    )
    margin: Annotated[int, Field(ge=0, le=100)] = 1
    max_stops: Annotated[int, Field(ge=1)] | None = 2
    max_climbs: Annotated[int, Field(ge=0)] | None = 10

    @model_validator(mode="after")
    def _can_be_climbed(self) -> GuardPolicy:
        if isinstance(self.limit, dict) and not self.limit:
            raise ValueError("limit is empty; give leaked, or one score such as {psnr: 20}")
        if _SKIP in self.ladder[:-1]:
            raise ValueError("skip sends zeros whatever follows; put it last in the ladder")
        for entry in self.ladder:
            try:
                _step_of(entry)
            except BractError as error:
                raise ValueError(f"ladder: {error}") from None
        for number in range(1, len(self.steps)):
            try:
                self.beyond(number)
            except BractError as error:
                raise ValueError(
                    f"ladder: with margin: {self.margin} the step {self.steps[number].name!r} is "
                    f"sent with what follows it, and {error}. Change the order, or set margin: 0"
                ) from None
        return self

    @property
    def needs_record(self) -> str | None:
        """Name a bound that was set, which a record over all runs holds; None where none was."""
        bounds = (name for name in ("max_stops", "max_climbs") if name in self.model_fields_set)
        return next((name for name in bounds if getattr(self, name) is not None), None)

    @property
    def highest(self) -> int:
        """Return the last step from which an update may begin: none that skips."""
        return max(number for number, step in enumerate(self.steps) if not step.skips)

    def beyond(self, number: int) -> list[Step]:
        """Return what leaves in the place of a step that passed, each a step further.

        They are `margin` at most; none for the update as it is, and where no step that adds
        anything follows.
        """
        found = [self.steps[number]]
        for further in self.steps[number + 1 :] if number else ():
            if len(found) > self.margin:
                break
            step = found[-1] if further.skips else found[-1].added(further)
            if step.adds_to(found[-1]):
                found.append(step)
        return found[1:]

    def cautions(self, *, recorded: bool) -> list[str]:
        """Return warnings about what this guard leaves open.

        Parameters
        ----------
        recorded
            Whether the site keeps a record that outlives its SuperNode (``state-dir``).
        """
        found = []
        if not recorded:
            found.append(
                "guard: without state-dir its record of refusals and climbs starts anew with every "
                "run and every start, so that max_stops and max_climbs bound less than they say; "
                "set state-dir in the node config"
            )
        if self.ladder and self.margin and not self.beyond(1):
            found.append(
                f"guard: its ladder has one step that sends anything, so that no update gets the "
                f"margin of {self.margin}; add a stronger step"
            )
        return found

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return what is tried in order, the update as it is first."""
        return (AS_IT_IS, *map(_step_of, self.ladder))


def _step_of(entry: str | dict[str, Any] | Sequence[dict[str, Any]]) -> Step:
    if isinstance(entry, str):
        return Step(SKIP, skips=True)
    entries = [entry] if isinstance(entry, dict) else list(entry)
    if not entries:
        raise BractError("found an empty list, expected defenses", code="config-value")
    batches = [one for one in entries if one.get("name") == BATCH]
    if batches and len(entries) > 1:
        raise BractError(
            "batch is a step of its own; write it as an entry of the ladder", code="config-value"
        )
    if batches:
        return _larger(batches[0])
    chain = build_defenses(entries)
    for defense in chain.defenses:
        if defense.needs or DEFENSES[defense.name].changes_model():
            raise BractError(
                f"{defense.name} needs the model or the examples, and a step works on the update "
                "alone; take noise or pruning",
                code="defense-unsuited",
            )
    return Step(", ".join(map(_in_words, entries)), chain, entries=tuple(entries))


def _in_words(entry: Mapping[str, Any]) -> str:
    settings = [f"{key} {value}" for key, value in entry.items() if key != "name"]
    return " ".join([str(entry["name"]), *settings])


def _larger(entry: dict[str, Any]) -> Step:
    size = entry.get("size")
    if set(entry) != {"name", "size"} or type(size) is not int or size < 2:
        raise BractError(
            f"batch: found {entry}, expected {{name: batch, size: N}} with a whole number from 2",
            code="config-value",
        )
    return Step(f"batches of {size}", batch=size)
