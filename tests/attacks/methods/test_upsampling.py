from typing import Any

import pytest
import torch
from torch.nn import functional as F

from bract.attacks.methods.grnn.upsampling import pack_kernel, upsampling_convolution


def reference(features: Any, kernels: Any) -> Any:
    trials = [
        F.conv2d(F.interpolate(x.transpose(0, 1), scale_factor=2), kernel, padding=1)
        for x, kernel in zip(features, kernels, strict=True)
    ]
    return torch.stack(trials).transpose(1, 2)


@pytest.mark.parametrize(
    ("trials", "inputs", "outputs", "images", "sides"),
    [(1, 1, 1, 1, (1, 1)), (2, 3, 5, 1, (4, 4)), (3, 4, 2, 2, (5, 3)), (1, 2, 3, 4, (2, 7))],
)
def test_it_is_a_convolution_of_the_doubled_image(
    trials: Any, inputs: Any, outputs: Any, images: Any, sides: Any
) -> None:
    features = torch.randn(trials, inputs, images, *sides, dtype=torch.float64, requires_grad=True)
    kernels = torch.randn(trials, outputs, inputs, 3, 3, dtype=torch.float64, requires_grad=True)
    made = upsampling_convolution(features, torch.stack([pack_kernel(k) for k in kernels]))
    wanted = reference(features, kernels)
    assert torch.allclose(made, wanted, atol=1e-12)
    slope = torch.randn_like(wanted)
    found = torch.autograd.grad(made, (features, kernels), slope)
    expected = torch.autograd.grad(wanted, (features, kernels), slope)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12)
