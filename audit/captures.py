"""The captures of a run: an index of what is there, and tensors only when they are asked for."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import overload

from bract.captures.observation import ClientDeclaration, Observation, ObservationStore
from bract.config.client_names import AGGREGATE
from bract.errors import BractError, SchemaError, one_line
from bract.inputs.base import what_is_audited
from bract.rundir import RunDirectory
from bract.schema.capture import ObservationFile, Rounding
from bract.schema.description import DESCRIPTION, AppDescription
from bract.updates.update import Tensors

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capture:
    """One observation on disk, without its tensors.

    Attributes
    ----------
    folder
        Where the tensors are; None for a round's aggregate, which no client sent.
    members
        The clients whose images it holds, where they are several.
    rounded
        How its update was rounded to be stored; None where it is as it came.
    shared
        Files with what was sent, where the round's captures share them.
    uploaded
        Bytes of the tensors that came; None where the capture does not say.
    run_id
        Flower's number of the run; None where the capture does not say.
    earlier
        Captures of the same client in earlier rounds that are attacked together with this one.
    """

    round: int
    client: str
    declaration: ClientDeclaration
    folder: Path | None = None
    members: tuple[str, ...] = ()
    rounded: Rounding | None = None
    shared: tuple[Path, ...] = ()
    uploaded: int | None = None
    earlier: tuple[Capture, ...] = ()
    run_id: str | None = None

    @property
    def rounds(self) -> list[Capture]:
        """The captures that are attacked together, by round; itself is the last."""
        return [*self.earlier, self]

    def within(self, rounds: Collection[int]) -> Capture:
        """Return the captures of some of the rounds together; this one alone where none is."""
        *earlier, last = [one for one in self.rounds if one.round in rounds] or [self]
        return replace(last, earlier=tuple(earlier))

    @property
    def files(self) -> list[Path]:
        """Every file that the observation is read from."""
        return [] if self.folder is None else [*sorted(self.folder.glob("*")), *self.shared]

    @property
    def key(self) -> str:
        """As `Observation.key`."""
        return f"round-{self.round:04d}/{self.client}"


@dataclass(frozen=True)
class Captures:
    """The captures below a folder, by round and client; no tensor is kept in memory.

    Attributes
    ----------
    models
        References ``package.module:callable`` that the operator of the audit named. A capture
        that declares another one is not loaded, because attacking it would run that code.
    description
        What ``bract.yaml`` says of every capture's client; it is laid over what they declare.
    index
        Every readable description; broken ones were named in a warning.
    """

    root: Path
    models: Collection[str] = ()
    description: AppDescription | None = None
    index: tuple[Capture, ...] = field(init=False)

    @classmethod
    def of_run(cls, run: RunDirectory, models: Collection[str] = ()) -> Captures:
        """Index the captures of a run, with what its ``bract.yaml`` says of them."""
        found = cls(run.captures, models, run.description())
        runs = sorted({c.run_id for c in found.index if c.run_id is not None})
        if len(runs) > 1 and not run.is_configured:
            _log.warning(
                "%s: holds the captures of %d runs (%s) as if they were one; a store of this "
                "version has a folder for each",
                run.captures,
                len(runs),
                one_line(", ".join(runs), 200),
            )
        return found

    def __post_init__(self) -> None:
        store = ObservationStore(self.root)
        found = []
        for folder in store.folders():
            try:
                described = store.describe(folder)
                declaration = self._described(described)
                found.append(
                    Capture(
                        described.round,
                        described.client,
                        declaration,
                        folder,
                        rounded=described.rounded,
                        shared=store.shared(described),
                        uploaded=described.uploaded,
                        run_id=described.provenance.run_id,
                    )
                )
            except SchemaError:
                raise
            except BractError as error:
                _log.warning("skipped: %s", error)
        object.__setattr__(self, "index", tuple(found))

    def _described(self, found: ObservationFile) -> ClientDeclaration:
        declared = found.declaration
        if self.description is not None:
            declared = self.description.declare(declared, found.client, found.round)
        return declared.trusting(self.models)

    def load(self, capture: Capture) -> Observation:
        """Read one observation, tensors and all."""
        if capture.folder is None:
            raise BractError(
                f"{capture.key}: no client sent it, so no folder holds it", code="captures-none"
            )
        self.check_model(capture)
        observation = self._read(capture.folder)
        if self.description is None:
            return observation
        observation = self._from_own_start(observation, capture)
        return replace(observation, declaration=capture.declaration)

    def _read(self, folder: Path) -> Observation:
        """Read one observation under the names of the described model."""
        observation = ObservationStore(self.root, models=self.models).load(folder)
        if self.description is None:
            return observation
        return with_buffers(
            with_names(observation, self.description.names), self.description.buffers
        )

    def _from_own_start(self, observation: Observation, capture: Capture) -> Observation:
        """Take what a client trains from its own last upload as if that had been sent."""
        own = () if self.description is None else self.description.own
        names = [name for name in own if name in observation.parameters]
        if not names:
            return observation
        before = self.before(capture)
        if not before or before[-1].folder is None:
            raise BractError(
                f"{capture.key}: {one_line(names[0], 100)} starts from the client's own last "
                "upload, which is not captured; its next round can be audited",
                code="capture-lacks",
            )
        last = self._read(before[-1].folder)
        sent, start = observation.parameters, {}
        for name in names:
            if name not in last.update or last.update[name].shape != sent[name].shape:
                raise BractError(
                    f"{before[-1].key}: holds no {one_line(name, 100)} to start from",
                    code="capture-lacks",
                )
            start[name] = last.parameters[name] - last.update[name]
        update = {name: start[name] - sent[name] + observation.update[name] for name in names}
        return replace(
            observation, parameters=sent | start, update=dict(observation.update) | update
        )

    def is_foreign(self, capture: Capture) -> bool:
        """Return whether attacking a capture would import code that was not named."""
        return capture.declaration.imports and capture.declaration.model not in self.models

    def check_model(self, capture: Capture) -> None:
        """Refuse one capture, or aggregate of some, that would import code that was not named."""
        if self.is_foreign(capture):
            raise BractError(
                f"{capture.key}: {self._how_to_trust([capture])}", code="code-untrusted"
            )

    def check_models(self, chosen: Sequence[Capture]) -> None:
        """Refuse a choice of which nothing can be attacked without code that was not named."""
        self._check_described(chosen)
        declared = sorted({str(c.declaration.model) for c in self.index if c.declaration.imports})
        if strange := sorted(set(self.models) - set(declared)):
            raise BractError(
                f"--model {strange[0]}: no capture declares it; "
                f"declared are {one_line(', '.join(declared) or 'models of the registry', 300)}",
                code="unknown-name",
            )
        foreign = [capture for capture in chosen if self.is_foreign(capture)]
        if foreign and len(foreign) == len(chosen):
            raise BractError(self._how_to_trust(foreign), code="code-untrusted")
        for capture in foreign:
            _log.warning("%s: %s", capture.key, self._how_to_trust([capture]))

    def _check_described(self, chosen: Sequence[Capture]) -> None:
        """Refuse a choice of which no capture says what was trained."""
        if not chosen or any(capture.declaration.model for capture in chosen):
            return
        options = " ".join(f"--model {shlex.quote(one_line(m, 200))}" for m in self.models)
        raise BractError(
            f"{self._folder / DESCRIPTION}: no capture declares its model, and no {DESCRIPTION} "
            f"names it; {what_is_audited()}; write one: bract describe "
            f"{shlex.quote(str(self._folder))} "
            f"{options or '--model my_app.task:Net'}",
            code="declaration-lacks",
        )

    def _how_to_trust(self, captures: Sequence[Capture]) -> str:
        models = sorted({str(capture.declaration.model) for capture in captures})
        named = one_line(", ".join(models), 300)
        options = " ".join(f"--model {shlex.quote(one_line(m, 200))}" for m in models[:5])
        where = shlex.quote(str(self._folder))
        who = "the capture declares"
        if self.description is not None and self.description.model is not None:
            who = f"{DESCRIPTION} names"
        return (
            f"{who} the model {named}, code that the audit would import and run; "
            f"if it is yours, name it: bract audit {where} {options}"
        )

    @property
    def _folder(self) -> Path:
        return self.root.parent if self.root.name == "captures" else self.root

    def of_round(self, number: int) -> list[Capture]:
        """Return one round's captures."""
        return [capture for capture in self.index if capture.round == number]

    def before(self, capture: Capture) -> list[Capture]:
        """Return the earlier captures of the same client, by round."""
        mine = [c for c in self.index if c.client == capture.client and c.round < capture.round]
        return sorted(mine, key=lambda c: c.round)


