"""What every Flower from 1.21 on must do: run by `make flower` in an environment of each."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flwr
import numpy as np
import older_app
import pytest
import torch
from click.testing import CliRunner
from command_lines import GROUP
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from older_app import CLIENTS, Net, digits, step
from safetensors.torch import load_file

import bract
from bract import DefenseMod, HonestButCurious, ObservationStore, keep
from bract.client import EncryptedClientApp
from bract.server.loopback import LoopbackGrid
from bract.strategies import Encrypted


def grid_of(app: ClientApp, **options: Any) -> LoopbackGrid:
    random.seed(0)  # Flower shuffles the nodes, and with them the order of floating point sums
    nodes = [{"partition-id": i, "num-partitions": CLIENTS, **options} for i in range(CLIENTS)]
    return LoopbackGrid(app, nodes, run_id=5)


def run_server(app: ServerApp, grid: LoopbackGrid) -> None:
    app(grid, Context(5, 0, {}, RecordDict(), {}))


def client_app(truth: Path | None = None, *, kind: str = "train", mods: Any = ()) -> ClientApp:
    """A client of the Message API."""
    app: ClientApp = answering(ClientApp(mods=list(mods)), truth, kind)
    return app


def answering(app: Any, truth: Path | None = None, kind: str = "train") -> Any:
    action = kind.partition(".")[2]

    def train(message: Message, context: Context) -> Message:
        net, loader = Net(), digits(int(context.node_config["partition-id"]))
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        step(net, loader if truth is None else keep(loader, message, context, folder=truth))
        content: dict[str, Any] = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=message)

    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 20, "accuracy": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    (app.train(action) if action else app.train())(train)
    app.evaluate()(evaluate)
    return app


def initial() -> ArrayRecord:
    torch.manual_seed(3)
    return ArrayRecord(Net().state_dict())


def plain() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)


def trained(strategy: Any, app: ClientApp, rounds: int = 2) -> dict[str, np.ndarray[Any, Any]]:
    result = strategy.start(grid_of(app), initial(), num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}


def bract_says(*words: object) -> Any:
    return CliRunner().invoke(GROUP, [str(word) for word in words])


def headline_of(folder: Path) -> Any:
    """Describe, audit and report round 1, and return the page's headline."""
    for words in (
        ("describe", folder, "--model", "older_app:Net", "--set", "training.lr=0.1"),
        ("audit", folder, "--model", "older_app:Net", "--rounds", "1", "--budget", "20s", "--yes"),
        ("report", folder),
    ):
        done = bract_says(*words)
        assert done.exit_code == 0, (words, done.output, done.exception)
    page = folder / "captures" / "latest" / "report.json"
    found = json.loads(page.read_text())
    assert {o["check"]["state"] for o in found["observations"]} == {"confirmed"}
    return found["verdict"]["headline"]


def test_a_wrapped_strategy_ends_with_the_same_bits_and_is_captured(tmp_path: Path) -> None:
    app = client_app(tmp_path / "truth")
    bare = trained(plain(), app)
    wrapped = trained(HonestButCurious(plain(), store=tmp_path / "captures"), app)
    assert bare.keys() == wrapped.keys()
    assert all(bare[name].tobytes() == wrapped[name].tobytes() for name in bare)
    held = list(ObservationStore(tmp_path / "captures" / "5"))
    assert [(o.round, o.client) for o in held] == [
        (number, f"node-{node}") for number in (1, 2) for node in (1, 2)
    ]
    kept = load_file(tmp_path / "truth" / "5" / "node-1" / "round-0001.safetensors")
    torch.testing.assert_close(kept["inputs"], next(iter(digits(0)))[0])


def test_a_mod_defends_and_a_client_app_encrypts(tmp_path: Path) -> None:
    hook = HonestButCurious(plain(), store=tmp_path / "captures")
    noisy = trained(hook, client_app(mods=[DefenseMod("noise", std=0.01)]), rounds=1)
    bare = trained(plain(), client_app(), rounds=1)
    change = np.concatenate([(noisy[name] - bare[name]).ravel() for name in bare])
    assert 0.004 < change.std() < 0.012
    defenses = [o.declaration.defenses for o in ObservationStore(tmp_path / "captures" / "5")]
    assert [entry["name"] for entry in defenses[0]] == ["noise"]


def test_an_update_leaves_encrypted(tmp_path: Path) -> None:
    app: ClientApp = answering(EncryptedClientApp(clients=3))
    assert bract_says("keygen", tmp_path / "keys", "--clients", 3).exit_code == 0
    key = tmp_path / "keys" / "private.pem"
    nodes: list[dict[str, Any]] = [
        {"partition-id": i, "paillier-key": str(key), "state-dir": str(tmp_path / f"state-{i}")}
        for i in range(3)
    ]
    hook = HonestButCurious(Encrypted(FedAvg(), clients=3), store=tmp_path / "captures")
    hook.start(LoopbackGrid(app, nodes, run_id=5), initial(), num_rounds=1)
    held = list(ObservationStore(tmp_path / "captures" / "5"))
    assert len(held) == 3 and all(o.ciphertexts and not o.update for o in held)


