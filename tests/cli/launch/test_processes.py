"""The command line against real SuperLink and SuperNode processes on loopback."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from bract import Observation, ObservationStore
from bract.attacks import Budget, Reconstruction, reconstruct
from bract.client.training import train_locally
from bract.data.views import client_data, data_spec
from bract.models import create_model
from bract.models.dropout import with_dropout
from bract.rundir import RunDirectory
from bract.seeds import derive_seed

pytestmark = pytest.mark.processes

QUICK = """
name: quick
truth: true
clients: 3
rounds: {rounds}
model: {{name: lenet-strided, activation: relu}}
training:
  lr: 0.1
  lr_schedule: {{kind: step, factor: 0.5, every: 1}}
  local_steps: 4
  augmentation: [random-crop]
  dropout: 0.2
data: {{partition: {{kind: sizes, sizes: [120, 60, 2]}}}}
"""


class Command:
    """One `bract` command in its own process, whose descendants can be told from all others."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        before: Sequence[str] = (),
        module: str = "bract.cli.main",
        **environment: str,
    ) -> None:
        self.tag = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", module, *arguments],
            cwd=folder,
            env={**os.environ, **environment, "BRACT_TEST_TAG": self.tag},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell's background job hands SIGINT on ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def finish(self, timeout: float = 180) -> tuple[int, str]:
        """Return the exit code and what was written to stderr."""
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors

    def descendants(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("BRACT_TEST_TAG") == self.tag:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def nothing_is_left(self, within: float = 15) -> bool:
        deadline = time.monotonic() + within
        while self.descendants() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.descendants()


def write_config(folder: Path, rounds: int) -> Path:
    path = folder / "quick.yaml"
    path.write_text(QUICK.format(rounds=rounds))
    return path


def wait_for_round(run: RunDirectory, number: int, command: Command) -> None:
    deadline = time.monotonic() + 120
    while not any(row.round >= number for row in run.metrics()):
        assert command.process.poll() is None, command.finish()
        assert time.monotonic() < deadline, "no round in two minutes"
        time.sleep(0.1)


def assert_computed_alike(run: RunDirectory, captured: Observation) -> None:
    """What came through the processes is what the same client computes in memory, and so is
    what an attack makes of it."""
    config = run.config()
    spec = data_spec(config.data)
    model = create_model("lenet-strided", classes=10, channels=1, image_size=32, activation="relu")
    model.load_state_dict(captured.parameters)
    with_dropout(model, config.training.dropout, classes=10)
    data = client_data(config, 2)
    again = train_locally(
        model,
        data.images,
        data.labels,
        config=config.training.at(captured.round, config.rounds),
        spec=spec,
        seed=derive_seed(config.seed, "train", 2, captured.round),
        device=torch.device("cpu"),
    )
    for name, value in again.update.items():
        torch.testing.assert_close(captured.update[name], value, rtol=1e-4, atol=1e-7)
    in_memory = replace(captured, update=again.update)
    budget = Budget(iterations=5)
    one, two = (reconstruct(o, "ig", budget=budget, device="cpu")[0] for o in (captured, in_memory))
    assert isinstance(one, Reconstruction) and isinstance(two, Reconstruction)
    assert one.gradient_cosine == pytest.approx(two.gradient_cosine, abs=1e-4)


def test_a_federation_trains_captures_and_keeps_the_truth_at_the_clients(tmp_path: Path) -> None:
    write_config(tmp_path, rounds=2)
    command = Command(tmp_path, "run", "quick.yaml")
    code, errors = command.finish()
    assert code == 0, errors
    assert command.nothing_is_left()
    run = RunDirectory.open(tmp_path / "runs" / "quick")
    rows = run.metrics()
    assert [row.round for row in rows] == [0, 1, 2]
    assert set(rows[2].clients) == {"client-0", "client-1", "client-2"}
    assert rows[2].clients["client-0"].local_steps == 4
    assert run.state().status == "finished"
    observations = list(ObservationStore(run.captures))
    assert [o.key for o in observations] == [
        f"round-000{r}/client-{c}" for r in (1, 2) for c in (0, 1, 2)
    ]
    small = observations[2]
    assert small.declaration.num_examples == 2
    assert small.declaration.lr == 0.1
    assert small.declaration.mean == (0.3053,)
    truth = load_file(run.truth / "client-2" / "round-0001.safetensors")
    assert truth["images"].shape == (2, 1, 32, 32)
    later = observations[5]
    assert (small.declaration.lr, later.declaration.lr) == (0.1, 0.05)
    assert later.declaration.augmentation == ("random-crop",)
    assert later.declaration.dropout == 0.2
    assert_computed_alike(run, small)
    assert_computed_alike(run, later)
    # What the client keeps for itself is nowhere in what the server wrote down.
    pixels = truth["images"].numpy().tobytes()
    for file in run.captures.rglob("*.safetensors"):
        assert pixels[:512] not in file.read_bytes()
    assert (run.models / "final.safetensors").is_file()
    assert (run.models / "best.safetensors").is_file()


def test_ctrl_c_leaves_no_process_and_resume_goes_on(tmp_path: Path) -> None:
    write_config(tmp_path, rounds=500)
    command = Command(tmp_path, "run", "quick.yaml")
    run = RunDirectory(tmp_path / "runs" / "quick")
    wait_for_round(run, 1, command)
    command.process.send_signal(signal.SIGINT)
    code, errors = command.finish(60)
    assert code == 130, errors
    assert "Traceback" not in errors
    assert command.nothing_is_left()
    assert run.state().status == "interrupted"
    done = max(row.round for row in run.metrics())
    write_config(tmp_path, rounds=done + 1)
    code, errors = Command(tmp_path, "run", "quick.yaml", "--resume").finish()
    assert code == 0, errors
    assert [row.round for row in run.metrics()] == list(range(done + 2))
    assert (run.models / "final.safetensors").is_file()


def test_a_killed_launcher_takes_every_process_with_it(tmp_path: Path) -> None:
    write_config(tmp_path, rounds=500)
    command = Command(tmp_path, "run", "quick.yaml")
    wait_for_round(RunDirectory(tmp_path / "runs" / "quick"), 1, command)
    assert len(command.descendants()) > 5
    command.process.kill()
    command.finish()
    assert command.nothing_is_left(30)


def test_a_client_that_fails_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    write_config(tmp_path, rounds=2)
    command = Command(tmp_path, "run", "quick.yaml", "--device", "cpu", "--device", "cuda:9")
    code, errors = command.finish()
    assert code == 1
    # One line, and no traceback in front of it: that is in the log that the line names.
    (said,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "client-1" in said
    assert "cuda:9" in said
    assert said.endswith("(traceback: runs/quick/logs/client-1.log)")
    assert "Traceback" not in errors
    assert "Traceback" in (tmp_path / "runs/quick/logs/client-1.log").read_text()
    assert command.nothing_is_left()
    state = json.loads((tmp_path / "runs" / "quick" / "run.json").read_text())
    assert state["status"] == "failed"
