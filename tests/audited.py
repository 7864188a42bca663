"""A run on disk that an audit takes a moment for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from observing import observed
from torch import nn

from bract import ObservationStore
from bract.audit.audit import Audit
from bract.cli.audit_requests import audit_requests
from bract.client.truth import save_truth
from bract.config import FederationConfig, build_config
from bract.config.config import AuditRequest
from bract.data.views import client_data, data_spec
from bract.models import create_model
from bract.models.initialise import initialise
from bract.rundir import RunDirectory
from bract.schema import AuditResult
from bract.updates.update import Tensors

SETTINGS = {
    "name": "audited",
    "data": {"image_size": 16, "validation": 0.0},
    "model": {"name": "lenet-strided", "activation": "relu"},
    "training": {"algorithm": "fedsgd", "batch_size": 2},
}


def captured_run(
    root: Path, settings: Mapping[str, Any]
) -> tuple[RunDirectory, FederationConfig, nn.Module]:
    """Make a finished run without captures, and the model that it begins with."""
    config = build_config(dict(settings))
    run = RunDirectory(root)
    run.create(config)
    run.update_state(status="finished")
    model = create_model(
        config.model.name,
        classes=10,
        channels=1,
        image_size=config.data.image_size,
        activation=config.model.activation,
    )
    return run, config, initialise(model, "default", 0)


def upload_gradient(
    run: RunDirectory,
    config: FederationConfig,
    model: nn.Module,
    client: int,
    *,
    number: int = 1,
    taken: slice | None = None,
) -> Tensors:
    """Capture a client's gradient of its first batch, keep the truth, and return the gradient."""
    data = client_data(config, client)
    taken = taken or slice(0, config.training.batch_size)
    images, labels = data.images[taken], data.labels[taken]
    seen = observed(
        images,
        labels,
        model=model,
        name=config.model.name,
        activation=config.model.activation,
        spec=data_spec(config.data),
        client=f"client-{client}",
        local_steps=1,
    )
    ObservationStore(run.captures).save(replace(seen, round=number))
    save_truth(run.truth / seen.client, number, images, labels)
    return seen.update


def audited_run(root: Path, uploads: int, **settings: Any) -> RunDirectory:
    """Make a run whose clients each uploaded the gradient of one batch of digits, with truth.

    Parameters
    ----------
    settings
        Of the configuration, over `SETTINGS`.
    """
    run, config, model = captured_run(root, SETTINGS | {"clients": uploads} | settings)
    for client in range(uploads):
        upload_gradient(run, config, model, client)
    return run


def with_keys(request: AuditRequest, **keys: Any) -> AuditRequest:
    """Return a request with some keys replaced, checked as a whole."""
    return AuditRequest.model_validate(request.model_dump() | keys)


def request_of(
    root: Path, settings: Mapping[str, Any] | None = None, *, tier: str = "oblivious", **files: Any
) -> AuditRequest:
    """Return the command line's request for one tier."""
    (request,) = audit_requests(root, settings, tier=tier, **files)
    return request


def attacked(audit: Audit) -> list[AuditResult]:
    """Run all that an audit plans; return the reconstructions."""
    return [one for one in audit.execute(audit.plan()) if isinstance(one, AuditResult)]


def attacked_run(root: Path, **request: Any) -> list[AuditResult]:
    """Run all that an audit of a run plans under a request; return the reconstructions."""
    return attacked(Audit(RunDirectory(root), AuditRequest(**request)))
