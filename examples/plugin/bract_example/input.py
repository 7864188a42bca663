"""An input: grey stripes, which are images that also have a baseline of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bract.config import DataConfig
from bract.errors import BractError
from bract.inputs import References, Truth
from bract.inputs.image import Image, Reference
from bract.schema import ClientDeclaration


class StripeReferences(Reference):
    """Test images, with an even grey as one more baseline without the gradient."""

    def baselines(self, labels: Tensor, count: int, *, seed: int) -> dict[str, Tensor]:
        """Return those of images, and ``even_grey``."""
        found = super().baselines(labels, count, seed=seed)
        return found | {"even_grey": torch.full_like(found["random_image"], 0.5)}


class Stripes(Image):
    """Images of one channel; scored and shown as images are."""

    name = "stripes"

    def read(self, kept: Mapping[str, Tensor], declaration: ClientDeclaration) -> Truth:
        """Return the originals, which must be grey."""
        truth = super().read(kept, declaration)
        if truth.images.shape[1] != 1:
            raise BractError(
                f"stripes have one channel, found {truth.images.shape[1]}", code="data-shape"
            )
        return truth

    def references(self, data: DataConfig, seed: int) -> References:
        """Return images of the test split."""
        return StripeReferences(data, seed)
