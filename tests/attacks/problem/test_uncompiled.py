"""Gradients without PyTorch's compiler are those of `torch.func.grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional as F

from bract.attacks.problem.uncompiled import gradient_at

Tensors = dict[str, Tensor]
Differentiate = Callable[[Callable[[Tensors], Tensor], Tensors, Iterable[Tensor]], Tensors]


def setting() -> tuple[Tensors, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (5, 3, 3, 3), "bias": (5,), "unused": (2,)}
    parameters = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    return parameters, torch.randn(2, 3, 6, 6, generator=generator)


def by_torch(
    function: Callable[[Tensors], Tensor], at: Tensors, beside: Iterable[Tensor]
) -> Tensors:
    del beside
    found: Tensors = grad(function)(at)
    return found


def value(parameters: Tensors, inputs: Tensor) -> Tensor:
    return F.conv2d(inputs, parameters["weight"], parameters["bias"]).sigmoid().square().sum()


def test_it_is_the_gradient_and_zero_where_nothing_depends() -> None:
    parameters, inputs = setting()
    found = gradient_at(lambda at: value(at, inputs), parameters, [inputs])
    wanted = by_torch(lambda at: value(at, inputs), parameters, [inputs])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not found["unused"].any()


def test_a_function_that_depends_on_nothing_has_the_gradient_zero() -> None:
    parameters, inputs = setting()
    found = gradient_at(lambda _: inputs.sum(), parameters, [inputs])
    assert found.keys() == parameters.keys() and not any(v.any() for v in found.values())


def test_a_function_that_changes_what_it_is_given_is_refused() -> None:
    """As `torch.func.grad` refuses it: the next call would have another value."""
    parameters, inputs = setting()
    buffer = torch.zeros(5)

    def keeps_a_mean(at: Tensors) -> Tensor:
        buffer.mul_(0.9).add_(0.1)
        return value(at, inputs) * buffer.sum()

    for differentiate in (gradient_at, by_torch):
        with pytest.raises(RuntimeError):
            differentiate(keeps_a_mean, parameters, [inputs, buffer])


def test_inference_mode_is_no_obstacle() -> None:
    parameters, inputs = setting()
    with torch.inference_mode():
        found = gradient_at(lambda at: value(at, inputs), parameters, [inputs])
    wanted = by_torch(lambda at: value(at, inputs), parameters, [inputs])
    assert all(torch.allclose(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("enabled", [False, True])
def test_nothing_is_kept_for_a_second_gradient_where_none_can_be(enabled: bool) -> None:
    parameters, inputs = setting()
    inputs.requires_grad_(not enabled)
    with torch.set_grad_enabled(enabled):
        found = gradient_at(lambda at: value(at, inputs), parameters, [inputs])
    assert not any(slope.requires_grad for slope in found.values())
    assert not any(given.requires_grad for given in parameters.values())


@pytest.mark.parametrize("moved", [False, True])
def test_it_is_differentiated_by_what_the_function_depends_on(moved: bool) -> None:
    parameters, inputs = setting()

    def second(differentiate: Differentiate) -> Tensor:
        images = inputs.clone().requires_grad_()
        # After a step the parameters depend on the images too, and the function on both.
        at = {n: p - 0.1 * images.sum() if moved else p for n, p in parameters.items()}
        found = differentiate(lambda here: value(here, images) * at["bias"].sum(), at, [images])
        torch.stack([slope.square().sum() for slope in found.values()]).sum().backward(
            inputs=[images]
        )
        assert images.grad is not None
        return images.grad

    assert torch.equal(second(gradient_at), second(by_torch))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_it_may_be_taken_inside_of_a_transform() -> None:
    parameters, inputs = setting()

    def slope(image: Tensor) -> Tensor:
        return gradient_at(lambda at: value(at, image[None]), parameters, [image])["weight"]

    each = vmap(slope)(inputs)
    assert torch.allclose(each[1], slope(inputs[1]), atol=1e-6)
    direction = torch.ones_like(inputs[0])
    change = jvp(slope, (inputs[0],), (direction,))[1]
    step = 1e-2 * direction
    near = (slope(inputs[0] + step) - slope(inputs[0] - step)) / 2e-2
    assert torch.allclose(change, near, atol=1e-2)
