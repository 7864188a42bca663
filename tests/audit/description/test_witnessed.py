"""What a witness saw is described, confirmed and never asked for; what it cannot say is named."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from audited import attacked_run
from flwr.app import ConfigRecord, RecordDict
from refusals import refused
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from bract import Observation, ObservationStore
from bract.cli.describe import describe_app
from bract.client import witness
from bract.rundir import RunDirectory
from bract.schema import AppDescription, ClientDeclaration, Work
from bract.updates.update import buffers_of, parameters_of

Train = Callable[[Any, Tensor, Tensor], None]
HERE = "test_witnessed"


def net(outputs: int = 10) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(96, outputs)
    )


def normalised() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 10),
    )


def one_logit() -> nn.Module:
    return net(1)


def labels_of(count: int) -> Tensor:
    return torch.arange(count) * 7 % 10


def trained(
    folder: Path,
    train: Train,
    model: Callable[[], nn.Module] = net,
    *,
    count: int = 8,
    clients: int = 2,
    rounds: int = 1,
    labels: Callable[[int], Tensor] = labels_of,
    after: Callable[[Any, Any], None] = lambda own, sent: None,
) -> Path:
    """Train clients under a witness, and capture what they send, with nothing declared."""
    torch.manual_seed(1)
    store, sent = ObservationStore(folder / "captures"), model()
    for number in range(1, rounds + 1):
        for client in range(clients):
            own = model()
            own.load_state_dict(sent.state_dict())
            images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(client))
            images[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
            content = RecordDict({"config": ConfigRecord({"server-round": number})})
            context: Any = SimpleNamespace(
                node_id=client, run_id=1, node_config={}, state=RecordDict()
            )
            message: Any = SimpleNamespace(content=content)
            before, held = parameters_of(own), buffers_of(own)
            with witness(own, message, context, folder / "truth"):
                train(own, images, labels(count))
            after(own, before)
            store.save(
                Observation(
                    round=number,
                    client=f"node-{client}",
                    parameters=before,
                    buffers=held,
                    update={n: before[n] - v for n, v in parameters_of(own).items()},
                    returned_buffers=buffers_of(own),
                    declaration=ClientDeclaration(num_examples=count),
                )
            )
    return folder


def described(folder: Path, model: str = "net", **settings: Any) -> AppDescription:
    truth = settings.pop("truth", folder / "truth" / "1")
    work, force = settings.pop("work", None), settings.pop("force", False)
    describe_app(folder, settings, model=f"{HERE}:{model}", truth=truth, work=work, force=force)
    found = RunDirectory(folder).description()
    assert found is not None
    return found


def loop(make: Callable[[Any], torch.optim.Optimizer], size: int = 4, epochs: int = 1) -> Train:
    """Return a training as quickstarts have it."""

    def train(model: Any, images: Tensor, labels: Tensor) -> None:
        optimizer = make(model)
        for _ in range(epochs):
            for x, y in DataLoader(TensorDataset(images, labels), size):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    return train


def momentum(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)


def rmsprop(model: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3)


def plain(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)


def summed(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = plain(model)
    for at in (0, 4):
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss(reduction="sum")(model(images[at : at + 4]), labels[at : at + 4])
        loss.backward()
        optimizer.step()


def accumulated(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = momentum(model)
    for at in range(0, 8, 2):
        (F.cross_entropy(model(images[at : at + 2]), labels[at : at + 2]) / 2).backward()
        if at % 4:
            optimizer.step()
            optimizer.zero_grad()


def clipped(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(images), labels).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def log_probabilities(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = momentum(model)
    F.nll_loss(F.log_softmax(model(images), dim=1), labels).backward()
    optimizer.step()


def in_evaluation(model: Any, images: Tensor, labels: Tensor) -> None:
    model.eval()
    loop(momentum)(model, images, labels)


def binary(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = momentum(model)
    F.binary_cross_entropy_with_logits(model(images).squeeze(1), (labels > 4).float()).backward()
    optimizer.step()


def by_sigmoid(model: Any, images: Tensor, labels: Tensor) -> None:
    probability = torch.sigmoid(model(images)).squeeze(1)
    nn.BCELoss()(probability, (labels > 4).float()).backward()
    momentum(model).step()


def two_alike(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizers = [torch.optim.SGD(model[part].parameters(), lr=0.1) for part in (0, 3)]
    for at in (0, 4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(images[at : at + 4]), labels[at : at + 4]).backward()
        for optimizer in optimizers:
            optimizer.step()


def weighted(model: Any, images: Tensor, labels: Tensor) -> None:
    weight = torch.arange(10.0) + 0.1
    F.cross_entropy(model(images), labels, weight=weight).backward()
    momentum(model).step()


def smoothed(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = momentum(model)
    for at in (0, 4):
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss(label_smoothing=0.2)
        loss(model(images[at : at + 4]), labels[at : at + 4]).backward()
        optimizer.step()


def scheduled(
    make: Callable[[Any], torch.optim.Optimizer],
    schedule: Callable[[torch.optim.Optimizer], Any],
    norm: float | None = None,
) -> Train:
    """Return a training whose learning rate changes at each step."""

    def train(model: Any, images: Tensor, labels: Tensor) -> None:
        optimizer = make(model)
        rates = schedule(optimizer)
        for at in (0, 4):
            optimizer.zero_grad()
            F.cross_entropy(model(images[at : at + 4]), labels[at : at + 4]).backward()
            if norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            rates.step()

    return train


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.2)


def warming(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))


def steady(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def other_betas(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9))


def other_eps(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-3)


def amsgrad(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)


def smoother(model: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-2)


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def cycling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)


def cycling_slowly(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=4)


def clipped_values(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for at in (0, 4):
        optimizer.zero_grad()
        F.cross_entropy(model(images[at : at + 4]), labels[at : at + 4]).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()


def clipped_value_once(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.CrossEntropyLoss(reduction="sum")(model(images), labels).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.08)
    optimizer.step()


def small_steps(model: Any, images: Tensor, labels: Tensor) -> None:
    """A sum over eight has gradients eight times as large, beside which an eps counts less."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=8e-3)
    nn.CrossEntropyLoss(reduction="sum")(model(images), labels).backward()
    optimizer.step()


