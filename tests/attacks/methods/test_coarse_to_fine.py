from dataclasses import replace
from typing import Any

import torch

from bract.attacks import Budget, attack
from bract.attacks.methods.coarse_to_fine import CoarseToFine
from bract.attacks.solve.pixels import resized
from bract.audit.questions.reconstruction.scores.image import match, psnr
from bract.models import create_model
from bract.models.initialise import initialise


def test_sizes_grow_and_share_the_whole_run() -> None:
    found = CoarseToFine()._stages(32)
    assert [side for side, _ in found] == [8, 16, 32]
    assert sum(share for _, share in found) == 1.0
    assert [side for side, _ in CoarseToFine()._stages(16)] == [8, 16]
    assert CoarseToFine()._stages(7) == [(7, 1.0)]


def test_images_of_several_epochs_come_back_whatever_their_order(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:6], digits[1][:6]
    network = create_model(
        "lenet-strided", classes=10, channels=1, image_size=16, activation="relu"
    )
    seen = observe(
        images,
        labels,
        model=initialise(network, "default", 0),
        steps=18,
        batch_size=2,
        lr=0.01,
        activation="relu",
    )
    seen = replace(seen, declaration=seen.declaration.updated({"model": "lenet-strided"}))
    result = attack("coarse-to-fine")(seen, budget=Budget(iterations=300), seed=1)
    pairs = match(result.images, images)
    found = float(psnr(result.images[pairs], images).mean())
    grey = float(psnr(torch.full_like(images, 0.3), images).mean())
    assert found > grey + 4.0
    assert {"pixels", "coarse to fine", "total variation"} <= set(result.components)


def test_enlarging_keeps_a_plane() -> None:
    plane = torch.full((1, 2, 1, 4, 4), 0.7)
    assert torch.equal(resized(plane, 4), plane)
    assert torch.allclose(resized(plane, 8), torch.full((1, 2, 1, 8, 8), 0.7))
