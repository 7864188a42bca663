"""The configuration of one federation: one YAML file, checked before any process starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from bract.config.audit import AuditConfig, AuditRequest, LeakConfig, ReportConfig
from bract.config.canaries import CanaryConfig
from bract.config.capture import CaptureConfig
from bract.config.client_names import RESERVED
from bract.config.deployment import DeploymentConfig, SiteConfig
from bract.config.encryption import EncryptionConfig
from bract.config.faults import code_of, fault, fields_at
from bract.config.schedule import ConstantRate, CosineRate
from bract.config.sections import (
    KINDS,
    STRATEGY_SECTIONS,
    DataConfig,
    DirichletPartition,
    FedAvgConfig,
    FedBoostingConfig,
    FedProxConfig,
    IidPartition,
    ModelConfig,
    Partition,
    ShardsPartition,
    SizesPartition,
    StrategyConfig,
    StrategySection,
    TrainingConfig,
)
from bract.config.work import Positive, Section
from bract.disk.named import read_named
from bract.errors import BractError, listed, one_line, shown
from bract.installed.references import own_word, vouched
from bract.parse.strict_yaml import parse_mapping, parse_yaml

__all__ = [
    "AuditConfig",
    "AuditRequest",
    "CaptureConfig",
    "DataConfig",
    "DeploymentConfig",
    "DirichletPartition",
    "FedAvgConfig",
    "FedBoostingConfig",
    "FedProxConfig",
    "FederationConfig",
    "IidPartition",
    "LeakConfig",
    "ModelConfig",
    "Partition",
    "ShardsPartition",
    "SiteConfig",
    "SizesPartition",
    "StrategyConfig",
    "StrategySection",
    "TrainingConfig",
    "build_config",
    "config_of_run",
    "dump_config",
    "load_config",
    "parse_config",
]


def _defense_list(value: Any) -> Any:
    if isinstance(value, str):  # a run config holds no lists, so it carries YAML text
        try:
            value = parse_yaml(value)
        except BractError as error:
            raise ValueError(str(error)) from None
    if not isinstance(value, list):
        return [] if value is None else value
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in value]
    for entry in entries:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise ValueError(
                "expected a defense's name, or name: and its hyper-parameters, "
                f"found {shown(entry)}"
            )
    return entries


class _NamedDefense(BaseModel):
    """A defense's name with its hyper-parameters: what a file may hold, for editors alone."""

    model_config = ConfigDict(extra="allow")

    name: str


def _scheme_alone(value: Any) -> Any:
    return {"scheme": value} if isinstance(value, str) else value


