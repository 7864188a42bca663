"""Images of any height and width: each attack that reconstructs squares reconstructs them too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pack
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bract import Observation
from bract.attacks import ATTACKS, Budget, Reconstruction, reconstruct
from bract.installed import TrustedReference
from bract.schema import ClientDeclaration

HERE = "test_not_square"
HEIGHT, WIDTH = 8, 16

NEED_SQUARES = {"grnn", "grnn-polish"}
"""Attacks whose generator makes squares alone."""


def convolutional(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2, padding=1),
        nn.Sigmoid(),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(HEIGHT * width * 2, 10),
    )


def connected(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(HEIGHT * width, 32), nn.ReLU(), nn.Linear(32, 10))


class Attentive(nn.Module):
    """A transformer on patches of four pixels, with an embedding of each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, stride=4)
        self.positions = nn.Parameter(torch.zeros(1, HEIGHT * width // 16, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        found: torch.Tensor = self.head(self.attention(tokens, tokens, tokens)[0].mean(dim=1))
        return found


def wide_convolutional() -> nn.Module:
    return convolutional(WIDTH)


def square_convolutional() -> nn.Module:
    return convolutional(HEIGHT)


def wide_connected() -> nn.Module:
    return connected(WIDTH)


def square_connected() -> nn.Module:
    return connected(HEIGHT)


def wide_attentive() -> nn.Module:
    return Attentive(WIDTH)


def square_attentive() -> nn.Module:
    return Attentive(HEIGHT)


def upload(kind: str, width: int) -> Observation:
    """Return one step on one random image."""
    torch.manual_seed(0)
    name = f"{'wide' if width == WIDTH else 'square'}_{kind}"
    model = globals()[name]()
    image, label = torch.rand(1, 1, HEIGHT, width), torch.tensor([3])
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    held = {name: value.clone() for name, value in model.named_buffers()}
    F.cross_entropy(model(image), label).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return Observation(
        round=1,
        client="a",
        parameters=before,
        buffers=held,
        update={name: before[name] - value.detach() for name, value in model.named_parameters()},
        declaration=ClientDeclaration(
            model=TrustedReference(f"{HERE}:{name}"),
            image_shape=(1, HEIGHT, width),
            classes=10,
            lr=0.1,
            local_steps=1,
            batch_size=1,
            num_examples=1,
        ),
    )


def attacks() -> Iterator[Any]:
    for name in sorted(ATTACKS):
        kind = ATTACKS[name]
        if "image" in kind.inputs and kind.tiers != ("surrogate",):
            for network in ("convolutional", "connected", "attentive"):
                quick = name in ("ig", "analytic", "coarse-to-fine") and network != "attentive"
                marks = () if quick else pytest.mark.thorough
                yield pytest.param(name, network, id=f"{name}-{network}", marks=marks)


@pytest.mark.parametrize(("attack", "network"), list(attacks()))
def test_an_attack_on_squares_takes_any_height_and_width(attack: str, network: str) -> None:
    def found(width: int) -> Any:
        seen = upload(network, width)
        (made,) = reconstruct(seen, attack, budget=Budget(iterations=5), device="cpu")
        if isinstance(made, Reconstruction):
            assert made.images.shape == (1, 1, HEIGHT, width)
            assert bool(made.images.isfinite().all())
        return made

    square, wide = found(HEIGHT), found(WIDTH)
    if attack in NEED_SQUARES:
        assert f"{HEIGHT}x{WIDTH}" in wide.reason
        return
    assert isinstance(wide, type(square)), getattr(wide, "reason", wide)


@pytest.mark.parametrize("kind", ["autoencoder", "flow"])
def test_a_prior_makes_squares_alone(kind: Any) -> None:
    seen = upload("convolutional", WIDTH)
    attack = "flow" if kind == "flow" else "ggl"
    (found,) = reconstruct(seen, attack, tier="surrogate", public=pack.prior(kind), device="cpu")
    assert f"(1, {HEIGHT}, {WIDTH})" in getattr(found, "reason", "")


@pytest.mark.parametrize("network", ["convolutional", "connected", "attentive"])
@pytest.mark.thorough
def test_the_default_audit_reconstructs_a_wide_image(network: str) -> None:
    torch.manual_seed(0)
    wanted = upload(network, WIDTH)
    (found,) = reconstruct(wanted, "auto", device="cpu")
    assert isinstance(found, Reconstruction)
    torch.manual_seed(0)
    globals()[f"wide_{network}"]()
    image = torch.rand(1, 1, HEIGHT, WIDTH)
    assert float((found.images - image).square().mean()) < 2e-3
