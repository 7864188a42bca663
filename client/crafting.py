"""Canaries whose gradients are crafted, after CANIFE (Maddock et al., ICLR 2023)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from bract.data.views import ClientData, DataSpec
from bract.errors import BractError
from bract.models.losses import loss_of

STEPS = 60
RATE = 0.05
OWN = 64
"""Most of the client's records whose gradients the canaries' are kept apart from."""


def craft(
    images: Tensor, labels: Tensor, model: nn.Module, data: ClientData, spec: DataSpec
) -> Tensor:
    """Return records whose gradients at this model are far from all others, in [0, 1].

    CANIFE descends on a record such that the sum of squared inner products of its gradient and the
    clients' is small while its norm is that of a clipped one. Here a client crafts all of its
    canaries together against its own records and one another, by cosines, which need no bound.

    Parameters
    ----------
    images, labels
        Where the descent starts, ``(m, ...)``; labels stay.
    model
        The global model that the client was sent.

    Raises
    ------
    BractError
        If the inputs are not numbers that a descent can move, as token ids are not.
    """
    if spec.text is not None:
        raise BractError(
            "crafted canaries need inputs of real numbers; texts are token ids",
            code="input-mismatch",
        )
    fixed = copy.deepcopy(model).eval()
    state = {n: p.detach() for n, p in fixed.named_parameters()}
    objective = loss_of(spec.loss)

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(fixed, parameters, (image[None],))
        found: Tensor = objective.mean(outputs, label[None])
        return found

    each = vmap(grad(loss), in_dims=(None, 0, 0))

    def directions(inputs: Tensor, wanted: Tensor) -> Tensor:
        gradients = each(state, spec.normalise(inputs), wanted)
        rows = torch.cat([gradients[name].flatten(1) for name in state], dim=1)
        unit: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return unit

    own = directions(data.images[:OWN], data.labels[:OWN]).detach()
    made = images.clone().requires_grad_()
    optimizer = torch.optim.Adam([made], lr=RATE)
    for _ in range(STEPS):
        rows = directions(made, labels)
        beside = (rows @ rows.T).square()
        found = (rows @ own.T).square().mean() + (beside.sum() - beside.trace()) / len(rows) ** 2
        (slope,) = torch.autograd.grad(found, made)
        if not bool(slope.isfinite().all()):
            break
        made.grad = slope
        optimizer.step()
        with torch.no_grad():
            made.clamp_(0.0, 1.0)
    return made.detach()
