"""Disturbed images whose gradients are held against the client's."""

import pytest
import torch

from bract.scores import psnr
from experiments.needle import disturbed


@pytest.mark.parametrize("kind", ["white", "smooth"])
@pytest.mark.parametrize("level", [15, 50])
def test_an_image_is_disturbed_to_the_psnr_asked_for(kind: str, level: int) -> None:
    image = torch.full((1, 3, 32, 32), 0.5)
    made = disturbed(image, level, kind, 0)
    assert float(psnr(made, image)[0]) == pytest.approx(level, abs=1e-3)


def test_smooth_noise_is_alike_at_neighbouring_pixels() -> None:
    def alike(kind: str) -> float:
        noise = disturbed(torch.zeros(1, 3, 32, 32), 20, kind, 0)
        pairs = torch.stack([noise[..., 1:].flatten(), noise[..., :-1].flatten()])
        return float(torch.corrcoef(pairs)[0, 1])

    assert alike("white") < 0.1
    assert alike("smooth") > 0.8
