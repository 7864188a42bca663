"""A client that answers twice, late, for the wrong round or under another client's name; and one
that is gone for two rounds and comes back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets
from encrypted_runs import final_model, small, small_grid, train
from flwr.app import Context, Message, RecordDict
from safetensors.torch import load_file

from bract import ObservationStore
from bract.paillier import PrivateKey
from bract.paillier.sharing import KeyShare
from bract.rundir import RunDirectory
from bract.server.loopback import LoopbackGrid
from bract.updates.update import Tensors

BAD = 3
"""Node of the client that misbehaves, which calls itself client-2."""

EVERYONE = {"client-0", "client-1", "client-2"}
OTHERS = {"client-0", "client-1"}
PAILLIER = {"scheme": "paillier", "clip": 0.5}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {"scheme": "none"}),
    "fedboosting": ("fedboosting", {"scheme": "none"}),
    "paillier": ("fedavg", PAILLIER),
    "threshold": ("fedavg", {**PAILLIER, "threshold": 2}),
    "encrypted fedboosting": ("fedboosting", PAILLIER),
}
pytestmark = pytest.mark.faults

READ_ONCE = functools.cache(sklearn.datasets.load_digits)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    monkeypatch.setattr(sklearn.datasets, "load_digits", READ_ONCE)


class BadAnswers(LoopbackGrid):
    """Changes what comes back of the bad node in the second round, as ``how`` says."""

    def __init__(self, *arguments: Any, how: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.how = how
        self.first: dict[str, Message] = {}
        self.trained: list[Message] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers, and what the bad node adds or puts in their place."""
        replies = list(super().pull_messages(message_ids))
        for reply in tuple(replies):
            if reply.metadata.src_node_id != BAD or not reply.has_content():
                continue
            kind = reply.metadata.message_type
            again = kind in self.first
            if self.how == "twice":
                replies.append(reply)
            elif again and self.how == "late":
                replies = [*self.first.values(), *replies]
            elif again and kind == "train" and self.how == "for the wrong round":
                replies[replies.index(reply)] = self.first[kind]
            elif again and kind == "train" and self.how == "under another's name":
                reply.content.config_records["declared"]["client"] = "client-0"
            self.first.setdefault(kind, reply)
        return replies


class Absent(LoopbackGrid):
    """The bad node is not connected in rounds 2 and 3; it returns, perhaps as another node."""

    def __init__(self, *arguments: Any, comes_back_as: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.comes_back_as = comes_back_as

    def get_node_ids(self) -> Iterable[int]:
        """Return who is connected."""
        trained = [
            int(str(m.content.config_records["config"]["server-round"]))
            for m in self.log
            if m.metadata.message_type == "train"
        ]
        last = max(trained, default=0)
        if last >= 3 and self.comes_back_as not in self.contexts:
            config = self.contexts.pop(BAD).node_config
            self.contexts[self.comes_back_as] = Context(
                run_id=self.contexts[1].run_id,
                node_id=self.comes_back_as,
                node_config=config,
                state=RecordDict(),
                run_config=self.contexts[1].run_config,
            )
        return [n for n in super().get_node_ids() if n != BAD or not 1 <= last < 3]


def federate(
    folder: Path, name: str, keys: dict[str, Any], kind: Any = LoopbackGrid, **given: Any
) -> RunDirectory:
    strategy, encryption = KINDS[name]
    changes: dict[str, Any] = {"training": {"lr": 0.1, "local_steps": 2}}
    if strategy == "fedboosting":
        changes["data"] = {"image_size": 8, "validation": 0.2}
    config = small(
        rounds=given.pop("rounds", 3),
        encryption=encryption,
        strategy={"name": strategy, "tolerate_failures": given.pop("tolerate", True)},
        **changes,
    )
    grid = small_grid(folder, config, keys.get(name, ()), kind=kind, **given)
    return train(folder, config, grid)


@pytest.fixture
def keys(whole_key: PrivateKey, two_of_three: list[KeyShare]) -> dict[str, Any]:
    whole = [whole_key] * 3
    return {"paillier": whole, "encrypted fedboosting": whole, "threshold": two_of_three}


def model(folder: Path, name: str) -> Tensors:
    if "scheme" in KINDS[name][1] and KINDS[name][1]["scheme"] == "none":
        return load_file(folder / "run" / "models" / "final.safetensors")
    return final_model(folder, 0)


def clients(run: RunDirectory) -> list[set[str]]:
    return [set(row.clients) for row in run.metrics()[1:]]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("how", ["twice", "late"])
def test_an_answer_that_nobody_waits_for_changes_nothing(
    how: str, name: str, tmp_path: Path, keys: dict[str, Any]
) -> None:
    honest = federate(tmp_path / "honest", name, keys)
    # Without tolerance: it does not even count as a failure.
    run = federate(tmp_path / "bad", name, keys, BadAnswers, how=how, tolerate=False)
    assert clients(run) == clients(honest) == [EVERYONE] * 3
    assert not any(row.failures for row in run.metrics())
    wanted, found = model(tmp_path / "honest", name), model(tmp_path / "bad", name)
    assert all(bool((wanted[key] == found[key]).all()) for key in wanted)
    kept = [o.key for o in ObservationStore(run.captures)]
    assert kept == [o.key for o in ObservationStore(honest.captures)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("for the wrong round", "no answer in time"),
        ("under another's name", "claims the name 'client-0', but has called itself 'client-2'"),
    ],
)
def test_an_answer_out_of_turn_costs_its_client_its_contribution(
    how: str, reason: str, name: str, tmp_path: Path, keys: dict[str, Any]
) -> None:
    run = federate(tmp_path, name, keys, BadAnswers, how=how, rounds=2)
    assert clients(run) == [EVERYONE, OTHERS]
    (failure,) = run.metrics()[2].failures
    assert failure.client == "client-2"
    assert reason in failure.reason


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("comes_back_as", [BAD, 9], ids=["the same node", "a new node"])
def test_who_was_gone_is_taken_back_in_the_next_round(
    comes_back_as: int, name: str, tmp_path: Path, keys: dict[str, Any]
) -> None:
    run = federate(tmp_path, name, keys, Absent, comes_back_as=comes_back_as, rounds=5)
    assert clients(run) == [EVERYONE, OTHERS, OTHERS, EVERYONE, EVERYONE]
    if name in keys:
        models = [final_model(tmp_path, client) for client in range(3)]
        assert all(bool((models[0][key] == models[2][key]).all()) for key in models[0])
