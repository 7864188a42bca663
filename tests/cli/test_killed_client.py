"""A SuperNode that is killed in the middle of a run and started again."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from bract import ObservationStore
from bract.cli.launch.launcher import LocalFederation
from bract.config import build_config
from bract.rundir import RunDirectory

pytestmark = pytest.mark.processes

ALPHA = 0.05


class Restartable(LocalFederation):
    """A federation of which one client can be killed and brought back."""

    def _start_supernodes(self, address: Any) -> None:
        self.address = address
        super()._start_supernodes(address)

    def kill(self, client: Any) -> Any:
        """Send SIGKILL to every process that writes to the client's log: all of its own."""
        log = self.run.logs / f"client-{client}.log"
        killed = 0
        for process in psutil.process_iter():
            output = Path(f"/proc/{process.pid}/fd/1")
            try:
                if process.pid != os.getpid() and output.readlink() == log.absolute():
                    process.send_signal(signal.SIGKILL)
                    killed += 1
            except (OSError, psutil.Error):
                continue
        return killed

    def bring_back(self, client: Any) -> None:
        self._start_supernode(client, self.address, [])


def wait(what: Any, within: Any = 300) -> None:
    deadline = time.monotonic() + within
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_killed_supernode_that_is_started_again_goes_on_with_its_moments(tmp_path: Path) -> None:
    config = build_config(
        {
            "name": "killed",
            "clients": 2,
            "rounds": 3,
            "data": {"image_size": 16, "validation": 0.0},
            "model": {"name": "lenet-strided", "activation": "relu"},
            "training": {"local_steps": 2},
            "strategy": {"tolerate_failures": True, "timeout": 45.0},
            "defenses": [{"name": "adadefense", "alpha": ALPHA}],
        }
    )
    run = RunDirectory(tmp_path / "killed")
    run.create(config)
    state_file = run.root / "state" / "client-1" / "killed-client-1.safetensors"

    def moments() -> Any:
        return load_file(state_file) if state_file.is_file() else {}

    with Restartable(config, run) as federation:
        training = threading.Thread(target=federation.train, args=(lambda row: None,))
        training.start()
        wait(lambda: any(row.round >= 1 for row in run.metrics()))
        before = int(moments()["adadefense.round"])
        assert federation.kill(1) >= 2
        federation.bring_back(1)
        training.join(400)
        assert not training.is_alive()
    assert run.state().status == "finished"
    uploads = [o for o in ObservationStore(run.captures) if o.client == "client-1"]
    after = moments()
    taken = int(after["adadefense.round"])
    assert taken > before >= 1
    # An update whose upload was lost with the process may count too; none may be forgotten.
    assert len(uploads) <= taken <= len(uploads) + 1
    # What the server got last is the defended update of all rounds, not that of a client's first
    # ones.
    m, v = after["adadefense.m"], after["adadefense.v"]
    expected = ALPHA * (m / (1 - 0.9**taken)) / (v / (1 - 0.999**taken) + 1e-8).sqrt()
    sent = torch.cat([value.flatten() for value in uploads[-1].update.values()])
    torch.testing.assert_close(sent, expected, rtol=1e-4, atol=1e-6)