def test_a_loop_of_ones_own_is_captured_and_what_is_not_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = grid_of(client_app(kind="train.fit"))
    with bract.listen(grid, store=tmp_path / "captures") as heard:
        for number in (1, 2):
            content: dict[str, Any] = {
                "arrays": initial(),
                "config": ConfigRecord({"lr": 0.1, "server-round": number}),
            }
            for node in heard.get_node_ids():
                heard.send_and_receive([Message(RecordDict(dict(content)), node, "train.fit")])
    held = list(ObservationStore(tmp_path / "captures" / "5"))
    assert [(o.round, o.client) for o in held] == [
        (number, f"node-{node}") for number in (1, 2) for node in (1, 2)
    ]
    assert not [r for r in caplog.records if "not captured" in r.message]


@pytest.fixture
def older(tmp_path: Path) -> Iterator[Path]:
    """Captures and truth of an app of the older API that ran two rounds."""
    grid = grid_of(older_app.client_app(tmp_path / "truth"))
    run_server(older_app.server_app(lambda s: HonestButCurious(s, tmp_path / "captures")), grid)
    yield tmp_path


def test_an_app_of_the_older_api_is_captured_and_kept(older: Path) -> None:
    held = list(ObservationStore(older / "captures" / "5"))
    assert [(o.round, o.client) for o in held] == [
        (number, f"node-{node}") for number in (1, 2) for node in (1, 2)
    ]
    assert held[0].declaration.num_examples == 1
    assert list(held[0].update) == [str(n) for n in range(len(Net().state_dict()))]
    kept = load_file(older / "truth" / "5" / "node-2" / "round-0002.safetensors")
    torch.testing.assert_close(kept["inputs"], next(iter(digits(1)))[0])


def wait_until_open(port: int, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert server.poll() is None, "the server ended before it listened"
        assert time.monotonic() < end, "the server does not listen"
        time.sleep(0.1)


@pytest.mark.processes
@pytest.mark.skipif(
    not flwr.__version__.startswith("1.41."), reason="shown with the Flower of the other tests"
)
def test_a_server_that_a_function_starts_on_a_port_is_captured(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    running: list[subprocess.Popen[bytes]] = []

    def start(*role: str) -> None:
        line = [sys.executable, older_app.__file__, *role]
        running.append(subprocess.Popen(line, stderr=subprocess.DEVNULL))

    try:
        start("server", address, str(tmp_path))
        # A client of this transport tries once: one that comes before the server ends, and the
        # server waits for it without end.
        wait_until_open(port, running[0])
        for number in range(CLIENTS):
            start("client", address, str(number))
        assert [process.wait(120) for process in running] == [0, 0, 0]
    finally:
        for process in running:
            process.kill()
    held = list(ObservationStore(tmp_path))
    assert [o.round for o in held] == [1, 1, 2, 2]
    assert {o.declaration.num_examples for o in held} == {1}


def test_an_older_strategy_ends_with_the_same_bits(tmp_path: Path) -> None:
    ends = []
    for wrap in (lambda s: s, lambda s: HonestButCurious(s, tmp_path / "captures")):
        older_app.SEEN.clear()
        run_server(older_app.server_app(wrap), grid_of(older_app.client_app(None)))
        ends.append([array.tobytes() for array in older_app.SEEN])
    assert ends[0] == ends[1] and ends[0]


def test_a_mod_defends_a_client_of_the_older_api(tmp_path: Path) -> None:
    results = []
    for mods in ([], [DefenseMod("noise", std=0.01)]):
        older_app.SEEN.clear()
        run_server(older_app.server_app(lambda s: s), grid_of(older_app.client_app(None, mods)))
        results.append(np.concatenate([array.ravel() for array in older_app.SEEN]))
    change = results[1] - results[0]
    assert 0.004 < change.std() < 0.03


def test_what_is_no_strategy_is_refused_when_it_is_wrapped(tmp_path: Path) -> None:
    for wrong in (FedAvg, "FedAvg", grid_of(client_app())):
        with pytest.raises(bract.errors.BractError) as caught:
            HonestButCurious(wrong, tmp_path)
        assert caught.value.code == "config-value"


def test_a_hook_that_nothing_uses_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        hook = HonestButCurious(plain(), tmp_path)
        del hook
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert [r for r in caplog.records if "bract.listen" in r.getMessage()]


def test_an_upload_of_either_api_gives_its_image_away(older: Path, tmp_path: Path) -> None:
    hook = HonestButCurious(plain(), store=tmp_path / "new" / "captures")
    trained(hook, client_app(tmp_path / "new" / "truth"), rounds=1)
    for folder in (older, tmp_path / "new"):
        headline = headline_of(folder)
        assert headline["images"] == 2 and headline["psnr"]["mean"] > 60


@pytest.mark.processes
def test_without_any_private_name_of_flower_all_of_this_works(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider",
         "-p", "without_private_names", __file__, "-m", "not processes",
         "--basetemp", str(tmp_path / "hidden")],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.thorough
def test_the_demo_runs_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bract.runtime.rules.has_runtime", lambda: False)
    done = bract_says("demo", "--quick", "--runs", tmp_path)
    assert done.exit_code == 0, (done.output, done.exception)
    assert (tmp_path / "demo" / "report.html").is_file()


def test_an_argument_keeps_its_help_and_a_wrong_command_has_one_suggestion() -> None:
    assert "Run directory" in bract_says("audit", "--help").output
    assert bract_says("audit").exit_code == 2
    wrong = bract_says("auditt")
    assert wrong.exit_code == 2 and wrong.output.count("Did you mean") <= 1
