"""Heads of frozen backbones of transformers: mapped, confirmed, and read by maui."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor, nn
from torch.nn import functional as F

from bract import Observation, ObservationStore
from bract.attacks import Budget, Reconstruction, reconstruct
from bract.audit.captures import Captures
from bract.cli.describe import describe_app
from bract.client import witness
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration

HERE = "test_frozen_heads"


def frozen(make: Callable[[], nn.Module], head: str) -> nn.Module:
    """Return a model of fixed weights, as published ones are, of which the head is trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = make()
    for name, value in model.named_parameters():
        value.requires_grad = name.startswith(f"{head}.")
    return model


def settings() -> dict[str, Any]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = {"image_size": 16, "patch_size": 4, "num_channels": 1}
    return {**sizes, **images, "intermediate_size": 32, "num_labels": 10}


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return frozen(lambda: ViTForImageClassification(ViTConfig(**settings())), "classifier")


def beit() -> nn.Module:
    """The mean over patches enters the head."""
    from transformers import BeitConfig, BeitForImageClassification

    config = BeitConfig(**settings(), use_mean_pooling=True)
    return frozen(lambda: BeitForImageClassification(config), "classifier")


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: Any = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
    sizes |= {"num_labels": 10, "num_channels": 1}
    config = ResNetConfig(layer_type="basic", **sizes)
    return frozen(lambda: ResNetForImageClassification(config), "classifier.1")


class EachPatch(nn.Module):
    """A head that classifies every patch, and the mean of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        whole: Any = vit()
        self.backbone: Any = whole.vit
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.backbone(images).last_hidden_state).mean(dim=1)
        return found


class OfMaxima(EachPatch):
    """No mean over patches, so that no single row of features explains the gradient."""

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.backbone(images).last_hidden_state).amax(dim=1)
        return found


def each_patch() -> nn.Module:
    return frozen(EachPatch, "head")


def of_maxima() -> nn.Module:
    return frozen(OfMaxima, "head")


def uploaded(folder: Path, model: nn.Module, head: str, *, bare: bool = False) -> None:
    """Train a head under a witness on one image, and capture it, by its last names alone."""
    sent = {n: v.clone() for n, v in model.state_dict().items() if n.startswith(f"{head}.")}
    image = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    image[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
    context: Any = SimpleNamespace(node_id=0, run_id=1, node_config={}, state=RecordDict())
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    message: Any = SimpleNamespace(content=content)
    with witness(model, message, context, folder / "truth"):
        outputs = model(image)
        F.cross_entropy(getattr(outputs, "logits", outputs), torch.tensor([3])).backward()
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    came = {name: model.state_dict()[name] for name in sent}

    def called(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n.rpartition(".")[2] if bare else n: v for n, v in tensors.items()}

    ObservationStore(folder / "captures").save(
        Observation(
            round=1,
            client="node-0",
            parameters=called(sent),
            update=called({name: value - came[name] for name, value in sent.items()}),
            declaration=ClientDeclaration(num_examples=1),
        )
    )


def described(folder: Path, name: str) -> Observation:
    """Describe the capture, and return it as an audit loads it."""
    reference = f"{HERE}:{name}"
    describe_app(folder, {}, model=reference, truth=folder / "truth" / "1")
    description = RunDirectory(folder).description()
    captures = Captures(folder / "captures", frozenset({reference}), description)
    return captures.load(captures.index[0])


HEADS = {"vit": "classifier", "beit": "classifier", "resnet": "classifier.1", "each_patch": "head"}


@pytest.mark.parametrize("bare", [False, True], ids=["names", "last names"])
@pytest.mark.parametrize("name", list(HEADS))
def test_a_head_is_mapped_and_confirmed_and_read_by_maui(
    name: str, bare: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uploaded(tmp_path, globals()[name](), HEADS[name], bare=bare)
    seen = described(tmp_path, name)
    assert "1 of 1" in capsys.readouterr().err
    (found,) = reconstruct(seen, "maui", budget=Budget(iterations=4), device="cpu")
    assert isinstance(found, Reconstruction) and found.labels.tolist() == [3]


@pytest.mark.thorough
def test_auto_lets_maui_compete_on_a_head_of_transformers(tmp_path: Path) -> None:
    uploaded(tmp_path, each_patch(), "head")
    seen = described(tmp_path, "each_patch")
    (found,) = reconstruct(seen, "auto", budget=Budget(iterations=10), device="cpu")
    assert isinstance(found, Reconstruction)
    assert "maui" in {trial.attack for trial in found.trials}


def test_a_head_of_tokens_whose_mean_is_not_taken_is_refused_by_maui(tmp_path: Path) -> None:
    uploaded(tmp_path, of_maxima(), "head")
    (found,) = reconstruct(described(tmp_path, "of_maxima"), "maui", device="cpu")
    assert {"head", "tokens", "mean"} <= set(getattr(found, "reason", "").split())