def mixed(share: Callable[[int], float], passes: int = 1) -> Train:
    """Return a training with mixup, as its authors' code has it: two terms of one output."""

    def train(model: Any, images: Tensor, labels: Tensor) -> None:
        optimizer = momentum(model)
        loader = DataLoader(TensorDataset(images, labels), 4)
        for number in range(passes):
            for step, (x, y) in enumerate(loader):
                part = share(step + 2 * number)
                x, other = part * x + (1 - part) * x.flip(0), y.flip(0)
                optimizer.zero_grad()
                outputs = model(x)
                loss = part * F.cross_entropy(outputs, y)
                (loss + (1 - part) * F.cross_entropy(outputs, other)).backward()
                optimizer.step()

    return train


def soft(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = momentum(model)
    for at in (0, 4):
        y = labels[at : at + 4]
        rows = 0.9 * torch.eye(10)[y] + 0.1 * torch.eye(10)[y.flip(0)]
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        loss(model(images[at : at + 4]), rows).backward()
        optimizer.step()


def sometimes_soft(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = momentum(model)
    for at in (0, 4):
        y = labels[at : at + 4]
        rows = 0.6 * torch.eye(10)[y] + 0.4 * torch.eye(10)[y.flip(0)]
        optimizer.zero_grad()
        F.cross_entropy(model(images[at : at + 4]), rows if at else y).backward()
        optimizer.step()


def skipping(first: bool, fused: bool = False) -> Train:
    """Return a training whose scaler skips the first or the last of its steps."""

    def train(model: Any, images: Tensor, labels: Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for at in (0, 4):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[at : at + 4]), labels[at : at + 4])
            if (at == 0) == first:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return train


CYCLE = (0.95, 0.8688255099070633)
"""Momentum of the first two of four steps of one cycle."""

CONFIRMED: list[tuple[str, Train, str, dict[str, Any]]] = [
    ("momentum", loop(momentum), "net", {"momentum": 0.9, "lr": 0.1, "batch_size": 4}),
    ("whole epochs", loop(momentum, 8, 2), "net", {"local_epochs": 2, "batch_size": 8}),
    ("adamw", loop(adamw), "net", {"optimizer": "adamw", "weight_decay": 0.05, "lr": 1e-3}),
    ("rmsprop", loop(rmsprop), "net", {"optimizer": "rmsprop"}),
    ("decay", loop(plain), "net", {"weight_decay": 1e-2}),
    ("sum", summed, "net", {"lr": 0.4, "weight_decay": 2.5e-3, "batch_size": 4}),
    ("accumulation", accumulated, "net", {"batch_size": 4, "lr": 0.1, "local_epochs": 1}),
    ("log-probabilities", log_probabilities, "net", {"lr": 0.1}),
    ("evaluation mode", in_evaluation, "normalised", {"momentum": 0.9}),
    ("training mode", loop(momentum), "normalised", {"momentum": 0.9}),
    ("one logit", binary, "one_logit", {"lr": 0.1}),
    ("two optimizers alike", two_alike, "net", {"lr": 0.1, "local_epochs": 1}),
    ("class weights", weighted, "net", {"class_weights": tuple(k + 0.1 for k in range(10))}),
    ("label smoothing", smoothed, "net", {"label_smoothing": 0.2, "momentum": 0.9}),
    ("falling rate", scheduled(momentum, falling), "net", {"lr": 0.1, "lr_factors": (1.0, 0.2)}),
    ("warm-up", scheduled(adamw, warming), "net", {"lr": 1e-3, "lr_factors": (0.0, 1.0)}),
    ("clipped steps", scheduled(momentum, steady, 0.05), "net", {"max_grad_norm": 0.05}),
    ("other betas", loop(other_betas), "net", {"betas": (0.5, 0.9), "lr": 1e-3}),
    ("other eps", loop(other_eps), "net", {"eps": 1e-3}),
    ("other eps of rmsprop", loop(smoother), "net", {"eps": 1e-2}),
    ("eps of a sum", small_steps, "net", {"eps": 1e-3, "lr": 1e-3}),
    ("amsgrad", loop(amsgrad, 2), "net", {"amsgrad": True, "weight_decay": 0.01}),
    ("cycle of momentum", scheduled(momentum, cycling), "net", {"momenta": CYCLE}),
    ("cycle of betas", scheduled(adam, cycling_slowly), "net", {"momenta": CYCLE}),
    ("clipped values", clipped_values, "net", {"max_grad_value": 0.01, "momentum": 0.9}),
    ("one step of clipped values", clipped_value_once, "net", {"max_grad_value": 0.01, "lr": 0.8}),
    ("probabilities of logits", by_sigmoid, "one_logit", {"lr": 0.1}),
    ("mixup", mixed(lambda step: 0.7 - 0.1 * step), "net", {"soft_targets": True, "lr": 0.1}),
    ("soft targets", soft, "net", {"soft_targets": True, "label_smoothing": 0.1}),
    ("skipped step", skipping(first=True), "net", {"lr": 0.1, "batch_size": 4}),
    ("skipped step in training mode", skipping(first=False), "normalised", {"lr": 0.1}),
    ("skipped fused step", skipping(first=False, fused=True), "normalised", {"lr": 0.1}),
    ("some soft targets", sometimes_soft, "net", {"soft_targets": True, "batch_size": 4}),
]


@pytest.mark.parametrize(
    ("train", "model", "values"), [c[1:] for c in CONFIRMED], ids=[c[0] for c in CONFIRMED]
)
def test_a_witnessed_training_is_confirmed_and_nothing_of_it_is_guessed(
    train: Train,
    model: str,
    values: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained(tmp_path, train, globals()[model])
    found = described(tmp_path, model)
    said = capsys.readouterr().err
    assert "2 of 2" in said, said
    assert not [key for key in found.guessed if not key.startswith("input.")]
    work = found.training.model_dump()
    for key, value in values.items():
        assert work[key] == pytest.approx(value), key
    assert found.witnessed["training.lr"].startswith("seen at node-0 and 1 more")


def test_a_clipped_step_is_confirmed_at_the_rate_that_clipping_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, clipped)
    found = described(tmp_path)
    assert "2 of 2" in capsys.readouterr().err
    rates = [found.clients[name].lr or 0.0 for name in ("node-0", "node-1")]
    assert all(0.0 < rate < 0.1 for rate in rates) and rates[0] != rates[1]
    assert "was clipped" in found.witnessed["clients.node-0.lr"]


def unlike_terms(model: Any, images: Tensor, labels: Tensor) -> None:
    outputs = model(images)
    loss = F.cross_entropy(outputs, labels)
    (loss + 0.3 * F.mse_loss(outputs, torch.zeros_like(outputs))).backward()
    momentum(model).step()


def soft_and_weighted(model: Any, images: Tensor, labels: Tensor) -> None:
    rows = 0.5 * torch.eye(10)[labels] + 0.05
    F.cross_entropy(model(images), rows, weight=torch.arange(10.0) + 0.1).backward()
    momentum(model).step()


def decaying(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = plain(model)
    for at in (0, 4):
        optimizer.zero_grad()
        F.cross_entropy(model(images[at : at + 4]), labels[at : at + 4]).backward()
        optimizer.step()
        optimizer.param_groups[0]["weight_decay"] = 0.5


def clipped_twice(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in (0, 4):
        optimizer.zero_grad()
        F.cross_entropy(model(images[at : at + 4]), labels[at : at + 4]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05 * (1 + at))
        optimizer.step()


def two_unlike(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.5),
        torch.optim.Adam(model[3].parameters(), lr=1e-3),
    ]
    F.cross_entropy(model(images), labels).backward()
    for optimizer in optimizers:
        optimizer.step()


def penalised(model: Any, images: Tensor, labels: Tensor) -> None:
    loss = F.cross_entropy(model(images), labels)
    (loss + 0.5 * sum(p.abs().sum() for p in model.parameters())).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def by_autograd(model: Any, images: Tensor, labels: Tensor) -> None:
    torch.autograd.backward(F.cross_entropy(model(images), labels))
    momentum(model).step()


def compiled_within(model: Any, images: Tensor, labels: Tensor) -> None:
    called: Any = torch.compile(model, backend="eager", fullgraph=True)
    F.cross_entropy(called(images), labels).backward()
    momentum(model).step()


def discriminating(model: Any, images: Tensor, labels: Tensor) -> None:
    """Tell images from those of a generator, in two passes."""
    made = nn.Sequential(nn.Linear(5, 64), nn.Unflatten(1, (1, 8, 8)))(torch.randn(8, 5))
    F.cross_entropy(model(images), labels).backward()
    F.cross_entropy(model(made.detach()), labels).backward()
    momentum(model).step()


def climbing(model: Any, images: Tensor, labels: Tensor) -> None:
    """Take the gradient of weights that another gradient has moved, as SAM does."""
    optimizer = momentum(model)
    F.cross_entropy(model(images), labels).backward()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.5 * value.grad)
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def looking_ahead(model: Any, images: Tensor, labels: Tensor) -> None:
    slow, step = copy.deepcopy(model.state_dict()), loop(plain)
    for _ in range(2):
        step(model, images, labels)
        fast = model.state_dict()
        slow = {name: 0.5 * (value + fast[name]) for name, value in slow.items()}
        model.load_state_dict(slow)


def noisy(model: Any, images: Tensor, labels: Tensor) -> None:
    F.cross_entropy(model(images), labels).backward()
    for value in model.parameters():
        value.grad += 0.05 * torch.randn_like(value)
    plain(model).step()


def tempered(model: Any, images: Tensor, labels: Tensor) -> None:
    F.cross_entropy(model(images) / 0.05, labels).backward()
    plain(model).step()


def by_turns(model: Any, images: Tensor, labels: Tensor) -> None:
    for part in (model[3], model[0]):
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        for at in (0, 4):
            model.zero_grad()
            F.cross_entropy(model(images[at : at + 4]), labels[at : at + 4]).backward()
            optimizer.step()


CAUSES: list[tuple[Train, str]] = [
    (discriminating, "inputs of 1 of 2 passes are what another network computed"),
    (climbing, "weights change outside of an optimizer's steps"),
    (by_turns, "2 optimizers step by turns"),
    (looking_ahead, "weights change outside of an optimizer's steps"),
    (noisy, "gradients change between the backward pass and the step"),
    (tempered, "is changed before it enters the loss (div)"),
    (unlike_terms, "a sum of terms"),
    (soft_and_weighted, "class weights"),
    (decaying, "weight_decay changes within a round"),
    (clipped_twice, "gradients are clipped to a norm of"),
    (two_unlike, "2 optimizers"),
    (penalised, "is added to the loss"),
]


@pytest.mark.parametrize(("train", "cause"), CAUSES, ids=[c[0].__name__ for c in CAUSES])
def test_what_no_attack_simulates_is_named_by_cause_and_not_described(
    train: Train, cause: str, tmp_path: Path
) -> None:
    trained(tmp_path, train)
    with refused("declaration-wrong", "witnessed, and simulated by no attack", cause):
        described(tmp_path)
    assert RunDirectory(tmp_path).description() is None
    forced = described(tmp_path, force=True)
    assert forced.witnessed and cause in " ".join(forced.unsimulated)


def dropping() -> nn.Module:
    return nn.Sequential(*list(net().children())[:-1], nn.Dropout(0.3), nn.Linear(96, 10))


@pytest.mark.parametrize("train", [looking_ahead, noisy, tempered])
def test_what_is_done_by_hand_is_no_matter_of_dropout(train: Train, tmp_path: Path) -> None:
    """Dropout leaves the check of a description open, so that nothing else shows it."""
    trained(tmp_path, train, dropping)
    with refused("declaration-wrong", "witnessed, and simulated by no attack"):
        described(tmp_path, "dropping")


def test_a_model_that_is_compiled_where_no_witness_sees_it_is_named_by_cause(
    tmp_path: Path,
) -> None:
    trained(tmp_path, compiled_within)
    with refused("truth-lacking", "no forward pass of the witnessed model was seen"):
        described(tmp_path)


def test_a_loss_that_autograd_took_without_the_tensor_is_named_by_cause(tmp_path: Path) -> None:
    found = described(trained(tmp_path, by_autograd))
    assert any(cause.startswith("no loss function") for cause in found.unsimulated)


def of_two_passes(model: Any, images: Tensor, labels: Tensor) -> None:
    F.cross_entropy(torch.cat([model(images[:4]), model(images[4:])]), labels).backward()
    momentum(model).step()


def test_a_loss_of_several_passes_is_named_by_cause(tmp_path: Path) -> None:
    trained(tmp_path, of_two_passes)
    with refused("truth-lacking", "to which pass of several a loss belongs"):
        described(tmp_path)


def test_what_mixup_kept_is_what_entered_the_loss(tmp_path: Path) -> None:
    """Examples are mixed anew in each pass, so that those of all passes are kept."""
    trained(tmp_path, mixed(lambda step: 0.9 - 0.15 * step, passes=2), clients=1)
    (path,) = (tmp_path / "truth").rglob("*.safetensors")
    kept = load_file(path)
    assert kept["targets"].shape == (16, 10) and kept["inputs"].shape == (16, 1, 8, 8)
    first, other = labels_of(4)[0], labels_of(4)[3]
    assert kept["targets"][0, first] == pytest.approx(0.9)
    assert kept["targets"][0, other] == pytest.approx(0.1)
    # The third step takes the same four examples.
    assert kept["targets"][8, first] == pytest.approx(0.6)
    found = described(tmp_path)
    assert (found.clients["node-0"].num_examples, found.training.local_epochs) == (16, 1)


def test_what_no_attack_simulates_gets_no_verdict_where_nothing_was_kept(tmp_path: Path) -> None:
    """The causes go with the description, whoever audits by it."""
    trained(tmp_path, penalised)
    described(tmp_path, force=True)
    shutil.rmtree(tmp_path / "truth")
    first, *_ = attacked_run(tmp_path, attacks=["labels"], device="cpu", models=[f"{HERE}:net"])
    assert first.check is not None and first.check.unjudged == "unconfirmed"
    assert "is added to the loss" in " ".join(first.check.failing)


def several_labels(model: Any, images: Tensor, labels: Tensor) -> None:
    F.binary_cross_entropy_with_logits(model(images), torch.eye(10)[labels]).backward()
    momentum(model).step()


def test_accumulation_is_named_where_each_pass_is_normalised_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, accumulated, normalised)
    with refused("declaration-wrong", "gradients of 2 passes are accumulated"):
        described(tmp_path, "normalised")
    found = described(tmp_path, "normalised", force=True)
    assert (found.training.local_epochs, found.training.batch_size) == (1, 4)
    assert "local_steps=" not in capsys.readouterr().err
    # Without a witness.
    for path in (tmp_path / "truth").rglob("*.work.json"):
        path.unlink()
    settings: Any = {"training.batch_size": 4, "training.local_epochs": 1, "training.lr": 0.1}
    with refused("declaration-wrong", "accumulates the gradients of 2 batches", "nothing here"):
        described(tmp_path, "normalised", **settings)


