import torch
from torch import nn
from torch.nn import functional as F

from experiments.pooled_places import Pooled, solved


def test_places_and_what_entered_are_found_from_nearby() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 8, 3).double()
    entered = torch.rand(2, 10, 10, dtype=torch.float64)
    pooled = F.max_pool2d(torch.sigmoid(layer(entered[None])), 2)
    slopes = torch.randn_like(pooled)
    (gradient,) = torch.autograd.grad(pooled, [layer.weight], slopes)
    known = Pooled.behind(layer, gradient, pooled[0].detach(), slopes[0])
    near = (entered + 0.05 * torch.randn_like(entered)).clamp(0.0, 1.0)
    found, places, left = solved(known, near, 0.0)
    assert float((near - entered).abs().max()) > 0.1
    inner = (slice(None), slice(1, -1), slice(1, -1))  # no place need see a corner
    assert float((found - entered)[inner].abs().max()) < 1e-6 and left < 1e-6
    assert torch.equal(places, known.outputs(entered).argmax(-1))
    wanted = torch.autograd.functional.jacobian(
        lambda x: (F.max_pool2d(torch.sigmoid(layer(x[None])), 2) * slopes).sum(), entered
    )
    assert torch.allclose(known.entered_slopes(places), wanted, atol=1e-9)
