"""Targets that are numbers, from the last layer's gradient: exact for one example."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.attacks.problem.case import Case
from bract.attacks.problem.training_path import mean_gradient
from bract.attacks.solve.labels import last_layer
from bract.errors import BractError


def infer_targets(case: Case) -> Tensor:
    """Return the targets of an update, float64 ``(B, 1)``; the same for all of a batch.

    The gradient of the last layer ``o = w h + b`` is ``s h`` and ``s``, with the slope s of the
    loss at o. So one example's features are ``dw / db``, its output follows from the parameters,
    and the loss determines at which target that output has that slope: under the squared error
    ``y = o - s / 2``. In a batch, and over several steps, s is a mean, and this is a start for a
    search.
    """
    weight_name, bias_name = last_layer(case.target_model)
    target = case.evidence.target
    loss = case.target_model.loss
    if bias_name is None or bias_name not in target or weight_name not in target:
        raise BractError(
            f"{case.observation.key}: the target needs the gradients of {weight_name} and its bias",
            code="attack-evidence",
        )
    if loss.label is None:
        return torch.zeros(case.images, 1, dtype=torch.float64)
    weight, slope = (
        mean_gradient(case.forward, target[n], case.observation.parameters[n]).double().cpu()[0]
        for n in (weight_name, bias_name)
    )
    if not float(slope.abs()) > 0.0:
        raise BractError(
            f"{case.observation.key}: the gradient of {bias_name} is zero; no target can be read",
            code="attack-evidence",
        )
    parameters = case.observation.parameters
    features = weight / slope
    output = parameters[weight_name].double().cpu()[0] @ features
    output = output + parameters[bias_name].double().cpu()[0]
    return loss.label(output, slope).expand(case.images, 1).clone()
