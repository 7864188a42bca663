"""The runner of TabLeak's own code gives it the same gradients, and reads its rows alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.harness.rows import send_rows
from experiments.tableak_peer import Described, by_published


def test_the_published_code_sees_the_clients_gradient_at_the_true_rows() -> None:
    sent = send_rows("breast-cancer", 4, seed=1)
    described = Described(sent.schema)
    exact = sent.truth.images.flatten(1)

    def invert(*, net: Any, true_grad: list[Tensor], true_label: Tensor, **_: Any) -> Tensor:
        standardised = (exact - described.mean) / described.std
        loss = torch.nn.functional.cross_entropy(net(standardised), true_label)
        for own, given in zip(torch.autograd.grad(loss, net.parameters()), true_grad, strict=True):
            torch.testing.assert_close(own, given)
        return standardised

    found = by_published(sent, 0, invert, members=1, iterations=1)
    torch.testing.assert_close(found, sent.truth.images)


def test_one_value_a_column_goes_to_the_pairing_of_rows() -> None:
    sent = send_rows("breast-cancer", 3, seed=2)
    described = Described(sent.schema)
    exact = sent.truth.images.flatten(1)
    decoded = described.decode_batch((exact - described.mean) / described.std)
    assert decoded.shape == (3, len(sent.schema.columns))
    np.testing.assert_allclose(decoded, exact.numpy(), atol=1e-5)
    assert len(described.create_tolerance_map()) == len(sent.schema.columns)
