"""Experiments with a generator: on other images than those that are attacked, trained once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bract.attacks import Refusal
from experiments.harness.clients import images_of, uploads
from experiments.papers.runners.base import Context
from experiments.papers.runners.generator import GeneratorRunner, GeneratorSettings, generator


def settings(**changes: Any) -> GeneratorSettings:
    return GeneratorSettings.model_validate(
        {"uploads": 2, "iterations": 1, "prior_images": 64, "prior_epochs": 1, **changes}
    )


def made(given: GeneratorSettings) -> list[torch.Tensor]:
    situation = given.situation(Context())
    captured = uploads(situation, split="score", secret=1)
    images = images_of(situation, "score")
    found = GeneratorRunner().outcomes(given, captured, images, range(2), Context())
    assert not any(isinstance(one, Refusal) for one in found), found
    return [one[0] for one in found if not isinstance(one, Refusal)]


def test_no_attacked_image_was_trained_on() -> None:
    given = settings(prior_images=1000)
    found = generator(given, Context())
    assert found.facts.images == 1000
    situation = given.situation(Context())
    assert bool(found.trained_on(images_of(situation, "choose").images).all())
    assert not bool(found.trained_on(images_of(situation, "score").images).any())


def test_rows_share_one_generator() -> None:
    first = generator(settings(tier="plain"), Context())
    assert generator(settings(attack="gias", uploads=1), Context()) is first
    assert generator(settings(prior_images=65), Context()) is not first


def test_ggl_searches_the_generator_and_the_generator_alone_sees_no_gradient() -> None:
    searched = made(settings(attack="ggl", tier="plain", iterations=3))
    alone = made(settings(attack="generator alone"))
    other = made(settings(attack="generator alone", model="lenet", tier="plain"))
    assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(alone, searched, strict=True))


@pytest.mark.slow
def test_who_is_told_of_the_lock_attacks_with_the_generator_too() -> None:
    given = settings(
        attack="gias",
        tier="adaptive",
        model="lenet-strided-bn",
        defenses=[{"name": "fedkl"}],
        iterations=2,
    )
    assert len(made(given)) == 2


def test_a_baseline_needs_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.papers.runners.generator._trained", None)
    assert len(made(settings(attack="class mean"))) == 2
