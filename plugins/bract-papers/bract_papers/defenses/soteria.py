"""Soteria: hide the features from which the batch could be reconstructed best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from bract.defenses import Defense, DefenseError, ProtectContext, Stage
from bract.models.layers import last_linear
from bract.models.tap import inputs
from bract.updates.update import Tensors


class Soteria(Defense):
    """Zero the last linear layer's update for some of the features that enter it.

    The features r of the batch x are ranked by ``sum_b |d r_f / d x_b| / |r_bf|`` (Soteria, section
    4.2) and the lowest ``ratio`` of them are pruned: columns of the last layer's weight. Other
    layers are sent as they are, so an attacker who leaves the last layer out of the matching is
    not hindered at all; Balunovic et al. (ICLR 2022) show it.

    Costs one backward pass for each feature and the batch.

    Parameters
    ----------
    ratio
        Share of the features that is pruned; the Guardian paper compares with 0.2.
    """

    name: ClassVar[str] = "soteria"
    title: ClassVar[str] = "Soteria"
    summary: ClassVar[str] = (
        "the update, the last layer pruned by how well its features give the batch away"
    )
    stage: ClassVar[Stage] = Stage.REPRESENTATION
    inputs: ClassVar[tuple[str, ...]] = ("image", "table")
    needs: ClassVar[tuple[str, ...]] = ("model", "images")

    ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2

    def protect(
        self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext
    ) -> Tensors:
        """Return the update with pruned columns in the last linear layer's weight."""
        del state
        assert context.model is not None and context.images is not None
        name, _ = last_linear(context.model)
        weight = f"{name}.weight"
        if weight not in update:
            raise DefenseError(
                f"defense 'soteria': the update has no {weight}; it holds {', '.join(update)}"
            )
        scores = sensitivities(context.model, name, context.images)
        pruned = torch.topk(scores, int(self.ratio * len(scores)), largest=False).indices
        protected = dict(update)
        protected[weight] = update[weight].index_fill(1, pruned.to(update[weight].device), 0.0)
        return protected


def sensitivities(model: nn.Module, layer: str, images: Tensor) -> Tensor:
    """Return ``sum_b |d r_f / d x_b| / |r_bf|`` ``(F,)`` for every feature f that enters a layer.

    The model is evaluated in evaluation mode and left in the mode and with the gradients it had.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    x = images.detach().clone().requires_grad_(True)
    try:
        with torch.enable_grad():
            entered = inputs(lambda: model(x), model, [layer])[layer]
    finally:
        for module, training in modes.items():
            module.training = training
    features = entered.flatten(1)
    total = torch.zeros(features.shape[1])
    for f in range(features.shape[1]):
        (slope,) = torch.autograd.grad(features[:, f].sum(), x, retain_graph=True)
        size = features[:, f].detach().abs() + torch.finfo(features.dtype).tiny
        total[f] = (slope.flatten(1).norm(dim=1) / size).sum().cpu()
    return total
