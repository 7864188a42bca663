"""TabLeak's own code beside this project's attacks, on identical gradients of rows.

    git clone https://github.com/eth-sri/tableak FOLDER
    OMP_NUM_THREADS=1 python -m experiments.tableak_peer --code FOLDER [--resume FILE] [--json]

Clients, networks and scores are those of `experiments.tables`: perceptrons of two hidden layers of
100 with ReLU, freshly drawn, one gradient. TabLeak's code runs with the settings of its own
``example.py``: 30 members, 1500 steps of Adam, softmax and sigmoid, cosine, pooled by median. It
is given the true labels, as it asks for them, and the schema's ranges, means and categories; this
project's attacks infer the labels. Its rows are projected onto the schema by the same code, and
scored by the same scorer. Nothing in its code is changed but one call, which writes into a copy.
No row and no network chose a setting of either. Seconds are the
process' own, on one thread, an upload.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bract.attacks import Budget, Reconstruction, reconstruct
from bract.config.table import TableSchema
from bract.data.rows import project
from bract.errors import BractError
from bract.scores.table import RowScorer
from experiments.harness.command import Finished, emit, note, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.rows import FIRST_SEED, SentRows, references_of, send_rows
from experiments.harness.scores import mean
from experiments.harness.uploads import captured_network

COLUMNS = (
    *("tool", "attack", "data", "batch", "clients", "labels", "features", "features_least"),
    *("exact", "refused", "cpu_seconds"),
)
DATA = ("breast-cancer", "fair")
BATCHES = (1, 8, 32)
OURS = ("row-span", "tableak")

Rebuild = Callable[[SentRows, int], Tensor | None]
"""Return the rows of an upload, by a seed, or None where it is refused."""


def main() -> None:
    """Attack every upload by each tool; print the table or JSON."""
    made = parser(__doc__, "resume")
    made.add_argument("--code", type=Path, required=True, help="folder of TabLeak's repository")
    made.add_argument("--clients", type=int, default=2)
    made.add_argument("--members", type=int, default=30)
    made.add_argument("--iterations", type=int, default=1500)
    made.add_argument("--finished", action="store_true", help="only what --resume holds")
    options = parse(made)
    invert = published(options.code)
    done = Finished(options.resume, "experiments.tableak_peer", keep_older=options.finished)

    def theirs(sent: SentRows, seed: int) -> Tensor:
        return by_published(sent, seed, invert, options.members, options.iterations)

    rows: list[Row] = []
    for data in DATA:
        for batch in BATCHES:
            tools: list[tuple[str, str, Rebuild]] = [("TabLeak", "tableak", theirs)]
            tools += [("bract", name, by_bract(name)) for name in OURS]
            for tool, attack, rebuild in tools:
                what: Row = {
                    **{"tool": tool, "attack": attack, "data": data, "batch": batch},
                    **{"clients": options.clients, "members": options.members},
                    "iterations": options.iterations,
                }
                row = done.get(what)
                if row is None and not options.finished:
                    row = done.add(what, row_of(what, rebuild, options.clients))
                if row is not None:
                    rows.append(note_row(row, COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


def row_of(what: Row, rebuild: Rebuild, clients: int) -> Row:
    """Attack as many clients as asked for, each with a network of its own."""
    data, batch = str(what["data"]), int(what["batch"])
    references = references_of(data)
    shares: list[float] = []
    exact, refused, spent = 0, 0, 0.0
    for seed in range(FIRST_SEED["score"], FIRST_SEED["score"] + clients):
        sent = send_rows(data, batch, seed=seed)
        begun = time.process_time()
        found = rebuild(sent, seed)
        spent += time.process_time() - begun
        refused += found is None
        if found is None:
            labels = sent.truth.labels
            found = references.baselines(labels, batch, seed=seed)["mode_and_mean"]
        scored = RowScorer(sent.schema, references).score(found, sent.truth)
        shares += [one.features or 0.0 for one in scored.rows]
        exact += sum(bool(one.exact) for one in scored.rows)
    return {
        **what,
        "labels": "given" if what["tool"] == "TabLeak" else "inferred",
        "features": mean(shares),
        "features_least": min(shares),
        "exact": exact / len(shares),
        "refused": refused,
        "cpu_seconds": spent / clients,
    }


def by_bract(attack: str) -> Rebuild:
    """Return this project's attack of a name, with its own settings."""

    def rebuild(sent: SentRows, seed: int) -> Tensor | None:
        budget = Budget(max_images=len(sent.truth.labels))
        (found,) = reconstruct(sent.captured, attack, budget=budget, seed=seed, device="cpu")
        if isinstance(found, Reconstruction):
            return found.images
        note(found.reason)
        return None

    return rebuild