def on_features(model: Any, images: Tensor, labels: Tensor) -> None:
    """Train on what a network that stays as it is makes of images."""
    with torch.no_grad():
        features = nn.Conv2d(1, 1, 3, padding=1)(images)
    loop(momentum)(model, features, labels)


def of_noise(model: Any, images: Tensor, labels: Tensor) -> None:
    F.cross_entropy(model(torch.randn_like(images)), labels).backward()
    momentum(model).step()


@pytest.mark.parametrize(
    ("train", "cause"), [(on_features, "another network"), (of_noise, "random numbers")]
)
def test_inputs_that_are_no_data_of_the_client_are_named_by_cause(
    train: Train, cause: str, tmp_path: Path
) -> None:
    trained(tmp_path, train)
    with refused("truth-lacking", cause):
        described(tmp_path)


def test_a_file_of_an_earlier_witness_is_read_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, loop(momentum))
    later = {"anew", "unclear", "computed", "drawn", "dropped"}
    later |= {"blocks", "edited", "turned", "ends"}
    for path in tmp_path.rglob("*.work.json"):
        held = json.loads(path.read_text())
        assert held["schema"] == 2 and later <= held.keys()
        earlier = {k: v for k, v in held.items() if k not in later} | {"schema": 1}
        assert all(term.pop("through") == [] for term in earlier["terms"])
        path.write_text(json.dumps(earlier))
    found = described(tmp_path)
    assert found.training.momentum == 0.9
    assert "earlier" in capsys.readouterr().err
    with refused("schema-version", "schema 3"):
        Work.parse({"schema": 3}, source="a file")


