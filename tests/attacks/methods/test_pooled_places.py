"""Places of max pooling, the maps that entered, and the image behind them."""

import pack
import pytest
import torch
from observing import observed, scores
from refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks import Budget, attack
from bract.attacks.methods import pooled_places


def known(
    entered: Tensor, layer: nn.Conv2d, activation: str = "sigmoid"
) -> tuple[pooled_places.Equations, Tensor]:
    """Return the equations of a block, and the loss' gradient of what entered."""
    act = pooled_places.ACTIVATIONS[activation]()
    values = entered.clone().requires_grad_()
    pooled = act.forward(F.max_pool2d(layer(values[None]), 2))
    slopes = torch.randn_like(pooled)
    gradient, below = torch.autograd.grad(pooled, [layer.weight, values], slopes)
    stride, padding = ((int(v[0]), int(v[1])) for v in (layer.stride, layer.padding))
    channels, height, width = entered.shape
    shape = pooled_places.Block("conv", stride, padding, (channels, height, width), act, 2)
    assert layer.bias is not None
    weight, bias = layer.weight.detach(), layer.bias.detach()
    made = pooled_places.Equations.of(
        shape, weight, bias, gradient, pooled.detach().flatten(), slopes.flatten()
    )
    return made, below.flatten()


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "relu"])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 2), (2, 1)])
def test_a_map_that_entered_leaves_rounding_and_hands_slopes_down(
    activation: str, stride: int, padding: int
) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 4, 3, stride=stride, padding=padding).double()
    entered = torch.rand(2, 10, 9, dtype=torch.float64)
    block, below = known(entered, layer, activation)
    assert block.left(entered.flatten()) < 1e-9
    assert block.left(entered.flip(0).flatten()) > 1e-2
    assert torch.allclose(block.entered_slopes(entered.flatten()), below, atol=1e-9)


def test_derivatives_are_those_of_the_errors() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 2, 3, padding=1).double()
    entered = torch.rand(3, 6, 7, dtype=torch.float64)
    block, _ = known(entered, layer)
    values = torch.rand(entered.numel(), dtype=torch.float64)
    wanted = torch.autograd.functional.jacobian(lambda x: block.errors(x, 0.1), values)
    errors, found = block.linearised(values, 0.1)
    assert torch.allclose(found, wanted, atol=1e-10)
    assert torch.allclose(errors, block.errors(values, 0.1))
    tied = pooled_places.Tied(block, torch.tensor([1.0, 2.0, 3.0]).double(), torch.ones(3).double())
    grey = torch.rand(42, dtype=torch.float64)
    wanted = torch.autograd.functional.jacobian(lambda x: tied.errors(x, 0.1), grey)
    assert torch.allclose(tied.linearised(grey, 0.1)[1], wanted, atol=1e-10)


def test_roughness_is_its_quadratic_form() -> None:
    values = torch.rand(3 * 20, dtype=torch.float64)
    rough = pooled_places.Roughness.at(values, (3, 4, 5), 0.5)
    assert float(values @ rough.normal(60) @ values) == pytest.approx(rough(values))
    assert rough(torch.ones(60, dtype=torch.float64)) == pytest.approx(0.0)


def test_places_and_what_entered_are_found_from_nearby() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 8, 3).double()
    entered = torch.rand(2, 10, 10, dtype=torch.float64)
    block, _ = known(entered, layer)
    low, high = torch.zeros(200).double(), torch.ones(200).double()
    start = (entered.flatten() + 0.05 * torch.randn(200).double()).clamp(0.0, 1.0)
    schedule = pooled_places.Cooling(1.0, 0.7, 40)
    found = pooled_places.cooled(block, start, (low, high), schedule, enough=1e-9)
    assert found.left < 1e-9
    assert torch.equal(block.places(found.values), block.places(entered.flatten()))
    inner = (slice(None), slice(1, -1), slice(1, -1))  # no place need see a corner
    assert float((found.values.view(2, 10, 10) - entered)[inner].abs().max()) < 1e-6
    stopped = pooled_places.cooled(
        block, start, (low, high), schedule, enough=1e-9, due=lambda: True
    )
    assert stopped.steps == 0


def test_best_reads_a_digit_through_max_pooling_in_grey_or_in_channels_that_are_alike() -> None:
    held = pack.held("lenet-b1")
    for channels in (1, 3):
        image = held.images.expand(-1, channels, -1, -1)
        seen = observed(image, held.labels, model="lenet", normalised=channels == 3)
        found = attack("best")(seen, budget=Budget(iterations=200))
        (trial,) = found.trials
        assert trial.method == "pooled-places" and trial.determined is not None
        assert trial.determined.sure and trial.loss < 1e-12
        assert (scores(found.images, image)[0].psnr or 0.0) > 50.0


def test_what_is_not_proven_is_refused_and_left_to_others() -> None:
    held = pack.held("lenet-b1")
    seen = observed(held.images, held.labels, model="lenet")
    with refused("attack-unsolved", "features.3"):
        attack("pooled-places")(seen, budget=Budget(iterations=1))
    with refused("budget-spent", "budget.seconds"):
        attack("pooled-places")(seen, budget=Budget(seconds=0.5))
    assert attack("best")(seen, budget=Budget(iterations=1)).trials[0].method == "grnn"


def test_batches_and_models_without_max_pooling_are_refused() -> None:
    held = pack.held("lenet-b1")
    several = observed(held.images.expand(2, -1, -1, -1), held.labels.expand(2), model="lenet")
    with refused("attack-unsuited", "2"):
        attack("pooled-places")(several)
    images: Tensor = held.images
    with refused("attack-unsuited", "lenet-strided"):
        attack("pooled-places")(observed(images, held.labels, model="lenet-strided"))
    with refused("attack-unsuited", "100"):
        attack("pooled-places", max_unknowns=100)(observed(images, held.labels, model="lenet"))
