from collections.abc import Callable

import pytest
import torch
from refusals import refused
from torch.nn import functional as F

from bract.models.losses import LOSSES, label_rows, loss_of

OUTPUTS = torch.tensor([[0.2], [0.7], [0.9]], dtype=torch.float64)
VALUES = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
PYTORCH: dict[str, Callable[..., torch.Tensor]] = {
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "huber": F.huber_loss,
    "binary_cross_entropy": F.binary_cross_entropy,
    "binary_cross_entropy_logits": F.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("name", PYTORCH)
def test_a_loss_is_that_of_pytorch(name: str) -> None:
    for scale in (1.0, 0.1):
        outputs = scale * OUTPUTS
        expected = PYTORCH[name](outputs[:, 0], VALUES)
        assert loss_of(name).mean(outputs, VALUES) == pytest.approx(float(expected), rel=1e-12)


def test_cross_entropy_takes_classes_and_soft_labels_alike() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 2, 1, 1])
    loss = loss_of("cross_entropy")
    assert torch.equal(loss.mean(logits, labels), F.cross_entropy(logits, labels))
    rows = label_rows(labels, 3, loss)
    assert torch.allclose(loss.each(logits, rows).mean(), F.cross_entropy(logits, labels))


@pytest.mark.parametrize("name", [name for name in PYTORCH if LOSSES[name].label])
def test_a_slope_determines_the_label(name: str) -> None:
    loss = loss_of(name)
    outputs = OUTPUTS.clone().requires_grad_()
    loss.each(outputs, VALUES[:, None]).sum().backward()
    assert loss.label is not None and outputs.grad is not None
    found = loss.label(OUTPUTS, outputs.grad)
    assert torch.allclose(found[:, 0], VALUES)


def test_an_unknown_loss_is_refused_by_name() -> None:
    with refused("unknown-name", "hinge", "cross_entropy"):
        loss_of("hinge")