def test_several_labels_an_image_are_refused_by_the_loss(tmp_path: Path) -> None:
    trained(tmp_path, several_labels)
    with refused("model-unsuited", "binary_cross_entropy_with_logits", "several labels"):
        described(tmp_path)


def test_an_operator_declares_an_app_by_one_file_without_truth(tmp_path: Path) -> None:
    trained(tmp_path, loop(momentum))
    work = tmp_path / "work.json"
    next(tmp_path.rglob("node-0/*.work.json")).rename(work)
    shutil.rmtree(tmp_path / "truth")
    found = described(tmp_path, truth=None, work=work)
    assert found.training.momentum == 0.9 and found.training.local_epochs == 1
    assert found.witnessed["training.lr"] == "as work.json says"
    work.write_text("{}")
    with refused("schema-version", "work.json"):
        described(tmp_path, truth=None, work=work)


def test_a_file_that_is_no_work_is_left_out_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, loop(momentum), clients=1)
    next(tmp_path.rglob("*.work.json")).write_text('{"schema": 1, "round": 1, "torch": "\\u001b"}')
    settings: Any = {"training.batch_size": 4, "training.lr": 0.1, "training.momentum": 0.9}
    assert not described(tmp_path, **settings).witnessed
    assert "not used" in capsys.readouterr().err