class FederationConfig(Section):
    """One federation, from data to audit. Every seed derives from ``seed``.

    ``defenses`` is the ordered list that every client applies to its update: each entry is a
    name, or has a ``name`` and that defense's own hyper-parameters (see `bract.defenses`).
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "federation"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    clients: Positive = 3
    rounds: Positive = 5
    device: str = "auto"
    truth: bool = False
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    strategy: StrategyConfig = FedAvgConfig()
    defenses: Annotated[
        list[dict[str, Any]],
        BeforeValidator(_defense_list, json_schema_input_type=list[str | _NamedDefense] | None),
    ] = []
    encryption: Annotated[
        EncryptionConfig,
        BeforeValidator(
            _scheme_alone,
            json_schema_input_type=Literal["none", "paillier", "masks"] | EncryptionConfig,
        ),
    ] = EncryptionConfig()
    capture: CaptureConfig = CaptureConfig()
    canaries: CanaryConfig = CanaryConfig()
    audit: AuditConfig = AuditConfig()
    report: ReportConfig = ReportConfig()
    deployment: DeploymentConfig | None = None

    def trusting(self, allowed: Collection[str], *, how: str) -> FederationConfig:
        """Return another party's configuration, whose code is on the allow-list.

        See `bract.installed.references.vouched`, which refuses what is not.
        """
        return self._with_model(vouched(self.model.name, allowed, what="model.name", how=how))

    def as_own_word(self) -> FederationConfig:
        """Return the configuration of the person who runs this process: its code is trusted."""
        return self._with_model(own_word(self.model.name))

    def _with_model(self, name: str) -> FederationConfig:
        model = self.model.model_copy(update={"name": name})
        return self.model_copy(update={"model": model})

    @property
    def declared_defenses(self) -> tuple[dict[str, Any], ...]:
        """Return what every client does to hide its examples, as the protocol declares it."""
        private = self.training.private
        return ((private.declared(),) if private else ()) + tuple(self.defenses)

    @property
    def sites(self) -> list[str] | None:
        """The names of the clients if the federation has them; None otherwise."""
        return None if self.deployment is None else [site.name for site in self.deployment.sites]

    def check_chosen_clients(self, clients: Sequence[str], source: str) -> None:
        """Refuse to capture or audit what is no client of this federation.

        Parameters
        ----------
        clients
            The names of all clients.
        source
            What names the configuration in errors.
        """
        for key, chosen in (
            ("audit.clients", self.audit.clients),
            ("capture.clients", self.capture.clients),
        ):
            unknown_names = sorted(set(chosen or ()) - {*clients, *RESERVED})
            if unknown_names:
                raise BractError(
                    f"{source}: {key} names {listed(map(shown, unknown_names))}, and the clients "
                    f"are {', '.join(clients)}; correct the name, or remove it",
                    code="unknown-name",
                )

    @model_validator(mode="after")
    def _encryption_cannot_overflow(self) -> FederationConfig:
        if self.encryption.enabled and self.strategy.implementation:
            raise ValueError(
                f"strategy {self.strategy.name!r} of an installed package cannot add ciphertexts "
                "up; set encryption: none or take one of bract's own strategies"
            )
        p_hat = self.strategy.p_hat if isinstance(self.strategy, FedBoostingConfig) else None
        problem = self.encryption.problem(self.clients, p_hat)
        if problem is not None:
            raise ValueError(problem)
        return self

    @property
    def asked(self) -> int:
        """Return how many clients a round asks."""
        return max(1, int(self.clients * self.strategy.fraction))

    @model_validator(mode="after")
    def _quorum_is_enough(self) -> FederationConfig:
        quorum, count = self.strategy.quorum, self.strategy.quorum_of(self.asked)
        if quorum is None:
            return self
        if not self.strategy.tolerate_failures:
            raise ValueError(
                f"strategy.quorum is {quorum}: rounds close without late clients, and "
                "strategy.tolerate_failures is false; set it to true, or remove the quorum"
            )
        if count > self.asked:
            raise ValueError(
                f"strategy.quorum is {quorum}, but a round asks {self.asked} clients; lower it"
            )
        problem = self.encryption.quorum_problem(count, self.asked)
        if problem is not None:
            raise ValueError(f"strategy.quorum is {quorum}, {count} of {self.asked}: {problem}")
        return self

    @model_validator(mode="after")
    def _rounds_have_clients(self) -> FederationConfig:
        joins, strategy = self.strategy.joins, self.strategy
        if not joins:
            return self
        clients = self.sites or [f"client-{number}" for number in range(self.clients)]
        if unknown_names := sorted(set(joins) - set(clients)):
            raise ValueError(
                f"strategy.joins names {listed(map(shown, unknown_names))}, and the clients are "
                f"{', '.join(clients)}; correct the name, or remove it"
            )
        last = max(joins, key=joins.__getitem__)
        if joins[last] > self.rounds:
            raise ValueError(
                f"strategy.joins has {last} join in round {joins[last]}, and the federation has "
                f"{self.rounds}; lower it, or raise rounds"
            )
        if all(joins.get(client, 1) > 1 for client in clients):
            raise ValueError(
                "strategy.joins leaves no client for round 1; remove one, or let it join in round 1"
            )
        if self.encryption.enabled:
            raise ValueError(
                f"strategy.joins leaves clients out of rounds, and under encryption: "
                f"{self.encryption.scheme} every client takes part in each; remove one of them"
            )
        if strategy.fraction < 1.0 or strategy.quorum is not None:
            key = "quorum" if strategy.quorum is not None else "fraction"
            raise ValueError(
                f"strategy.joins goes with rounds that ask all clients, and strategy.{key} is "
                f"{getattr(strategy, key)}; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _codes_are_no_floats(self) -> FederationConfig:
        dtype, scheme = self.training.update_dtype, self.encryption.scheme
        if self.encryption.enabled and dtype != "float32":
            raise ValueError(
                f"training.update_dtype is {dtype}, but encryption: {scheme} sends codes of "
                f"{self.encryption.bits} bits; remove it, or lower encryption.bits"
            )
        return self

    @model_validator(mode="after")
    def _privacy_covers_what_is_sent(self) -> FederationConfig:
        if any(entry["name"] == "per-example" for entry in self.defenses):
            raise ValueError(
                "defenses names per-example, which is no step after training; set "
                "training: {private: {epsilon: 8}}"
            )
        if self.training.private is not None and self.strategy.name == "fedboosting":
            raise ValueError(
                "training.private adds noise to updates, and fedboosting weighs clients by scores "
                "of their training examples, which get none; take another strategy"
            )
        return self

    @model_validator(mode="after")
    def _rate_follows_schedule(self) -> FederationConfig:
        training, schedule = self.training, self.training.lr_schedule
        if training.algorithm == "fedsgd" and not isinstance(schedule, ConstantRate):
            raise ValueError(
                f"training.lr_schedule is {schedule.kind}, but fedsgd uploads a gradient, along "
                "which the server steps by strategy.server_lr; remove it or set "
                "training.algorithm: fedavg"
            )
        if isinstance(schedule, CosineRate) and schedule.floor > training.lr:
            raise ValueError(
                f"training.lr_schedule.floor is {schedule.floor:g}, above training.lr "
                f"{training.lr:g}, from which a cosine falls to it; lower one or raise the other"
            )
        if not training.at(self.rounds, self.rounds).lr > 0.0:
            raise ValueError(
                f"training.lr_schedule makes the learning rate 0 by round {self.rounds}; raise its "
                "factor, floor or rounds"
            )
        return self

    @model_validator(mode="after")
    def _sizes_match_clients(self) -> FederationConfig:
        partition = self.data.partition
        if isinstance(partition, SizesPartition) and len(partition.sizes) != self.clients:
            raise ValueError(
                f"data.partition.sizes has {len(partition.sizes)} entries for "
                f"{self.clients} clients; give one size a client"
            )
        if self.deployment is not None and len(self.deployment.sites) != self.clients:
            raise ValueError(
                f"deployment.sites names {len(self.deployment.sites)} sites for {self.clients} "
                "clients; name one a client"
            )
        if self.training.algorithm == "fedsgd" and self.training.local_steps not in (None, 1):
            raise ValueError(
                f"training.local_steps is {self.training.local_steps}, but fedsgd uploads the "
                "gradient of one batch; remove it or set training.algorithm: fedavg"
            )
        if self.capture.store is not None and self.audit.live_every is not None:
            raise ValueError(
                f"audit.live_every attacks captures in the run's folder, and capture.store is "
                f"{self.capture.store}; leave one of them out"
            )
        if self.strategy.name == "fedboosting" and self.data.validation == 0.0:
            raise ValueError(
                "data.validation is 0, but fedboosting judges every model on the clients' "
                "validation splits; set data.validation: 0.1"
            )
        return self


def load_config(path: Path) -> FederationConfig:
    """Read and check a federation's YAML file."""
    try:
        text = read_named(path).decode("utf-8")
    except FileNotFoundError:
        raise BractError(
            f"{path}: no such file; `bract init` writes one", code="file-missing"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BractError(
            f"{path}: cannot be read as text: {one_line(error, 200)}", code="file-unreadable"
        ) from error
    return parse_config(text, source=str(path))


def parse_config(text: str, *, source: str = "config") -> FederationConfig:
    """Check the text of a federation's YAML file; ``source`` names it in errors."""
    return build_config(deepcopy(_read(text, source)), source=source)


@lru_cache(maxsize=4)
def _read(text: str, source: str) -> dict[str, Any]:
    """Return what YAML text holds; a process that answers many messages reads it once a run."""
    return parse_mapping(text, source=source)


def build_config(content: dict[str, Any], *, source: str = "config") -> FederationConfig:
    """Check a federation given as nested dictionaries."""
    try:
        return FederationConfig.model_validate(content)
    except ValidationError as error:
        raise BractError(f"{source}: {_describe(error)}", code=code_of(error)) from error


def config_of_run(run_config: Mapping[str, Any]) -> FederationConfig:
    """Read a federation from a Flower run config, the same way on server and clients.

    The key ``federation`` holds YAML text; every other key (``rounds``, ``training.lr``) is laid
    over it, so that ``flwr run . --run-config "rounds=3"`` works.
    """
    base = parse_config(str(run_config.get("federation") or ""), source="run config")
    content = base.model_dump(mode="json")
    # The key that chooses a section's kind goes first: the other kind's own keys leave with it.
    overrides = sorted(run_config.items(), key=lambda item: item[0] != "strategy.name")
    for key, value in overrides:
        if key in ("federation", "run-dir"):
            continue
        if key == "strategy.name" and value != base.strategy.name:
            shared = StrategySection.model_fields
            content["strategy"] = {k: v for k, v in content["strategy"].items() if k in shared}
        *sections, last = key.split(".")
        target = content
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise BractError(
                    f"run config: {shown(key)}: {shown(section)} is no section", code="config-key"
                )
        target[last] = value
    return build_config(content, source="run config")


def dump_config(config: FederationConfig) -> str:
    """Write a configuration as YAML that `parse_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _describe(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        location = [str(part) for part in problem["loc"]]
        shown_at = [part for i, part in enumerate(location) if not _is_kind(location[: i + 1])]
        if problem["type"] == "union_tag_invalid" and shown_at == ["strategy"]:
            lines.append(str(STRATEGY_SECTIONS.missing(problem["ctx"]["tag"])))
        elif not shown_at:
            lines.append(str(problem["ctx"]["error"]) if "ctx" in problem else problem["msg"])
        else:
            lines.append(fault({**problem, "loc": shown_at}, _keys_at(location[:-1])))
    return listed(lines)


def _is_kind(location: list[str]) -> bool:
    """Return whether the last part is the name of a section's kind, which no file has as a key."""
    return location[-1] in KINDS.get(tuple(location[:-1]), {})


def _keys_at(location: list[str]) -> list[str]:
    for i in reversed(range(len(location))):
        if _is_kind(location[: i + 1]):
            return fields_at(KINDS[tuple(location[:i])][location[i]], location[i + 1 :])
    return fields_at(FederationConfig, location)
