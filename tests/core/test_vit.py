from typing import Any

import pytest
import torch
from refusals import refused
from torch import nn

from bract.models import create_model
from bract.models.initialise import initialise
from bract.models.vit import ViT, sinusoids


def make(name: str, size: int = 32, channels: int = 3, classes: int = 10) -> Any:
    return create_model(name, classes=classes, channels=channels, image_size=size)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_counts_are_those_of_the_sizes() -> None:
    # Patches 48 x 192 + 192, class token 192, positions 65 x 192; a block 2 x 384 in norms,
    # 192 x 576 + 576 and 192 x 192 + 192 in attention, 192 x 768 + 768 and 768 x 192 + 192 behind
    # it; last norm 384, head 1,930.
    block = 768 + 111_168 + 37_056 + 148_224 + 147_648
    with torch.device("meta"):
        assert count(make("vit")) == 9_408 + 192 + 12_480 + 6 * block + 384 + 1_930
        # torchvision gives 86,567,656 with 1,000 classes.
        assert count(make("vit_b_16", 224, classes=1000)) == 86_567_656


@pytest.mark.parametrize(
    "settings",
    ["pool=mean", "positions=sinusoidal", "norm=post", "embedding=linear", "patch = 8, depth=1"],
)
@pytest.mark.parametrize(("size", "channels"), [(16, 3), (32, 1)])
def test_every_variant_takes_other_sizes_and_colours(
    settings: str, size: int, channels: int
) -> None:
    model = make(f"vit(width=24,{settings})", size, channels)
    assert model(torch.rand(2, channels, size, size)).shape == (2, 10)


def test_both_embeddings_are_one_map_of_the_pixels_of_a_patch() -> None:
    torch.manual_seed(0)
    models = [make(f"vit(width=24,depth=1,embedding={e})", 16) for e in ("convolution", "linear")]
    by_channel = models[0].patches.projection
    by_place = models[1].patches.projection
    with torch.no_grad():
        by_place.weight.copy_(by_channel.weight.permute(0, 2, 3, 1).flatten(1))
        by_place.bias.copy_(by_channel.bias)
    images = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(models[0].patches(images), models[1].patches(images))


def test_a_block_before_and_after_norm_is_pytorchs_own() -> None:
    for norm in ("pre", "post"):
        torch.manual_seed(0)
        model = make(f"vit(width=24,depth=1,norm={norm})", 16)
        (block,) = model.blocks
        reference = nn.TransformerEncoderLayer(
            24, 3, 96, 0.0, "gelu", batch_first=True, norm_first=norm == "pre"
        )
        pairs = {
            "self_attn.in_proj_": block.attention.queries_keys_values,
            "self_attn.out_proj.": block.attention.out,
            "linear1.": block.expand,
            "linear2.": block.contract,
            "norm1.": block.norm1,
            "norm2.": block.norm2,
        }
        state = {f"{n}{p}": getattr(m, p) for n, m in pairs.items() for p in ("weight", "bias")}
        reference.load_state_dict(state)
        tokens = torch.randn(2, 5, 24)
        torch.testing.assert_close(block(tokens), reference(tokens))


def test_fixed_positions_are_sines_and_cosines_and_no_parameter() -> None:
    found = sinusoids(3, 4)
    # Position 2, rates 1 and 1 / 100.
    expected = torch.tensor([2.0, 2.0, 0.02, 0.02])
    expected = torch.where(torch.tensor([1, 0, 1, 0]).bool(), expected.sin(), expected.cos())
    torch.testing.assert_close(found[2], expected)
    model = make("vit(positions=sinusoidal,depth=1)")
    assert "positions" not in dict(model.named_parameters())
    assert "positions" in dict(model.named_buffers())


@pytest.mark.parametrize(("name", "size"), [("vit(width=24,depth=1)", 16), ("vit_b_16", 16)])
def test_every_parameter_is_drawn_from_the_seed(name: str, size: int) -> None:
    torch.manual_seed(1)
    first = initialise(make(name, size), "default", 5)
    torch.manual_seed(2)
    second = initialise(make(name, size), "default", 5)
    for (key, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), key
    head = list(first.parameters())[-2]
    assert bool(head.any()), "an output layer of zeros lets no gradient through"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit(pach=8)", ("config-key", "patch")),
        ("vit(patch)", ("config-value", "name=value")),
        ("vit(patch=4,patch=8)", ("config-value",)),
        ("vit(patch=four)", ("config-value", "four")),
        ("vit(pool=max)", ("config-value", "max")),
        ("vit(patch=5)", ("model-unsuited", "vit")),
        ("vit(width=100)", ("config-value", "3")),
        ("vit(depth=65)", ("config-value", "1", "64")),
        ("lenet(depth=2)", ("config-key", "lenet")),
        ("vitt(depth=2)", ("unknown-name", "vitt")),
    ],
)
def test_a_wrong_size_is_named_with_what_was_expected(name: str, reason: tuple[str, ...]) -> None:
    with refused(*reason):
        make(name)


def test_torchvisions_transformer_needs_whole_patches() -> None:
    with refused("model-unsuited", 16):
        make("vit_b_16", 40)


def test_a_transformer_can_be_made_without_the_registry() -> None:
    model = ViT(classes=3, channels=1, image_size=8, width=8, depth=1, heads=2)
    assert model(torch.rand(1, 1, 8, 8)).shape == (1, 3)
