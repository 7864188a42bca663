"""The two LeNets with batch normalisation after every convolution.

FedKL needs a normalisation layer. Compare it with these, not with the plain LeNets: otherwise the
normalisation is counted as the lock's effect.
"""

from __future__ import annotations

from torch import nn

from bract.models.lenet import LeNet, StridedLeNet
from bract.models.registry import MODELS


@MODELS.register("lenet-bn")
class LeNetBN(LeNet):
    """`LeNet` with `torch.nn.BatchNorm2d` between each convolution and its activation."""

    def __init__(
        self, *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
    ) -> None:
        super().__init__(
            classes=classes, channels=channels, image_size=image_size, activation=activation
        )
        self.features = _normalised(self.features)


@MODELS.register("lenet-strided-bn")
class StridedLeNetBN(StridedLeNet):
    """`StridedLeNet` with `torch.nn.BatchNorm2d` between each convolution and its activation."""

    def __init__(
        self, *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
    ) -> None:
        super().__init__(
            classes=classes, channels=channels, image_size=image_size, activation=activation
        )
        self.features = _normalised(self.features)


def _normalised(features: nn.Sequential) -> nn.Sequential:
    layers: list[nn.Module] = []
    for layer in features:
        layers.append(layer)
        if isinstance(layer, nn.Conv2d):
            layers.append(nn.BatchNorm2d(layer.out_channels))
    return nn.Sequential(*layers)
