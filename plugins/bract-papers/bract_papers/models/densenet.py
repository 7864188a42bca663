"""Densely connected networks (Huang et al., CVPR 2017)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from bract.errors import BractError
from bract.models import activation_layer
from bract.models.resnet import with_activation


def densenet121(
    *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """Build torchvision's DenseNet-121, untrained; 6,964,106 parameters for ten classes in colour.

    Names of tensors are torchvision's. Its last rectifier, a function in place, is a layer here.
    """
    import torchvision

    if image_size < 32:
        raise BractError(
            f"model 'densenet121' needs images of at least 32 pixels, found {image_size}",
            code="model-unsuited",
        )
    model = torchvision.models.densenet121(weights=None, num_classes=classes)
    if channels != 3:
        model.features.conv0 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return nn.Sequential(
        OrderedDict(
            features=with_activation(model.features, activation),
            activation=activation_layer(activation),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=model.classifier,
        )
    )
