"""Models of texts train with per-example privacy: every text's gradient is clipped by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from encrypted_runs import small, small_grid, train
from refusals import refused
from torch import Tensor, nn

from bract import ObservationStore
from bract.client.accounting import Mechanism
from bract.client.private_training import check_layers, train_privately
from bract.config import build_config
from bract.config.text import TextSchema
from bract.crypto import SecretStream
from bract.data.spec import DataSpec
from bract.data.tokens import as_example
from bract.models import create_model
from bract.models.losses import label_rows, loss_of

pytest.importorskip("opacus")
pytest.importorskip("transformers")

TEXTS, LENGTH, BOUND = 6, 8, 0.5
ENCODER, DECODER = "text-encoder(width=16,depth=2,heads=2", "text-decoder(width=16,depth=2,heads=2"


def clipped_mean(model: nn.Module, inputs: Tensor, labels: Tensor, loss: str) -> dict[str, Tensor]:
    """Slow reference: one backward pass a text."""
    objective = loss_of(loss)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in named.items()}
    for text, label in zip(inputs, labels, strict=True):
        outputs = model(text[None])
        rows = label_rows(label[None], outputs.shape[-1], objective).to(outputs)
        found = torch.autograd.grad(
            objective.each(outputs, rows).sum(), list(named.values()), allow_unused=True
        )
        norm = torch.cat([g.flatten() for g in found if g is not None]).norm()
        for name, slope in zip(named, found, strict=True):
            if slope is not None:
                total[name] += slope * min(1.0, BOUND / float(norm)) / len(inputs)
    return total


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (f"{ENCODER})", "classification"),
        (f"{DECODER})", "classification"),
        (f"{ENCODER},lora=2)", "classification"),
        (f"{DECODER},lora=2)", "classification"),
        (f"{ENCODER},trained=last)", "classification"),
        (f"{ENCODER})", "token-classification"),
        (f"{DECODER})", "token-classification"),
        (f"{DECODER})", "language-model"),
    ],
)
def test_the_update_is_the_mean_of_texts_gradients_clipped_one_by_one(
    model: str, task: Any
) -> None:
    schema = TextSchema(
        vocabulary=60,
        length=LENGTH,
        special=(0, 1, 2),
        task=task,
        tags=3 if task == "token-classification" else 0,
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (TEXTS, LENGTH), generator=generator)
    ids[::3, -2:] = 0
    labels = torch.randint(-1, 3, ids.shape, generator=generator).where(ids > 0, -1)
    if task != "token-classification":
        labels = labels[:, 0].abs() if task == "classification" else torch.zeros(TEXTS)
    mean, std = schema.feature_moments()
    classes = schema.outputs or 4
    spec = DataSpec((LENGTH, 1, 1), classes, mean, std, text=schema)
    network = create_model(
        model, classes=classes, channels=LENGTH, image_size=1, activation="", text=schema
    ).train()
    texts = as_example(ids, schema)
    wanted = clipped_mean(network, spec.normalise(texts), labels, spec.loss)
    section = {
        "private": {"noise_multiplier": 1e-9, "max_grad_norm": BOUND},
        "algorithm": "fedsgd",
        "batch_size": TEXTS,
    }
    found = train_privately(
        network,
        texts,
        labels,
        config=build_config({"training": section}).training,
        spec=spec,
        device=torch.device("cpu"),
        mechanism=Mechanism("sampled", 1e-9, 1.0, 1),
        stream=SecretStream.derived(2**70, "texts"),
    )
    assert set(found.update) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found.update[name], value, atol=1e-6, rtol=1e-4)


def test_statistics_that_are_sent_are_refused_and_frozen_weights_are_not() -> None:
    plain = nn.Linear(2, 2)
    plain.register_buffer("frozen", torch.ones(2), persistent=False)
    check_layers(plain.train())
    plain.register_buffer("seen", torch.ones(2))
    with refused("model-unsuited", "statistics"):
        check_layers(plain)


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["classification", "token-classification"])
def test_a_federation_of_texts_trains_privately_and_declares_it(tmp_path: Path, task: str) -> None:
    config = small(
        data={
            "name": "clinical-notes",
            "input": "text",
            "validation": 0.0,
            "text": {"length": 16, "task": task},
            "partition": {"kind": "sizes", "sizes": [8, 6, 4]},
        },
        model={"name": f"{ENCODER})"},
        training={
            "lr": 0.1,
            "batch_size": 4,
            "local_steps": 1,
            "private": {"noise_multiplier": 1.0},
        },
    )
    run = train(tmp_path, config, small_grid(tmp_path, config))
    seen = list(ObservationStore(run.captures))
    assert len(seen) == 3
    for one in seen:
        assert [d["name"] for d in one.declaration.defenses] == ["per-example"]
        assert all(bool(value.any()) for value in one.update.values())
