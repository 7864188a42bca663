"""The space of a search: which keys of a configuration may take which values.

A YAML file::

    space:
      training.batch_size: [1, 8, 64]               # a choice
      training.lr: {low: 0.02, high: 0.2, log: true}  # a range
    defenses:                                       # one of these chains; a field may be a range
      - []
      - [{name: noise, std: {low: 1.0e-4, high: 0.1, log: true}}]
      - [adadefense, {name: pruning, ratio: {low: 0.5, high: 0.99}}]
    constraints: {accuracy_loss: 0.02, leak: none}
    search: {trials: 40, seeds: 3}

What is left out has the default. A choice or chain that no configuration of the space can hold is
refused before the search, with the reason.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bract.attacks import ATTACKS, has_attacker
from bract.client.defenses import build_defenses
from bract.config import FederationConfig, build_config
from bract.data.views import data_spec
from bract.defenses import DEFENSES, Noise, PerExample, configured_model, noise_entry, title
from bract.disk import read_named
from bract.errors import BractError, one_line, shown
from bract.parse import parse_yaml
from bract.registry import unknown

Setting = dict[str, Any]
"""Values that were chosen, by the name of their dimension."""

DEFENSE = "defenses"
"""The dimension of chains; their own fields are ``defenses[N].NAME.FIELD``."""

_BUDGETS = {"iterations", "seconds", "total_seconds"}
"""Keys of the audit section of which a stage's own stands for all."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Range(_Section):
    """Numbers from ``low`` to ``high``, both included."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}; exchange them")
        if self.log and self.low <= 0.0:
            raise ValueError(f"log needs a low above 0, found {self.low:g}")
        return self

    @property
    def middle(self) -> float:
        """The arithmetic mean of the ends, of a ``log`` range the geometric one."""
        return self.at(0.5)

    def at(self, share: float) -> float:
        """Return the value at a share of the range, cut to [0, 1]; `share` undoes it."""
        share = min(1.0, max(0.0, share))
        if self.log:
            value = self.low * (self.high / self.low) ** share
        else:
            value = self.low + (self.high - self.low) * share
        return round(value) if self.whole else self.rounded(value)

    def share(self, value: float) -> float:
        """Return where in the range a value is, in [0, 1]."""
        if self.low == self.high:
            return 0.0
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def rounded(self, value: float) -> float:
        """Return a value to three significant digits, within the range."""
        return min(max(float(f"{value:.3g}"), self.low), self.high)

    @property
    def ends(self) -> tuple[float, ...]:
        """Values that are tried for feasibility."""
        return tuple(dict.fromkeys(int(v) if self.whole else v for v in (self.low, self.high)))


class Constraints(_Section):
    """What a candidate must keep to be recommended.

    Attributes
    ----------
    accuracy
        Least test accuracy.
    accuracy_loss
        Most that it may lose of the accuracy of the configuration as it is, in [0, 1].
    leak
        ``none``: no question's rule finds a leak; None bounds nothing.
    epsilon
        Most that the account of noise may spend over all rounds.
    seconds, bytes
        Most CPU seconds of a round, and bytes of a client's upload.
    """

    accuracy: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    accuracy_loss: Annotated[float, Field(ge=0.0, le=1.0)] | None = 0.02
    leak: Literal["none"] | None = "none"
    epsilon: Annotated[float, Field(gt=0.0)] | None = None
    seconds: Annotated[float, Field(gt=0.0)] | None = None
    bytes: Annotated[int, Field(ge=1)] | None = None


class Search(_Section):
    """How far the search goes.

    Attributes
    ----------
    trials
        Candidates that are trained and attacked cheaply.
    seeds
        Federations of each point of the frontier, each with its own seed and its own images.
    points
        Most points that get the full attack; those that leak least come first.
    frontier
        Points that the frontier is to have. Where it has fewer after ``trials`` candidates, up to
        as many again are tried near it.
    workers
        Processes that train and attack federations at once; None takes the number of cores.
    together
        Candidates that are asked for at once, so the most that several workers share. It changes
        what is searched, ``workers`` does not.
    floor
        A candidate with less than this share of the accuracy of the configuration as it is is
        trained and not attacked.
    cheap, middle
        Keys of the audit section in the first two stages, which attack the first round by the first
        of the configuration's attacks unless they name others.
    full
        Keys of the audit section that the full attack has in place of the configuration's own.
    """

    trials: Annotated[int, Field(ge=1)] = 40
    seeds: Annotated[int, Field(ge=1, le=50)] = 3
    points: Annotated[int, Field(ge=1)] = 12
    frontier: Annotated[int, Field(ge=0)] = 8
    workers: Annotated[int, Field(ge=1, le=256)] | None = None
    together: Annotated[int, Field(ge=1, le=256)] = 8
    floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    cheap: dict[str, Any] = {"iterations": 80}
    middle: dict[str, Any] = {"iterations": 250}
    full: dict[str, Any] = {}


class SpaceFile(_Section):
    """The whole YAML file."""

    space: dict[str, list[Any] | Range] | None = None
    defenses: list[list[str | dict[str, Any]]] | None = None
    constraints: Constraints = Constraints()
    search: Search = Search()


class Suggest(Protocol):
    """Choose a value of one dimension, as Optuna's trials do."""

    def categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of the choices."""

    def number(self, name: str, among: Range) -> float:
        """Return a number of a range."""


class Space:
    """What may be changed about one configuration.

    Parameters
    ----------
    source
        What errors call the space.
    models
        Whether the configuration names the model that is trained; of a third-party app it does not,
        and no defense is held against it before the search.
    """

    def __init__(
        self,
        base: FederationConfig,
        file: SpaceFile,
        *,
        source: str = "space",
        models: bool = True,
    ) -> None:
        self.base, self.file, self.source, self.models = base, file, source, models
        self.keys = file.space if file.space is not None else _default_keys(base)
        chains = file.defenses
        self.notes: list[str] = []
        if chains is None:
            chains, self.notes = _default_chains(base, self.keys)
        self.chains = [[e if isinstance(e, dict) else {"name": e} for e in c] for c in chains]
        self._known = base.model_dump(mode="json")
        self._check()

    def suggest(self, ask: Suggest) -> Setting:
        """Return one setting of every dimension that the earlier choices leave."""
        found: Setting = {}
        for key, values in self.keys.items():
            found[key] = (
                ask.number(key, values)
                if isinstance(values, Range)
                else ask.categorical(key, values)
            )
        names = [_chain_name(i, chain) for i, chain in enumerate(self.chains)]
        found[DEFENSE] = ask.categorical(DEFENSE, names)
        for key, among in self._ranges(names.index(found[DEFENSE])):
            found[key] = ask.number(key, among)
        return found

    def starts(self) -> list[Setting]:
        """Return a setting for each chain: the middle of its ranges, all else as configured.

        Where the space lacks the configured value, the nearest one or the first stands in.
        """
        found: list[Setting] = []
        own = {key: _nearest(values, _get(self._known, key)) for key, values in self.keys.items()}
        for position, name in enumerate(self.names()):
            middles = {key: among.middle for key, among in self._ranges(position)}
            found.append({**own, DEFENSE: name, **middles})
        return found

    def axes(self, setting: Setting) -> dict[str, list[Any] | Range]:
        """Return what may vary of a setting beside its chain, by name."""
        return self.keys | dict(self._ranges(self.names().index(setting[DEFENSE])))

    def neighbour(self, setting: Setting, draw: Random) -> Setting:
        """Return a setting with the same chain that differs a little in one or more dimensions."""
        axes = self.axes(setting)
        free = [k for k, v in axes.items() if len(v if isinstance(v, list) else v.ends) > 1]
        moved = [key for key in free if draw.random() < 1.0 / 2.0] or draw.sample(
            free, min(1, len(free))
        )
        return setting | {key: _step(axes[key], setting[key], draw) for key in moved}

    def configure(self, setting: Setting) -> FederationConfig:
        """Return the configuration of a setting.

        Raises
        ------
        BractError
            If the values do not go together, in one line.
        """
        content = copy.deepcopy(self._known)
        for key in self.keys:
            _put(content, key, setting[key])
        position = [_chain_name(i, c) for i, c in enumerate(self.chains)].index(setting[DEFENSE])
        chain = copy.deepcopy(self.chains[position])
        for key, _ in self._ranges(position):
            _, name, field = key.split(".", 2)
            next(e for e in chain if e["name"] == name)[field] = setting[key]
        built = build_defenses(chain)
        content["defenses"] = chain
        if built.server_lr != 1.0:
            content["strategy"]["server_lr"] = built.server_lr
        config = build_config(content, source=self.source)
        if self.models:
            _check_model(config)
        return config

    def names(self) -> list[str]:
        """Return the name of each chain, in order, as `suggest` chooses among them."""
        return [_chain_name(i, chain) for i, chain in enumerate(self.chains)]

    def corners(self) -> Iterator[Setting]:
        """Yield settings at the ends of ranges, over all choices and chains."""
        axes = [
            values.ends if isinstance(values, Range) else tuple(values)
            for values in self.keys.values()
        ]
        for position, name in enumerate(self.names()):
            ranges = self._ranges(position)
            for values in product(*axes):
                setting = dict(zip(self.keys, values, strict=True)) | {DEFENSE: name}
                yield setting | {key: among.ends[0] for key, among in ranges}

    def _ranges(self, position: int) -> list[tuple[str, Range]]:
        return [
            (f"{DEFENSE}[{position}].{entry['name']}.{field}", _range(value, self.source))
            for entry in self.chains[position]
            for field, value in entry.items()
            if isinstance(value, Mapping)
        ]

    def _check(self) -> None:
        for key, values in self.keys.items():
            _known_key(self._known, key, self.source)
            if isinstance(values, list) and not values:
                raise BractError(
                    f"{self.source}: {key} has no value to choose; list one or more",
                    code="config-value",
                )
        for chain in self.chains:
            for entry in chain:
                if entry.get("name") not in DEFENSES:
                    name = str(entry.get("name"))
                    raise BractError(
                        f"{self.source}: {unknown('defense', name, DEFENSES)}", code="unknown-name"
                    )
        self._check_stages()
        self._check_adaptive()
        if self.models:
            self._check_bytes()
        self._check_epsilon()
        self._check_varies()
        self._check_feasible()

    def _check_stages(self) -> None:
        """Refuse keys of the audit section that no attack could be run with."""
        stages = {"cheap": self.file.search.cheap, "middle": self.file.search.middle}
        for name, stage in (stages | {"full": self.file.search.full}).items():
            where = f"{self.source}: search.{name}"
            content = self.base.audit.model_dump(mode="json") | stage
            if stage.keys() & _BUDGETS:
                content |= dict.fromkeys(_BUDGETS - stage.keys())
            audit = build_config({"audit": content}, source=where).audit
            for attack in audit.attacks:
                if attack not in ATTACKS:
                    error = ATTACKS.missing(attack)
                    raise BractError(f"{where}.attacks: {error}", code=error.code)
            clients = int(max(self._values("clients")))
            for client in audit.clients or ():
                if client not in [f"client-{number}" for number in range(clients)]:
                    raise BractError(
                        f"{where}.clients names {client}, and the federation has {clients}: "
                        f"client-0 to client-{clients - 1}",
                        code="unknown-name",
                    )
            rounds = int(min(self._values("rounds")))
            if audit.rounds and min(audit.rounds) > rounds:
                raise BractError(
                    f"{where}.rounds begins with {min(audit.rounds)}, and a candidate may have "
                    f"{rounds}; name a round that every candidate has",
                    code="config-conflict",
                )

    def _check_varies(self) -> None:
        own = [dict(entry) for entry in self.base.defenses]
        varied = [self._values(key) != [_get(self._known, key)] for key in self.keys]
        if not any(varied) and all(chain == own for chain in self.chains):
            raise BractError(
                f"{self.source}: space and defenses hold the configuration as it is alone; give a "
                "key of space more values, or add a chain to defenses",
                code="config-conflict",
            )

    def _check_adaptive(self) -> None:
        private = any(self._values("training.private"))
        for chain in self.chains:
            names = [str(entry["name"]) for entry in chain]
            if has_attacker(names) or (private and has_attacker([PerExample.name, *names])):
                return
        raise BractError(
            f"{self.source}: defenses has no chain that an adaptive attacker knows "
            f"({self.names()[0].split(': ', 1)[1]}), and another cannot be recommended; add "
            "a chain that one knows, such as [] or [guardian]",
            code="config-conflict",
        )

    def _check_bytes(self) -> None:
        limit = self.file.constraints.bytes
        if limit is None:
            return
        sizes = {}
        width = 4 if set(self._values("training.update_dtype")) == {"float32"} else 2
        for name in self._values("model.name"):
            content = copy.deepcopy(self._known)
            content["model"]["name"] = name
            try:
                base = build_config(content, source=self.source)
                with torch.device("meta"):
                    model = configured_model(base, data_spec(base.data))
            except BractError:
                continue  # of no use to any candidate, or refused below
            sizes[width * sum(p.numel() for p in model.parameters())] = name
        if sizes and limit < min(sizes):
            fix = "or add a smaller one to model.name of space"
            raise BractError(
                f"{self.source}: constraints.bytes is {limit}, and an update of model.name "
                f"{sizes[min(sizes)]} has {min(sizes)}; raise it, {fix}",
                code="config-conflict",
            )

    def _check_epsilon(self) -> None:
        limit = self.file.constraints.epsilon
        if limit is None:
            return
        rounds = int(min(self._values("rounds")))
        spent = [s for c in self.chains if (s := self._least_spent(c, rounds)) is not None]
        for one in self._values("training.private"):
            if isinstance(one, Mapping) and one.get("epsilon") is not None:
                spent.append(float(one["epsilon"]))
        if not spent or min(spent) > limit:
            best = f"the least of the space is {min(spent):.3g}" if spent else "no chain has one"
            raise BractError(
                f"{self.source}: constraints.epsilon is {limit:g} over {rounds} rounds, and of "
                f"defenses and training.private {best}; add noise with clip and epsilon, or raise "
                "the constraint",
                code="config-conflict",
            )

    def _values(self, key: str) -> list[Any]:
        """Return the values that a key may have: of a range its ends."""
        among = self.keys.get(key)
        if among is None:
            return [_get(self._known, key)]
        return list(among.ends) if isinstance(among, Range) else list(among)

    def _least_spent(self, chain: Sequence[Mapping[str, Any]], rounds: int) -> float | None:
        """Return the least that noise of this chain can spend over some rounds."""
        entry = noise_entry(chain)
        if entry is None:
            return None
        low = {k: _range(v, self.source).low for k, v in entry.items() if isinstance(v, dict)}
        high = {k: _range(v, self.source).high for k, v in entry.items() if isinstance(v, dict)}
        ends = {
            **{k: v for k, v in entry.items() if k != "name"},
            **low,
            **({"std": high["std"]} if "std" in high else {}),
        }
        return Noise(**ends).spent(rounds)

    def _check_feasible(self) -> None:
        """Refuse a chain that no model of the space can have, and a space without any candidate."""
        worked: set[str] = set()
        why: dict[str, str] = {}
        for name in self.names():
            mine = (s for s in self.corners() if s[DEFENSE] == name)
            for setting in islice(mine, 200):
                try:
                    self.configure(setting)
                except BractError as error:
                    why.setdefault(name, str(error))
                else:
                    worked.add(name)
                    break
        missing = [name for name in self.names() if name not in worked]
        if len(missing) == len(self.names()):
            raise BractError(
                f"{self.source}: no candidate of the space can run: {why[missing[0]]}; add a value "
                "that can",
                code="config-conflict",
            )
        if missing:
            raise BractError(
                f"{self.source}: defenses {missing[0]} can run with no candidate of the space: "
                f"{why[missing[0]]}; remove the chain, or add a value that it can run with",
                code="config-conflict",
            )


def load_space(base: FederationConfig, path: Path | None) -> Space:
    """Read a space's YAML file; the default space where there is none."""
    if path is None:
        return Space(base, SpaceFile(), source="the default space")
    return Space(base, read_space(path), source=str(path))


