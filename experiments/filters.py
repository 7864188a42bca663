"""Filters of an update: what they leave of it, the epsilon that they spend, and what is read still.

    pip install --no-deps --target FOLDER nvflare==2.8.1
    OMP_NUM_THREADS=2 python -m experiments.filters [--nvflare FOLDER] [--strong 5] [--json]

``densenet121`` rows: a client's update of three Adam steps on 16 crops of 64 pixels each, through
torchvision's network of 7 million parameters for ten classes, means over ``--updates`` networks and
crops. ``lenet-strided`` rows: the gradient of one digit, from each of four clients; ``read`` counts
the digits that `auto` reads in what is left within ``--strong`` processor seconds: the rule of an
audit, adaptive where the filter is a defense of this project, and without knowing of it where it is
another's. ``cosine`` is with the update before the filter, ``kept`` the share of values that are
not zero. ``epsilon`` is of one round, as the filter's own accounts have it. NVFlare's filters are
its own code with its defaults, Flower's is `LocalDpMod`; without ``--nvflare`` its rows are left
out. Drawn noise is seeded.
"""

from __future__ import annotations

import logging
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from torch.nn import functional

from bract.client.defenses import ProtectContext, build_defenses
from bract.models import create_model
from bract.models.initialise import initialise
from bract.server.loopback import LoopbackGrid
from bract.updates.update import Tensors, difference, flatten, parameters_of
from experiments.guard import CLIENTS, Setting, site
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.images import image_set
from experiments.harness.result import Row

COLUMNS = ("model", "filter", "updates", "parameters", "cosine", "kept", "epsilon", "read")
ROWS, SIZE, STEPS = 16, 64, 3
SMALL = Setting("lenet-strided")


@dataclass(frozen=True)
class Filter:
    """A filter of updates.

    Attributes
    ----------
    sent
        Returns what leaves of an update, and the epsilon that it spent where the filter tells.
    chain
        As a configuration of this project names it; empty for a filter of others.
    """

    sent: Callable[[Tensors, int], tuple[Tensors, float | None]]
    chain: tuple[Mapping[str, Any], ...] = ()


def filters(nvflare: Path | None) -> dict[str, Filter]:
    """Return every filter by the name of its row."""
    own: dict[str, list[dict[str, Any]]] = {
        "none": [],
        "noise 0.001, clip 1": [{"name": "noise", "std": 1e-3, "clip": 1.0}],
        "noise 0.01, clip 1": [{"name": "noise", "std": 1e-2, "clip": 1.0}],
        "pruning 0.9": [{"name": "pruning", "ratio": 0.9}],
        "pruning 0.99": [{"name": "pruning", "ratio": 0.99}],
        "truncated-svd": [{"name": "truncated-svd"}],
        "AdaDefense": [{"name": "adadefense"}],
        "Guardian": [{"name": "guardian"}],
    }
    found = {name: Filter(partial(_defended, chain), tuple(chain)) for name, chain in own.items()}
    for epsilon in (10.0, 1000.0):
        found[f"Flower LocalDpMod, clip 1, epsilon {epsilon:g}"] = Filter(partial(_local, epsilon))
    if nvflare is not None:
        sys.path.insert(0, str(nvflare))
        for name in ("PercentilePrivacy", "SVTPrivacy"):
            found[f"NVFlare {name}"] = Filter(partial(_nvflare, name))
    return found


def _defended(
    chain: list[dict[str, Any]], update: Tensors, seed: int
) -> tuple[Tensors, float | None]:
    defenses = build_defenses(chain)
    made = defenses.protect(update, {}, ProtectContext(round=1, seed=seed))
    return made, None


def _local(epsilon: float, update: Tensors, seed: int) -> tuple[Tensors, float | None]:
    """Pass an update through Flower's mod, as a model that moved by it."""
    np.random.seed(seed)
    zeros = {name: torch.zeros_like(value) for name, value in update.items()}
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=epsilon, delta=1e-5)
    app = ClientApp()

    @app.train(mods=[mod])
    def train(message: Message, _: Context) -> Message:
        return Message(RecordDict({"arrays": _record(update)}), reply_to=message)

    grid = LoopbackGrid(app, [{}])
    content = RecordDict({"arrays": _record(zeros)})
    (reply,) = grid.send_and_receive([grid.create_message(content, "train", 1, "")])
    (record,) = reply.content.array_records.values()
    return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}, epsilon


