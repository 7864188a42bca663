from dataclasses import replace
from typing import Any

import pytest
import torch
from defended_clients import capture, residual
from refusals import refused

from bract.attacks import Reconstruction, reconstruct
from bract.attacks.methods.gauss_newton import GaussNewton
from bract.attacks.problem.case import open_case
from bract.attacks.problem.client_model import BatchGradient
from bract.attacks.task import evidence_for
from bract.client.defenses import ProtectContext
from bract.scores import psnr
from bract_papers.adaptive.precode import noise_name, read_noise

ENTRY = {"name": "precode", "latent": 16}
BLOCK = "classifier.1.bottleneck"


def hidden(
    digits: Any, count: Any = 1, entry: Any = ENTRY, model: Any = "lenet-strided", **settings: Any
) -> Any:
    return capture(digits[0][:count], digits[1][:count], entry, model=model, **settings)


def drawn(seed: Any, *shape: Any) -> Any:
    """What a client of this private seed draws, from its own stream."""
    return ProtectContext(seed=seed).stream("precode").normal(shape)


@pytest.mark.parametrize("model", ["lenet", "lenet-strided"])
def test_one_images_noise_is_read_off_the_update(digits: Any, model: Any) -> None:
    captured = hidden(digits, entry={"name": "precode"}, model=model, seed=3)
    block = next(
        n.removesuffix(".encoder.weight")
        for n in captured.seen.parameters
        if n.endswith("bottleneck.encoder.weight")
    )
    noise, error = read_noise(captured.seen, block)
    assert error < 1e-2
    assert torch.allclose(noise, drawn(3, 1, 256), atol=2e-3)
    assert residual(captured, {}, trials=2) < 2e-6


def test_one_step_of_local_training_is_one_gradient(digits: Any) -> None:
    captured = hidden(digits, seed=3, steps=1, lr=0.1)
    noise, error = read_noise(captured.seen, BLOCK)
    assert torch.allclose(noise, drawn(3, 1, 16), atol=max(0.05, 10 * error))
    forward: Any = open_case(captured.seen, tier="adaptive", max_images=1, unroll=4).forward
    assert forward.known


def test_a_batchs_own_noise_explains_its_update_and_the_mean_does_not(digits: Any) -> None:
    captured = hidden(digits, 3, seed=5)
    name = noise_name(BLOCK)
    assert residual(captured, {name: drawn(5, 3, 16)}, trials=2) < 1e-6
    assert residual(captured, {name: torch.zeros(3, 16)}) > 1e-4


def test_every_unrolled_step_has_noise_of_its_own(digits: Any) -> None:
    captured = hidden(digits, 4, seed=5, steps=2, batch_size=2, momentum=0.5, proximal_mu=2.0)
    stream = ProtectContext(seed=5).stream("precode")
    noise = torch.stack([stream.normal((2, 16)) for _ in range(2)])
    forward: Any = open_case(captured.seen, tier="adaptive", max_images=8, unroll=16).forward
    assert forward.shape == (2, 2, 16)
    assert residual(captured, {noise_name(BLOCK): noise}) < 1e-5


def test_a_short_last_batch_draws_less_noise(digits: Any) -> None:
    captured = hidden(digits, 3, seed=5, steps=2, batch_size=2)
    stream = ProtectContext(seed=5).stream("precode")
    noise = torch.stack([stream.normal((2, 16)) for _ in range(2)])
    stream = ProtectContext(seed=5).stream("precode")
    stream.normal((2, 16))
    noise[1, :1] = stream.normal((1, 16))
    assert residual(captured, {noise_name(BLOCK): noise}) < 1e-5


def test_the_divergence_in_the_clients_loss_is_simulated(digits: Any) -> None:
    captured = hidden(digits, seed=3)
    light = replace(captured.seen.declaration, defenses=({**ENTRY, "weight": 0.0},))
    without = replace(captured, seen=replace(captured.seen, declaration=light))
    assert residual(without, {}) > 100 * residual(captured, {})


def test_the_oblivious_attacker_decodes_the_mean_and_gives_the_same_numbers_each_time(
    digits: Any,
) -> None:
    seen = hidden(digits).seen
    case = open_case(seen, tier="oblivious", max_images=1, unroll=1)
    assert isinstance(case.forward, BatchGradient)
    state = {n: v[None].repeat_interleave(2, 0) for n, v in seen.parameters.items()}
    inputs = torch.rand(2, 1, 1, 16, 16)
    assert torch.equal(case.target_model(state, {}, inputs), case.target_model(state, {}, inputs))


def test_with_the_noise_known_the_image_is_solved_for(tiny: Any) -> None:
    captured = capture(tiny[0][:1], tiny[1][:1], ENTRY, model="lenet-strided", init="uniform")
    oblivious, adaptive = (
        float(psnr(found.images, captured.images)[0])
        for tier in ("oblivious", "adaptive")
        for found in reconstruct(captured.seen, GaussNewton(), tier=tier, device="cpu")
        if isinstance(found, Reconstruction)
    )
    assert adaptive > 40
    assert adaptive > oblivious + 10


def test_several_images_say_that_the_noise_is_searched(digits: Any) -> None:
    one, several = (evidence_for(hidden(digits, count).seen, "adaptive") for count in (1, 2))
    assert "read the noise" in one.notes["method"]
    assert "searched" in several.notes["method"]
    assert not several.buffers


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"latent": 0}, ("config-value", "latent")),
        ({"weight": -1.0}, ("config-value", "weight")),
        ({"secret": 1}, ("config-value", "secret")),
        ({"latent": 8}, ("declaration-wrong", "16", "8")),
    ],
)
def test_a_declaration_that_does_not_fit_is_flagged(
    digits: Any, changed: Any, reason: tuple[str, ...]
) -> None:
    seen = hidden(digits).seen
    wrong = replace(seen, declaration=replace(seen.declaration, defenses=({**ENTRY, **changed},)))
    with refused(*reason):
        evidence_for(wrong, "adaptive")


def test_a_model_without_the_bottleneck_is_flagged(observe: Any, digits: Any) -> None:
    plain = observe(digits[0][:1], digits[1][:1], defenses=(ENTRY,))
    with refused("declaration-wrong", 0):
        evidence_for(plain, "adaptive")


def test_two_images_declared_as_one_are_flagged(digits: Any) -> None:
    seen = hidden(digits, 2).seen
    wrong = replace(seen, declaration=replace(seen.declaration, batch_size=1, num_examples=1))
    with refused("declaration-wrong", "batch_size", "num_examples"):
        evidence_for(wrong, "adaptive")


def test_a_bottleneck_that_drew_no_noise_is_flagged(
    digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bract_papers.models.bottleneck.VariationalBottleneck._noise",
        lambda _, like: torch.zeros_like(like),
    )
    with refused("declaration-wrong", "0.022"):
        evidence_for(hidden(digits).seen, "adaptive")