def with_buffers(observation: Observation, names: Collection[str]) -> Observation:
    """Take captured tensors that are the model's buffers out of its parameters.

    A capture tells the two apart by type and PyTorch's own names; a model may have others, such as
    the mean of its inputs.
    """
    held = [name for name in names if name in observation.parameters]
    if not held:
        return observation
    sent = {name: observation.parameters[name] for name in held}
    returned = {n: v - observation.update[n] for n, v in sent.items() if n in observation.update}
    return replace(
        observation,
        parameters={n: v for n, v in observation.parameters.items() if n not in sent},
        update={n: v for n, v in observation.update.items() if n not in sent},
        buffers=observation.buffers | sent,
        returned_buffers=observation.returned_buffers | returned,
    )


def with_names(observation: Observation, names: Mapping[str, str]) -> Observation:
    """Give captured tensors the names that the model has for them.

    Parameters
    ----------
    names
        The model's name by the captured one; tensors that it lacks keep theirs.
    """
    if not names:
        return observation

    def renamed(tensors: Tensors) -> Tensors:
        found = {names.get(name, name): value for name, value in tensors.items()}
        if len(found) < len(tensors):
            raise BractError(
                f"{observation.key}: {DESCRIPTION} gives several captured tensors one name; "
                "correct names",
                code="declaration-wrong",
            )
        return found

    return replace(
        observation,
        parameters=renamed(observation.parameters),
        update=renamed(observation.update),
        buffers=renamed(observation.buffers),
        returned_buffers=renamed(observation.returned_buffers),
    )


