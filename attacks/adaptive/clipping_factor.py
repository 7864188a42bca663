"""The factor by which a whole update was shrunk, read off the last layer."""

from __future__ import annotations

import torch

from bract.attacks.problem.client_model import images_in
from bract.attacks.problem.target_model import TargetModel
from bract.attacks.solve.labels import last_layer
from bract.captures.observation import Observation
from bract.errors import BractError
from bract.updates.update import Tensors

_FIT = 0.02


def shrinkage(
    observation: Observation, target_model: TargetModel, gradient: Tensors
) -> float | None:
    """Return f at least 1 so that ``f * gradient`` is the client's, or None where it cannot be
    determined.

    One example and one step: the last layer's gradient is ``dW = d h^T`` and ``db = d`` with
    ``d = softmax(W h + b) - y``. A common factor leaves the ratio ``h = dW^T db / |db|^2`` as it
    is, so h gives the d that the client had and f is their ratio. None as well where the tensors
    do not fit together so (noise).
    """
    declaration = observation.declaration
    try:
        weight, bias = last_layer(target_model)
        single = images_in(declaration, 2) == 1 and observation.law.one_step
    except BractError:
        return None
    if bias is None or not single or not target_model.loss.is_plain:
        return None
    dw, db = gradient[weight].cpu().double(), gradient[bias].cpu().double()
    square = float(db.square().sum())
    if square == 0.0:
        return None
    features = (db @ dw) / square
    parameters = observation.parameters
    logits = parameters[weight].cpu().double() @ features + parameters[bias].cpu().double()
    slope = logits.softmax(dim=0)
    slope[int(db.argmin())] -= 1.0
    factor = float(slope @ db) / square
    misfit = float((dw - db[:, None] * features).norm()) / max(float(dw.norm()), 1e-300)
    off = float((slope - factor * db).norm()) / max(float(slope.norm()), 1e-300)
    if misfit > _FIT or off > _FIT or not torch.isfinite(torch.tensor(factor)):
        return None
    return max(factor, 1.0)
