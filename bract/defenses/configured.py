"""The model of a configuration, as its defenses and dropout change it."""

from __future__ import annotations

from torch import nn

from bract.config import FederationConfig
from bract.data.views import DataSpec
from bract.defenses.entries import prepare_model
from bract.models import create_model
from bract.models.dropout import with_dropout


def configured_model(config: FederationConfig, spec: DataSpec) -> nn.Module:
    """Build the model that server and clients share; it holds no client's secrets.

    Raises
    ------
    BractError
        If the model does not fit the data, a defense or the dropout.
    """
    channels, size, _ = spec.image_shape
    model = create_model(
        config.model.name,
        classes=spec.classes,
        channels=channels,
        image_size=size,
        **spec.schemas,
        activation=config.model.activation,
    )
    model = prepare_model(model, config.defenses)
    return with_dropout(model, config.training.dropout, classes=spec.classes)
