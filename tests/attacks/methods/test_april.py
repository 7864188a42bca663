from typing import Any

import pytest
import torch
from observing import scores
from refusals import refused
from torch import Tensor
from torch.nn import functional as F

from bract.attacks import Budget
from bract.attacks.problem.linear_layers import patch_projection
from bract.attacks.problem.target_model import target_model_of
from bract_papers.april import (
    April,
    PatchBorders,
    WithPositions,
    patch_of_each_pixel,
)

FIXED = "vit(patch=4,width=48,depth=1,heads=2,positions=sinusoidal)"


def photo(size: int, count: int = 1) -> Tensor:
    """Smooth images in colour."""
    coarse = torch.rand(count, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, size=size, mode="bilinear", align_corners=False)


def test_the_loss_is_the_relative_error_and_the_angle_of_positions() -> None:
    captured = {"a": torch.tensor([[3.0, 0.0]]), "p": torch.tensor([[0.0, 4.0]])}
    simulated = {"a": torch.tensor([[3.0, 0.0]]), "p": torch.tensor([[3.0, 4.0]])}
    # 9 of 25 is the error; the cosine of (0, 4) and (3, 4) is 0.8.
    found = WithPositions(alpha=2.0, position="p")(simulated, captured, None)
    assert float(found) == pytest.approx(9 / 25 + 2.0 * 0.2)
    without = WithPositions(alpha=2.0, position=None)(simulated, captured, None)
    assert float(without) == pytest.approx(9 / 25)


def test_borders_are_the_differences_across_patches_alone(observe: Any) -> None:
    seen = observe(photo(8), torch.tensor([3]), model=FIXED)
    owner = patch_of_each_pixel(patch_projection(target_model_of(seen), seen), (3, 8, 8))
    assert owner[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1] and owner[7, 0] == 2
    image = torch.zeros(1, 1, 3, 8, 8)
    image[..., 4:] = 0.5  # a step of 0.5 where two patches meet, side by side
    image[..., :4, 0] = 0.25  # and steps within a patch, which do not count
    prior = PatchBorders(weight=2.0, owner=owner)
    # Rows: every difference across is 0.5. Columns: 0.25 at one of eight places.
    expected = 2.0 * (0.25 + 0.0625 / 8)
    assert float(prior(None, image)) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [FIXED, FIXED.replace("sinusoidal", "learned")])
def test_a_search_comes_nearer_to_the_image(observe: Any, model: str) -> None:
    image = photo(8)
    seen = observe(image, torch.tensor([3]), model=model)
    short, long = (April()(seen, budget=Budget(iterations=n)) for n in (1, 60))
    assert long.final_loss < 0.1 * short.final_loss
    assert scores(long.images, image)[0].psnr > scores(short.images, image)[0].psnr
    assert "patch borders" in long.components and "total variation" in long.components


def test_a_batch_is_searched_and_a_model_without_patches_is_refused(observe: Any) -> None:
    images, labels = photo(8, 2), torch.tensor([3, 4])
    found = April()(observe(images, labels, model=FIXED), budget=Budget(iterations=2))
    assert found.images.shape == (2, 3, 8, 8)
    with refused("attack-unsuited", "mlp"):
        April()(observe(images, labels, model="mlp"))


def test_attention_of_torchvision_can_be_differentiated_twice(observe: Any) -> None:
    from torchvision.models.vision_transformer import VisionTransformer

    from bract.models import MODELS

    def small(**_: Any) -> VisionTransformer:
        torch.manual_seed(0)
        made = VisionTransformer(8, 4, 1, 2, 16, 32, num_classes=10)
        made.heads[-1].reset_parameters()
        return made

    MODELS._entries["test-torchvision"] = small
    try:
        seen = observe(photo(8), torch.tensor([3]), model=small(), name="test-torchvision")
        found = April()(seen, budget=Budget(iterations=3, restarts=2))
    finally:
        del MODELS._entries["test-torchvision"]
    assert len(found.trials) == 2 and not found.failed