def _record(arrays: Tensors) -> ArrayRecord:
    return ArrayRecord({name: Array(value.detach().numpy()) for name, value in arrays.items()})


def _nvflare(name: str, update: Tensors, seed: int) -> tuple[Tensors, float | None]:
    modules = {"PercentilePrivacy": "percentile_privacy", "SVTPrivacy": "svt_privacy"}
    made = getattr(import_module(f"nvflare.app_common.filters.{modules[name]}"), name)()
    dxo, fl = import_module("nvflare.apis.dxo"), import_module("nvflare.apis.fl_context")
    np.random.seed(seed)
    arrays = {key: value.numpy().copy() for key, value in update.items()}
    sent = dxo.DXO(dxo.DataKind.WEIGHT_DIFF, data=arrays)
    left = made.process_dxo(sent, sent.to_shareable(), fl.FLContext())
    spent = made.get_privacy_spent() if name == "SVTPrivacy" else None
    return {key: torch.from_numpy(value) for key, value in left.data.items()}, spent


def trained(seed: int) -> Tensors:
    """Return what three steps of Adam change in a fresh network."""
    images = image_set("photos", ROWS * STEPS * (seed + 1), "score", size=SIZE)
    torch.manual_seed(seed)
    model = create_model("densenet121", classes=10, channels=3, image_size=SIZE, activation="relu")
    initialise(model, "default", seed)
    before = {name: value.clone() for name, value in parameters_of(model).items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    labels = torch.randint(10, (ROWS * STEPS,), generator=torch.Generator().manual_seed(seed))
    for step in range(STEPS):
        part = slice((seed * STEPS + step) * ROWS, (seed * STEPS + step + 1) * ROWS)
        optimizer.zero_grad()
        target = labels[step * ROWS : (step + 1) * ROWS]
        functional.cross_entropy(model(images.images[part]), target).backward()
        optimizer.step()
    return difference(parameters_of(model), before)


def measured(one: Filter, updates: list[Tensors]) -> Row:
    """Return means over updates."""
    cosines, kept, spent = [], [], list[float | None]()
    for seed, update in enumerate(updates):
        left, epsilon = one.sent(update, seed)
        flat, before = flatten(left).double(), flatten(update).double()
        cosines.append(float(functional.cosine_similarity(flat, before, dim=0)))
        kept.append(float((flat != 0).double().mean()))
        spent.append(epsilon)
    return {
        "updates": len(updates),
        "parameters": int(flatten(updates[0]).numel()),
        "cosine": statistics.fmean(cosines),
        "cosine_each": cosines,
        "kept": statistics.fmean(kept),
        "epsilon": spent[0],
    }


def read(one: Filter, strong: float) -> Row:
    """Return what is left of one digit's gradients, and how many digits an attacker reads in it."""
    found, updates = 0, []
    for client in range(CLIENTS):
        sent = site(SMALL, client)
        updates.append(sent.seen.update)
        left, _ = one.sent(sent.seen.update, client)
        declared = build_defenses([dict(entry) for entry in one.chain]).public()
        declaration = sent.seen.declaration.updated({"defenses": declared})
        seen = replace(sent.seen, update=left, declaration=declaration)
        found += sent.read_by(seen, strong)
    return {**measured(one, updates), "read": found}


def rows(options: Any) -> Iterator[Row]:
    """Yield every row."""
    large = [trained(seed) for seed in range(options.updates)]
    finished = Finished(options.resume, "bract.client", "experiments.filters")
    for name, one in filters(options.nvflare).items():
        row = finished.row(("densenet121", name, options.updates), partial(measured, one, large))
        yield {"model": "densenet121", "filter": name, **row}
    for name, one in filters(options.nvflare).items():
        row = finished.row(("small", name, options.strong), partial(read, one, options.strong))
        yield {"model": SMALL.model, "filter": name, "strong_seconds": options.strong, **row}


def main() -> None:
    """Measure every filter; then print the table or JSON."""
    arguments = parser(__doc__, "threads", "resume")
    arguments.add_argument("--nvflare", type=Path, help="folder with NVFlare 2.8.1")
    arguments.add_argument("--updates", type=int, default=2, help="of the large network")
    arguments.add_argument("--strong", type=float, default=5.0, help="seconds of the attacker")
    options = parse(arguments)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    emit([note_row(row, COLUMNS) for row in rows(options)], COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
