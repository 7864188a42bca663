import math
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


@pytest.mark.parametrize("weights", [(), (10.0, 0.1, 2.0)], ids=["even", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_smoothing_and_class_weights_are_those_of_pytorch(
    smoothing: float, weights: tuple[float, ...]
) -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.tensor([0, 2, 1, 1])
    loss = loss_of("cross_entropy", smoothing=smoothing, class_weights=weights)
    given = torch.tensor(weights).double() if weights else None
    wanted = F.cross_entropy(logits, labels, given, label_smoothing=smoothing)
    rows = label_rows(labels, 3, loss).double()
    assert torch.allclose(loss.each(logits, rows).mean(), wanted)
    assert torch.allclose(loss.mean(logits, labels), wanted)
    alike = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    F.cross_entropy(alike, labels, given, label_smoothing=smoothing).backward()
    assert alike.grad is not None
    found = loss.mean_slope(torch.full((3,), 1 / 3).double(), rows.mean(dim=0))
    assert torch.allclose(found, alike.grad.sum(dim=0))


def test_smoothing_and_class_weights_as_worked_by_hand() -> None:
    # Of even outputs each class costs log 2. Labels 0 and 1 smoothed by 0.5 are (3/4, 1/4) and
    # (1/4, 3/4); weighed by (1, 3) they cost 3/2 and 5/2 log 2, and the mean weight is 2.
    loss = loss_of("cross_entropy", smoothing=0.5, class_weights=(1.0, 3.0))
    each = loss.each(torch.zeros(2, 2), torch.eye(2))
    assert each.tolist() == pytest.approx([0.75 * math.log(2), 1.25 * math.log(2)])


def test_only_losses_of_classes_have_smoothing_and_class_weights() -> None:
    with refused("declaration-wrong", "label_smoothing"):
        loss_of("mse", smoothing=0.1)
    with refused("declaration-wrong", "class_weights"):
        loss_of("language_model", class_weights=(1.0, 2.0))


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


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_labels_that_are_probabilities_enter_as_they_do_in_torch(smoothing: float) -> None:
    outputs = torch.randn(4, 3, dtype=torch.float64)
    rows = torch.rand(4, 3, dtype=torch.float64)
    rows = rows / rows.sum(dim=1, keepdim=True)
    loss = loss_of("cross_entropy", smoothing=smoothing, soft=True)
    wanted = F.cross_entropy(outputs, rows, label_smoothing=smoothing)
    found = loss.each(outputs, label_rows(rows, 3, loss)).mean()
    assert torch.allclose(found, wanted) and torch.allclose(loss.mean(outputs, rows), wanted)
    assert not loss.is_plain


def test_two_equal_probabilities_as_worked_by_hand() -> None:
    """Equal outputs predict a half each: the loss is ln 2 whatever the labels are."""
    loss = loss_of("cross_entropy", soft=True)
    assert float(loss.mean(torch.zeros(1, 2), torch.tensor([[0.3, 0.7]]))) == pytest.approx(
        0.6931472
    )


def test_probabilities_are_labels_of_classes_without_weights() -> None:
    with refused("declaration-wrong", "soft_targets"):
        loss_of("mse", soft=True)
    with refused("declaration-wrong", "class_weights", "soft_targets"):
        loss_of("cross_entropy", soft=True, class_weights=(1.0, 2.0))
