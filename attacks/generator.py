"""GRNN's generator: one network a lane that makes images and labels from fixed noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from bract.attacks.problem import Problem
from bract.errors import BractError
from bract.update import Tensors


class Generator(nn.Module):
    """Image and label branches on a common latent (GRNN; thesis, figure 3.2 and table 3.1).

    A transposed convolution makes 4x4 features, then each upsampling block doubles the side:
    nearest neighbour, 3x3 convolution without bias, batch normalisation over the images of the
    lane, gated linear unit. The last block has the image's channels, a sigmoid bounds pixels to
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
        blocks = size.bit_length() - 3
        if size != 2 ** (blocks + 2) or not 1 <= blocks <= 6:
            raise BractError(
                f"GRNN's generator makes images of 8, 16, 32, 64, 128 or 256 pixels, found {size}"
            )
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
    """Candidate images as outputs of one generator a lane; its weights are the variables.

    Parameters
    ----------
    labels
        Rows ``(L, B, classes)`` that replace the label branch, or None to use it.
    """

    def __init__(
        self, problem: Problem, *, latent: int, width: int, labels: Tensor | None = None
    ) -> None:
        images, channels, size, _ = problem.image_shape
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
        self._network = networks[0].to(problem.device)
        self._labels = labels
        self._latent = torch.stack(latents).to(problem.device, problem.dtype)
        states = [dict(n.named_parameters()) for n in networks]
        self.variables: Tensors = {
            name: torch.stack([s[name].detach().cpu() for s in states])
            .to(problem.device, problem.dtype)
            .requires_grad_()
            for name in states[0]
        }

    def decode(self) -> tuple[Tensor, Tensor]:
        """Run every lane's generator on its own latents."""
        if len(self._latent) == 1:
            state = {name: value[0] for name, value in self.variables.items()}
            image, label = functional_call(self._network, state, (self._latent[0],))
            images, labels = image[None], label[None]
        else:

            def one(state: Tensors, latent: Tensor) -> tuple[Tensor, Tensor]:
                made: tuple[Tensor, Tensor] = functional_call(self._network, state, (latent,))
                return made

            images, labels = vmap(one)(self.variables, self._latent)
        return images, labels if self._labels is None else self._labels
