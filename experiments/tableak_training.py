"""TabLeak's experiment over training beside this project's attacks, on identical gradients.

    git clone https://github.com/eth-sri/tableak FOLDER
    OMP_NUM_THREADS=1 python -m experiments.tableak_training --code FOLDER [--resume FILE] [--json]

TabLeak's ``run_attack_over_training.py``: a perceptron of two hidden layers of 100 with ReLU learns
by FedAvg of one step (learning rate 0.5) from clients of 32 rows, and in rounds of its training
their gradients are inverted. Here in rounds 1, 5 and 15, on Adult and German credit as the clone
holds them (rows with a missing value left out, as there), ten clients a round, of which
``--clients`` are attacked. Its code runs at its full budget, 30 members of 1500 steps with median
pooling, and is given the true labels, as it asks for them; this project's attacks infer them.
``accuracy`` is its own score (categories right, numbers within 0.319 standard deviations, rows
paired by its code), ``exact`` the share of rows of which every feature is right by this project's
scorer. Two guesses without the gradient are scored alike: each label's most frequent categories
and mean numbers, and rows of the table that no client holds. Seconds are the process' own, on one
thread, an upload.
"""

from __future__ import annotations

import csv
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bract.audit.intervals import mean_interval
from bract.config import DataConfig
from bract.config.config import TrainingConfig
from bract.data.infer_schema import infer_schema
from bract.data.sources import open_source
from bract.data.spec import DataSpec
from bract.data.tables import read_table
from bract.data.views import data_spec
from bract.errors import BractError
from bract.inputs import INPUTS, References, Truth
from bract.scores.table import RowScorer
from bract.updates.update import parameters_of
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.rows import SentRows, row_network, sent_of
from experiments.harness.scores import mean
from experiments.tableak_peer import Described, Rebuild, by_bract, by_published, published

COLUMNS = (
    *("tool", "attack", "data", "round", "clients", "labels", "accuracy", "accuracy_low"),
    *("accuracy_high", "exact", "refused", "cpu_seconds"),
)
BATCH, FEDERATED, RATE = 32, 10, 0.5
ROUNDS = (1, 5, 15)
MODEL, ACTIVATION = "mlp-100", "relu"
OURS = ("row-span", "tableak", "auto")
GUESSES = ("mode_and_mean", "random_row")
ADULT = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "salary"),
)
GERMAN = (*(f"A{place}" for place in range(1, 21)), "class")
FILES = {
    "adult": ("ADULT/adult.data", ", ", ADULT),
    "german": ("German/german.data", " ", GERMAN),
}
"""File in the clone's ``datasets``, what separates its cells, and its columns, the target last."""


def main() -> None:
    """Attack every upload by each tool; print the table or JSON."""
    made = parser(__doc__, "resume")
    made.add_argument("--code", type=Path, required=True, help="folder of TabLeak's repository")
    made.add_argument("--clients", type=int, default=3, help="attacked in each round")
    made.add_argument("--members", type=int, default=30)
    made.add_argument("--iterations", type=int, default=1500)
    options = parse(made)
    invert = published(options.code)
    pairing = importlib.import_module("utils").match_reconstruction_ground_truth
    done = Finished(options.resume, "experiments.tableak_training")

    def theirs(sent: SentRows, seed: int) -> Tensor:
        return by_published(sent, seed, invert, options.members, options.iterations)

    tools: list[tuple[str, str, Rebuild]] = [("TabLeak", "tableak", theirs)]
    tools += [("bract", name, by_bract(name)) for name in OURS]
    rows: list[Row] = []
    for data in FILES:
        with tempfile.TemporaryDirectory() as folder:
            table = config_of(data, options.code, Path(folder))
            references = INPUTS["table"]().references(table, 0)
            for round_, uploads in sent_in_rounds(table, options.clients):
                every = [*tools, *(("none", name, guessed(references, name)) for name in GUESSES)]
                for tool, attack, rebuild in every:
                    what: Row = {
                        **{"tool": tool, "attack": attack, "data": data, "round": round_},
                        **{"clients": options.clients, "members": options.members},
                        "iterations": options.iterations,
                    }
                    row = done.get(what)
                    if row is None:
                        row = done.add(what, row_of(what, uploads, rebuild, references, pairing))
                    rows.append(note_row(row, COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


def config_of(data: str, code: Path, folder: Path) -> DataConfig:
    """Return the data section of a table of the clone, as CSV with an inferred schema."""
    name, separator, columns = FILES[data]
    path = code / "datasets" / name
    if not path.is_file():
        raise BractError(f"{path}: not there; see --help", code="file-missing")
    cells = [line.strip().split(separator) for line in path.read_text().splitlines()]
    whole = [row for row in cells if len(row) == len(columns) and "?" not in row]
    written = folder / f"{data}.csv"
    with written.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *whole])
    schema = infer_schema(
        read_table(written),
        target=columns[-1],
        categorical=("class",) if data == "german" else (),
        statistics="public",
        source=data,
    )
    return DataConfig(name="csv", input="table", path=written, table=schema)