def read_space(path: Path) -> SpaceFile:
    """Read a space's YAML file."""
    try:
        content = parse_yaml(read_named(path).decode("utf-8"))
    except FileNotFoundError:
        raise BractError(f"{path}: no such file", code="file-missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BractError(
            f"{path}: cannot be read as text: {one_line(error, 200)}", code="file-unreadable"
        ) from error
    except BractError as error:
        raise BractError(f"{path}: {error}", code=error.code) from None
    try:
        return SpaceFile.model_validate(content or {})
    except ValidationError as error:
        problems = error.errors()
        first = next((p for p in problems if p["type"] != "list_type"), problems[0])
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        if first["type"] == "extra_forbidden":
            sections: dict[str, type[BaseModel]] = {"constraints": Constraints, "search": Search}
            fields = sections.get(str(first["loc"][0]), SpaceFile)
            raise BractError(
                f"{path}: {unknown('key', str(first['loc'][-1]), fields.model_fields)}",
                code="config-key",
            ) from error
        found = shown(first["input"])
        raise BractError(
            f"{path}: {where}: found {found}; {first['msg']}", code="config-value"
        ) from error


def app_chains() -> tuple[list[list[str | dict[str, Any]]], list[str]]:
    """Return the chains that run in an app without a change of its code, and the other defenses."""
    chains: list[list[str | dict[str, Any]]] = [[], [_NOISE], [_PRUNING], [_PRUNING, _NOISE]]
    left: list[str] = []
    for name in DEFENSES:
        kind = DEFENSES[name]
        if name in ("noise", "pruning", "per-example"):
            continue
        if kind.keeps == "model" or kind.changes_model():
            left.append(name)
            continue
        entry: Setting = {"name": name} | _TRIED.get(name, {})
        chains += _attacked(entry)
    return chains, left


