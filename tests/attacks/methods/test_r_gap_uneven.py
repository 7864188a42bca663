"""R-GAP where coordinates of the gradient are known unevenly well, as behind AdaDefense."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import check_refusal, refused
from torch import Tensor, nn

from bract import Observation
from bract.attacks import ADAPTIVE, Evidence, Known, Reconstruction, reconstruct
from bract.attacks.methods.r_gap.alive_units import alive_units
from bract.attacks.methods.r_gap.chain import chain_of
from bract.attacks.methods.r_gap.rank_one import factors, logit_gradient_from_weights
from bract.client.defenses import build_defenses
from bract.scores import psnr
from experiments.harness.uploads import gradient_upload, network_for, plain_spec


@pytest.fixture(scope="module")
def defended(digits: Any) -> Any:
    """Return one digit of 16 pixels, and its upload of a ReLU LeNet behind AdaDefense."""
    image, label = digits[0][0:1], digits[1][0:1]
    network = network_for(plain_spec((1, 16, 16)), "lenet-strided", 1001, activation="relu")
    seen = gradient_upload(network, image, label, model="lenet-strided", activation="relu")
    chain = build_defenses([{"name": "adadefense"}])
    sent = chain.protect(seen.update, {})
    declared = replace(seen.declaration, defenses=tuple(chain.public()))
    return image, replace(seen, update=sent, declaration=declared)


@pytest.mark.thorough
def test_one_digit_behind_adadefense_is_read_off_and_fitted(
    defended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, seen = defended
    (found,) = reconstruct(seen, "r-gap", tier="adaptive", device="cpu")
    assert isinstance(found, Reconstruction)
    assert float(psnr(found.images, image)[0]) > 60
    assert found.certificate is None
    monkeypatch.setattr("bract.attacks.methods.r_gap.r_gap.MOST_FITTED", 0)
    (read,) = reconstruct(seen, "r-gap", tier="adaptive", device="cpu")
    assert isinstance(read, Reconstruction)
    apart, before = (float((one.images - image).square().sum()) for one in (found, read))
    assert apart < 0.5 * before


def test_uneven_weights_without_errors_are_refused(
    defended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, seen = defended
    read = ADAPTIVE["adadefense"]

    def without(observation: Observation, known: Known) -> Evidence:
        return replace(read(observation, known), errors=None)

    monkeypatch.setitem(ADAPTIVE._entries, "adadefense", without)
    (found,) = reconstruct(seen, "r-gap", tier="adaptive", device="cpu")
    assert not isinstance(found, Reconstruction)
    check_refusal(found, "attack-evidence")


def test_factors_are_found_from_the_coordinates_that_are_trusted() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (5, 40))
    trust = (torch.rand(5, 40, generator=generator, dtype=torch.float64) > 0.5).double()
    trust[0] = 1.0  # so that every column is known somewhere
    wrong = torch.outer(left, right) + 3.0 * (1.0 - trust)
    one, other, rest = factors(wrong, trust)
    assert torch.allclose(torch.outer(one, other), torch.outer(left, right), atol=1e-6)
    assert rest < 1e-6
    assert float(one.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [0.1, 10.0])
def test_the_softmax_decides_how_long_the_gradient_at_the_logits_is(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 30, generator=generator, dtype=torch.float64) * 0.1
    bias = torch.randn(4, generator=generator, dtype=torch.float64)
    entering = size * torch.rand(30, generator=generator, dtype=torch.float64)
    wanted = (weight @ entering + bias).softmax(dim=0)
    wanted[2] -= 1.0
    gradient = torch.outer(wanted, entering)
    found = logit_gradient_from_weights(
        gradient, torch.ones_like(gradient), weight, bias, wanted.sign()
    )
    assert torch.allclose(found, wanted, rtol=1e-6)


def test_a_sum_of_two_gradients_has_no_factors() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(4, 2, generator=generator, dtype=torch.float64) @ torch.randn(
        2, 30, generator=generator, dtype=torch.float64
    )
    with refused("attack-unsolved", "example"):
        logit_gradient_from_weights(
            gradient,
            torch.ones_like(gradient),
            torch.zeros(4, 30).double(),
            torch.zeros(4).double(),
            torch.tensor([1.0, -1.0, 1.0, 1.0]),
        )


def test_units_in_doubt_are_decided_by_the_gradient_of_their_bias() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten())
    network.append(nn.Linear(2 * 4 * 4, 3))
    network.double()
    state = {name: value.detach() for name, value in network.named_parameters()}
    block = chain_of(network, state, (1, 4, 4)).blocks[0]
    values, slope = torch.rand(1, 2, 4, 4).double() + 1.0, torch.randn(1, 2, 4, 4).double()
    truth = torch.rand(values.shape) > 0.5
    values = torch.where(truth, values, torch.zeros_like(values))
    errors = torch.full_like(values, 1e-3)
    # One unit that is alive and one that is not, both at about two deviations.
    alive, dead = truth.nonzero()[0], (~truth).nonzero()[0]
    for place in (alive, dead):
        values[tuple(place)], errors[tuple(place)] = 0.2, 0.1
    gradients: dict[str, Tensor] = {"0.bias": (slope * truth).sum(dim=(0, 2, 3))}
    trust = {"0.bias": torch.ones(2).double()}
    given = (block, state, gradients, trust)
    assert torch.equal(alive_units(values, errors, slope, *given), truth)
    unknown = (block, state, gradients, {"0.bias": torch.full((2,), 1e-20).double()})
    found = alive_units(values, errors, slope, *unknown)
    assert not bool(found[tuple(alive)])
