"""What a client's update should look like before its image is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bract.attacks.problem.client_model import loss_gradient
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.problem.visibility import smooth_images
from bract.captures.observation import Observation
from bract.updates.update import Tensors

_PROBES = 16


def class_gradients(
    observation: Observation,
    target_model: TargetModel,
    device: torch.device,
    *,
    only: Sequence[str] = (),
) -> list[Tensors]:
    """Mean gradient of smooth random images under each label, at the captured parameters.

    float64 on ``device``, by name, one entry a class.

    Parameters
    ----------
    only
        Names of the parameters whose gradients are wanted; all where there are none.
    """
    shape, classes = target_model.image_shape, target_model.classes
    pixels = smooth_images(_PROBES, shape, torch.Generator().manual_seed(0))
    inputs = target_model.normalise(pixels)[None].to(device)
    target_model.model.to(device)
    sent, held = observation.parameters, observation.buffers
    parameters = {n: sent[n].to(device)[None] for n in target_model.parameter_names}
    buffers = {n: held[n].to(device)[None] for n in target_model.buffer_names}
    found = []
    for k in range(classes):
        rows = torch.zeros(1, _PROBES, classes, device=device)
        rows[..., k] = 1.0
        gradient = loss_gradient(target_model, parameters, buffers, inputs, rows, only=only)
        found.append({n: v[0].detach().double() for n, v in gradient.items()})
    return found


def likely_labels(classes: int, images: int, misfit: Callable[[list[int]], float]) -> list[int]:
    """Labels that fit best, added one by one."""
    chosen: list[int] = []
    for _ in range(images):
        chosen.append(min(range(classes), key=lambda k: misfit([*chosen, k])))
    return sorted(chosen)