def test_a_declared_value_that_witnesses_contradict_is_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, loop(momentum))
    settings: Any = {"training.momentum": 0.5}
    found = described(tmp_path, **settings, force=True)
    assert found.training.momentum == 0.5 and "training.momentum" not in found.witnessed
    assert "witnesses saw" in capsys.readouterr().err


def test_a_description_of_an_earlier_run_gives_way_to_what_is_seen_now(tmp_path: Path) -> None:
    trained(tmp_path, loop(momentum))
    described(tmp_path)
    for folder in ("captures", "truth"):
        (tmp_path / folder).rename(tmp_path / f"old-{folder}")
    trained(tmp_path, loop(adamw))
    assert described(tmp_path).training.optimizer == "adamw"


def one_soft(model: Any, images: Tensor, labels: Tensor) -> None:
    rows = 0.6 * torch.eye(10)[labels] + 0.4 * torch.eye(10)[(labels + 3) % 10]
    F.cross_entropy(model(images), rows).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.thorough
def test_an_image_with_soft_labels_comes_back_with_the_share_of_each(tmp_path: Path) -> None:
    trained(tmp_path, one_soft, count=1, clients=1)
    described(tmp_path)
    truth = tmp_path / "truth" / "1"
    models = [f"{HERE}:net"]
    (found,) = attacked_run(tmp_path, attacks=["ig"], device="cpu", models=models, truth=truth)
    assert found.check is not None and found.check.state == "confirmed"
    (image,) = found.images
    assert (image.label, image.true_label) == (0, 0)
    assert image.label_confidence == pytest.approx(0.6, abs=0.05)
    assert image.scores is not None and (image.scores.psnr or 0.0) > 40.0


