"""VGG-Face's network: VGG-16's convolutions with three fully connected layers of a face set."""

from __future__ import annotations

from torch import Tensor, nn

from bract.errors import BractError
from bract.models import activation_layer

_BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and 3x3 convolutions of each block; each ends by halving the side."""


class VGGFace(nn.Module):
    """Configuration D of Deep Face Recognition (Parkhi, Vedaldi, Zisserman. BMVC 2015).

    Thirteen 3x3 convolutions in five blocks that each end in a maximum over 2x2, then ``fc6`` and
    ``fc7`` with dropout of a half, and ``fc8`` to the classes. ``fc6`` spans all that the blocks
    leave, 7x7 at 224 pixels and one value a channel at 32 to 63, where torchvision's VGG-16 repeats
    values up to 7x7. With 2,622 classes at 224 pixels in colour it has 145,002,878 parameters.

    Parameters
    ----------
    classes, channels, image_size, activation
        See `bract.models.create_model`; at least 32 pixels.
    width
        Features of ``fc6`` and ``fc7``; the registered name has the paper's.
    """

    def __init__(
        self,
        *,
        classes: int,
        channels: int,
        image_size: int,
        activation: str = "sigmoid",
        width: int = 4096,
    ) -> None:
        super().__init__()
        if image_size < 32:
            raise BractError(
                f"model 'vggface' needs images of at least 32 pixels, found {image_size}",
                code="model-unsuited",
            )
        if width < 1:
            raise BractError(
                f"model 'vggface' needs a width of at least 1, found {width}", code="config-value"
            )
        layers: list[nn.Module] = []
        inputs = channels
        for outputs, convolutions in _BLOCKS:
            for _ in range(convolutions):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), activation_layer(activation)]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        side = image_size // 32
        self.features = nn.Sequential(*layers)
        self.flatten = nn.Flatten()
        self.fc6 = nn.Linear(inputs * side * side, width)
        self.activation6 = activation_layer(activation)
        self.dropout6 = nn.Dropout(0.5)
        self.fc7 = nn.Linear(width, width)
        self.activation7 = activation_layer(activation)
        self.dropout7 = nn.Dropout(0.5)
        self.fc8 = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` to logits ``(B, classes)``."""
        found = self.flatten(self.features(images))
        found = self.dropout6(self.activation6(self.fc6(found)))
        logits: Tensor = self.fc8(self.dropout7(self.activation7(self.fc7(found))))
        return logits
