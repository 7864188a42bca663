"""The model of a configuration, as its defenses and dropout change it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from bract.captures.observation import ClientDeclaration
from bract.config import FederationConfig
from bract.data.views import DataSpec
from bract.defenses.base import DEFENSES
from bract.defenses.entries import prepare_model
from bract.errors import BractError
from bract.models import create_model
from bract.models.dropout import dropout_rate, with_dropout


def configured_declaration(config: FederationConfig, spec: DataSpec) -> ClientDeclaration:
    """Return what a configuration says of model and data, without how clients train and defend."""
    return ClientDeclaration(
        model=config.model.name,
        activation=config.model.activation,
        input=config.data.input,
        image_shape=spec.image_shape,
        classes=spec.classes,
        mean=spec.mean,
        std=spec.std,
        table=spec.table,
        text=spec.text,
        signal=spec.signal,
        loss=spec.loss,
    )


def work_declaration(
    config: FederationConfig, spec: DataSpec, model: nn.Module, server_round: int
) -> ClientDeclaration:
    """Return what a configuration says of every client's computation in one round.

    Parameters
    ----------
    model
        What `configured_model` built.
    """
    training = config.training
    work = training.declared(server_round, config.rounds)
    return replace(
        configured_declaration(config, spec),
        algorithm=training.algorithm,
        **(work | {"dropout": dropout_rate(model)}),
        defenses=config.declared_defenses,
        encryption=config.encryption.scheme,
    )


def configured_model(config: FederationConfig, spec: DataSpec) -> nn.Module:
    """Build the model that server and clients share; it holds no client's secrets.

    Raises
    ------
    BractError
        If the model does not fit the data, a defense or the dropout, or a defense the input.
    """
    for entry in config.defenses:
        fits = DEFENSES[str(entry["name"])].inputs
        if fits and config.data.input not in fits:
            raise BractError(
                f"defenses: {entry['name']} protects the inputs {', '.join(fits)}, and data.input "
                f"is {config.data.input}; take another defense, such as noise",
                code="defense-unsuited",
            )
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
