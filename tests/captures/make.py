"""Compute the capture pack anew: ``make captures``.

Writes the uploads, their truth, two trained generators, and what every attack reaches on them;
``make captures RESULTS=--results`` keeps the uploads. Read the change of ``expected.json``
before it is committed: a lower score there is a weaker attack.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import foreign_models
import pack
import torch
from defended_clients import capture
from observing import observed, one_step
from signal_uploads import signal_upload
from text_uploads import SCHEMA, texts
from text_uploads import upload as text_upload
from torch import Tensor

from bract import Observation, ObservationStore
from bract.client.truth import save_truth
from bract.config import DataConfig, SignalSchema
from bract.data.sources import open_source
from bract.data.tokens import as_example
from bract.data.views import data_spec
from bract.data.views import test_data as load_test_data
from bract.models import create_model
from bract.models.initialise import initialise
from bract_priors.prior_training import PriorSettings, train_prior
from experiments.harness.rows import config_of, send_rows

Sent = tuple[str, Observation, Tensor, Tensor]

SEED = 0
DEFENSES: dict[str, dict[str, Any]] = {
    "adadefense": {"name": "adadefense"},
    "censor": {"name": "censor", "trials": 2},
    "clipped-noise": {"name": "noise", "std": 1e-3, "clip": 1.0},
    "guardian": {"name": "guardian"},
    "laplace": {"name": "noise", "kind": "laplace", "std": 1e-3},
    "pruning": {"name": "pruning", "ratio": 0.5},
    "soteria": {"name": "soteria"},
    "truncated-svd": {"name": "truncated-svd"},
}
"""Defenses of one image's gradient through the strided LeNet."""

RECONSTRUCTS = {"reconstructs": True}

SHARES = {"table": 0.1, "text": 0.25, "signal": 0.2}
"""How much worse than here an attack may be, as a share of features or tokens, or correlation. Of a
text of four tokens one may be another: which tokens a search ends at hangs on the processor."""


def images() -> Iterator[Sent]:
    """Yield uploads of 8-pixel digits, and two of 16 pixels for the pooled LeNet."""
    tiny, kinds = load_test_data(DataConfig(name="digits", image_size=8))
    large, large_kinds = load_test_data(DataConfig(name="digits", image_size=16))

    def sent(called: str, count: int, **settings: Any) -> Sent:
        settings = {"init": "uniform"} | settings
        return (
            called,
            observed(tiny[:count], kinds[:count], **settings),
            tiny[:count],
            kinds[:count],
        )

    for count in (1, 2, 4, 8):
        yield sent(f"lenet-strided-b{count}", count)
    yield sent("lenet-strided-relu-b1", 1, **of_model("lenet-strided", "relu"))
    yield sent("lenet-strided-default-b1", 1, init="default")
    yield sent("linear-b1", 1, model="linear")
    yield sent("linear-b4", 4, model="linear")
    yield sent("mlp-100-b1", 1, model="mlp-100", init="default")
    yield sent("mlp-100-relu-b4", 4, **of_model("mlp-100", "relu"), init="default")
    for make in (foreign_models.residual_cnn, foreign_models.relu_mlp, foreign_models.tanh_cnn):
        torch.manual_seed(SEED)
        model, name = make(), foreign_models.named(make)
        yield sent(f"{make.__name__.replace('_', '-')}-b1", 1, model=model, name=name)
    frozen, name = (
        foreign_models.frozen_backbone(),
        foreign_models.named(foreign_models.frozen_backbone),
    )
    yield sent("frozen-backbone-b1", 1, model=frozen.eval(), name=name, norm_mode="eval")
    vit = "vit(patch=4, width=48, depth=1)"
    yield sent("vit-b1", 1, model=vit, init="default")
    trainings: dict[str, dict[str, Any]] = {
        "step": {"steps": 1},
        "steps": {"steps": 4},
        "proximal": {"steps": 3, "proximal_mu": 0.5},
        "momentum": {"steps": 3, "momentum": 0.9},
        "decay": {"steps": 3, "weight_decay": 0.01},
        "adam": {"steps": 2, "optimizer": "adam", "lr": 1e-3},
    }
    for name, settings in trainings.items():
        yield sent(f"fedavg-{name}-b1", 1, **{"lr": 0.1} | settings)
    yield sent("fedavg-epochs-b2", 2, steps=4, batch_size=1, lr=0.1)
    for count in (1, 2):
        seen = one_step(tiny[:count], kinds[:count])
        yield f"returned-statistics-b{count}", seen, tiny[:count], kinds[:count]
    seen = one_step(tiny[:1], kinds[:1], activation="relu", model="resnet20")
    yield "returned-statistics-resnet-b1", seen, tiny[:1], kinds[:1]
    pooled = observed(large[:1], large_kinds[:1], model="lenet", init="uniform")
    yield "lenet-b1", pooled, large[:1], large_kinds[:1]
    for name, entry in DEFENSES.items():
        found = capture(tiny[:1], kinds[:1], entry, model="lenet-strided", init="uniform")
        yield f"defended-{name}-b1", found.seen, found.images, found.labels
    pruned = capture(
        tiny[:1], kinds[:1], DEFENSES["pruning"], model="lenet-strided", steps=2, init="uniform"
    )
    yield "defended-pruning-fedavg-b1", pruned.seen, pruned.images, pruned.labels
    private = private_step(tiny[:1], kinds[:1])
    yield "defended-per-example-b1", private, tiny[:1], kinds[:1]
    precode = capture(tiny[:1], kinds[:1], {"name": "precode", "latent": 16}, model="lenet-strided")
    yield "defended-precode-b1", precode.seen, precode.images, precode.labels
    fedkl = capture(
        tiny[:1], kinds[:1], {"name": "fedkl", "key_length": 16}, model="lenet-strided-bn"
    )
    yield "defended-fedkl-b1", fedkl.seen, fedkl.images, fedkl.labels


