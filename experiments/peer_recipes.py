"""Attacks of breaching and LeakPro from their own packages, on the uploads of `experiments.peers`.

breaching (Geiping et al.) has recipes in configuration files, LeakPro presets as functions; each is
taken as it ships, but for the number of iterations.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bract.captures.observation import Observation

RECIPES = ("invertinggradients", "modern", "seethroughgradients")
"""breaching's own, by the names of its configuration files."""

PRESETS = ("idlg", "inverting_gradients", "huang", "gia_running")
"""LeakPro's, by the names of its functions; the last two match statistics of normalisation."""


@dataclass(frozen=True)
class Upload:
    """One client's upload: the network that it trained, and what it keeps."""

    network: nn.Module
    seen: Observation
    gradients: tuple[Tensor, ...]
    statistics: tuple[Tensor, ...]
    truth: Tensor
    labels: Tensor
    classes: int
    accuracy: float | None
    number: int
    source: int


def breaching_installed() -> bool:
    """Return whether the peer can be run."""
    return importlib.util.find_spec("breaching") is not None


def _recipe(name: str) -> Any:
    """Return a recipe of breaching as it ships."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import breaching

        return breaching.get_attack_config(name)


def breach(
    iterations: int, upload: Upload, recipe: str, statistics_given: bool, device: str
) -> tuple[Tensor, Tensor]:
    """Return images and labels by a recipe of breaching."""
    from breaching.attacks import prepare_attack

    channels = upload.truth.shape[1]
    config = _recipe(recipe)
    config.optim.max_iterations = iterations
    config.optim.callback = iterations
    buffers = [b.to(device) for b in upload.statistics] if statistics_given else None
    setup = {"device": torch.device(device), "dtype": torch.float32}

    metadata = SimpleNamespace(
        shape=tuple(upload.truth.shape[1:]),
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        classes=upload.classes,
        modality="vision",
        task="classification",
    )
    payload = {
        "parameters": list(upload.network.parameters()),
        "buffers": None,
        "metadata": metadata,
    }
    shared = {
        "gradients": [g.to(device) for g in upload.gradients],
        "buffers": buffers,
        "metadata": {
            "num_data_points": len(upload.labels),
            "labels": None,
            "local_hyperparams": None,
            "data_key": "inputs",
        },
    }
    attacker = prepare_attack(upload.network, nn.CrossEntropyLoss(), config, setup)
    found, _ = attacker.reconstruct([payload], [shared], {}, dryrun=False)
    return found["data"].detach().cpu().clamp(0.0, 1.0), found["labels"].cpu()


def leakpro_installed() -> bool:
    """Return whether LeakPro's modular attacks can be run."""
    try:
        return importlib.util.find_spec("leakpro.attacks.gia_attacks.modular.presets") is not None
    except ImportError:
        return False


def leak(
    iterations: int, upload: Upload, preset: str, statistics_given: bool, device: str
) -> tuple[Tensor, Tensor]:
    """Return images and labels by a preset of LeakPro."""
    from leakpro.attacks.gia_attacks.modular import presets as shipped
    from leakpro.attacks.gia_attacks.modular.components.optimization_building_blocks import (
        training_simulator,
    )
    from leakpro.fl_utils.fl_client_simulator import ClientObservations

    channels = upload.truth.shape[1]
    config = getattr(shipped, f"{preset}_attack")()
    config.max_iterations = iterations
    config.labels = "idlg"
    names = [name for name, _ in upload.network.named_parameters()]
    seen = ClientObservations(
        gradients=dict(zip(names, [g.to(device) for g in upload.gradients], strict=True)),
        num_images=len(upload.labels),
        input_shape=tuple(upload.truth.shape),
        training_settings=training_simulator.TrainingSettings(
            epochs=1,
            optimizer_type="sgd",
            training_batch_size=len(upload.labels),
            compute_mode="gradients",
            model_mode="train",
            shuffle_mode="client",
        ),
        data_mean=torch.zeros(channels, 1, 1),
        data_std=torch.ones(channels, 1, 1),
        num_classes=upload.classes,
    )
    if statistics_given:
        seen.pre_bn_stats = _pairs(upload.network, upload.seen.buffers)
        seen.post_bn_stats = _pairs(upload.network, upload.seen.returned_buffers)
    runs = config.build(client_observations=seen)
    found = runs.run_attack(
        target_model=upload.network,
        client_observations=seen,
        device=torch.device(device),
        input_shape=tuple(upload.truth.shape),
    )
    images = found[0] if isinstance(found, tuple) else found
    last = list(seen.gradients.values())
    labels = runs.label_inference.infer_labels(
        gradients=last, model=upload.network, num_samples=len(upload.labels)
    ).labels
    return images.detach().cpu().reshape(upload.truth.shape).clamp(0.0, 1.0), labels.flatten().cpu()


def _pairs(network: nn.Module, buffers: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the running mean and variance of every batch normalisation."""
    return [
        (buffers[f"{name}.running_mean"], buffers[f"{name}.running_var"])
        for name, module in network.named_modules()
        if isinstance(module, nn.BatchNorm2d)
    ]


def shipped_iterations(tool: str, name: str) -> int | None:
    """Return the iterations that a peer's recipe ships with; None for this project's attacks."""
    if tool == "breaching":
        return int(_recipe(name).optim.max_iterations)
    if tool == "LeakPro":
        from leakpro.attacks.gia_attacks.modular import presets as shipped

        return int(getattr(shipped, f"{name}_attack")().max_iterations)
    return None
