"""The mask of a client's dropout, read off its update, and what attacks make of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from observing import observed as observe
from torch import Tensor, nn

from bract import Observation
from bract.attacks import Budget, Case, Problem, Reconstruction, reconstruct
from bract.attacks.problem.dropout import MASK, read_dropout
from bract.attacks.problem.global_models import observe_global_models
from bract.attacks.problem.target_model import target_model_of
from bract.attacks.task import AttackTask, open_cases
from bract.client.training import train_locally
from bract.config.config import TrainingConfig
from bract.data.views import DataSpec
from bract.installed import own_word
from bract.models import create_model
from bract.models.dropout import with_dropout
from bract.models.initialise import initialise
from bract.schema import ClientDeclaration
from bract.updates.update import buffers_of, parameters_of

SPEC = DataSpec((1, 16, 16), 10, (0.3,), (0.4,))
CPU = torch.device("cpu")


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    coarse = torch.rand(count, 1, 4, 4, generator=generator)
    return nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear"), torch.arange(count)


def client(count: int = 1, model: str = "lenet", said: Any = "rate", **training: Any) -> Any:
    """Return what a client with dropout sent, and the inputs of its output layer that it kept."""
    options = {"algorithm": "fedsgd", "batch_size": count, "lr": 0.3, "dropout": 0.4}
    config = TrainingConfig(**(options | training))
    network = create_model(model, classes=10, channels=1, image_size=16)
    network = with_dropout(initialise(network, "default", 0), config.dropout, classes=10)
    kept: list[Tensor] = []
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, __, out: kept.append(out[0] != 0))
    sent, buffers = parameters_of(network), buffers_of(network)
    pixels, labels = images(count)
    fit = train_locally(network, pixels, labels, config=config, spec=SPEC, seed=0, device=CPU)
    declaration = ClientDeclaration(
        algorithm=config.algorithm,
        model=model,
        image_shape=SPEC.image_shape,
        classes=10,
        mean=SPEC.mean,
        std=SPEC.std,
        lr=config.lr,
        weight_decay=config.weight_decay,
        dropout=config.dropout if said == "rate" else said,
        local_steps=fit.steps,
        batch_size=min(config.batch_size, count),
        num_examples=count,
    )
    seen = Observation(1, "client-0", sent, fit.update, declaration, buffers=buffers)
    return seen, pixels[fit.used], labels[fit.used], (kept or [torch.ones(0)])[0]


def opened(seen: Observation) -> Case:
    ((case,), _) = open_cases([seen], AttackTask(tier="oblivious"), attack="ig")
    assert isinstance(case, Case)
    return case


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"algorithm": "fedavg", "local_steps": 1},
        {"algorithm": "fedavg", "local_steps": 1, "weight_decay": 0.05},
    ],
)
def test_the_zero_columns_are_the_dropped_inputs_and_the_mask_is_simulated(training: Any) -> None:
    seen, pixels, labels, kept = client(**training)
    found = read_dropout(seen, target_model_of(seen))
    (mask,) = found.masks.values()
    assert list(found.masks) == [MASK + "classifier.5.weight"]
    assert found.readable and 10 < int(kept.sum()) < 84 - 10
    torch.testing.assert_close(mask, kept.float() / 0.6)
    case = opened(seen)
    assert "zero columns" in case.evidence.notes["dropout"]
    problem = Problem.stack([(case, 0)], seed=0, device=CPU)
    rows = nn.functional.one_hot(labels, 10)[None].float()
    made = problem.simulate(pixels[None], rows, {})
    plain = Problem.stack(
        [(replace(case, evidence=replace(case.evidence, buffers={})), 0)], seed=0, device=CPU
    ).simulate(pixels[None], rows, {})
    for name, wanted in seen.gradient().items():
        assert torch.allclose(made[name][0], wanted, atol=2e-6), name
    # Without the mask the same images do not give the update: the test would see it missing.
    name = "classifier.3.weight"
    assert not torch.allclose(plain[name][0], seen.gradient()[name], rtol=0.1)


@pytest.mark.parametrize(
    ("count", "training", "changes", "words"),
    [
        (3, {}, {}, "every image of the batch"),
        (3, {"algorithm": "fedavg", "batch_size": 1}, {}, "every local step"),
        (1, {}, {"defenses": ({"name": "pruning"},)}, "a defense changed"),
    ],
)
def test_what_mixes_masks_says_so_and_is_matched_without_dropout(
    count: int, training: Any, changes: Any, words: str
) -> None:
    seen, _, _, _ = client(count, **training)
    seen = replace(seen, declaration=replace(seen.declaration, **changes))
    case = opened(seen)
    assert words in case.evidence.notes["dropout"]
    assert "simulated without dropout" in case.evidence.notes["dropout"]
    assert not case.evidence.buffers


def test_without_dropout_nothing_is_read_or_told() -> None:
    seen, _, _, _ = client(dropout=0.0)
    for said in (0.0, None):
        given = replace(seen, declaration=replace(seen.declaration, dropout=said))
        assert "dropout" not in opened(given).evidence.notes
        assert not read_dropout(given, target_model_of(given)).masks


class Own(nn.Module):
    """A model with dropout of its own, which nobody declares."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(256, 40), nn.Linear(40, 10)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.dropout(self.hidden(x.flatten(1)).sigmoid()))
        return logits