def select(
    found: Sequence[Capture],
    *,
    rounds: frozenset[int] | None = None,
    clients: frozenset[str] | None = None,
) -> list[Capture]:
    """Return the captures of these rounds and clients; None takes every one.

    A round that is missing beside others that are there is named in a warning.
    """
    names = sorted({capture.client for capture in found})
    numbers = sorted({capture.round for capture in found})
    if strange := sorted((clients or frozenset()) - set(names)):
        only = "; the aggregate belongs to --tier colluding" if AGGREGATE in strange else ""
        raise BractError(
            f"no capture is of client {', '.join(map(repr, strange))}; "
            f"there are {', '.join(names) or 'none'}{only}",
            code="unknown-name",
        )
    chosen = [
        c
        for c in found
        if (rounds is None or c.round in rounds) and (clients is None or c.client in clients)
    ]
    if not chosen:
        fix = "was capture.enabled on, and did a round finish?"
        if numbers:
            fix = f"captured were rounds {', '.join(map(str, numbers))}"
        raise BractError(
            f"no capture to attack among the chosen rounds and clients; {fix}", code="captures-none"
        )
    if missing := sorted((rounds or frozenset()) - set(numbers)):
        _log.warning("round %s: not captured", ", ".join(map(str, missing)))
    return chosen


@dataclass(frozen=True)
class Lazy(Sequence[Observation]):
    """Observations that are read when they are reached; iterating holds one at a time.

    Attributes
    ----------
    load
        Reads one.
    """

    captures: Sequence[Capture]
    load: Callable[[Capture], Observation]

    def __len__(self) -> int:
        return len(self.captures)

    @overload
    def __getitem__(self, index: int) -> Observation: ...

    @overload
    def __getitem__(self, index: slice) -> Lazy: ...

    def __getitem__(self, index: int | slice) -> Observation | Lazy:
        if isinstance(index, slice):
            return Lazy(self.captures[index], self.load)
        return self.load(self.captures[index])


def over_rounds(captures: Sequence[Capture], count: int) -> list[Capture]:
    """Gather each client's captures by ``count`` rounds; aggregates, by who is in them.

    Counted from a client's last round, so that its first group may be smaller. A group goes by the
    name of its last capture, which holds the others as `Capture.earlier`.
    """
    if count == 1:
        return list(captures)
    found: list[Capture] = []
    for whose in dict.fromkeys((c.client, c.members) for c in captures):
        mine = [c for c in captures if (c.client, c.members) == whose]
        mine.sort(key=lambda c: c.round)
        for end in range(len(mine), 0, -count):
            group = mine[max(0, end - count) : end]
            found.append(replace(group[-1], earlier=tuple(group[:-1])))
    return found
