"""Pictures that an app feeds as rows, or without a dimension of channels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_signal_app import checked, described, kept, redescribed, run
from torch import Tensor, nn


class OfRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x)
        return found


class RowsOfPictures(OfRows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


class Unsqueezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 2, 3), nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.body(x.unsqueeze(1))).flatten(1))
        return found


class OfPictures(Unsqueezing):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.squeeze(1))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def of_rows() -> nn.Module:
    return made(OfRows)


def rows_of_pictures() -> nn.Module:
    return made(RowsOfPictures)


def unsqueezing() -> nn.Module:
    return made(Unsqueezing)


def of_pictures() -> nn.Module:
    return made(OfPictures)


PICTURES = torch.rand(4, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("app", "named", "inputs", "kind"),
    [
        (of_rows, rows_of_pictures, PICTURES.flatten(1), "table"),
        (unsqueezing, of_pictures, PICTURES, "signal"),
    ],
)
def test_they_are_named_and_judged_as_pictures_where_that_is_declared(
    app: Callable[[], nn.Module],
    named: Callable[[], nn.Module],
    inputs: Tensor,
    kind: str,
    tmp_path: Path,
) -> None:
    captures = run(tmp_path, app, inputs, torch.arange(4) % 3)
    found = described(captures, tmp_path)
    assert getattr(found.description.input, kind) is not None
    (doubt,) = [line for line in found.doubts if "pictures of 1×8×8" in line]
    assert "input.kind=image" in doubt and "input.shape=[1,8,8]" in doubt
    content = {
        "model": f"{__name__}:{named.__name__}",
        "input": {"kind": "image", "shape": [1, 8, 8]},
    }
    pictures = redescribed(captures, content)
    found = checked(pictures, tmp_path)
    assert found.is_confirmed and not any("pictures" in line for line in found.doubts)
    assert torch.allclose(kept(pictures, found, tmp_path).images, PICTURES[:, None])
