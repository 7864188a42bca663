"""A run on disk that an audit takes a moment for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from bract.audit.audit import Audit
from bract.cli.audit import audit_requests
from bract.client.truth import save_truth
from bract.config import build_config
from bract.config.config import AuditRequest
from bract.data.views import client_data, data_spec
from bract.models import create_model
from bract.models.initialise import initialise
from bract.protocol.observation import ClientDeclaration, Observation, ObservationStore
from bract.protocol.update import parameters_of
from bract.rundir import RunDirectory
from bract.schema import AuditResult


def audited_run(root: Path, clients: int) -> RunDirectory:
    """Make a run whose clients each uploaded the gradient of two 16-pixel digits, with truth."""
    config = build_config(
        {
            "name": "audited",
            "clients": clients,
            "data": {"image_size": 16, "validation": 0.0},
            "model": {"name": "lenet-strided", "activation": "relu"},
            "training": {"algorithm": "fedsgd", "batch_size": 2},
        }
    )
    run = RunDirectory(root)
    run.create(config)
    run.update_state(status="finished")
    spec = data_spec(config.data)
    model = create_model("lenet-strided", classes=10, channels=1, image_size=16, activation="relu")
    initialise(model, "default", 0)
    names = [name for name, _ in model.named_parameters()]
    for client in range(clients):
        data = client_data(config, client)
        images, labels = data.images[:2], data.labels[:2]
        loss = F.cross_entropy(model(spec.normalise(images)), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        declaration = ClientDeclaration(
            algorithm="fedsgd",
            model="lenet-strided",
            activation="relu",
            image_shape=spec.image_shape,
            classes=10,
            mean=spec.mean,
            std=spec.std,
            local_steps=1,
            batch_size=2,
            num_examples=2,
        )
        ObservationStore(run.captures).save(
            Observation(
                round=1,
                client=f"client-{client}",
                parameters=parameters_of(model),
                update=dict(zip(names, gradients, strict=True)),
                declaration=declaration,
            )
        )
        save_truth(run.truth / f"client-{client}", 1, images, labels)
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
