"""LPIPS, where its backbones are on this machine, and ST-LPIPS. Nothing is ever downloaded."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bract.errors import BractError

Backbone = Literal["alex", "vgg"]

_WEIGHTS: dict[str, tuple[str, str]] = {
    "alex": ("alexnet-owt-7be5be79.pth", "alexnet"),
    "vgg": ("vgg16-397923af.pth", "vgg16"),
}


def lpips_unavailable(backbone: Backbone) -> str | None:
    """Return why LPIPS with this backbone cannot run here, and the fix; None where it can."""
    if backbone not in _WEIGHTS:
        raise BractError(
            f"unknown LPIPS backbone {backbone!r}; expected 'alex' or 'vgg'", code="unknown-name"
        )
    file, model = _WEIGHTS[backbone]
    path = Path(torch.hub.get_dir()) / "checkpoints" / file
    if path.exists():
        return None
    return (
        f"LPIPS-{backbone} needs torchvision's {model} weights at {path}; on a machine with "
        f'network run python -c "import torchvision; torchvision.models.{model}'
        f"(weights='DEFAULT')\" and copy the file there"
    )


def lpips_distance(images: Tensor, originals: Tensor, backbone: Backbone) -> Tensor | None:
    """LPIPS (Zhang et al. 2018) of each image, float64 ``(N,)``, or None (`lpips_unavailable`).

    Images float32 ``(N, C, H, W)`` in [0, 1]; grey is repeated to colour; images under 32
    pixels are enlarged bilinearly to 32, below which AlexNet's strides leave nothing to compare.
    """
    if lpips_unavailable(backbone) is not None:
        return None
    network = _network(backbone)
    with torch.no_grad():
        distances: Tensor = network(_prepare(images), _prepare(originals))
    return distances.flatten().to(torch.float64)


def stlpips_unavailable() -> str | None:
    """Return why ST-LPIPS cannot run here, and the fix; None where it can."""
    needed = ("stlpips_pytorch", "torchsummary", "IPython")
    if all(importlib.util.find_spec(name) is not None for name in needed):
        return None
    return (
        "ST-LPIPS, which brings its weights along and can stand in for LPIPS, needs "
        "pip install 'bract[stlpips]'"
    )


def stlpips_distance(images: Tensor, originals: Tensor) -> Tensor | None:
    """Shift-tolerant LPIPS with AlexNet (Ghildyal and Liu, ECCV 2022), float64 ``(N,)``, or None.

    Another network than LPIPS on another scale: compare its figures with each other only. Images
    as in `lpips_distance`.
    """
    if stlpips_unavailable() is not None:
        return None
    network = _shift_tolerant()
    with torch.no_grad():
        distances: Tensor = network(_prepare(images), _prepare(originals))
    return distances.flatten().to(torch.float64)


@functools.cache
def _shift_tolerant() -> Any:
    from stlpips_pytorch import stlpips

    return stlpips.LPIPS(net="alex", variant="shift_tolerant", verbose=False).eval()


@functools.cache
def _network(backbone: Backbone) -> Any:
    import lpips

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return lpips.LPIPS(net=backbone, verbose=False).eval()


def _prepare(images: Tensor) -> Tensor:
    colour = images.float().cpu().expand(-1, 3, -1, -1)
    if min(colour.shape[-2:]) < 32:
        colour = torch.nn.functional.interpolate(
            colour, size=(32, 32), mode="bilinear", align_corners=False
        )
    return colour * 2.0 - 1.0
