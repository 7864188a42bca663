"""The plain convolutional network of the Inverting Gradients experiments."""

from __future__ import annotations

from torch import Tensor, nn

from bract.errors import BractError
from bract.models import activation_layer

_WIDTHS = (1, 2, 2, 4, 4, 4, 4, 4)
_POOLED = (5, 7)
"""Channels of each convolution in multiples of the first, and after which of them is pooled."""


class ConvNet(nn.Module):
    """Eight 3x3 convolutions with batch normalisation, one linear layer (Geiping et al. 2020).

    Channels are 1, 2, 2, 4, 4, 4, 4, 4 times ``width``; after the sixth and the eighth a 3x3
    max pooling of stride 3 leaves a ninth of the side. Width 64 has 2,904,970 parameters for ten
    classes of colour images of 32 pixels.
    """

    def __init__(
        self, *, width: int, classes: int, channels: int, image_size: int, activation: str
    ) -> None:
        super().__init__()
        if image_size < 9:
            raise BractError(
                f"model 'convnet{width}' needs images of at least 9 pixels, found {image_size}",
                code="model-unsuited",
            )
        layers: list[nn.Module] = []
        inputs = channels
        for index, factor in enumerate(_WIDTHS):
            outputs = factor * width
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                activation_layer(activation),
            ]
            if index in _POOLED:
                layers.append(nn.MaxPool2d(3))
            inputs = outputs
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs * (image_size // 3 // 3) ** 2, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` to logits ``(B, classes)``."""
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def convnet64(
    *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """Build the ConvNet of width 64."""
    return ConvNet(
        width=64, classes=classes, channels=channels, image_size=image_size, activation=activation
    )