def private_step(examples: Tensor, labels: Tensor) -> Observation:
    """Return a step of DP-SGD on one image: its gradient, clipped to 1, and Gaussian noise."""
    entry = {"name": "per-example", "noise_multiplier": 0.01, "max_grad_norm": 1.0}
    seen = observed(examples, labels, init="uniform", steps=1, lr=0.1, defenses=(entry,))
    generator = torch.Generator().manual_seed(SEED)
    norm = torch.stack([value.square().sum() for value in seen.update.values()]).sum().sqrt()
    factor = min(1.0, 0.1 / float(norm))
    update = {
        name: factor * value + 0.1 * 0.01 * torch.randn(value.shape, generator=generator)
        for name, value in seen.update.items()
    }
    return replace(seen, update=update)


def of_model(name: str, activation: str) -> dict[str, Any]:
    """Return the settings of an observation of a model with another activation."""
    model = create_model(name, classes=10, channels=1, image_size=8, activation=activation)
    return {"model": initialise(model, "default", SEED), "name": name, "activation": activation}


def rounds() -> Iterator[Observation]:
    """Yield one client's uploads of the same image in rounds 2 and 3, like round 1's."""
    tiny, kinds = load_test_data(DataConfig(name="digits", image_size=8))
    for number in (2, 3):
        model = create_model("lenet-strided", classes=10, channels=1, image_size=8)
        initialise(model, "uniform", number)
        seen = observed(tiny[:1], kinds[:1], model=model, name="lenet-strided")
        yield replace(seen, round=number)


def tables() -> Iterator[Sent]:
    """Yield uploads of rows: classes and numbers, one gradient and local epochs."""
    epochs: dict[str, Any] = {"algorithm": "fedavg", "batch_size": 8, "local_epochs": 3, "lr": 0.01}
    spec = data_spec(config_of("diabetes"))
    assert spec.table is not None
    columns = tuple(
        replace(c, encoder=None if c.is_number else "embedding") for c in spec.table.columns
    )
    embedded = replace(spec, table=replace(spec.table, columns=columns))
    for name, sent in {
        "wine-b1": send_rows("wine", 1, seed=0),
        "wine-b6": send_rows("wine", 6, seed=0),
        "wine-logistic-b2": send_rows("wine", 2, seed=0, model="logistic"),
        "wine-fedavg-b8": send_rows("wine", 8, seed=1, **epochs),
        "breast-cancer-b1": send_rows("breast-cancer", 1, seed=3),
        "diabetes-b1": send_rows("diabetes", 1, seed=3),
        "diabetes-b4": send_rows("diabetes", 4, seed=1),
        "diabetes-embedding-b4": send_rows(
            "diabetes", 4, seed=0, model="table-embedding", spec=embedded
        ),
    }.items():
        yield name, sent.captured, sent.truth.images, sent.truth.labels


