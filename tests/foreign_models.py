"""Ten models in the shapes that third-party apps have, for one 8x8 grey image and ten classes.

Each is made by a callable without arguments, which a capture names as ``foreign_models:name``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bract.installed import own_word
from bract.models import create_model
from bract.models.frozen import with_frozen_backbone
from bract.models.initialise import initialise

SIZE, CLASSES = 8, 10


def _convolutions(activation: type[nn.Module], *, norm: bool = False) -> nn.Module:
    def block(wide_in: int, wide: int, stride: int) -> list[nn.Module]:
        between = [nn.BatchNorm2d(wide)] if norm else []
        return [nn.Conv2d(wide_in, wide, 3, stride, 1), *between, activation()]

    return nn.Sequential(
        *block(1, 8, 1), *block(8, 16, 2), nn.Flatten(), nn.Linear(16 * 16, CLASSES)
    )


def relu_cnn() -> nn.Module:
    return _convolutions(nn.ReLU)


def tanh_cnn() -> nn.Module:
    return _convolutions(nn.Tanh)


def gelu_cnn() -> nn.Module:
    return _convolutions(nn.GELU)


def batch_norm_cnn() -> nn.Module:
    return _convolutions(nn.ReLU, norm=True)


class PooledNet(nn.Module):
    """The shape of Flower's own first example: convolution, pooling, three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2 = nn.Linear(16 * 4, 40), nn.Linear(40, 24)
        self.fc3 = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x))).flatten(1)
        logits: Tensor = self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))
        return logits


def pooled_cnn() -> nn.Module:
    return PooledNet()


class ResidualNet(nn.Module):
    """Two convolutions with a shortcut, and the mean over the places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        held = torch.relu(self.stem(x))
        held = held + torch.relu(self.block(held))
        logits: Tensor = self.head(held.mean((2, 3)))
        return logits


def residual_cnn() -> nn.Module:
    return ResidualNet()


def _perceptron(*activations: nn.Module) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    wide = SIZE * SIZE
    for activation in activations:
        layers += [nn.Linear(wide, 32), activation]
        wide = 32
    return nn.Sequential(*layers, nn.Linear(wide, CLASSES))


def linear() -> nn.Module:
    return _perceptron()


def relu_mlp() -> nn.Module:
    return _perceptron(nn.ReLU())


def sigmoid_mlp() -> nn.Module:
    return _perceptron(nn.Sigmoid())


def deep_mlp() -> nn.Module:
    return _perceptron(nn.LeakyReLU(), nn.Tanh(), nn.ReLU())


class DroppingNet(nn.Module):
    """Draws masks of dropout in its own code, where no layer shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        features = self.hidden(images.flatten(1)).relu()
        found: Tensor = self.out(nn.functional.dropout(features, 0.5, self.training))
        return found


def dropping() -> nn.Module:
    return DroppingNet()


class BottleneckNet(nn.Module):
    """The shape of Flower's example for Lightning: its forward is the embedding alone."""

    def __init__(self) -> None:
        super().__init__()
        wide = SIZE * SIZE
        self.encoder = nn.Sequential(nn.Linear(wide, 32), nn.ReLU(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, wide))

    def forward(self, x: Tensor) -> Tensor:
        embedding: Tensor = self.encoder(x)
        return embedding


def bottleneck() -> nn.Module:
    """An autoencoder, which is no classifier and so none of `MODELS`."""
    return BottleneckNet()


def frozen_backbone() -> nn.Module:
    """A strided LeNet of which the classifier alone is trained; none of `MODELS`."""
    made = create_model("lenet-strided", classes=CLASSES, channels=1, image_size=SIZE)
    return with_frozen_backbone(initialise(made, "default", 0), ["classifier"])


MODELS = (
    relu_cnn,
    tanh_cnn,
    gelu_cnn,
    batch_norm_cnn,
    pooled_cnn,
    residual_cnn,
    linear,
    relu_mlp,
    sigmoid_mlp,
    deep_mlp,
)
"""Every model of this file."""


def named(make: Callable[[], nn.Module]) -> str:
    """Return the trusted reference by which a declaration names one of the models."""
    return own_word(f"{__name__}:{make.__qualname__}")
