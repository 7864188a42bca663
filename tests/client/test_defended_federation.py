"""The real ClientApp with defenses, under the real server, without processes."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file

import bract.client.app as client_app
from bract import ObservationStore
from bract.client.defenses import AdaDefense, ProtectContext
from bract.config import build_config, dump_config, load_config
from bract.rundir import RunDirectory
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)


def configured(defenses: Any, **changes: Any) -> Any:
    return build_config(
        {
            "clients": 2,
            "rounds": 2,
            "seed": 3,
            "data": {"image_size": 16, "validation": 0.2},
            "model": {"name": "lenet-strided-bn", "activation": "relu"},
            "training": {"lr": 0.1, "local_steps": 3},
            "defenses": defenses,
            **changes,
        }
    )


def seed_file(folder: Any, seed: Any) -> Any:
    path = folder / f"seed-{seed}"
    path.write_text(f"{2**200 + seed}\n")
    path.chmod(0o600)
    return path


def federate(folder: Any, defenses: Any, node: Any = None, **changes: Any) -> Any:
    config = configured(defenses, **changes)
    run = RunDirectory(folder / "run")
    run.create(config)
    nodes = [
        {
            "partition-id": i,
            "private-seed-file": str(seed_file(folder, i)),
            "state-dir": str(folder / f"state-{i}"),
            "truth-dir": str(folder / f"truth-{i}"),
            **(node or {}),
        }
        for i in range(config.clients)
    ]
    grid = LoopbackGrid(client_app.app, nodes, {"federation": dump_config(config)})
    Federation(config, run).train(grid)
    return run, grid


def updates(run: Any) -> Any:
    return {o.key: o.update for o in ObservationStore(run.captures)}


def state_of(folder: Any, client: Any) -> Any:
    return load_file(folder / f"state-{client}" / f"federation-client-{client}.safetensors")


@pytest.mark.thorough
def test_the_server_receives_defended_updates_and_is_told_the_public_part(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    bare, _ = federate(tmp_path / "plain", [])
    run, _ = federate(tmp_path, [{"name": "adadefense", "alpha": 0.5}])
    first = "round-0001/client-0"
    expected = AdaDefense(alpha=0.5).protect(updates(bare)[first], {}, ProtectContext())
    for name, value in updates(run)[first].items():
        torch.testing.assert_close(value, expected[name])
    (observation,) = [o for o in ObservationStore(run.captures) if o.key == first]
    assert observation.declaration.defenses[0]["name"] == "adadefense"
    assert observation.declaration.defenses[0]["alpha"] == 0.5
    assert observation.declaration.defenses[0]["beta2"] == 0.999
    assert run.metrics()[-1].clients["client-0"].defense_seconds > 0
    # What the defense measured on the private update stays with the client.
    assert run.metrics()[-1].clients["client-0"].other == {}
    assert "cosine" in (tmp_path / "truth-0" / "round-0002.defense.json").read_text()


def test_a_client_that_was_killed_and_restarted_goes_on_with_its_moments(tmp_path: Path) -> None:
    whole, _ = federate(tmp_path / "whole", [{"name": "adadefense"}])
    # The same federation, but every process is new after round 1: only the folders are left.
    federate(tmp_path / "cut", [{"name": "adadefense"}], rounds=1)
    assert int(state_of(tmp_path / "cut", 1)["adadefense.round"]) == 1
    resumed, grid = federate(tmp_path / "cut", [{"name": "adadefense"}])
    assert not any(context.state for context in grid.contexts.values())
    assert int(state_of(tmp_path / "cut", 1)["adadefense.round"]) == 2
    for key, update in updates(whole).items():
        for name, value in update.items():
            torch.testing.assert_close(updates(resumed)[key][name], value)
    # Without the state, the second update would be another one.
    shutil.rmtree(tmp_path / "cut")
    federate(tmp_path / "cut", [{"name": "adadefense"}], rounds=1)
    for i in range(2):
        shutil.rmtree(tmp_path / "cut" / f"state-{i}")
    lost, _ = federate(tmp_path / "cut", [{"name": "adadefense"}])
    key = "round-0002/client-0"
    assert not torch.allclose(
        updates(lost)[key]["features.0.weight"], updates(whole)[key]["features.0.weight"]
    )


@pytest.mark.parametrize("algorithm", ["fedavg", "fedsgd"])
def test_no_byte_of_key_or_lock_is_in_what_the_server_holds(tmp_path: Path, algorithm: Any) -> None:
    steps = 3 if algorithm == "fedavg" else None
    run, grid = federate(
        tmp_path, ["fedkl"], training={"algorithm": algorithm, "lr": 0.1, "local_steps": steps}
    )
    held = b"".join(p.read_bytes() for p in run.root.rglob("*") if p.is_file())
    sent = b"".join(
        array.data
        for message in grid.log
        for record in message.content.array_records.values()
        for array in record.values()
    )
    assert len(held) > 50_000
    for client in range(2):
        state = state_of(tmp_path, client)
        secrets = {n: v for n, v in state.items() if n.startswith("fedkl.") and v.numel() > 1}
        assert len(secrets) == 5
        for name, value in secrets.items():
            for piece in (value.flatten()[:4], value.flatten()[-4:]):
                assert piece.numpy().tobytes() not in held, name
                assert piece.numpy().tobytes() not in sent, name
    assert not torch.equal(state_of(tmp_path, 0)["fedkl.key"], state_of(tmp_path, 1)["fedkl.key"])
    for observation in ObservationStore(run.captures):
        assert "features.1.weight" not in observation.update
        assert "features.1.running_mean" in observation.buffers


def test_locks_are_trained_at_their_clients_and_accuracy_is_told_with_and_without_the_key(
    tmp_path: Path,
) -> None:
    federate(tmp_path, ["fedkl"], rounds=1)
    first = state_of(tmp_path, 0)
    run, _ = federate(tmp_path, ["fedkl"])
    second = state_of(tmp_path, 0)
    weight = "fedkl.features.1/scale.weight"
    assert not torch.equal(first[weight], second[weight])
    assert torch.equal(first["fedkl.key"], second["fedkl.key"])
    metrics = run.metrics()[-1].clients["client-0"]
    assert metrics.validation_accuracy is not None
    assert metrics.random_key_accuracy is not None


def test_every_defense_runs_in_the_real_client(tmp_path: Path) -> None:
    entries = [
        {"name": "fedkl", "key_length": 16},
        {"name": "precode", "latent": 8},
        "soteria",
        "guardian",
        "pruning",
        {"name": "noise", "std": 1e-3},
    ]
    run, _ = federate(tmp_path, entries)
    names = [d["name"] for o in ObservationStore(run.captures) for d in o.declaration.defenses[:6]]
    assert names[:6] == ["fedkl", "precode", "soteria", "guardian", "pruning", "noise"]


def test_the_sites_policy_stops_the_run_before_training(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("require: [{name: noise, minimum: {std: 0.01}}]")
    node = {"policy": str(policy)}
    with refused("run-failed", "client-0", "policy"):
        federate(tmp_path, ["adadefense"], node)
    # That they failed is listed, and no upload.
    assert [p.name for p in (tmp_path / "run" / "captures").glob("*")] == ["left.jsonl"]
    federate(tmp_path, [{"name": "noise", "std": 0.01}], node, rounds=1)


def test_a_broken_defense_fails_the_round_and_nothing_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(AdaDefense, "protect", lambda self, update, *_: {})
    with refused("run-failed", "client-0"):
        federate(tmp_path, ["adadefense"])
    assert "defense 'adadefense' changed the names" in caplog.text
    # That they failed is listed, and no upload.
    assert [p.name for p in (tmp_path / "run" / "captures").glob("*")] == ["left.jsonl"]


def test_a_server_that_scales_defended_updates_must_be_told_so(tmp_path: Path) -> None:
    entry = {"name": "adadefense", "alpha_at": "server", "alpha": 0.02}
    with refused("run-failed", "strategy.server_lr", "0.02"):
        federate(tmp_path / "a", [entry])
    at_server, _ = federate(tmp_path / "b", [entry], strategy={"server_lr": 0.02})
    at_client, _ = federate(tmp_path / "c", [{"name": "adadefense", "alpha": 0.02}])
    models = [load_file(r.models / "final.safetensors") for r in (at_server, at_client)]
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=1e-3, atol=1e-4)


def test_defenses_are_written_as_names_or_with_hyper_parameters(tmp_path: Path) -> None:
    config = configured(["guardian", {"name": "pruning", "ratio": 0.5}])
    assert config.defenses == [{"name": "guardian"}, {"name": "pruning", "ratio": 0.5}]
    (tmp_path / "c.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "c.yaml") == config
    assert configured("[{name: noise, std: 0.1}]").defenses == [{"name": "noise", "std": 0.1}]
    with refused("config-value", "defenses"):
        configured([{"std": 0.1}])


def test_the_arrays_of_a_clients_update_are_listed_as_the_models(tmp_path: Path) -> None:
    """The model was sent packed, and updates come as they are."""
    run, _ = federate(tmp_path, [{"name": "noise", "std": 0.01}], rounds=1)
    lines = [json.loads(line) for line in (run.captures / "left.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["message"].startswith("train")]
    arrays = [t for line in trained for t in line.get("things", ()) if t["source"] == "arrays"]
    assert arrays and all(t.get("model") and not t.get("flags") for t in arrays)
