"""Residual networks: the small ones of the CIFAR experiments, and torchvision's."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from bract.errors import BractError
from bract.models.layers import replace_layer
from bract.models.registry import MODELS, activation_layer


class _Block(nn.Module):
    """Two 3x3 convolutions with a shortcut without parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.activation1 = activation_layer(activation)
        self.activation2 = activation_layer(activation)
        self.stride = stride
        self.padding = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.activation1(self.norm1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.padding:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, self.padding, self.padding))
        added: Tensor = self.activation2(out + shortcut)
        return added


class CifarResNet(nn.Module):
    """ResNet of depth 6n+2 for small images (He et al. 2016, section 4.2), option A shortcuts.

    A 3x3 convolution of 16 channels, then 3 stages of n blocks with 16, 32 and 64 channels, global
    average pooling and one linear layer. Depth 20 has 269,722 parameters for ten classes of colour
    images, depth 32 has 464,154.
    """

    def __init__(
        self, *, depth: int, classes: int, channels: int, image_size: int, activation: str
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise BractError(
                f"a CIFAR ResNet has depth 6n+2 (20, 32, 44, ...), found {depth}",
                code="config-value",
            )
        if image_size < 8:
            raise BractError(
                f"model 'resnet{depth}' needs images of at least 8 pixels, found {image_size}",
                code="model-unsuited",
            )
        n = (depth - 2) // 6
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.activation = activation_layer(activation)
        widths = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    _Block(inputs, outputs, stride, activation),
                    *(_Block(outputs, outputs, 1, activation) for _ in range(n - 1)),
                )
                for inputs, outputs, stride in widths
            )
        )
        self.classifier = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` to logits ``(B, classes)``."""
        features = self.stages(self.activation(self.norm(self.conv(images))))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits


@MODELS.register("resnet20")
def resnet20(
    *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """Build the CIFAR ResNet of depth 20."""
    return CifarResNet(
        depth=20, classes=classes, channels=channels, image_size=image_size, activation=activation
    )


@MODELS.register("resnet32")
def resnet32(
    *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """Build the CIFAR ResNet of depth 32."""
    return CifarResNet(
        depth=32, classes=classes, channels=channels, image_size=image_size, activation=activation
    )


@MODELS.register("resnet18")
def resnet18(
    *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """Build torchvision's ResNet-18, untrained; 11,181,642 parameters for ten classes in colour."""
    return _torchvision_resnet("resnet18", classes, channels, image_size, activation)


@MODELS.register("resnet34")
def resnet34(
    *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """Build torchvision's ResNet-34, untrained."""
    return _torchvision_resnet("resnet34", classes, channels, image_size, activation)


@MODELS.register("resnet50")
def resnet50(
    *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """Build torchvision's ResNet-50, untrained; 23,528,522 parameters for ten classes in colour."""
    return _torchvision_resnet("resnet50", classes, channels, image_size, activation)


@MODELS.register("resnet101")
def resnet101(
    *, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
) -> nn.Module:
    """Build torchvision's ResNet-101, untrained."""
    return _torchvision_resnet("resnet101", classes, channels, image_size, activation)


def _torchvision_resnet(
    name: str, classes: int, channels: int, image_size: int, activation: str
) -> nn.Module:
    import torchvision

    if image_size < 16:
        raise BractError(
            f"model {name!r} needs images of at least 16 pixels, found {image_size}",
            code="model-unsuited",
        )
    model: nn.Module = getattr(torchvision.models, name)(weights=None, num_classes=classes)
    if channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return with_activation(model, activation)


def with_activation(model: nn.Module, activation: str) -> nn.Module:
    """Replace every in-place ReLU by a new layer of ``activation``, in place.

    In-place activations overwrite what a second derivative needs.
    """
    for name in [n for n, m in model.named_modules() if isinstance(m, nn.ReLU)]:
        replace_layer(model, name, activation_layer(activation))
    return model
