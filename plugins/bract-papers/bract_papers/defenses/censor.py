"""CENSOR: an update orthogonal to the client's own, the best of several (Zhang et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from bract.crypto import SecretStream
from bract.defenses import Defense, ProtectContext, Stage
from bract.models.losses import loss_of
from bract.updates.update import Tensors


class Censor(Defense):
    """Send, tensor by tensor, a random direction orthogonal to the update, of the same norm.

    CENSOR (Zhang et al., NDSS 2025, algorithm 1): ``trials`` times a random r is drawn for each
    tensor g, ``r - (r.g / g.g) g`` (eq. 12) is scaled to the norm of g, and the candidate after
    which the batch has the lowest loss is sent. The paper's implementation begins with an infinite
    loss, so the update itself is never sent; here as well.

    Deviations: the direction is drawn from the client's secret stream; a tensor of one value, to
    which nothing is orthogonal, is sent as zero; the loss is that of the round's first batch.

    Parameters
    ----------
    trials
        Candidates, T of the paper.
    step
        Of a gradient (``fedsgd``): the learning rate of the trial step. None for updates that are
        differences of weights, which move the model as they are.
    """

    name: ClassVar[str] = "censor"
    title: ClassVar[str] = "CENSOR"
    summary: ClassVar[str] = "the best of several random directions orthogonal to the update"
    stage: ClassVar[Stage] = Stage.TRANSFORM
    needs: ClassVar[tuple[str, ...]] = ("model", "images", "labels")

    trials: Annotated[int, Field(ge=1, le=1000)] = 20
    step: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None

    @torch.no_grad()
    def protect(
        self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext
    ) -> Tensors:
        """Return the candidate with the lowest loss; `report` gives its loss and the update's."""
        del state
        model, images, labels = context.model, context.images, context.labels
        assert model is not None and images is not None and labels is not None
        stream = context.stream("censor")
        training = model.training
        model.eval()
        try:
            best, lowest = dict(update), float("inf")
            for _ in range(self.trials):
                candidate = {name: orthogonal(value, stream) for name, value in update.items()}
                loss = self._loss(model, images, labels, update, candidate)
                if loss < lowest:
                    best, lowest = candidate, loss
            own = self._loss(model, images, labels, update, update)
        finally:
            model.train(training)
        self.note(loss=lowest, loss_undefended=own)
        return best

    def _loss(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        update: Mapping[str, Tensor],
        candidate: Mapping[str, Tensor],
    ) -> float:
        """Return the batch's loss after a step along the candidate."""
        moved = {}
        for name, value in model.state_dict().items():
            if name not in update:
                continue
            if self.step is None:
                # The model has trained: it is the received one less the update.
                moved[name] = value + update[name] - candidate[name]
            else:
                moved[name] = value - self.step * candidate[name]
        logits = functional_call(model, moved, (images,))
        name = "token_cross_entropy" if labels.dim() > 1 else "cross_entropy"
        return float(loss_of(name).mean(logits, labels))


def orthogonal(value: Tensor, stream: SecretStream) -> Tensor:
    """Return a random tensor orthogonal to ``value`` and of its norm; zero where there is none."""
    square = value.double().square().sum()
    if value.numel() < 2 or float(square) == 0.0:
        return torch.zeros_like(value)
    drawn = stream.normal(value.shape, torch.float64).to(value.device)
    drawn -= (drawn * value).sum() / square * value
    found: Tensor = drawn * (square.sqrt() / drawn.norm())
    return found.to(value.dtype)
