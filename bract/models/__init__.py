"""Models under attack, by name."""

from bract.models.convnet import ConvNet, convnet64
from bract.models.densenet import densenet121
from bract.models.dropout import dropout_rate, masked_layers, seed_dropout, with_dropout
from bract.models.fully_connected import mlp, perceptron
from bract.models.initialise import INITIALISERS, initialise
from bract.models.keylock import (
    key_locks,
    private_parameters,
    trainable_parameters,
    with_random_key,
)
from bract.models.lenet import LeNet, StridedLeNet
from bract.models.lenet_bn import LeNetBN, StridedLeNetBN
from bract.models.precode import auxiliary_loss
from bract.models.registry import MODELS, activation_layer, create_model
from bract.models.resnet import (
    CifarResNet,
    resnet18,
    resnet20,
    resnet32,
    resnet34,
    resnet50,
    resnet101,
)
from bract.models.vgg import vgg16, vgg16_bn
from bract.models.vggface import VGGFace

__all__ = [
    "INITIALISERS",
    "MODELS",
    "CifarResNet",
    "ConvNet",
    "LeNet",
    "LeNetBN",
    "StridedLeNet",
    "StridedLeNetBN",
    "VGGFace",
    "activation_layer",
    "auxiliary_loss",
    "convnet64",
    "create_model",
    "densenet121",
    "dropout_rate",
    "initialise",
    "key_locks",
    "masked_layers",
    "mlp",
    "perceptron",
    "private_parameters",
    "resnet18",
    "resnet20",
    "resnet32",
    "resnet34",
    "resnet50",
    "resnet101",
    "seed_dropout",
    "trainable_parameters",
    "vgg16",
    "vgg16_bn",
    "with_dropout",
    "with_random_key",
]
