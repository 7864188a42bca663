"""Vision transformers: sizes by name, and torchvision's ViT-B/16."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.errors import BractError
from bract.models.layers import replace_layer
from bract.models.registry import MODELS

Pool = Literal["class", "mean"]
Positions = Literal["learned", "sinusoidal"]
Norm = Literal["pre", "post"]
Embedding = Literal["convolution", "linear"]

_SPREAD = 0.02
"""Standard deviation of fresh position embeddings and class tokens (Dosovitskiy et al. 2021)."""

_MOST_LAYERS, _MOST_WIDTH = 64, 8192


class _Patches(nn.Module):
    """Cut images into squares and map each linearly to a token ``(B, N, width)``, row by row."""

    def __init__(self, channels: int, patch: int, width: int, embedding: Embedding) -> None:
        super().__init__()
        self.patch = patch
        self.projection: nn.Conv2d | nn.Linear
        if embedding == "convolution":
            self.projection = nn.Conv2d(channels, width, patch, stride=patch)
        else:
            self.projection = nn.Linear(channels * patch**2, width)

    def forward(self, images: Tensor) -> Tensor:
        if isinstance(self.projection, nn.Conv2d):
            tokens: Tensor = self.projection(images).flatten(2).transpose(1, 2)
            return tokens
        count, channels, side, _ = images.shape
        cut = images.view(count, channels, side // self.patch, self.patch, -1, self.patch)
        rows = cut.permute(0, 2, 4, 3, 5, 1).reshape(count, (side // self.patch) ** 2, -1)
        mapped: Tensor = self.projection(rows)
        return mapped


class _Attention(nn.Module):
    """Multi-head self-attention of ``(B, T, width)``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        count, length, width = tokens.shape
        joint = self.queries_keys_values(tokens)
        parts = joint.view(count, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(width // self.heads)
        seen = scores.softmax(dim=-1) @ values
        mixed: Tensor = self.out(seen.transpose(1, 2).reshape(count, length, width))
        return mixed


class _Block(nn.Module):
    """Attention and a feed-forward layer, each with a shortcut and a layer normalisation."""

    def __init__(self, width: int, heads: int, hidden: int, norm: Norm) -> None:
        super().__init__()
        self.before = norm == "pre"
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.expand, self.contract = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def _feed_forward(self, tokens: Tensor) -> Tensor:
        contracted: Tensor = self.contract(F.gelu(self.expand(tokens)))
        return contracted

    def forward(self, tokens: Tensor) -> Tensor:
        if self.before:
            tokens = tokens + self.attention(self.norm1(tokens))
            return tokens + self._feed_forward(self.norm2(tokens))
        tokens = self.norm1(tokens + self.attention(tokens))
        normed: Tensor = self.norm2(tokens + self._feed_forward(tokens))
        return normed


class ViT(nn.Module):
    """A vision transformer for classification (Dosovitskiy et al., ICLR 2021).

    Parameters
    ----------
    patch
        Side of a patch in pixels; it divides ``image_size``.
    width, depth, heads, hidden
        Width of a token, number of blocks, heads of attention, and units of the feed-forward
        layers; ``heads`` divides ``width``. ``hidden`` None takes four times the width.
    pool
        ``class``: the logits come from a learned token. ``mean``: from the mean over patches.
    positions
        ``learned``, or the fixed ``sinusoidal`` ones of Vaswani et al. (2017), in the order of
        patches.
    norm
        ``pre``: normalise what enters each sub-layer, and the output once. ``post``: normalise
        after each shortcut.
    embedding
        Whether a ``convolution`` or a ``linear`` layer maps a patch to a token; the same map, with
        the pixels of a patch by channel or by place.
    """

    positions: Tensor

    def __init__(
        self,
        *,
        classes: int,
        channels: int,
        image_size: int,
        patch: int = 4,
        width: int = 192,
        depth: int = 6,
        heads: int = 3,
        hidden: int | None = None,
        pool: Pool = "class",
        positions: Positions = "learned",
        norm: Norm = "pre",
        embedding: Embedding = "convolution",
    ) -> None:
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        _check_sizes(image_size, patch, width, depth, heads, hidden)
        tokens = (image_size // patch) ** 2 + (pool == "class")
        self.patches = _Patches(channels, patch, width, embedding)
        self.class_token = nn.Parameter(torch.empty(1, 1, width)) if pool == "class" else None
        if positions == "learned":
            self.positions = nn.Parameter(torch.empty(1, tokens, width))
        else:
            self.register_buffer("positions", sinusoids(tokens, width)[None])
        self.blocks = nn.Sequential(*(_Block(width, heads, hidden, norm) for _ in range(depth)))
        self.norm = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        self.head = nn.Linear(width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the position embedding and the class token; layers draw their own parameters."""
        for drawn in (self.class_token, self.positions):
            if isinstance(drawn, nn.Parameter):
                nn.init.normal_(drawn, std=_SPREAD)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` to logits ``(B, classes)``."""
        tokens = self.patches(images)
        if self.class_token is not None:
            tokens = torch.cat([self.class_token.expand(len(images), -1, -1), tokens], dim=1)
        found = self.norm(self.blocks(tokens + self.positions))
        logits: Tensor = self.head(found.mean(dim=1) if self.class_token is None else found[:, 0])
        return logits


def sinusoids(tokens: int, width: int) -> Tensor:
    """Return fixed positions ``(tokens, width)`` in [-1, 1] (Vaswani et al. 2017, section 3.5)."""
    place = torch.arange(tokens, dtype=torch.float32)[:, None]
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    found = torch.zeros(tokens, width)
    found[:, 0::2] = torch.sin(place * rates)
    found[:, 1::2] = torch.cos(place * rates)[:, : width // 2]
    return found


@MODELS.register("vit")
def vit(
    *,
    classes: int,
    channels: int,
    image_size: int,
    activation: str = "sigmoid",
    patch: int = 4,
    width: int = 192,
    depth: int = 6,
    heads: int = 3,
    hidden: int | None = None,
    pool: Pool = "class",
    positions: Positions = "learned",
    norm: Norm = "pre",
    embedding: Embedding = "convolution",
) -> nn.Module:
    """Build a `ViT`; 2,693,578 parameters for ten classes of 32x32 colour images.

    Its feed-forward layers have GELU, whatever the ``activation``.
    """
    del activation
    return ViT(
        classes=classes,
        channels=channels,
        image_size=image_size,
        patch=patch,
        width=width,
        depth=depth,
        heads=heads,
        hidden=hidden,
        pool=pool,
        positions=positions,
        norm=norm,
        embedding=embedding,
    )


@MODELS.register("vit_b_16")
def vit_b_16(
    *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """Build torchvision's ViT-B/16, untrained; 85,806,346 parameters for ten classes at 224 pixels.

    Its feed-forward layers have GELU, whatever the ``activation``. torchvision sets the output
    layer to zeros, so that no gradient reaches the layers before it; here it is drawn as every
    linear layer is.
    """
    del activation
    from torchvision.models.vision_transformer import VisionTransformer

    if image_size < 16 or image_size % 16:
        raise BractError(
            f"model 'vit_b_16' needs images whose side is a multiple of 16 pixels, found "
            f"{image_size}",
            code="model-unsuited",
        )

    class Redrawn(VisionTransformer):  # type: ignore[misc]
        """Draws what PyTorch's layers do not draw by themselves."""

        def reset_parameters(self) -> None:
            """Draw positions, class token and attention, and the output layer."""
            nn.init.normal_(self.encoder.pos_embedding, std=_SPREAD)
            nn.init.zeros_(self.class_token)
            for module in self.modules():
                if isinstance(module, nn.MultiheadAttention):
                    module._reset_parameters()
            self.heads.head.reset_parameters()

    model = Redrawn(
        image_size=image_size,
        patch_size=16,
        num_layers=12,
        num_heads=12,
        hidden_dim=768,
        mlp_dim=3072,
        num_classes=classes,
    )
    if channels != 3:
        replace_layer(model, "conv_proj", nn.Conv2d(channels, 768, 16, stride=16))
    model.reset_parameters()
    return model


def _check_sizes(
    image_size: int, patch: int, width: int, depth: int, heads: int, hidden: int
) -> None:
    sizes = {"patch": patch, "width": width, "depth": depth, "heads": heads, "hidden": hidden}
    for name, value in sizes.items():
        most = _MOST_LAYERS if name == "depth" else _MOST_WIDTH
        if not 1 <= value <= most:
            raise BractError(
                f"model 'vit': {name} is {value}, expected 1 to {most}", code="config-value"
            )
    if image_size % patch:
        raise BractError(
            f"model 'vit': patches of {patch} pixels do not divide images of {image_size}; choose "
            "a patch that does",
            code="model-unsuited",
        )
    if width % heads:
        raise BractError(
            f"model 'vit': width {width} is no multiple of its {heads} heads", code="config-value"
        )