def written() -> Iterator[Sent]:
    """Yield uploads of random texts through an encoder, a decoder and a language model."""
    wide = "(width=32, depth=2, heads=2)"
    language = replace(SCHEMA, task="language-model")
    for name, model, count, schema in (
        ("encoder-b1", "text-encoder", 1, SCHEMA),
        ("encoder-b2", "text-encoder", 2, SCHEMA),
        ("decoder-b1", "text-decoder", 1, SCHEMA),
        ("language-model-b1", "text-decoder", 1, language),
    ):
        ids = texts(count, seed=1, schema=schema)
        classes = 1 if schema is language else 3
        seen = text_upload(model + wide, ids, schema=schema, classes=classes)
        yield name, seen, as_example(ids, schema), torch.arange(count) % classes


def signals() -> Iterator[Sent]:
    """Yield uploads of signals through a perceptron, convolutions, and a forecasting LSTM."""
    classes = SignalSchema(channels=2, length=12, low=(-1.0,), high=(1.0,))
    for name, model, activation, schema in (
        ("signal-mlp-b1", "mlp-100", "relu", classes),
        ("signal-conv1d-b1", "conv1d", "sigmoid", classes),
        ("signal-lstm-b1", "lstm", "sigmoid", replace(classes, task="forecast", horizon=2)),
    ):
        seen, signal, labels = signal_upload(model, schema, activation=activation)
        yield name, seen, signal, labels


def generators() -> None:
    """Train the two kinds of generator on digits of the split that no client holds."""
    source = open_source(DataConfig(name="digits"), "train")
    public = source.images(range(600), channels=1, size=8)
    for settings in (
        PriorSettings(latent=8, width=8, epochs=20, lr=5e-3),
        PriorSettings(kind="flow", width=8, epochs=12, lr=5e-3),
    ):
        made = train_prior(public, source.labels[:600], settings, source="digits", classes=10)
        made.save(pack.PRIORS / f"{settings.kind}.safetensors")


def results() -> None:
    """Write what every attack reaches on every upload of its inputs."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for attack, name in pack.pairs():
        begun = time.perf_counter()
        row = pack.reached(attack, name)
        if "score" in row:
            kind = pack.upload(name).declaration.input
            row = held(row["score"], kind) if pack.scored(attack, name) else RECONSTRUCTS
        found.setdefault(attack, {})[name] = row
        print(f"{time.perf_counter() - begun:.1f} s", attack, name, row, flush=True)
    pack.EXPECTED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def held(score: float, kind: str) -> dict[str, Any]:
    """Return a score with its tolerance: 3 dB, or a quarter of more than 12 dB; or a share.

    A score that is within what chance gives holds nothing, and is left out.

    Near-exact images differ by many decibels where their last bits do.
    """
    if kind in ("text", "signal") and score < pack.FEW:
        return RECONSTRUCTS
    if kind in SHARES or score <= 1.0:
        return {"score": score, "tolerance": SHARES.get(kind, 0.0)}
    if score < pack.WEAK:
        return RECONSTRUCTS
    return {"score": score, "tolerance": max(3.0, round(score / 4, 1))}


def main() -> None:
    """Write the pack."""
    torch.set_num_threads(1)
    if "--results" not in sys.argv:
        for folder in (pack.CAPTURES, pack.TRUTH, pack.PRIORS):
            shutil.rmtree(folder, ignore_errors=True)
        pack.PRIORS.mkdir()
        store = ObservationStore(pack.CAPTURES)
        for make in (images, tables, written, signals):
            torch.manual_seed(SEED)
            for name, seen, examples, labels in make():
                update = {n: value.clone() for n, value in seen.update.items()}
                store.save(replace(seen, round=1, client=name, update=update))
                save_truth(pack.TRUTH / name, 1, examples.contiguous(), labels)
        for seen in rounds():
            name = "lenet-strided-b1"
            store.save(replace(seen, client=name))
            held = pack.held(name)
            save_truth(pack.TRUTH / name, seen.round, held.images, held.labels)
        generators()
    results()


if __name__ == "__main__":
    main()
