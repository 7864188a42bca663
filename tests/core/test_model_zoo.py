from typing import Any

import pytest
import torch
from refusals import refused

from bract.models import create_model
from bract_papers.models.vggface import VGGFace

SMALL = [
    "mlp",
    "lenet-bn",
    "lenet-strided-bn",
    "resnet20",
    "resnet32",
    "resnet18",
    "resnet34",
    "convnet64",
]
LARGE = ["vgg16", "vgg16-bn", "resnet50", "resnet101", "densenet121", "vggface"]


def make(
    name: Any, size: Any = 32, channels: Any = 3, classes: Any = 10, activation: Any = "sigmoid"
) -> Any:
    return create_model(
        name, classes=classes, channels=channels, image_size=size, activation=activation
    )


def count(model: Any) -> Any:
    return sum(p.numel() for p in model.parameters())


def test_parameter_counts_are_the_published_ones() -> None:
    # He et al. give 0.27 M and 0.46 M; torchvision 11,689,512, 21,797,672, 25,557,032, 44,549,160
    # (ResNets) and 7,978,856 (DenseNet-121) with 1,000 classes
    # and 138,357,544 for VGG-16.
    assert count(make("resnet20")) == 269_722
    assert count(make("resnet32")) == 464_154
    with torch.device("meta"):
        assert count(make("resnet18", classes=1000)) == 11_689_512
        assert count(make("resnet34", classes=1000)) == 21_797_672
        assert count(make("resnet50", classes=1000)) == 25_557_032
        assert count(make("resnet101", classes=1000)) == 44_549_160
        assert count(make("densenet121", classes=1000)) == 7_978_856
        assert count(make("vgg16", classes=1000)) == 138_357_544
        # A normalisation layer has two parameters a channel; VGG-16 has 4,224 channels in all.
        assert count(make("vgg16-bn", classes=1000)) == 138_357_544 + 2 * 4224
        # Parkhi et al.: 14,714,688 in VGG-16's convolutions, 25,089 x 4,096 in fc6, 4,097 x 4,096
        # in fc7, 4,097 x 2,622 in fc8.
        assert count(make("vggface", 224, classes=2622)) == 145_002_878
    # 2,878,720 in convolutions, 2 x 1,600 in normalisation, 23,050 in the classifier.
    assert count(make("convnet64")) == 2_904_970
    assert count(make("mlp", channels=1)) == 1025 * 256 + 257 * 256 + 257 * 10
    assert count(make("lenet-bn", channels=1)) == 61_706 + 2 * (6 + 16)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("size", "channels", "classes"), [(32, 3, 10), (32, 1, 7), (48, 3, 4)])
def test_a_model_takes_other_sizes_colours_and_classes(
    name: Any, size: Any, channels: Any, classes: Any
) -> None:
    model = make(name, size, channels, classes)
    assert model(torch.rand(2, channels, size, size)).shape == (2, classes)


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize(("size", "channels"), [(32, 3), (64, 1)])
def test_a_large_model_takes_other_sizes_and_colours(name: Any, size: Any, channels: Any) -> None:
    with torch.device("meta"):
        model = make(name, size, channels, 5)
        assert model(torch.rand(2, channels, size, size)).shape == (2, 5)


@pytest.mark.parametrize("name", [*SMALL[:4], "resnet18", "densenet121"])
@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_gradients_can_be_differentiated_again(name: Any, activation: Any) -> None:
    torch.manual_seed(0)
    model = make(name, activation=activation)
    image = torch.rand(1, 3, 32, 32, requires_grad=True)
    if name in ("resnet18", "densenet121"):
        model.eval()  # one image leaves a single value a channel, which has no batch statistics
    loss = torch.nn.functional.cross_entropy(model(image), torch.tensor([3]))
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    torch.stack([g.square().sum() for g in gradients]).sum().backward()
    assert image.grad is not None
    assert float(image.grad.abs().sum()) > 0


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_the_activation_is_the_one_asked_for_and_never_in_place(name: Any, activation: Any) -> None:
    with torch.device("meta"):
        model = make(name, activation=activation)
    found = [m for m in model.modules() if isinstance(m, torch.nn.Sigmoid | torch.nn.ReLU)]
    assert found
    wanted = torch.nn.Sigmoid if activation == "sigmoid" else torch.nn.ReLU
    assert all(isinstance(m, wanted) for m in found)
    assert not any(getattr(m, "inplace", False) for m in found)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet20", 7),
        ("resnet50", 15),
        ("densenet121", 31),
        ("vgg16", 31),
        ("vggface", 31),
        ("lenet-bn", 12),
    ],
)
def test_images_that_are_too_small_are_refused(name: Any, size: Any) -> None:
    with refused("model-unsuited"):
        make(name, size)


def test_the_face_network_takes_other_widths() -> None:
    # 14,713,536 in convolutions of grey images; fc6 513 x 64, fc7 65 x 64, fc8 65 x 100.
    model = VGGFace(classes=100, channels=1, image_size=32, width=64)
    assert count(model) == 14_713_536 + 32_832 + 4_160 + 6_500
    assert model(torch.rand(2, 1, 32, 32)).shape == (2, 100)
    with refused("config-value", "width", 1, 0):
        VGGFace(classes=100, channels=1, image_size=32, width=0)


def test_fc6_spans_what_the_convolutions_leave() -> None:
    with torch.device("meta"):
        for size, features in ((32, 512), (63, 512), (64, 2048), (224, 25_088)):
            assert make("vggface", size).fc6.in_features == features
            assert make("vggface", size)(torch.rand(1, 3, size, size)).shape == (1, 10)


def test_the_face_network_drops_half_of_fc6_and_fc7_in_training_alone() -> None:
    torch.manual_seed(0)
    model = VGGFace(classes=4, channels=1, image_size=32, width=64).train()
    image = torch.rand(1, 1, 32, 32)
    assert not torch.equal(model(image), model(image))
    model.eval()
    assert torch.equal(model(image), model(image))
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)] == [0.5, 0.5]
