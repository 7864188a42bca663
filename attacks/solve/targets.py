"""Targets that are numbers, from the last layer's gradient: exact for one example."""

from __future__ import annotations

import torch
from torch import Tensor

from bract.attacks.problem.case import Case
from bract.attacks.problem.training_path import mean_gradient
from bract.attacks.solve.labels import last_layer
from bract.errors import BractError


def infer_targets(case: Case) -> Tensor:
    """Return the targets of an update, float64 ``(B, K)``; the same for all of a batch.

    The gradient of the last layer ``o = W h + b`` is ``s h^T`` and ``s``, with the slopes s of the
    loss at the K outputs o. So one example's features are ``dW^T s / |s|^2``, its outputs follow
    from the parameters, and the loss determines at which targets these outputs have these slopes:
    under the mean squared error ``y = o - K s / 2``. In a batch, and over several steps, s is a
    mean, and this is a start for a search.
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
        return torch.zeros(case.images, len(target[bias_name]), dtype=torch.float64)
    weight, slope = (
        mean_gradient(case.forward, target[n], case.observation.parameters[n]).double().cpu()
        for n in (weight_name, bias_name)
    )
    if not float(slope.abs().max()) > 0.0:
        raise BractError(
            f"{case.observation.key}: the gradient of {bias_name} is zero; no target can be read",
            code="attack-evidence",
        )
    parameters = case.observation.parameters
    features = slope @ weight / slope.square().sum()
    outputs = parameters[weight_name].double().cpu() @ features
    outputs = outputs + parameters[bias_name].double().cpu()
    # The loss is a mean over the outputs, so that each slope is a K-th of that of its own error.
    return loss.label(outputs, len(slope) * slope).expand(case.images, -1).clone()
