"""GRNN's generator: one network a trial that makes images and labels from fixed noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks.methods.grnn.upsampling import pack_kernel, upsampling_convolution
from bract.attacks.problem.problem import Problem
from bract.errors import BractError
from bract.updates.update import Tensors

SIDES = tuple(2**power for power in range(3, 9))
"""Sides of the squares that the generator makes."""


def makes_size(height: int, width: int) -> bool:
    """Return whether the generator makes images of this size."""
    return height == width and width in SIDES


def check_sides(height: int, width: int) -> None:
    """Refuse images that the generator does not make.

    Raises
    ------
    BractError
        If they are not square, or the side is no power of two from 8 to 256.
    """
    if not makes_size(height, width):
        listed = ", ".join(map(str, SIDES))
        raise BractError(
            f"GRNN's generator makes square images with a side of {listed} pixels, found "
            f"{height}x{width}; attack with ig, or let the app resize its images",
            code="attack-unsuited",
        )


class Generator(nn.Module):
    """Image and label branches on a common latent (GRNN; thesis, figure 3.2 and table 3.1).

    A transposed convolution makes 4x4 features, then each upsampling block doubles the side:
    nearest neighbour, 3x3 convolution without bias, batch normalisation over the images of the
    trial, gated linear unit. The last block has the image's channels, a sigmoid bounds pixels to
    (0, 1). The label branch is one linear layer with softmax.

    Parameters
    ----------
    size
        Side of the image, a power of two from 8 to 256.
    latent
        Length of the latent vector; 128 in GRNN, 1024 in the defense papers.
    width
        Channels before the last block, doubled for every block before it.
    """

    def __init__(
        self, *, size: int, channels: int, classes: int, latent: int = 128, width: int = 32
    ) -> None:
        super().__init__()
        check_sides(size, size)
        blocks = size.bit_length() - 3
        wide = width * 2 ** (blocks - 1)
        self.label = nn.Linear(latent, classes)
        self.seed = nn.ConvTranspose2d(latent, 2 * wide, 4)
        outputs = [wide // 2**i for i in range(1, blocks)] + [channels]
        inputs = [wide // 2**i for i in range(blocks)]
        self.blocks = nn.ModuleList(
            UpsamplingBlock(i, o) for i, o in zip(inputs, outputs, strict=True)
        )

    def forward(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Map latents ``(B, latent)`` to images ``(B, C, size, size)`` and label rows."""
        image = F.glu(self.seed(latent[:, :, None, None]), dim=1)
        for block in self.blocks:
            image = block(image)
        return torch.sigmoid(image), self.label(latent).softmax(dim=-1)


class UpsamplingBlock(nn.Module):
    """Double the side: nearest neighbour, 3x3 convolution, batch normalisation, GLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, 2 * outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2 * outputs, track_running_stats=False)

    def forward(self, features: Tensor) -> Tensor:
        """Map ``(B, inputs, s, s)`` to ``(B, outputs, 2s, 2s)``."""
        larger = F.interpolate(features, scale_factor=2, mode="nearest")
        return F.glu(self.norm(self.conv(larger)), dim=1)


class GeneratorSearch:
    """Candidate images as outputs of one generator a trial; its weights are the variables.

    All trials run as one batch, without `torch.func.vmap`, which would turn the convolutions into
    grouped ones. For one image a trial, the first layer's 128 x 4,096 weights see one fixed latent
    and act through their sum only, so that sum is the variable (`sums`); the optimizer moves it as
    it would move the weights.

    Parameters
    ----------
    labels
        Rows ``(L, B, classes)`` that replace the label branch, or None to use it.

    Attributes
    ----------
    variables
        Leaves ``(L, ...)`` by name.
    sums
        What `bract.attacks.solve.optimizers.FirstOrder` must know of variables that are sums.
    """

    def __init__(
        self, problem: Problem, *, latent: int, width: int, labels: Tensor | None = None
    ) -> None:
        images, channels, height, size = problem.image_shape
        check_sides(height, size)
        networks, latents = [], []
        for generator in problem.generators():
            seed = int(torch.randint(2**62, (1,), generator=generator))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                networks.append(
                    Generator(
                        size=size,
                        channels=channels,
                        classes=problem.classes,
                        latent=latent,
                        width=width,
                    )
                )
                latents.append(torch.randn(images, latent))
        self._labels = labels
        self._latent = torch.stack(latents).to(problem.device, problem.dtype)
        self._blocks = len(networks[0].blocks)
        self.sums: Tensors = {"seed.output": self._latent[:, 0]} if images == 1 else {}
        states = [_variables_of(n, z) for n, z in zip(networks, latents, strict=True)]
        self.variables: Tensors = {
            name: torch.stack([s[name].detach() for s in states])
            .to(problem.device, problem.dtype)
            .requires_grad_()
            for name in states[0]
        }

    @property
    def components(self) -> tuple[str, ...]:
        """The generator, and whether labels are read off or found by its label branch."""
        return "generator", "labels joint" if self._labels is None else "labels analytic"

    def decode(self) -> tuple[Tensor, Tensor]:
        """Run every trial's generator on its own latents."""
        v, z = self.variables, self._latent
        if "seed.output" in v:
            seed = v["seed.output"][:, :, None]
        else:
            seed = torch.bmm(v["seed.weight"].transpose(1, 2), z.transpose(1, 2))
            seed = seed.view(len(seed), -1, 16, z.shape[1]).transpose(2, 3)
        seed = seed.reshape(*seed.shape[:3], 4, 4) + v["seed.bias"][:, :, None, None, None]
        features = F.glu(seed, dim=1)
        for number in range(self._blocks):
            larger = upsampling_convolution(features, v[f"blocks.{number}.conv"])
            features = F.glu(
                _normalise(larger, v[f"blocks.{number}.scale"], v[f"blocks.{number}.shift"]), dim=1
            )
        images = torch.sigmoid(features).transpose(1, 2)
        if self._labels is not None:
            return images, self._labels
        logits = torch.baddbmm(v["label.bias"][:, None], z, v["label.weight"].transpose(1, 2))
        return images, logits.softmax(dim=-1)


def _variables_of(network: Generator, latents: Tensor) -> Tensors:
    """The free weights of one trial, laid out for `GeneratorSearch.decode`."""
    weight = network.seed.weight
    found: Tensors = {"label.weight": network.label.weight, "label.bias": network.label.bias}
    if len(latents) == 1:
        found["seed.output"] = torch.einsum("i,ioyx->oyx", latents[0], weight).flatten(1)
    else:
        found["seed.weight"] = weight.flatten(1)
    assert network.seed.bias is not None
    found["seed.bias"] = network.seed.bias
    for number, block in enumerate(network.blocks):
        assert isinstance(block, UpsamplingBlock)
        found[f"blocks.{number}.conv"] = pack_kernel(block.conv.weight)
        found[f"blocks.{number}.scale"] = block.norm.weight
        found[f"blocks.{number}.shift"] = block.norm.bias
    return found


def _normalise(features: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Batch normalisation of ``(L, C, B, h, w)`` over the images of each trial."""
    trials, channels, images, height, width = features.shape
    rows = features.reshape(1, trials * channels, images * height, width)
    made = F.batch_norm(rows, None, None, scale.flatten(), shift.flatten(), training=True)
    return made.view_as(features)
