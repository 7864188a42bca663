"""What a target model makes of an architecture that it cannot use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from observing import observed
from refusals import check_named
from torch import Tensor, nn

from bract.attacks import Budget, Refusal, reconstruct
from bract.models import MODELS


class _Structured(nn.Module):
    """A classifier that returns its logits inside something else, as many libraries' models do."""

    def __init__(self, wrap: type) -> None:
        super().__init__()
        self.wrap = wrap
        self.logits = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Any:
        made = self.logits(images)
        return {"logits": made} if self.wrap is dict else (made, images)


@pytest.mark.parametrize("wrap", [dict, tuple])
@pytest.mark.parametrize("attack", ["ig", "best", "auto", "r-gap", "patch-span", "spear"])
def test_a_model_that_returns_no_tensor_is_refused(
    wrap: type, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS._entries, "test-structured", lambda **_: _Structured(wrap))
    torch.manual_seed(0)
    plain = _Structured(wrap).logits
    seen = observed(torch.rand(1, 1, 8, 8), torch.tensor([3]), model=plain, name="test-structured")
    seen = replace(
        seen,
        parameters={f"logits.{name}": value for name, value in seen.parameters.items()},
        update={f"logits.{name}": value for name, value in seen.update.items()},
    )
    (found,) = reconstruct(seen, attack, budget=Budget(iterations=2))
    assert isinstance(found, Refusal)
    check_named(found.reason, "_Structured", wrap.__name__)
