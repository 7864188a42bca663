"""torchvision's VGG-16, without and with batch normalisation."""

from __future__ import annotations

from torch import nn

from bract.errors import BractError
from bract.models.layers import replace_layer
from bract.models.registry import MODELS
from bract.models.resnet import with_activation


@MODELS.register("vgg16")
def vgg16(
    *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """Build torchvision's VGG-16, untrained; 134,301,514 parameters for ten classes in colour."""
    return _vgg("vgg16", classes, channels, image_size, activation)


@MODELS.register("vgg16-bn")
def vgg16_bn(
    *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """Build torchvision's VGG-16 with batch normalisation, untrained."""
    return _vgg("vgg16_bn", classes, channels, image_size, activation)


def _vgg(name: str, classes: int, channels: int, image_size: int, activation: str) -> nn.Module:
    import torchvision

    if image_size < 32:
        raise BractError(
            f"model {name.replace('_', '-')!r} needs images of at least 32 pixels, "
            f"found {image_size}",
            code="model-unsuited",
        )
    model: nn.Module = getattr(torchvision.models, name)(weights=None, num_classes=classes)
    if channels != 3:
        replace_layer(model, "features.0", nn.Conv2d(channels, 64, 3, padding=1))
    return with_activation(model, activation)
