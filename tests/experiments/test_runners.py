"""Runners: what they measure is what they say."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
import torch
from PIL import Image
from refusals import refused

from bract.defenses import Guardian
from experiments.harness.clients import Situation, uploads
from experiments.papers.runners import runner
from experiments.papers.runners.base import Context
from experiments.papers.runners.federation import FederationRunner, FederationSettings
from experiments.papers.runners.gaussians import _roughness
from experiments.papers.runners.objectives import CosineAndSquared, Norm
from experiments.papers.runners.pictures import picture
from experiments.papers.runners.reconstruction import (
    ReconstructionRunner,
    ReconstructionSettings,
    attacker,
)


def settings(**changes: Any) -> ReconstructionSettings:
    return ReconstructionSettings.model_validate(
        {"iterations": 2, "uploads": 3, "together": 2, **changes}
    )


def test_an_unknown_setting_names_the_row() -> None:
    with refused("config-value", 9, "a", "iteration"):
        runner("reconstruction").parse({"iteration": 3}, where="table 9, row 'a'")


def test_an_attack_has_the_options_that_it_has() -> None:
    with refused("config-key", "grnn", "speed"):
        attacker(settings(options={"speed": 1}))
    with refused("unknown-name", "objective", "l7"):
        attacker(settings(options={"objective": "l7"}))


def test_the_losses_of_grnn_s_table_are_what_they_are_called() -> None:
    simulated = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([[0.0]])}
    captured = {"a": torch.tensor([[0.0, 4.0]]), "b": torch.tensor([[0.0]])}
    assert float(Norm()(simulated, captured, None)) == pytest.approx(5.0)
    assert float(CosineAndSquared()(simulated, captured, None)) == pytest.approx(26.0)


def test_units_are_clients_of_one_row() -> None:
    found = ReconstructionRunner()
    given = settings(attack="class mean")
    assert found.count(given) == 2
    parts = [found.run(given, unit, Context()) for unit in range(2)]
    assert [s.group for part in parts for s in part.samples] == [0, 1, 2]
    whole = found.run(settings(attack="class mean", together=3), 0, Context())
    assert [s.values for s in whole.samples] == [s.values for p in parts for s in p.samples]
    assert parts[0].pictures is not None and parts[1].pictures is None


def test_a_client_is_the_same_alone_and_among_others() -> None:
    situation = Situation(data="digits", model="lenet-strided", uploads=3)
    together = uploads(situation, split="score", secret=1)[2]
    (alone,) = uploads(situation, split="score", secret=1, clients=range(2, 3))
    assert alone.captured.key == together.captured.key
    for name, value in together.captured.update.items():
        assert torch.equal(alone.captured.update[name], value)


def test_a_picture_has_originals_above() -> None:
    white, black = torch.ones(1, 4, 4), torch.zeros(1, 4, 4)
    content = base64.b64decode(picture([(white, black), (white, black)]))
    image = Image.open(io.BytesIO(content))
    assert image.size == (8, 8)
    assert image.getpixel((0, 0)) == 255
    assert image.getpixel((7, 7)) == 0


def test_a_straight_boundary_has_length_one() -> None:
    across = torch.arange(64)[None, :].expand(64, 64)
    assert _roughness(across > 31) == 1.0
    assert _roughness(across > 99) == 0.0


def test_guardian_from_the_gradient_is_its_default() -> None:
    g = torch.randn(50, generator=torch.Generator().manual_seed(0))
    guardian = Guardian()
    assert torch.equal(guardian.solve(g, 1.0), guardian.solve(g, 1.0, start=g))
    assert not torch.equal(guardian.solve(g, 1.0), guardian.solve(g, 1.0, start=g.flip(0)))


@pytest.mark.parametrize("strategy", ["fedavg", "centralised", "fedboosting"])
def test_a_federation_has_one_sample_a_seed(strategy: str) -> None:
    training = {"local_steps": 1, "batch_size": 4}
    given = FederationSettings(
        strategy=strategy, rounds=2, judged=1, watched=(1,), clients=2, training=training
    )
    assert given.config(0, Context()).clients == (1 if strategy == "centralised" else 2)
    (sample,) = FederationRunner().run(given, 1, Context()).samples
    assert sample.group == 1
    assert {"accuracy", "accuracy@1"} <= set(sample.values)


def test_fedkl_s_accuracy_is_that_of_the_clients_keys() -> None:
    given = FederationSettings(
        model="lenet-strided-bn", defenses=({"name": "fedkl"},), rounds=1, judged=1, clients=2,
        training={"local_steps": 1, "batch_size": 4},
    )  # fmt: skip
    (sample,) = FederationRunner().run(given, 0, Context()).samples
    values = sample.values
    each = [values["client0"], values["client1"]]
    assert values["accuracy"] == pytest.approx(sum(v or 0.0 for v in each) / 2)
    # Two Linear(1024, 12) with biases; the paper's ratio counts them over all parameters.
    assert values["lock_share"] == pytest.approx(24_600 / (24_600 + 15_826), abs=0.02)


def test_an_unknown_strategy_is_named() -> None:
    with refused("unknown-name", "strategy", "best"):
        FederationRunner().run(FederationSettings(strategy="best"), 0, Context())
