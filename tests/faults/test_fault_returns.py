"""Clients of real federations that fail and come back, with ``tolerate_failures``."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty_app
import psutil
import pytest
from breaking import measured, python_path

from bract.cli.launch.launcher import Launch, LocalFederation
from bract.config import FederationConfig, build_config
from bract.rundir import RunDirectory
from bract.schema.metrics import MetricsRow

pytestmark = pytest.mark.processes

LONG = 5000


class Faulty(LocalFederation):
    """A federation whose clients run `faulty_app`, and in which one may be stopped."""

    def __init__(self, config: FederationConfig, run: RunDirectory) -> None:
        super().__init__(config, run, Launch(client_app="faulty_app:app"))

    def _write_app(self) -> None:
        super()._write_app()
        manifest = self.processes.folder / "app" / "pyproject.toml"
        text = manifest.read_text().replace("bract.client.app:app", "faulty_app:app")
        manifest.write_text(text)

    def signal(self, client: int, number: signal.Signals) -> None:
        """Send a signal to every process that writes to the client's log: all of its own."""
        log = (self.run.logs / f"client-{client}.log").absolute()
        for process in psutil.process_iter():
            try:
                if (
                    process.pid != os.getpid()
                    and Path(f"/proc/{process.pid}/fd/1").readlink() == log
                ):
                    process.send_signal(number)
            except (OSError, psutil.Error):
                continue


class Training:
    """A run that trains in a thread; `wait` looks at its rounds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.faults = folder / "faults"
        self.faults.mkdir()
        here = Path(faulty_app.__file__).parent
        monkeypatch.setenv("PYTHONPATH", python_path(here, here.parent))
        monkeypatch.setenv(faulty_app.FOLDER, str(self.faults))
        config = build_config(
            {
                "name": "returns",
                "clients": 2,
                "rounds": LONG,
                "data": {"image_size": 16, "validation": 0.0},
                "model": {"name": "lenet-strided", "activation": "relu"},
                "training": {"local_steps": 1},
                "capture": {"enabled": False},
                **changes,
                "strategy": {"tolerate_failures": True, **changes.get("strategy", {})},
            }
        )
        self.run = RunDirectory(folder / "returns")
        self.run.create(config)
        self.federation = Faulty(config, self.run)
        self._ended: list[BaseException | None] = []
        self._thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        try:
            self.federation.train(lambda row: None)
            self._ended.append(None)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self._ended.append(error)

    def __enter__(self) -> Training:
        self.federation.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.federation.__exit__(*error)
        self._thread.join(60)

    def wait(
        self, found: Callable[[MetricsRow], bool], what: str, within: float = 300
    ) -> MetricsRow:
        """Return the first round that is as wanted."""
        deadline = time.monotonic() + within
        while True:
            for row in self.run.metrics()[1:]:
                if found(row):
                    return row
            assert not self._ended, self._ended
            assert time.monotonic() < deadline, f"{what}: not in {within:.0f} s"
            time.sleep(0.1)

    def whole_round_after(self, number: int) -> MetricsRow:
        """Return the next round that all clients took part in and nobody failed in."""
        count = self.run.config().clients
        return self.wait(
            lambda row: row.round > number and len(row.clients) == count and not row.failures,
            f"a round of {count} clients after round {number}",
        )

    def fail(self, client: int, kind: str, fault: str) -> MetricsRow:
        """Have a client fail in its next message of a kind; return the round that says so."""
        started = max((row.round for row in self.run.metrics()), default=0)
        (self.faults / f"{client}-{kind}").write_text(fault)
        begun = time.monotonic()
        row = self.wait(lambda row: row.round > started and bool(row.failures), "a failure")
        (failure,) = row.failures
        measured(f"{fault}, {kind}", 0, time.monotonic() - begun, failure.reason)
        assert failure.client == f"client-{client}"
        return row


@pytest.mark.faults
def test_a_client_whose_memory_is_full_is_named_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Training(tmp_path, monkeypatch) as training:
        training.whole_round_after(0)
        row = training.fail(1, "train", faulty_app.MEMORY)
        assert row.failures[0].reason.startswith("out of memory;")
        assert set(row.clients) == {"client-0"}
        assert training.whole_round_after(row.round).round == row.round + 1


STOPPED = float(os.environ.get("BRACT_STOPPED_SECONDS", "0"))
"""How long the SuperNode is stopped at least; 0 is until three rounds went without it."""


@pytest.mark.deployment
@pytest.mark.timeout(STOPPED + 900)
def test_a_supernode_that_is_stopped_and_continued_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Training(tmp_path, monkeypatch) as training:
        number = training.whole_round_after(0).round
        training.federation.signal(1, signal.SIGSTOP)
        begun = time.monotonic()
        lost = training.wait(lambda row: row.round > number and bool(row.failures), "a failure")
        measured("SIGSTOP to a SuperNode", 0, time.monotonic() - begun, lost.failures[0].reason)
        assert [failure.client for failure in lost.failures] == ["client-1"]
        # It is not waited for.
        alone = training.wait(
            lambda row: row.round >= lost.round + 3 and time.monotonic() - begun >= STOPPED,
            "three rounds more",
            within=300 + STOPPED,
        )
        stopped = time.monotonic() - begun
        training.federation.signal(1, signal.SIGCONT)
        begun = time.monotonic()
        row = training.whole_round_after(alone.round)
        measured(f"SIGCONT after {stopped:.0f} s", 0, time.monotonic() - begun, f"{row.round}")


KILLS = [
    ("fedavg", {"scheme": "none"}, ["train"]),
    ("fedboosting", {"scheme": "none"}, ["evaluate.fused"]),
    ("fedavg", {"scheme": "paillier"}, ["train"]),
    ("fedavg", {"scheme": "paillier", "threshold": 2}, ["train"]),
]


@pytest.mark.deployment
@pytest.mark.parametrize(
    ("strategy", "encryption", "kinds"), KILLS, ids=["plain", "boosting", "paillier", "threshold"]
)
def test_a_killed_clientapp_costs_its_message_and_its_client_is_taken_back(
    strategy: str,
    encryption: dict[str, Any],
    kinds: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: dict[str, Any] = {"strategy": {"name": strategy}, "encryption": encryption}
    if strategy == "fedboosting":
        changes["data"] = {"image_size": 16, "validation": 0.2}
    if encryption["scheme"] != "none":
        changes["clients"] = 3
        changes["model"] = {"name": "encrypted_runs:tiny"}
        changes["data"] = {"image_size": 8, "validation": 0.0}
    with Training(tmp_path, monkeypatch, **changes) as training:
        training.whole_round_after(0)
        for kind in kinds:
            row = training.fail(1, kind, faulty_app.KILLED)
            assert "ClientApp stopped responding." in row.failures[0].reason
            training.whole_round_after(row.round)
