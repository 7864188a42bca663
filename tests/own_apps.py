"""An app of its own that ran once, as the commands for captures of other apps find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import foreign_models
import torch
from torch.nn import functional as F

from bract import Observation, ObservationStore
from bract.captures.stores import occupy
from bract.client.defenses import ProtectContext, build_defenses
from bract.client.truth import save_truth
from bract.config import DataConfig
from bract.data.views import test_data as load_test_data
from bract.schema import ClientDeclaration
from bract.schema.store import StoreOwner
from bract.updates.update import parameters_of

MODEL = "foreign_models:relu_mlp"


def own_app(
    root: Path, *, model: str = MODEL, defense: str | None = None, truth: bool = True
) -> Path:
    """Lay out captures of one client, which declare next to nothing, and the truth beside them."""
    images, labels = load_test_data(DataConfig(name="digits", image_size=8))
    network = getattr(foreign_models, model.partition(":")[2])()
    loss = _loss(network, images[:1], labels[:1])
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    names = [name for name, _ in network.named_parameters()]
    update = {n: 0.1 * g for n, g in zip(names, gradients, strict=True)}
    declaration = ClientDeclaration(num_examples=1)
    if defense is not None:
        chain = build_defenses([{"name": defense}])
        update = chain.protect(update, {}, ProtectContext())
        declaration = declaration.updated({"defenses": tuple(chain.public())})
    folder = root / "captures" / "77"
    occupy(folder, StoreOwner(run_id="77", app="own", started=1.0))
    ObservationStore(folder).save(
        Observation(
            round=1,
            client="node-1",
            parameters=parameters_of(network),
            update=update,
            declaration=declaration,
            provenance={"run_id": "77"},
        )
    )
    if truth:
        save_truth(root / "truth" / "77" / "node-1", 1, images[:1], labels[:1])
    return root


def _loss(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "decoder"):
        return F.cross_entropy(model(images), labels)
    rows = images.flatten(1)
    return F.mse_loss(model.decoder(model.encoder(rows)), rows)
