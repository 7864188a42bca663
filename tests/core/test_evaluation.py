from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bract.data.spec import DataSpec
from bract.models.evaluation import MOST, PIXELS, TOKENS, at_once, evaluate

SMALL = DataSpec((1, 8, 8), 3, (0.5,), (0.25,))


class Counting(nn.Module):
    """A linear model that notes how many records it took at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)
        self.taken: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.taken.append(len(inputs))
        logits: Tensor = self.layer(inputs.flatten(1))
        return logits


def test_loss_and_accuracy_in_parts_are_those_of_all_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(600, 1, 8, 8, generator=generator)
    labels = torch.randint(3, (600,), generator=generator)
    model = Counting()
    loss, accuracy = evaluate(model, images, labels, spec=SMALL)
    assert model.taken == [MOST, MOST, 88]
    logits = model.layer(((images - 0.5) / 0.25).flatten(1))
    assert loss == pytest.approx(float(nn.functional.cross_entropy(logits, labels)))
    assert accuracy == pytest.approx(float((logits.argmax(1) == labels).float().mean()))


def test_a_model_takes_fewer_large_images_and_long_texts_at_once() -> None:
    assert at_once(replace(SMALL, image_shape=(3, 32, 32))) == MOST
    assert at_once(replace(SMALL, image_shape=(3, 224, 224))) == PIXELS // (3 * 224 * 224)
    assert at_once(replace(SMALL, image_shape=(3, 4096, 4096))) == 1
    text: Any = object()
    assert at_once(replace(SMALL, image_shape=(32, 1, 1), text=text)) == TOKENS // 32
    assert at_once(replace(SMALL, image_shape=(4096, 1, 1), text=text)) == 1