def _attacked(entry: Setting) -> list[list[str | dict[str, Any]]]:
    """Return a defense alone, with noise and with pruning, where an adaptive attacker knows it."""
    name = str(entry["name"])
    chains: list[list[str | dict[str, Any]]] = [[entry]] if has_attacker([name]) else []
    for last in (_NOISE, _PRUNING):
        if has_attacker([name, str(last["name"])]):
            chains.append([entry, last])
    return chains


def _default_keys(base: FederationConfig) -> dict[str, list[Any] | Range]:
    keys: dict[str, list[Any] | Range] = {
        "training.batch_size": sorted({base.training.batch_size, 1, 4, 16, 64}),
        "training.local_steps": [base.training.local_steps, 1, 5, 20],
        "training.lr": Range(low=base.training.lr / 4, high=base.training.lr * 2, log=True),
    }
    if base.data.input == "image":
        keys["model.activation"] = ["relu", "sigmoid"]
    if base.training.algorithm == "fedsgd":
        del keys["training.local_steps"]
    if base.clients >= 3 and not base.strategy.implementation:
        keys["encryption.scheme"] = ["none", "paillier", "masks"]
    if base.training.private is None and importlib.util.find_spec("opacus") is not None:
        keys["training.private"] = [None, {"epsilon": 8.0}, {"epsilon": 1.0}]
    return keys


