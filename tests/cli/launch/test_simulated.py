"""What `bract run --simulate` refuses, and how it hands the clients to Flower's engine."""

from __future__ import annotations

import importlib.util
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from environments import ROOT
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from refusals import refused

from bract.cli import main
from bract.cli.launch.launcher import Launch, LocalFederation
from bract.cli.launch.processes import Processes
from bract.cli.launch.simulated import SimulatedFederation, check_simulable, clients_at_once
from bract.config import FederationConfig, build_config
from bract.errors import BractError
from bract.installed import TrustedReference, import_reference
from bract.rundir import RunDirectory
from bract.runtime import simulation, sockets
from bract.runtime.pinned import APP
from bract.runtime.private_ray import SESSION_BYTES
from bract.runtime.simulation import SITES, engine_environment
from bract.server.loopback import LoopbackGrid
from bract.strategies import FedAvg

app = ClientApp()


@app.train()
def refuse(message: Message, context: Context) -> Message:
    raise BractError("client-0: holds no examples", code="usage")


def run(folder: Path, *options: str, **config: Any) -> None:
    """Call ``bract run`` on a configuration."""
    (folder / "f.yaml").write_text(json.dumps({"name": "refused", **config}))
    words = ["run", str(folder / "f.yaml"), "--runs", str(folder / "runs"), "--cold", *options]
    main.app(words, standalone_mode=False)


@pytest.mark.parametrize(
    "option",
    [
        ("--superlink", "fl.example.org:8000"),
        ("--superlink", "a/8000.sock"),
        ("--root-certificates", "ca.pem"),
        ("--insecure",),
        ("--remote",),
        ("--profile",),
    ],
)
def test_what_names_a_superlink_or_processes_is_refused(
    option: tuple[str, ...], tmp_path: Path
) -> None:
    with refused("usage", option[0], "--simulate"):
        run(tmp_path, "--simulate", *option)
    assert not (tmp_path / "runs").exists()


def test_at_once_without_a_simulation_is_refused(tmp_path: Path) -> None:
    with refused("usage", "--at-once", "--simulate"):
        run(tmp_path, "--at-once", "2")


def test_without_ray_the_extra_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else find(name)
    )
    with refused("package-missing", "--simulate"):
        run(tmp_path, "--simulate")
    assert not (tmp_path / "runs").exists()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any(entry.startswith("flwr[simulation]") for entry in extras["simulation"])


@pytest.fixture
def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for an installed Ray."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find("json" if name == "ray" else name)
    )


@pytest.mark.usefixtures("with_ray")
def test_sites_on_other_machines_are_refused(tmp_path: Path) -> None:
    deployment = {"server": "fl.example.org", "sites": ["north", "south"]}
    with refused("config-conflict", "deployment", "north", "south", "--simulate"):
        run(tmp_path, "--simulate", clients=2, deployment=deployment)
    assert not (tmp_path / "runs").exists()
    check_simulable(build_config({"clients": 2}))


@pytest.mark.usefixtures("with_ray")
def test_more_clients_than_images_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with refused("data-partition", 2000, 1437):
        run(tmp_path, "--simulate", clients=2000)
    assert not (tmp_path / "runs").exists()


def engine(tmp_path: Path, config: FederationConfig, **launch: Any) -> SimulatedFederation:
    directory = RunDirectory(tmp_path / config.name)
    directory.create(config)
    return SimulatedFederation(config, directory, Launch(fork_server=False, **launch))


def test_a_simulated_client_has_the_node_configuration_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config({"clients": 3, "truth": True})
    started: list[Any] = []

    def start(self: Any, name: str, command: Any, private: Any = None) -> None:
        started.append((command, dict(private)))
        if SITES in private:
            started.append(json.loads(Path(private[SITES]).read_text()))
            assert Path(private[SITES]).stat().st_mode & 0o777 == 0o600

    monkeypatch.setattr(Processes, "start", start)
    monkeypatch.setattr(LocalFederation, "_wait_until_healthy", lambda *_: None)
    federation = engine(tmp_path, config, private_seed=7 << 80, devices=["cpu"], at_once=5)
    address = federation._start_superlink()
    federation._start_supernodes(address)
    ((command, _), sites) = started
    assert "--simulation" in command
    assert [site["partition-id"] for site in sites] == [0, 1, 2]
    assert sites == [federation._node_config(i, []) for i in range(3)]
    assert sites[1]["state-dir"].endswith("/state/client-1")
    assert sites[1]["truth-dir"].endswith("/truth/client-1")
    assert "device" in sites[0] and "device" not in sites[1]
    seeds = {Path(site["private-seed-file"]).read_text() for site in sites}
    assert len(seeds) == 3
    asked = federation._engine()
    assert (asked["num_supernodes"], asked["init_args_num_cpus"]) == (3, 5)
    federation.processes.end()


def test_a_core_is_one_client_at_a_time_and_no_round_has_idle_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)

    def at_once(clients: int, fraction: float = 1.0) -> int:
        strategy = {"name": "fedavg", "fraction": fraction}
        return clients_at_once(build_config({"clients": clients, "strategy": strategy}))

    assert at_once(1000, 0.02) == 8
    assert at_once(1000, 0.004) == 4
    # With two threads each, as three processes would have them.
    assert at_once(3) == 3
    assert at_once(1) == 1


def test_the_engine_asks_for_a_secret_of_its_own_on_the_loopback_interface(tmp_path: Path) -> None:
    one, two = (engine_environment(tmp_path, tmp_path / "sites.json", "a.b:c") for _ in range(2))
    assert one["RAY_AUTH_MODE"] == "token"
    assert len(one["RAY_AUTH_TOKEN"]) == 64 and one["RAY_AUTH_TOKEN"] != two["RAY_AUTH_TOKEN"]
    assert one["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert one["RAY_TMPDIR"] == str(tmp_path)
    assert one[APP] == "a.b:c"


def test_the_sockets_of_the_engine_fit_below_the_folder() -> None:
    session = "/ray/session_2026-11-22_14-49-24_423896_4194304/sockets/plasma_store"
    processes = Processes(None, threads=1, fork_server=False, simulate=True)
    try:
        assert len(f"{processes.folder}{session}") <= sockets.LONGEST_PATH
    finally:
        processes.end()
    assert len(session) <= SESSION_BYTES


def test_what_an_app_raises_in_the_engine_reaches_the_strategy_as_from_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sites.json").write_text('[{"partition-id": 0, "device": "cpu"}]')
    monkeypatch.setenv(SITES, str(tmp_path / "sites.json"))
    monkeypatch.setenv(APP, f"{__name__}:app")
    simulation._sites.cache_clear()
    simulated = import_reference(TrustedReference(simulation.SIMULATED_APP), what="app")
    grid = LoopbackGrid(app, [{}])
    message = Message(RecordDict(), 1, "train")
    (message_id,) = grid.push_messages([message])
    (expected,) = grid.pull_messages([message_id])
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    answer = simulated(message, context)
    assert context.node_config == {"partition-id": 0, "device": "cpu"}
    assert isinstance(answer.error, Error)
    assert (answer.error.code, answer.error.reason) == (
        expected.error.code,
        expected.error.reason,
    )
    failure = FedAvg().failure(1, str(answer.error.reason))
    assert (failure.client, failure.reason) == ("client-0", "holds no examples")
    assert "Traceback" in capsys.readouterr().err
