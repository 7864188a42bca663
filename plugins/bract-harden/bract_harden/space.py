"""The space of a search: which keys of a configuration may take which values.

A choice or chain that no configuration of the space can hold is refused before the search, with the
reason.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
from pydantic import ValidationError

from bract.attacks import ATTACKS, has_attacker
from bract.client.defenses import build_defenses
from bract.config import FederationConfig, build_config
from bract.data.views import data_spec
from bract.defenses import DEFENSES, Noise, PerExample, configured_model, noise_entry
from bract.errors import BractError, shown
from bract.registry import unknown
from bract_harden.chains import chain_name, check_model, default_chains
from bract_harden.space_file import Range, SpaceFile, read_space

Setting = dict[str, Any]
"""Values that were chosen, by the name of their dimension."""

DEFENSE = "defenses"
"""The dimension of chains; their own fields are ``defenses[N].NAME.FIELD``."""

_BUDGETS = {"iterations", "seconds", "total_seconds"}
"""Keys of the audit section of which a stage's own stands for all."""


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
            chains, self.notes = default_chains(base)
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
        names = [chain_name(i, chain) for i, chain in enumerate(self.chains)]
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
        position = [chain_name(i, c) for i, c in enumerate(self.chains)].index(setting[DEFENSE])
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
            check_model(config)
        return config

    def names(self) -> list[str]:
        """Return the name of each chain, in order, as `suggest` chooses among them."""
        return [chain_name(i, chain) for i, chain in enumerate(self.chains)]

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
                    missing = DEFENSES.missing(str(entry.get("name")))
                    raise BractError(f"{self.source}: {missing}", code=missing.code)
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
