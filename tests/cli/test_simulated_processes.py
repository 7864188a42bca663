"""Flower's simulation engine against real processes: the same numbers, the same endings."""

from __future__ import annotations

import importlib.util
import ipaddress
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from test_processes import Command, wait_for_round

from bract import ObservationStore
from bract.rundir import RunDirectory

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Flower's simulation engine needs ray"
    ),
]

NOISY = """
name: noisy
truth: true
clients: 3
rounds: {rounds}
model: {{name: lenet-bn, activation: relu}}
training: {{lr: 0.1, local_steps: 2}}
data: {{image_size: 16, partition: {{kind: sizes, sizes: [120, 60, 8]}}}}
defenses: [adadefense, {{name: noise, std: 0.001, clip: 1.0}}]
"""


def write_config(folder: Path, rounds: int) -> None:
    (folder / "noisy.yaml").write_text(NOISY.format(rounds=rounds))


def comparable(run: RunDirectory) -> list[Any]:
    """Return the rows of the metrics without what a clock said."""

    def timeless(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {k: v for k, v in value.items() if k != "time" and not k.endswith("seconds")}
        return {k: timeless(v) for k, v in kept.items()}

    return [timeless(row.to_dict()) for row in run.metrics()]


def captured(run: RunDirectory) -> dict[str, torch.Tensor]:
    """Return every tensor of the captures, the truth and the defenses' state, by its place."""
    found = {}
    for seen in ObservationStore(run.captures):
        for group in ("parameters", "buffers", "update", "returned_buffers"):
            for name, value in getattr(seen, group).items():
                found[f"{seen.key}/{group}/{name}"] = value
    for folder in (run.truth, run.root / "state", run.models):
        for file in folder.rglob("*.safetensors"):
            for name, value in load_file(file).items():
                found[f"{file.relative_to(run.root)}/{name}"] = value
    return found


def test_the_same_seeds_give_the_metrics_captures_and_truth_of_processes(tmp_path: Path) -> None:
    write_config(tmp_path, rounds=2)
    (tmp_path / "seed").write_text(f"{secrets.randbits(256)}\n")
    (tmp_path / "seed").chmod(0o600)
    runs = {}
    for name, how in (("processes", ()), ("engine", ("--simulate",))):
        words = ("run", "noisy.yaml", "--runs", name, "--private-seed-file", "seed", *how)
        command = Command(tmp_path, *words)
        code, errors = command.finish()
        assert code == 0, errors
        assert command.nothing_is_left()
        runs[name] = RunDirectory.open(tmp_path / name / "noisy")
    rows = comparable(runs["engine"])
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert set(rows[2]["clients"]) == {"client-0", "client-1", "client-2"}
    assert rows == comparable(runs["processes"])
    theirs, ours = captured(runs["processes"]), captured(runs["engine"])
    # Both rounds of each client, what each trained on, and the moments that each keeps.
    updates = [key for key in ours if "/update/" in key]
    assert {key.partition("/update/")[0] for key in updates} == {
        f"round-000{r}/client-{c}" for r in (1, 2) for c in range(3)
    }
    assert "truth/client-1/round-0002.safetensors/images" in ours
    assert ours["state/client-2/noisy-client-2.safetensors/adadefense.round"] == 2
    assert ours.keys() == theirs.keys()
    differing = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    assert differing == []


def test_ctrl_c_ends_the_engine_and_resume_goes_on(tmp_path: Path) -> None:
    write_config(tmp_path, rounds=500)
    command = Command(tmp_path, "run", "noisy.yaml", "--simulate")
    run = RunDirectory(tmp_path / "runs" / "noisy")
    wait_for_round(run, 2, command)
    engine = [p for p in command.descendants() if "ray" in " ".join(p.cmdline())]
    assert len(engine) > 3
    assert_only_this_machine_reaches(command.descendants())
    command.process.send_signal(signal.SIGINT)
    code, errors = command.finish(60)
    assert code == 130, errors
    assert "Traceback" not in errors
    assert "--simulate --resume" in errors
    assert command.nothing_is_left()
    assert run.state().status == "interrupted"
    done = max(row.round for row in run.metrics())
    write_config(tmp_path, rounds=done + 1)
    code, errors = Command(tmp_path, "run", "noisy.yaml", "--simulate", "--resume").finish()
    assert code == 0, errors
    assert [row.round for row in run.metrics()] == list(range(done + 2))
    # The moments of before, not those of a client that begins.
    state = captured(run)["state/client-1/noisy-client-1.safetensors/adadefense.round"]
    assert int(state) in (done + 1, done + 2)


def assert_only_this_machine_reaches(processes: list[psutil.Process]) -> None:
    addresses = set()
    for process in processes:
        for found in process.net_connections("inet"):
            if found.status == psutil.CONN_LISTEN:
                addresses.add(found.laddr.ip)
    assert addresses
    for address in addresses:
        parsed = ipaddress.ip_address(address)
        mapped = getattr(parsed, "ipv4_mapped", None)
        assert (mapped or parsed).is_loopback, addresses


def test_a_client_that_fails_in_the_engine_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    write_config(tmp_path, rounds=2)
    words = ("run", "noisy.yaml", "--simulate", "--device", "cpu", "--device", "cuda:9")
    command = Command(tmp_path, *words)
    code, errors = command.finish()
    assert code == 1
    (said,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "client-1: device 'cuda:9': this machine has" in said
    assert said.endswith("(traceback: runs/noisy/logs/superlink.log)")
    assert "Traceback" not in errors
    assert command.nothing_is_left()
    assert RunDirectory(tmp_path / "runs" / "noisy").state().status == "failed"


def test_a_process_that_is_killed_is_started_again_and_its_clients_come_back(
    tmp_path: Path,
) -> None:
    write_config(tmp_path, rounds=500)
    with (tmp_path / "noisy.yaml").open("a") as file:
        file.write("strategy: {name: fedavg, tolerate_failures: true}\n")
    command = Command(tmp_path, "run", "noisy.yaml", "--simulate")
    run = RunDirectory(tmp_path / "runs" / "noisy")
    wait_for_round(run, 2, command)
    found = [p for p in command.descendants() if "ray::ClientAppActor" in " ".join(p.cmdline())]
    found[0].kill()
    deadline = time.monotonic() + 120
    while not all_came_back(run):
        assert command.process.poll() is None, command.finish()
        assert time.monotonic() < deadline, comparable(run)[-1]
        time.sleep(0.2)
    command.process.send_signal(signal.SIGINT)
    assert command.finish(60)[0] == 130
    assert command.nothing_is_left()


def all_came_back(run: RunDirectory) -> bool:
    """Tell whether every client answered in a round after one in which some failed."""
    rows = run.metrics()
    failed = [row.round for row in rows if row.failures]
    return bool(failed) and any(len(row.clients) == 3 for row in rows if row.round > failed[-1])
