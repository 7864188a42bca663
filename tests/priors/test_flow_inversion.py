"""Attackers who trained a flow on public images."""

from __future__ import annotations

from dataclasses import replace

import pack
import pytest
import torch
from defended_clients import capture
from observing import observed as observe
from refusals import check_refusal
from torch import Tensor

from bract.attacks import Budget, Reconstruction, Refusal, reconstruct
from bract.attacks.registry import attacks_only_for
from bract.scores import psnr
from bract_priors.flow_inversion import FlowInversion
from bract_priors.prior_training import PriorSettings, train_prior
from bract_priors.trained_prior import TrainedPrior

SETTINGS = PriorSettings(kind="flow", width=8, epochs=12, lr=5e-3)


@pytest.fixture(scope="module")
def prior() -> TrainedPrior:
    """A flow of 8-pixel digits; the attacked ones are of the other split."""
    return pack.prior("flow")


def test_an_attacker_with_a_flow_gets_more_than_the_flow_gives(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor]
) -> None:
    images, labels = tiny[0][:2], tiny[1][:2]
    assert not prior.trained_on(images).any()
    seen = [observe(images[i : i + 1], labels[i : i + 1], client=f"c{i}") for i in range(2)]
    budget = Budget(iterations=80)
    found = reconstruct(seen, "flow", budget=budget, tier="surrogate", public=prior)
    made = []
    for result in found:
        assert isinstance(result, Reconstruction)
        assert "trained generator" in result.components and not result.unknowns
        assert result.settings["surrogate"].startswith("a flow trained on 600 public images")
        made.append(result.images)
    sampled = float(psnr(prior.sample(labels.tolist(), seed=1), images).mean())
    assert float(psnr(torch.cat(made), images).mean()) > sampled + 6


def test_a_batch_has_one_noise_an_image_and_more_restarts_begin_elsewhere(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor]
) -> None:
    seen = observe(tiny[0][:2], tiny[1][:2])
    budget = Budget(iterations=60, restarts=2)
    (found,) = reconstruct(seen, "flow", budget=budget, tier="surrogate", public=prior)
    assert isinstance(found, Reconstruction) and found.images.shape == (2, 1, 8, 8)
    assert not torch.equal(found.trials[0].images, found.trials[1].images)
    assert sorted(found.labels.tolist()) == sorted(tiny[1][:2].tolist())
    order = [found.labels.tolist().index(label) for label in tiny[1][:2].tolist()]
    sampled = psnr(prior.sample(tiny[1][:2].tolist(), seed=1), tiny[0][:2])
    assert float(psnr(found.images[order], tiny[0][:2]).mean()) > float(sampled.mean()) + 3


def test_each_attack_takes_the_kind_of_prior_that_it_searches(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor]
) -> None:
    seen = observe(tiny[0][:1], tiny[1][:1])
    bare = replace(SETTINGS, kind="autoencoder", epochs=1)
    decoder = train_prior(tiny[0], None, bare, source="digits")
    (found,) = reconstruct(seen, "flow", public=decoder)
    assert isinstance(found, Refusal)
    check_refusal(found, "prior-unsuited", "autoencoder", "--kind flow")
    for name in ("ggl", "gias", "learned-inverter"):
        (found,) = reconstruct(seen, name, public=prior)
        assert isinstance(found, Refusal)
        check_refusal(found, "prior-unsuited", "autoencoder", "flow")
    (found,) = reconstruct(seen, "flow")
    check_refusal(found, "prior-unsuited", "--kind flow")
    assert attacks_only_for("surrogate", "flow") == ["flow"]
    assert "flow" not in attacks_only_for("surrogate", "autoencoder")


def test_against_noise_the_density_of_the_flow_s_noise_is_the_prior(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor]
) -> None:
    held = capture(tiny[0][:1], tiny[1][:1], {"name": "noise", "std": 1e-2}, model="lenet-strided")
    budget = Budget(iterations=4)
    (found,) = reconstruct(held.seen, "flow", budget=budget, tier="surrogate", public=prior)
    assert isinstance(found, Reconstruction) and "latent prior in nats" in found.components


def test_with_nothing_to_match_the_flow_makes_the_image(
    prior: TrainedPrior, tiny: tuple[Tensor, Tensor]
) -> None:
    seen = observe(tiny[0][:1], tiny[1][:1])
    alone = FlowInversion().prior()
    assert alone is not None
    (found,) = reconstruct(seen, alone, budget=Budget(iterations=4), public=prior)
    assert isinstance(found, Reconstruction) and found.images.shape == (1, 1, 8, 8)