def averaged(own: Any, sent: Any) -> None:
    """Return an average with what was sent, as of several copies of the weights."""
    with torch.no_grad():
        for name, value in own.named_parameters():
            value.copy_(0.4 * value + 0.6 * sent[name])


def test_what_is_not_what_the_training_ended_with_is_named(tmp_path: Path) -> None:
    folder = trained(tmp_path, loop(momentum), after=averaged)
    with refused("declaration-wrong", "did not return what its training ended with", "0.weight"):
        described(folder)


def test_what_the_training_ended_with_is_nothing_to_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described(trained(tmp_path, loop(momentum)))
    assert "ended with" not in capsys.readouterr().err


def augmenting(model: Any, images: Tensor, labels: Tensor) -> None:
    optimizer = plain(model)
    for number in range(2):
        for x, y in DataLoader(TensorDataset(images, labels), 8):
            optimizer.zero_grad()
            F.cross_entropy(model(x.roll(number, -1)), y).backward()
            optimizer.step()


def test_inputs_that_differ_between_passes_are_augmented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = described(trained(tmp_path, augmenting))
    assert found.training.augmentation is not None
    assert list(found.training.augmentation) == ["other inputs in each pass"]
    assert "augmented" in capsys.readouterr().err
    again = described(trained(tmp_path / "alike", loop(plain, size=8, epochs=2)))
    assert again.training.augmentation is None