def published(code: Path) -> Callable[..., Tensor]:
    """Return ``invert_grad`` of a clone of TabLeak's repository, by which it runs."""
    if not (code / "attacks" / "gradient_inversion_attack.py").is_file():
        raise BractError(
            f"{code}: is no clone of github.com/eth-sri/tableak; see --help", code="file-missing"
        )
    sys.path.insert(0, str(code.resolve()))
    for name in ("attacks", "utils", "models", "datasets", "defenses"):
        sys.modules.pop(name, None)
    inversion = importlib.import_module("attacks.gradient_inversion_attack")
    bound = inversion.continuous_sigmoid_bound
    # It writes into a leaf of the graph, which today's torch refuses.
    setattr(inversion, bound.__name__, lambda x, dataset: bound(x.clone(), dataset))
    found: Callable[..., Tensor] = inversion.invert_grad
    return found


def by_published(
    sent: SentRows, seed: int, invert: Callable[..., Tensor], members: int, iterations: int
) -> Tensor:
    """Run TabLeak's code on an upload; return the rows as features ``(B, 1, 1, width)`` alike."""
    described, truth = Described(sent.schema), sent.truth
    network = captured_network(sent.captured)
    torch.manual_seed(seed)
    shaped = torch.zeros(len(truth.labels), sent.schema.width)
    found = invert(
        net=network,
        training_criterion=nn.CrossEntropyLoss(),
        true_grad=[sent.captured.gradient()[n] for n, _ in network.named_parameters()],
        true_label=truth.labels,
        true_data=shaped,
        reconstruction_loss="cosine_sim",
        dataset=described,
        max_iterations=iterations,
        post_selection=members,
        softmax_trick=True,
        sigmoid_trick=True,
        pooling="median+softmax",
        verbose=False,
    ).detach()
    rows = project(sent.schema, found * described.std + described.mean)
    return rows.view_as(truth.images)


class Described:
    """What TabLeak's code asks of a data set, from a schema alone.

    Attributes
    ----------
    mean, std
        Of each feature; its search sees ``(feature - mean) / std``, as the network does.
    """

    standardized = True

    def __init__(self, schema: TableSchema) -> None:
        self.schema = schema
        means, stds = schema.feature_moments()
        self.mean, self.std = torch.tensor(means), torch.tensor(stds)
        self.train_feature_index_map: dict[str, tuple[str, list[int]]] = {}
        self.train_features: dict[str, list[str] | None] = {}
        self.standardized_continuous_bounds: dict[str, tuple[float, float]] = {}
        for column, place in schema.groups():
            kind = "cat" if column.one_hot else "cont"
            at = list(range(place.start, place.stop))
            self.train_feature_index_map[column.name] = (kind, at)
            self.train_features[column.name] = list(column.values) if column.one_hot else None
            if not column.one_hot:
                mean, std = means[at[0]], stds[at[0]]
                bounds = ((0.0 - mean) / std, (1.0 - mean) / std)
                self.standardized_continuous_bounds[column.name] = bounds

    def decode_batch(self, rows: Tensor, standardized: bool = True) -> Any:
        """Return rows with one value a column, as its pairing of rows takes them."""
        raw = rows.detach() * self.std + self.mean if standardized else rows.detach()
        values = [
            raw[:, at].argmax(dim=1).double() if kind == "cat" else raw[:, at[0]].double()
            for kind, at in self.train_feature_index_map.values()
        ]
        return torch.stack(values, dim=1).numpy()

    def project_batch(self, rows: Tensor, standardized: bool = True) -> Tensor:
        """Return the rows with a single category a column."""
        raw = rows * self.std + self.mean if standardized else rows.clone()
        for kind, at in self.train_feature_index_map.values():
            if kind == "cat":
                hot = nn.functional.one_hot(raw[:, at].argmax(dim=1), len(at))
                raw[:, at] = hot.to(raw)
        return (raw - self.mean) / self.std if standardized else raw

    def create_tolerance_map(self) -> list[Any]:
        """Return ``cat``, or the tolerance of a number by which its code pairs rows."""
        return [
            "cat" if kind == "cat" else 0.319 * float(self.std[at[0]])
            for kind, at in self.train_feature_index_map.values()
        ]


if __name__ == "__main__":
    main()
