"""Clients that hold rows of a table, and what they send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bract.attacks import Reconstruction
from bract.captures.observation import ClientDeclaration, Observation
from bract.client.training import planned_steps, train_locally
from bract.config import DataConfig
from bract.config.config import TrainingConfig
from bract.config.table import TableSchema
from bract.data.sources import Split, open_source
from bract.data.spec import DataSpec
from bract.data.views import data_spec
from bract.inputs import INPUTS, References, Truth
from bract.models import create_model
from bract.models.initialise import initialise
from bract.scores.base import ScoredImages
from bract.scores.table import RowScorer
from bract.updates.update import buffers_of, parameters_of

FIRST_SEED = {"score": 100, "choose": 0}
"""Seed of each split's first client: no rows or network both choose a setting and score it."""


@dataclass(frozen=True)
class SentRows:
    """One client's upload of rows, and the rows."""

    captured: Observation
    truth: Truth
    schema: TableSchema


def config_of(name: str) -> DataConfig:
    """Return the data section of an embedded table."""
    return DataConfig(name=name, input="table")


def references_of(name: str) -> References:
    """Return rows of the test split, which no client trains on."""
    return INPUTS["table"]().references(config_of(name), 0)


def send_rows(
    name: str,
    rows: int,
    *,
    seed: int,
    split: Split = "train",
    model: str = "mlp-100",
    activation: str = "relu",
    spec: DataSpec | None = None,
    **training: Any,
) -> SentRows:
    """Train a client of so many rows, drawn under a seed, on a fresh network of that seed.

    Parameters
    ----------
    training
        Keys of the configuration's section; one gradient of all rows by default.
    """
    spec = spec or data_spec(config_of(name))
    assert spec.table is not None
    source = open_source(config_of(name).model_copy(update={"table": spec.table}), split)
    order = torch.randperm(len(source.labels), generator=torch.Generator().manual_seed(seed))
    picks = order[:rows].tolist()
    inputs, labels = source.images(picks, channels=0, size=0), source.labels[picks]
    network = row_network(spec, model=model, activation=activation, seed=seed)
    work = TrainingConfig.model_validate({"algorithm": "fedsgd", "batch_size": rows} | training)
    return sent_of(
        network, Truth(inputs, labels), spec, work, seed=seed, model=model, activation=activation
    )


def row_network(spec: DataSpec, *, model: str, activation: str, seed: int) -> nn.Module:
    """Return a fresh network for rows of a schema, drawn under a seed."""
    network = create_model(
        model,
        classes=spec.classes,
        channels=spec.image_shape[0],
        image_size=1,
        activation=activation,
        table=spec.table,
    )
    return initialise(network, "default", seed)


def sent_of(
    network: nn.Module,
    truth: Truth,
    spec: DataSpec,
    work: TrainingConfig,
    *,
    seed: int,
    model: str,
    activation: str,
    round_: int = 1,
) -> SentRows:
    """Train a client of these rows on a network, which is changed, and return what it sends."""
    assert spec.table is not None
    rows = len(truth.labels)
    before = {n: v.clone() for n, v in parameters_of(network).items()}
    buffers = {n: v.clone() for n, v in buffers_of(network).items()}
    result = train_locally(
        network,
        truth.images,
        truth.labels,
        config=work,
        spec=spec,
        seed=seed,
        device=torch.device("cpu"),
    )
    declaration = ClientDeclaration(
        algorithm=work.algorithm,
        model=model,
        activation=activation,
        input="table",
        image_shape=spec.image_shape,
        classes=spec.classes,
        mean=spec.mean,
        std=spec.std,
        table=spec.table,
        loss=spec.loss,
        optimizer=work.optimizer,
        momentum=work.momentum,
        weight_decay=work.weight_decay,
        lr=work.lr,
        local_steps=planned_steps(work, rows),
        batch_size=min(work.batch_size, rows),
        num_examples=rows,
    )
    captured = Observation(
        round=round_,
        client=f"client-{seed}",
        parameters=before,
        buffers=buffers,
        update=result.update,
        returned_buffers={},
        declaration=declaration,
    )
    return SentRows(captured, truth, spec.table)


def score_rows(
    sent: SentRows, result: Reconstruction, references: References | None = None
) -> ScoredImages:
    """Score a reconstruction against the client's rows."""
    scorer = RowScorer(sent.schema, references)
    return scorer.score(result.images, sent.truth, recovered=result.targets)


def features_right(scored: ScoredImages) -> float:
    """Return the mean share of features right."""
    found = [row.features or 0.0 for row in scored.rows]
    return sum(found) / len(found)