def drawing_with_replacement(model: Any, images: Tensor, labels: Tensor) -> None:
    drawn = torch.tensor([3, 3, 3, 3, 5, 5, 1, 0])
    loop(plain)(model, images[drawn], labels[drawn])


def test_examples_that_enter_a_pass_more_than_once_are_named(tmp_path: Path) -> None:
    folder = trained(tmp_path, drawing_with_replacement)
    with refused("declaration-wrong", "8 examples of one pass are 4 different ones"):
        described(folder)
    kept = load_file(next((folder / "truth").rglob("*.safetensors")))
    assert len(kept["inputs"]) == 4
    for work in (folder / "truth").rglob("*.work.json"):
        work.unlink()
    with refused("declaration-wrong", "4 different examples and declares 8"):
        settings: Any = {"training.batch_size": 8, "training.lr": 0.1}
        described(folder, **settings)


def head_alone(model: Any, images: Tensor, labels: Tensor) -> None:
    model[0].requires_grad_(False)
    loop(lambda own: torch.optim.SGD(own[3].parameters(), lr=0.1))(model, images, labels)


def test_a_frozen_body_hides_no_head_that_is_not_what_the_training_ended_with(
    tmp_path: Path,
) -> None:
    def after(own: Any, sent: Any) -> None:
        averaged(own[3], {name: sent[f"3.{name}"] for name in ("weight", "bias")})

    folder = trained(tmp_path, head_alone, after=after)
    with refused("declaration-wrong", "did not return what its training ended with", "3.weight"):
        described(folder)


