"""The two LeNets of the gradient leakage literature."""

from __future__ import annotations

import math

from torch import Tensor, nn

from bract.errors import BractError
from bract.models.registry import MODELS, activation_layer


@MODELS.register("lenet")
class LeNet(nn.Module):
    """LeNet-5 with max pooling: 5x5 convolutions of 6 and 16 channels, then 120-84-classes.

    The thesis attacks this one (chapter 3). A 32x32 grey input gives 61,706 parameters for ten
    classes.
    """

    def __init__(
        self, *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
    ) -> None:
        super().__init__()
        side = ((image_size - 4) // 2 - 4) // 2
        if side < 1:
            raise BractError(
                f"model 'lenet' needs images of at least 16 pixels, found {image_size}",
                code="model-unsuited",
            )
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 5),
            activation_layer(activation),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            activation_layer(activation),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * side * side, 120),
            activation_layer(activation),
            nn.Linear(120, 84),
            activation_layer(activation),
            nn.Linear(84, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` to logits ``(B, classes)``."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


@MODELS.register("lenet-strided")
class StridedLeNet(nn.Module):
    """Three 5x5 convolutions of 12 channels with strides 2, 2 and 1, then one linear layer.

    The LeNet of Deep Leakage from Gradients and of the AdaDefense and FedKL papers; a 32x32
    input reaches the linear layer with 768 features.
    """

    def __init__(
        self, *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
    ) -> None:
        super().__init__()
        side = math.ceil(math.ceil(image_size / 2) / 2)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 12, 5, padding=2, stride=2),
            activation_layer(activation),
            nn.Conv2d(12, 12, 5, padding=2, stride=2),
            activation_layer(activation),
            nn.Conv2d(12, 12, 5, padding=2, stride=1),
            activation_layer(activation),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(12 * side * side, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` to logits ``(B, classes)``."""
        logits: Tensor = self.classifier(self.features(images))
        return logits
