"""The benchmark of what defenses cost: its loop is the real federation's, its figures are right."""

import logging
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bract.client.app as client_app
from bract.client.defenses import ProtectContext
from bract.config import build_config, dump_config
from bract.disk import write_text
from bract.rundir import RunDirectory
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid
from experiments import defended_accuracy as benchmark
from experiments.harness.command import Finished
from experiments.harness.federation import Clients


@pytest.mark.parametrize(
    ("model", "defenses"),
    [
        ("lenet-strided", [{"name": "adadefense"}, {"name": "noise", "std": 1e-3}]),
        ("lenet-strided-bn", [{"name": "fedkl"}]),
        ("lenet-strided", [{"name": "precode"}]),
    ],
)
def test_the_loop_trains_as_the_real_client_and_server_do(
    model: Any, defenses: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)

    def secrets(clients: Any, client: Any) -> Any:
        return ProtectContext(round=clients.number, seed=2**200 + client)

    monkeypatch.setattr(Clients, "context", secrets)
    config = build_config(
        {
            "seed": 3,
            "rounds": 2,
            "model": {"name": model},
            "training": {
                "local_steps": 2,
                "lr": 0.05,
                "lr_schedule": {"kind": "exponential", "factor": 0.5},
                "augmentation": ["random-crop"],
                "dropout": 0.3,
            },
            "defenses": defenses,
            "capture": {"enabled": False},
        }
    )
    nodes: Any = [
        {
            "partition-id": i,
            "private-seed-file": str(
                write_text(tmp_path / f"seed-{i}", str(2**200 + i), private=True)
            ),
            "state-dir": str(tmp_path),
        }
        for i in range(config.clients)
    ]
    run = RunDirectory(tmp_path / "run")
    run.create(config)
    grid = LoopbackGrid(client_app.app, nodes, {"federation": dump_config(config)})
    Federation(config, run).train(grid)
    wanted = load_file(run.models / "final.safetensors")

    clients = Clients(config)
    clients.round()
    clients.round()
    assert set(clients.arrays) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(clients.arrays[name], value, rtol=1e-5, atol=1e-6)


def found(hits: Any) -> Any:
    hits = [float(hit) for hit in hits]
    figures = dict.fromkeys(("norm_first", "norm_later", "cosine_first", "cosine_later"), 1.0)
    return {"accuracy": sum(hits) / len(hits), "hits": hits, "random_key": None, **figures}


def test_points_are_paired_by_seed_with_a_t_interval_over_seeds_and_one_over_digits() -> None:
    # Three seeds, four digits: -25, 0 and -50 points.
    base = [found(h) for h in ([1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1])]
    own = [found(h) for h in ([1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0])]
    row = benchmark.summary(own, base)
    assert row["points"] == pytest.approx(-25.0)
    # The standard deviation is 25, t(0.975, 2) is 4.302653.
    assert row["points_ci95"] == pytest.approx(4.302653 * 25.0 / 3**0.5, rel=1e-6)
    # Means over seeds: 0, 0, -2/3, -1/3; standard deviation 0.3191424, t(0.975, 3) 3.182446.
    assert row["points_images_ci95"] == pytest.approx(100 * 3.182446 * 0.3191424 / 2, rel=1e-5)
    assert not row["sees_a_point"]
    assert row["accuracy"] == pytest.approx(0.5)
    assert row["at_chance"] == 0
    assert benchmark.summary([found([0, 0, 0, 0]), own[0]], base[:2])["at_chance"] == 1


def test_rows_hold_the_seeds_that_both_have_and_a_file_of_other_settings_is_left(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = benchmark.Setting
    done = {
        setting("lenet", "sigmoid", defense, seed): found([1, 0])
        for defense, seed in (("none", 0), ("none", 1), ("pruning", 1), ("pruning", 2))
    }
    rows = benchmark.rows_of(done)
    assert [(row["defense"], row["seeds"]) for row in rows] == [("none", 2), ("pruning", 1)]
    finished = Finished(tmp_path / "rows")
    for each, figures in done.items():
        finished.add(benchmark.key_of(each, choose=False), figures)
    again = Finished(finished.path)
    assert list(benchmark.read(again)) == list(done)
    assert benchmark.read(again, choose=True) == {}
    monkeypatch.setitem(benchmark.SETTINGS["lenet", "sigmoid"], "rounds", 7)
    assert benchmark.read(again) == {}


def test_fedkl_is_run_with_a_normalisation_and_the_others_without() -> None:
    counts = {("lenet", "sigmoid"): 2, ("lenet-bn", "sigmoid"): 1}
    made = benchmark.plan(counts, ["fedkl", "noise 0.01"])
    assert [(s.model, s.defense, s.seed) for s in made] == [
        ("lenet", "none", 0),
        ("lenet", "noise 0.01", 0),
        ("lenet", "none", 1),
        ("lenet", "noise 0.01", 1),
        ("lenet-bn", "none", 0),
        ("lenet-bn", "fedkl", 0),
    ]
