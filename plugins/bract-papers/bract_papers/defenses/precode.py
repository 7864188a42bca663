"""PRECODE: a variational bottleneck before the output layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from bract.defenses import Defense, DefenseError, ProtectContext, Stage
from bract.updates.update import Tensors
from bract_papers.models.bottleneck import bottlenecks, insert_bottleneck


class Precode(Defense):
    """Train and share a model with a stochastic bottleneck (PRECODE, section 3.2).

    The update is sent as it is: its gradient went through noise that only the client knows. The
    client adds `bract.models.own_loss.auxiliary_loss` to its loss.

    Parameters
    ----------
    latent
        Size k of the bottleneck; the paper has 256.
    weight
        Weight of the Kullback-Leibler term; the paper has 0.001.
    """

    name: ClassVar[str] = "precode"
    title: ClassVar[str] = "PRECODE"
    summary: ClassVar[str] = (
        "the update of a model with a stochastic bottleneck before the output layer"
    )
    stage: ClassVar[Stage] = Stage.MODEL
    needs: ClassVar[tuple[str, ...]] = ("model",)

    latent: Annotated[int, Field(ge=1, le=2**16)] = 256
    weight: Annotated[float, Field(ge=0.0)] = 1e-3

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Put the bottleneck before the last linear layer."""
        return insert_bottleneck(model, latent=self.latent, weight=self.weight)

    def attach(self, model: nn.Module, state: Tensors, context: ProtectContext) -> None:
        """Draw the bottleneck's noise from the client's secret stream."""
        del state
        for block in bottlenecks(model):
            block.stream = context.stream("precode")

    def protect(
        self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext
    ) -> Tensors:
        """Check that the model that was trained has the bottleneck, and return the update."""
        del state
        assert context.model is not None
        if not bottlenecks(context.model):
            raise DefenseError(
                "defense 'precode': the trained model has no bottleneck; "
                "prepare_model was not called"
            )
        return dict(update)