def sent_in_rounds(table: DataConfig, clients: int) -> Iterator[tuple[int, list[SentRows]]]:
    """Train by FedAvg; yield in each of `ROUNDS` what the first clients sent."""
    spec = data_spec(table)
    network = row_network(spec, model=MODEL, activation=ACTIVATION, seed=0)
    work = TrainingConfig(algorithm="fedsgd", batch_size=BATCH, lr=RATE)
    for round_ in range(1, max(ROUNDS) + 1):
        sent = []
        start = {name: value.clone() for name, value in network.state_dict().items()}
        for client in range(FEDERATED):
            network.load_state_dict(start)
            truth = held_by(table, spec, seed=1000 * round_ + client)
            sent.append(
                sent_of(
                    network, truth, spec, work, seed=1000 * round_ + client,
                    model=MODEL, activation=ACTIVATION, round_=round_,
                )
            )  # fmt: skip
        network.load_state_dict(start)
        with torch.no_grad():
            for name, value in parameters_of(network).items():
                steps = [upload.captured.gradient()[name] for upload in sent]
                value -= RATE * torch.stack(steps).mean(dim=0)
        if round_ in ROUNDS:
            yield round_, sent[:clients]


def held_by(table: DataConfig, spec: DataSpec, *, seed: int) -> Truth:
    """Return a client's rows and labels, drawn under a seed."""
    source = open_source(table.model_copy(update={"table": spec.table}), "train")
    order = torch.randperm(len(source.labels), generator=torch.Generator().manual_seed(seed))
    picks = order[:BATCH].tolist()
    return Truth(source.images(picks, channels=0, size=0), source.labels[picks])


def guessed(references: References, name: str) -> Rebuild:
    """Return a guess that sees the labels and no gradient."""
    return lambda sent, seed: guess_of(references, name, sent, seed)


def guess_of(references: References, name: str, sent: SentRows, seed: int) -> Tensor:
    """Return rows guessed from an upload's labels alone."""
    labels = sent.truth.labels
    return references.baselines(labels, len(labels), seed=seed)[name]


def row_of(
    what: Row,
    uploads: list[SentRows],
    rebuild: Rebuild,
    references: References,
    pairing: Callable[..., Any],
) -> Row:
    """Attack the uploads of a round, and score what was found by both scorers."""
    right: list[float] = []
    groups: list[int] = []
    exact: list[float] = []
    refused, spent = 0, 0.0
    for place, sent in enumerate(uploads):
        begun = time.process_time()
        rebuilt = rebuild(sent, place)
        spent += time.process_time() - begun
        refused += rebuilt is None
        found = guess_of(references, "mode_and_mean", sent, place) if rebuilt is None else rebuilt
        described = Described(sent.schema)
        original, guess = (
            described.decode_batch(rows.flatten(1), standardized=False)
            for rows in (sent.truth.images, found)
        )
        wrong = pairing(original, guess, described.create_tolerance_map())[1]
        right += (1.0 - wrong).tolist()
        groups += [place] * len(wrong)
        scored = RowScorer(sent.schema, references).score(found, sent.truth)
        exact += [float(bool(one.exact)) for one in scored.rows]
    low, high = mean_interval(right, groups=groups, bounds=(0.0, 1.0)) or (None, None)
    return {
        **what,
        "labels": "given" if what["tool"] != "bract" else "inferred",
        "accuracy": mean(right),
        "accuracy_low": low,
        "accuracy_high": high,
        "exact": mean(exact),
        "refused": refused,
        "cpu_seconds": spent / len(uploads),
    }


if __name__ == "__main__":
    main()