@pytest.mark.parametrize("trains", [True, False])
def test_a_models_own_layers_count_where_they_dropped_and_nobody_declared_it(trains: bool) -> None:
    torch.manual_seed(1)
    network = Own().train(trains)
    pixels, labels = images(1)
    seen = observe(pixels, labels, model=network, name=own_word(f"{__name__}:Own"))
    case = opened(seen)
    assert bool(case.evidence.buffers) is trains
    problem = Problem.stack([(case, 0)], seed=0, device=CPU)
    made = problem.simulate(pixels[None], nn.functional.one_hot(labels, 10)[None].float(), {})
    for name, wanted in seen.update.items():
        assert torch.allclose(made[name][0], wanted, atol=1e-6), name


@pytest.mark.thorough
def test_an_attack_that_reads_the_mask_comes_nearer_than_one_that_does_not() -> None:
    seen, pixels, _, _ = client(model="lenet-strided", dropout=0.5)
    blind = replace(seen, declaration=replace(seen.declaration, dropout=0.0))
    errors = []
    for given in (seen, blind):
        (found,) = reconstruct(given, "ig", budget=Budget(iterations=300), device="cpu")
        assert isinstance(found, Reconstruction)
        errors.append(float((found.images - pixels).square().mean()))
    assert errors[0] < errors[1] / 2


def test_a_mask_is_not_read_from_a_difference_of_models() -> None:
    seen, *_ = client(algorithm="fedavg", local_steps=1)
    other, *_ = client(algorithm="fedavg", local_steps=1, model="lenet")
    # The observer's own update is another one: what is left of the two is rounded.
    own = {n: torch.randn_like(v) * 0.01 for n, v in other.update.items()}
    after = {n: v - 0.5 * (seen.update[n] + own[n]) for n, v in seen.parameters.items()}
    found = observe_global_models(
        seen.parameters,
        after,
        [seen.declaration],
        number=1,
        client="others",
        known=[(0.5, own)],
    )
    read = read_dropout(found, target_model_of(found))
    assert not read.readable and not read.masks
    assert "computed from float32 models" in (read.note or "")


@pytest.mark.parametrize("said", ["rate", None])
def test_a_mask_in_front_of_a_frozen_layer_is_not_read(said: Any) -> None:
    """As of an app's own adapters beside the frozen last layer."""
    seen, *_ = client(said=said)
    model = target_model_of(seen)
    frozen = list(seen.parameters)[-2:]
    groups = {
        group: {n: v for n, v in getattr(seen, group).items() if n not in frozen}
        for group in ("parameters", "update")
    }
    found = read_dropout(replace(seen, **groups), model)
    assert not found.masks and (said is None or not found.readable)
