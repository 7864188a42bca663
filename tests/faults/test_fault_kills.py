"""A ClientApp killed in a message, before each of its writes and after the last one.

Without processes: what a killed one leaves is what is on the disk, and its node answers with
Flower's error. The client is taken back in the next round, with whatever it had written.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets
from encrypted_runs import final_model, small, small_grid, train
from flwr.app import Error, Message

from bract.paillier import PrivateKey
from bract.paillier.sharing import KeyShare
from bract.rundir import RunDirectory
from bract.server.loopback import LoopbackGrid

CLIENT_APP_CRASHED = 8
CRASHED = "ClientApp stopped responding."

PAILLIER = {"scheme": "paillier", "clip": 0.5}
IN_BAND = {**PAILLIER, "keys": "in-band"}
THRESHOLD = {**PAILLIER, "threshold": 2}
NONE = {"scheme": "none"}
OTHERS = {"client-1", "client-2"}
pytestmark = pytest.mark.faults

READ_ONCE = functools.cache(sklearn.datasets.load_digits)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    monkeypatch.setattr(sklearn.datasets, "load_digits", READ_ONCE)


class Killed(BaseException):
    """Stands for SIGKILL."""


class KillingGrid(LoopbackGrid):
    """Kills one node's app in messages of one type: at its first write, its second, and so on.

    ``every`` = 2 spares every other message of that type, from the first on; ``first`` is the
    number of writes that it gets done before the first kill.
    """

    def __init__(
        self, *arguments: Any, node: int, phase: str, every: int, first: int = 0, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.node, self.phase, self.every = node, phase, every
        self.seen, self.kills = 0, first
        self.writes: int | None = None
        self.done = False

    def fsync(self, descriptor: int) -> None:
        """Take the place of ``os.fsync``, which ends every write of a file.

        A folder is synchronised after a file took its name: a kill there leaves what one at the
        next write leaves.
        """
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return
        if self.writes is not None:
            self.writes -= 1
            if self.writes < 0:
                raise Killed

    def _answer(self, message: Message) -> Message:
        asked = (message.metadata.dst_node_id, message.metadata.message_type)
        if asked != (self.node, self.phase) or self.done:
            return super()._answer(message)
        self.seen += 1
        if self.seen % self.every:
            return super()._answer(message)
        self.writes = self.kills
        self.kills += 1
        try:
            super()._answer(message)
            self.done = True  # it was killed between its last write and its answer
        except Killed:
            pass
        finally:
            self.writes = None
        return Message(Error(CLIENT_APP_CRASHED, CRASHED), reply_to=message)


def federate(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: list[PrivateKey] | list[KeyShare],
    kill: dict[str, Any],
    **changes: Any,
) -> tuple[RunDirectory, KillingGrid]:
    config = small(**changes)
    grid = small_grid(folder, config, keys, kind=KillingGrid, **kill)
    assert isinstance(grid, KillingGrid)
    monkeypatch.setattr(os, "fsync", grid.fsync)
    return train(folder, config, grid), grid


def options(strategy: str, encryption: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "encryption": encryption,
        "strategy": {"name": strategy, "tolerate_failures": True},
    }
    if strategy == "fedboosting":
        changes["training"] = {"lr": 0.1, "local_steps": 2}
        changes["data"] = {"image_size": 8, "validation": 0.2}
    return changes


def all_alike(folder: Path) -> bool:
    models = [final_model(folder, client) for client in range(3)]
    return all(bool((models[0][n] == m[n]).all()) for m in models[1:] for n in m)


PHASES = [
    pytest.param("fedavg", NONE, "train", 2, 7, id="plain-train"),
    pytest.param("fedboosting", NONE, "train", 2, 7, id="boosting-train"),
    pytest.param("fedboosting", NONE, "evaluate.fused", 2, 7, id="boosting-validation"),
    pytest.param("fedavg", PAILLIER, "query.hello", 1, 4, id="paillier-hello"),
    pytest.param("fedavg", PAILLIER, "train", 2, 9, id="paillier-train"),
    pytest.param("fedboosting", PAILLIER, "evaluate.fused", 1, 4, id="paillier-validation"),
    pytest.param("fedavg", IN_BAND, "query.hello", 1, 4, id="in-band-hello"),
    pytest.param("fedavg", IN_BAND, "train", 1, 6, id="in-band-train"),
    pytest.param("fedavg", THRESHOLD, "query.hello", 1, 4, id="threshold-hello"),
    pytest.param("fedavg", THRESHOLD, "train", 1, 5, id="threshold-train"),
    pytest.param("fedavg", THRESHOLD, "query.partial", 1, 2, id="threshold-help"),
    pytest.param("fedboosting", THRESHOLD, "evaluate.fused", 1, 4, id="threshold-validation"),
]


@pytest.mark.parametrize(("strategy", "encryption", "kind", "every", "rounds"), PHASES)
def test_a_client_killed_at_any_point_of_a_phase_is_back_in_the_next_round(
    strategy: str,
    encryption: dict[str, Any],
    kind: str,
    every: int,
    rounds: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole_key: PrivateKey,
    two_of_three: list[KeyShare],
) -> None:
    keys: Any = {"threshold": two_of_three, "keys": [], "clip": [whole_key] * 3, "scheme": []}
    keys = next(keys[name] for name in keys if name in encryption)
    run, grid = federate(
        tmp_path,
        monkeypatch,
        keys,
        {"node": 3, "phase": kind, "every": every},
        rounds=rounds,
        **options(strategy, encryption),
    )
    rows = run.metrics()
    assert [row.round for row in rows] == list(range(rounds + 1))
    assert grid.done, f"{grid.kills} kills did not come to the end of its work"
    everyone = {"client-0", "client-1", "client-2"}
    missed = [row.round for row in rows[1:] if set(row.clients) != everyone]
    failed = {row.round: [(f.client, f.reason) for f in row.failures] for row in rows[1:]}
    for number, failures in failed.items():
        assert all(CRASHED in reason for _, reason in failures), (number, failures)
    if kind in ("train", "query.hello"):
        assert missed == [every * (kill + 1) for kill in range(grid.kills)]
    else:  # its update counts, its scores or its help are lost
        assert missed == []
    assert set(rows[-1].clients) == everyone
    if encryption is not NONE:
        assert all_alike(tmp_path)


def test_a_client_that_loses_the_last_message_leaves_the_others_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_key: PrivateKey
) -> None:
    kill = {"node": 3, "phase": "evaluate.final", "every": 1}
    run, _ = federate(
        tmp_path, monkeypatch, [whole_key] * 3, kill, rounds=1, **options("fedavg", PAILLIER)
    )
    assert [row.round for row in run.metrics()] == [0, 1]
    assert final_model(tmp_path, 0) and final_model(tmp_path, 1)
    judged = run.metrics()[1].evaluation
    assert judged is not None and judged.clients == 2


def test_a_dealer_that_is_killed_is_replaced_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = {"node": 1, "phase": "query.deal", "every": 1}
    run, _ = federate(tmp_path, monkeypatch, [], kill, rounds=2, **options("fedavg", IN_BAND))
    assert [set(row.clients) for row in run.metrics()[1:]] == [OTHERS, OTHERS | {"client-0"}]
    assert all_alike(tmp_path)


@pytest.mark.parametrize("point", [0, 1, 2], ids=["no key", "wrote a key", "wrote all"])
@pytest.mark.parametrize(
    "encryption", [IN_BAND, {**IN_BAND, "threshold": 2}], ids=["whole", "shares"]
)
def test_a_dealer_that_is_killed_takes_the_key_that_another_one_dealt(
    encryption: dict[str, Any], point: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = {"node": 1, "phase": "query.deal", "every": 1, "first": point}
    run, grid = federate(tmp_path, monkeypatch, [], kill, rounds=3, **options("fedavg", encryption))
    everybody = OTHERS | {"client-0"}
    assert [set(row.clients) for row in run.metrics()[1:]] == [OTHERS, everybody, everybody]
    assert all_alike(tmp_path)
    assert grid.seen == 1, "its share waits for it, so that nobody has to deal again"