_NOISE: Setting = {
    "name": "noise",
    "clip": 1.0,
    "std": {"low": 3e-4, "high": 0.1, "log": True},
}
_PRUNING: Setting = {"name": "pruning", "ratio": {"low": 0.5, "high": 0.99}}

_TRIED: dict[str, Setting] = {
    "adadefense": {
        "alpha": {"low": 2e-3, "high": 0.05, "log": True},
        "secret_updates": {"low": 0, "high": 8, "whole": True},
    },
    "guardian": {"min_cosine": {"low": 0.1, "high": 0.7}},
    "soteria": {"ratio": {"low": 0.2, "high": 0.8}},
    "truncated-svd": {"energy": {"low": 0.3, "high": 0.95}},
}
"""Ranges of other defenses' hyper-parameters; one without an entry has its defaults."""


def _default_chains(
    base: FederationConfig, keys: Mapping[str, Any]
) -> tuple[list[list[str | dict[str, Any]]], list[str]]:
    """Return the chains that a model of the space can have, and notes on what was left out."""
    del keys
    chains: list[list[str | dict[str, Any]]] = [[], [_NOISE], [_PRUNING], [_PRUNING, _NOISE]]
    left: list[str] = []
    for name in DEFENSES:
        if name in ("noise", "pruning", "per-example"):
            continue
        entry: Setting = {"name": name} | _TRIED.get(name, {})
        plain = {"name": name}
        try:
            build_defenses([plain])
            _check_model(base.model_copy(update={"defenses": [plain]}))
        except BractError:
            left.append(name)
            continue
        chains += _attacked(entry)
    own = [dict(entry) for entry in base.defenses]
    if own:
        chains.append(list(own))
    notes = []
    if left:
        notes.append(
            f"Not searched: {', '.join(left)}, which model {base.model.name} lacks the layers for; "
            "name a model that has them in model.name of the space."
        )
    return chains, notes