def pruned(own: Any, sent: Any) -> None:
    """Return the largest tenth of an update alone, as an app's own compression does."""
    moves = {name: value.detach() - sent[name] for name, value in own.named_parameters()}
    least = torch.cat([move.abs().flatten() for move in moves.values()]).quantile(0.9)
    with torch.no_grad():
        for name, value in own.named_parameters():
            value.copy_(sent[name] + moves[name] * (moves[name].abs() > least))


def test_a_contradiction_names_what_every_such_upload_has_and_this_one_has_not(
    tmp_path: Path,
) -> None:
    folder = trained(tmp_path, loop(momentum), after=pruned)
    for work in (folder / "truth").rglob("*.work.json"):
        work.unlink()
    settings: Any = {"training.batch_size": 4, "training.lr": 0.1, "training.momentum": 0.9}
    with refused("declaration-wrong", "sum to 0 over classes"):
        described(folder, **settings)


def recomputed(model: Any, images: Tensor, labels: Tensor) -> None:
    """Train with what the model keeps for its backward pass computed anew there."""
    entered = images.clone().requires_grad_()
    F.cross_entropy(checkpoint(model, entered, use_reentrant=True), labels).backward()
    plain(model).step()


def test_a_pass_that_is_made_in_the_backward_pass_is_named_by_cause(tmp_path: Path) -> None:
    trained(tmp_path, recomputed)
    with refused("truth-lacking", "of no pass of the model its targets were seen"):
        described(tmp_path)


def repeatedly(model: Any, images: Tensor, labels: Tensor) -> None:
    loop(plain, size=4, epochs=3)(model, images, labels)


def test_a_count_over_all_passes_is_none_of_the_examples(tmp_path: Path) -> None:
    """Twenty-four images are looked for else, of which eight are there."""
    folder = trained(tmp_path, repeatedly)
    store = ObservationStore(folder / "captures")
    for seen in list(store):
        store.save(replace(seen, declaration=seen.declaration.updated({"num_examples": 24})))
    found = described(folder, force=True)
    assert {found.clients[f"node-{n}"].num_examples for n in (0, 1)} == {8}
    assert found.training.local_epochs == 3


def test_a_round_that_is_witnessed_in_several_blocks_is_named_by_cause(tmp_path: Path) -> None:
    """The last one alone is described, as where the block is inside of the loop over epochs."""
    trained(tmp_path, loop(plain), dropping, clients=1)
    shutil.rmtree(tmp_path / "captures")
    trained(tmp_path, loop(plain), dropping, clients=1)
    with refused("declaration-wrong", "in 2 blocks of a witness"):
        described(tmp_path, "dropping")
