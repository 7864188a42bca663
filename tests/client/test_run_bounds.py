"""Bounds of a policy on local training, as it is carried out; what a run may learn around them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from bract.client import REFUSED, answered
from bract.client import app as client_app
from bract.client import training as local_training
from bract.config import build_config, dump_config
from bract.data import views
from bract.defenses import configured
from bract.installed import release
from bract.models import initialise
from bract.protocol import arrays
from bract.seeds import derive_seed
from bract.server import loopback


def built(**changes: Any) -> Any:
    section = {
        "name": "asked",
        "clients": 3,
        "rounds": 5,
        "data": {"image_size": 8, "validation": 0.1},
        "model": {"name": "linear"},
    }
    training = {"lr": 0.1, "local_steps": 1} | changes.pop("training", {})
    return build_config(section | {"training": training} | changes)


def answer(config: Any, policy: str, tmp_path: Path, kind: str = "train", **more: Any) -> Any:
    """Return a site's reply to its first message of a run."""
    (tmp_path / "policy.yaml").write_text(policy)
    node = {
        "partition-id": 0,
        "name": "site",
        "state-dir": str(tmp_path / "state"),
        "policy": str(tmp_path / "policy.yaml"),
        **more.pop("node", {}),
    }
    run = more.pop("run", 1)
    federation = {"federation": dump_config(config)}
    grid = loopback.LoopbackGrid(client_app.app, [node], federation, run_id=run)
    spec: Any = views.known_spec(config.data)
    model = initialise.initialise(
        configured.configured_model(config, spec),
        config.model.init,
        derive_seed(config.seed, "model"),
    )
    about = {"server-round": 1, "bract-version": release(), "bract-session": "x"}
    content = RecordDict(
        {
            "config": ConfigRecord(about | more.pop("about", {})),
            "arrays": arrays.to_arrays(model.state_dict()),
            **{name: arrays.to_arrays(held) for name, held in more.items()},
        }
    )
    (reply,) = grid.send_and_receive([grid.create_message(content, kind, 1, "")])
    return reply


COUNT = len(views.client_data(built(), 0).images)


@pytest.mark.parametrize(
    ("policy", "training", "met"),
    [
        ("local_epochs: {minimum: 2}", {"algorithm": "fedsgd"}, False),
        ("local_epochs: {minimum: 2}", {"local_steps": 1}, False),
        ("local_epochs: {minimum: 2}", {"local_steps": 3, "batch_size": COUNT - 1}, False),
        ("local_epochs: {minimum: 2}", {"local_steps": 4, "batch_size": COUNT - 1}, True),
        ("local_epochs: {minimum: 2}", {"local_steps": None, "local_epochs": 2}, True),
        ("local_epochs: {maximum: 2}", {"local_steps": 5, "batch_size": COUNT - 1}, False),
        ("local_epochs: {maximum: 2}", {"local_steps": 2, "batch_size": 1000}, True),
        (
            "batch_size: {minimum: 8}",
            {"local_steps": None, "local_epochs": 1, "batch_size": COUNT - 1},
            False,
        ),
        ("batch_size: {minimum: 8}", {"local_steps": 1, "batch_size": COUNT - 1}, True),
        ("batch_size: {minimum: 8}", {"local_epochs": 1, "batch_size": COUNT}, True),
        ("min_training_images: 50", {"batch_size": 1}, False),
        ("min_training_images: 50", {"batch_size": 10, "local_steps": 4}, False),
        ("min_training_images: 50", {"batch_size": 10, "local_steps": 5}, True),
        ("min_training_images: 50", {"algorithm": "fedsgd", "batch_size": 49}, False),
    ],
)
def test_bounds_hold_for_what_is_trained(
    policy: str, training: dict[str, Any], met: bool, tmp_path: Path
) -> None:
    reply = answer(built(training=training), policy, tmp_path)
    assert reply.has_content() is met
    if not met:
        reason = str(reply.error.reason)
        assert REFUSED in reason or policy.partition(":")[0] in reason
        assert str(COUNT) not in reason


@pytest.mark.parametrize(
    ("training", "passes", "examples"),
    [
        ({"algorithm": "fedsgd", "batch_size": 4}, (0, 1), 4),
        ({"local_steps": 3, "batch_size": 4}, (1, 1), 10),
        ({"local_steps": 4, "batch_size": 4}, (1, 2), 10),
        ({"local_steps": 2, "batch_size": 4}, (0, 1), 8),
        ({"local_steps": 2, "batch_size": 40}, (2, 2), 10),
        ({"local_steps": None, "local_epochs": 3, "batch_size": 4}, (3, 3), 10),
    ],
)
def test_passes_and_distinct_examples_of_ten(
    training: dict[str, Any], passes: tuple[int, int], examples: int
) -> None:
    section = built(training=training).training
    assert local_training.planned_passes(section, 10) == passes
    assert local_training.planned_examples(section, 10) == examples


def test_a_site_with_too_few_images_does_not_advertise_how_many(tmp_path: Path) -> None:
    config = built(training={"local_steps": 1000}, encryption="masks")
    reply = answer(config, "min_training_images: 5000", tmp_path, "query.advertise")
    assert reply.has_error()
    assert REFUSED in str(reply.error.reason)
    assert answer(
        config, "min_training_images: 1", tmp_path, "query.advertise", run=2
    ).has_content()


def test_fused_models_are_no_way_around_the_first_model(tmp_path: Path) -> None:
    config = built(strategy={"name": "fedboosting"})
    spec: Any = views.known_spec(config.data)
    crafted = {
        name: torch.full_like(value, 9.0)
        for name, value in configured.configured_model(config, spec).state_dict().items()
    }

    def scored() -> Any:
        fused = {"fused-0": crafted, "about": {"models": 1}}
        return answer(config, "initial_model: from-seed", tmp_path, "evaluate.fused", **fused)

    reply = scored()
    assert reply.has_error()
    assert "from-seed" in str(reply.error.reason)
    assert answer(config, "initial_model: from-seed", tmp_path).has_content()
    assert scored().has_content()


def test_an_update_that_fails_before_its_examples_are_counted_spends_epsilon(
    tmp_path: Path,
) -> None:
    pytest.importorskip("opacus")
    path = tmp_path / "own.csv"
    path.write_text("x,y\n" + "".join(f"{i % 7},{'ab'[i % 2]}\n" for i in range(60)))

    def asked(categories: list[str], run: int) -> Any:
        table = {
            "columns": [{"name": "x", "kind": "categorical", "categories": categories}],
            "target": {"name": "y", "categories": ["a", "b"]},
        }
        config = built(
            clients=1,
            data={"name": "csv", "input": "table", "table": table, "validation": 0.0},
            training={"batch_size": 16, "private": {"noise_multiplier": 100.0}},
        )
        node = {"data-path": str(path)}
        return answer(config, "max_epsilon: 0.5", tmp_path, run=run, node=node)

    assert asked([str(k) for k in range(6)], 1).has_error()
    record = (tmp_path / "state" / "site-answered.json").read_text()
    ((mechanism, count),) = answered.Answered.parse(record, source="").spent().items()
    assert (mechanism.rate, mechanism.steps, count) == (1.0, 1, 1)
    assert asked([str(k) for k in range(7)], 2).has_content()
    record = (tmp_path / "state" / "site-answered.json").read_text()
    spent = answered.Answered.parse(record, source="").spent()
    assert sum(spent.values()) == 2
    # A secret assigns rows to training, equal ones together, so how many train differs from run
    # to run; that none but batch_size of the 60 do has a probability of 1.3e-5.
    assert min(mechanism.rate for mechanism in spent) < 1.0