def _check_model(config: FederationConfig) -> None:
    """Refuse defenses that need what the model lacks."""
    with torch.device("meta"):
        configured_model(config, data_spec(config.data))


def _chain_name(position: int, chain: Sequence[Mapping[str, Any]]) -> str:
    names = " + ".join(str(entry.get("name")) for entry in chain) or "none"
    return f"{position}: {names}"


def describe(config: FederationConfig) -> str:
    """Return what a candidate's chain is called on the page."""
    return title(build_defenses(config.defenses).public())


def _range(value: Mapping[str, Any], source: str) -> Range:
    try:
        return Range.model_validate(dict(value))
    except ValidationError as error:
        raise BractError(
            f"{source}: found {shown(dict(value))}; {error.errors()[0]['msg']}", code="config-value"
        ) from (error)


_REACH = 0.15
"""Standard deviation of a neighbour's step, as a share of the range."""


def _step(among: list[Any] | Range, value: Any, draw: Random) -> Any:
    """Return a value near another: of numbers the next higher or lower, of names any other."""
    if isinstance(among, Range):
        share = among.share(value) + draw.gauss(0.0, _REACH)
        return among.at(2.0 - share if share > 1.0 else abs(share))
    if not all(_is_number(one) for one in among):
        return draw.choice([one for one in among if one != value] or [value])
    ordered = sorted(set(among))
    position = ordered.index(value)
    near = ordered[max(0, position - 1) : position] + ordered[position + 1 :][:1]
    return draw.choice(near or [value])


def _nearest(among: list[Any] | Range, value: Any) -> Any:
    if isinstance(among, Range):
        return (
            among.rounded(min(max(value, among.low), among.high))
            if _is_number(value)
            else among.middle
        )
    if value in among or not _is_number(value):
        return value if value in among else among[0]
    numbers = [one for one in among if _is_number(one)]
    return min(numbers, key=lambda one: abs(one - value)) if numbers else among[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _get(content: Mapping[str, Any], key: str) -> Any:
    at: Any = content
    for part in key.split("."):
        at = at[part]
    return at


def _known_key(content: Mapping[str, Any], key: str, source: str) -> None:
    at: Any = content
    for part in key.split("."):
        if not isinstance(at, Mapping) or part not in at:
            known = list(at) if isinstance(at, Mapping) else []
            raise BractError(f"{source}: space: {unknown('key', key, known)}", code="config-key")
        at = at[part]


def _put(content: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        content = content[section]
    content[last] = value
