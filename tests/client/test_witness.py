"""What a witness sees of a training, and that the training is the same with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from witnessed import context, seen

from bract.client import DefenseMod, keep, witness
from bract.schema import Work
from bract.server.loopback import LoopbackGrid

IMAGES = torch.rand(10, 1, 4, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(10) % 3


def loader(size: int = 4, labels: Tensor = LABELS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(IMAGES, labels), size, shuffle=True, generator=generator)


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64, outputs),
    )


def sgd(net: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), **({"lr": 0.1, "momentum": 0.9} | settings))


def plain(net: nn.Module, batches: Any, optimizer: torch.optim.Optimizer, **loss: Any) -> None:
    net.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y, **loss).backward()
        optimizer.step()


def test_a_plain_loop_is_seen_whole_and_its_result_is_the_same_to_the_bit(
    message: Message, tmp_path: Path
) -> None:
    def trained(watched: bool) -> tuple[dict[str, Tensor], Tensor]:
        net = network()
        optimizer = sgd(net, weight_decay=1e-3)
        torch.manual_seed(5)
        if watched:
            with witness(net, message, context(), tmp_path):
                for _ in range(2):
                    plain(net, loader(), optimizer)
        else:
            for _ in range(2):
                plain(net, loader(), optimizer)
        return net.state_dict(), torch.rand(1)

    (with_it, after), (without, drawn) = trained(True), trained(False)
    assert all(torch.equal(with_it[n], without[n]) for n in without) and torch.equal(after, drawn)
    work = seen(tmp_path)
    assert (work.round, work.steps, work.forwards, work.backwards, work.passes) == (2, 6, 6, 6, 2)
    assert work.examples == (4, 4, 2, 4, 4, 2) and work.distinct == 10 and work.whole
    (term,) = work.terms
    assert (term.name, term.reduction, term.label_smoothing) == ("cross_entropy", "mean", 0.0)
    assert term.scale == 1.0 and work.even and not work.remainder
    (optimizer,) = work.optimizers
    assert optimizer.name == "SGD" and optimizer.steps == 6 and not optimizer.resumed
    (group,) = optimizer.groups
    expected = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": False}
    assert expected.items() <= group.settings.items()
    assert set(work.moved) == {n for n, _ in network().named_parameters()} and not work.frozen
    kinds = {layer.kind: (layer.training, layer.rate) for layer in work.layers}
    assert kinds == {"normalisation": (True, None), "dropout": (True, 0.25)}
    assert work.loader is not None and work.loader.batch_size == 4 and work.loader.examples == 10


def test_what_entered_model_and_loss_is_kept_as_keep_keeps_it(
    message: Message, tmp_path: Path
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path / "seen"):
        for _ in range(2):
            plain(net, loader(), sgd(net))
    list(keep(loader(), message, context(), tmp_path / "kept"))
    mine, theirs = (
        load_file(next((tmp_path / n).rglob("*.safetensors"))) for n in ("seen", "kept")
    )
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def test_the_label_is_what_entered_the_loss(message: Message, tmp_path: Path) -> None:
    net, optimizer = network(), None
    optimizer = sgd(net)
    patients = torch.arange(10) + 100
    with witness(net, message, context(**{"truth-dir": str(tmp_path)})):
        for at in range(0, 10, 5):
            batch = {"patient": patients[at : at + 5], "img": IMAGES[at : at + 5]}
            batch["finding"] = LABELS[at : at + 5]
            F.cross_entropy(net(batch["img"]), batch["finding"]).backward()
            optimizer.step()
    (path,) = tmp_path.rglob("*.safetensors")
    assert torch.equal(load_file(path)["labels"], LABELS)


def test_without_a_folder_nothing_is_watched(
    message: Message, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = network()
    with witness(net, message, context()):
        assert not net._forward_pre_hooks
        plain(net, loader(), sgd(net))
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_training_passes_and_what_was_seen_is_written(
    message: Message, tmp_path: Path
) -> None:
    net, error = network(), ZeroDivisionError("theirs")
    with pytest.raises(ZeroDivisionError) as raised, witness(net, message, context(), tmp_path):
        plain(net, loader(), sgd(net))
        raise error
    assert raised.value is error
    assert not seen(tmp_path).whole
    assert not any(m._forward_pre_hooks for m in net.modules())


def test_a_witness_that_fails_says_so_once_and_the_training_goes_on(
    message: Message,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("mine")

    monkeypatch.setattr("bract.client.loss_terms.Terms.computed", broken)
    net, other = network(), network()
    torch.manual_seed(5)
    with witness(net, message, context(), tmp_path):
        plain(net, loader(), sgd(net))
    torch.manual_seed(5)
    plain(other, loader(), sgd(other))
    mine, theirs = (list(one.parameters())[-2] for one in (net, other))
    assert torch.equal(mine, theirs)
    assert caplog.text.count("not witnessed") == 1
    assert not list(tmp_path.rglob("*.work.json"))


def test_a_full_disk_does_not_stop_training(
    message: Message, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "1").write_text("in the way")
    net = network()
    with witness(net, message, context(), tmp_path):
        plain(net, loader(), sgd(net))
    assert "not witnessed any more" in caplog.text


def accumulating(net: nn.Module) -> None:
    optimizer = sgd(net)
    for at in range(0, 8, 2):
        (F.cross_entropy(net(IMAGES[at : at + 2]), LABELS[at : at + 2]) / 2).backward()
        if at % 4 == 2:
            optimizer.step()
            optimizer.zero_grad()


def scheduled(net: nn.Module) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, betas=(0.8, 0.99), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2)
    for _ in range(3):
        plain(net, [(IMAGES[:4], LABELS[:4])], optimizer)
        schedule.step()


def clipped(net: nn.Module) -> None:
    optimizer = sgd(net)
    for norm in (1e-3, 1e-3, 1e-3):
        F.cross_entropy(net(IMAGES), LABELS).backward()
        nn.utils.clip_grad_norm_(net.parameters(), norm)
        optimizer.step()


def clipped_by_value(net: nn.Module) -> None:
    F.cross_entropy(net(IMAGES), LABELS).backward()
    nn.utils.clip_grad_value_(net.parameters(), 1e-4)
    sgd(net).step()


def in_bfloat16(net: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = net(IMAGES)
    F.cross_entropy(outputs.float(), LABELS).backward()
    sgd(net).step()


def frozen(net: Any) -> None:
    net[0].weight.requires_grad_(False)
    net[1].eval()
    F.cross_entropy(net(IMAGES), LABELS).backward()
    torch.optim.SGD([net[5].weight, net[5].bias], lr=0.1).step()


def weighted_terms(net: nn.Module) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    outputs = net(IMAGES)
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)(outputs, LABELS)
    (loss + 0.25 * F.mse_loss(outputs, torch.zeros_like(outputs))).backward()
    sgd(net).step()


def own_penalty(net: nn.Module) -> None:
    loss = F.cross_entropy(net(IMAGES), LABELS)
    (loss + 0.1 * sum(p.square().sum() for p in net.parameters())).backward()
    sgd(net).step()


def validated(net: nn.Module) -> None:
    with torch.no_grad():
        F.cross_entropy(net(IMAGES[:1]), LABELS[:1])
    plain(net, [(IMAGES[:4], LABELS[:4])], sgd(net))


def validating_with_gradients(net: nn.Module) -> None:
    """Validate before training, in each pass and behind it, and never differentiate that."""
    other = DataLoader(TensorDataset(torch.rand(90, 1, 4, 4), torch.zeros(90).long()), 1)
    optimizer = sgd(net, momentum=0.0)

    def validate() -> None:
        net.eval()
        for x, y in other:
            F.cross_entropy(net(x), y)
        net.train()

    validate()
    for _ in range(2):
        for number, (x, y) in enumerate(loader()):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            if number == 1:
                validate()
            optimizer.step()
        validate()


def without_tensors(net: nn.Module) -> None:
    """Return what holds no tensor that can be found."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Any:
            found = self.net(x)
            return lambda: found

    hidden = Hidden()
    with_own = sgd(net)
    F.cross_entropy(hidden(IMAGES)(), LABELS).backward()
    with_own.step()


def by_autograd_alone(net: nn.Module) -> None:
    optimizer = sgd(net)
    loss = F.cross_entropy(net(IMAGES), LABELS)
    for value, slope in zip(
        net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True
    ):
        value.grad = slope
    optimizer.step()


def two_optimizers(net: Any) -> None:
    body = torch.optim.SGD(net[0].parameters(), lr=0.01)
    head = torch.optim.Adam(net[5].parameters(), lr=0.1)
    for _ in range(2):
        F.cross_entropy(net(IMAGES), LABELS).backward()
        body.step()
        head.step()


SEEN: list[tuple[Callable[[Any], None], Callable[[Work], Any], Any]] = [
    (
        accumulating,
        lambda w: (w.steps, w.backwards, w.examples, w.terms[0].scale),
        (2, 4, (4, 4), 0.5),
    ),
    (
        scheduled,
        lambda w: [(c.step, c.settings["lr"]) for c in w.optimizers[0].changes],
        [(1, 0.0075), (2, 0.005)],
    ),
    (scheduled, lambda w: w.optimizers[0].groups[0].settings["betas"], (0.8, 0.99)),
    (
        clipped,
        lambda w: [(c.kind, c.bound, c.steps, c.reached) for c in w.clips],
        [("norm", 1e-3, 3, 3)],
    ),
    (clipped, lambda w: 0 < (w.clips[0].least or 0) < 0.1, True),
    (
        clipped_by_value,
        lambda w: [(c.kind, c.bound, c.reached) for c in w.clips],
        [("value", 1e-4, 1)],
    ),
    (in_bfloat16, lambda w: w.autocast, "bfloat16"),
    (frozen, lambda w: (w.frozen, w.moved), (("0.weight",), ("5.weight", "5.bias"))),
    (frozen, lambda w: {layer.name: layer.training for layer in w.layers}, {"1": False, "4": True}),
    (
        weighted_terms,
        lambda w: [(t.name, t.factor) for t in w.terms],
        [("cross_entropy", 1.0), ("mse_loss", 0.25)],
    ),
    (
        weighted_terms,
        lambda w: (w.terms[0].weight, w.terms[0].label_smoothing),
        ((1.0, 2.0, 3.0), 0.1),
    ),
    (own_penalty, lambda w: w.remainder, True),
    (validated, lambda w: (w.forwards, w.distinct, w.examples), (1, 4, (4,))),
    (
        validating_with_gradients,
        lambda w: (w.forwards, w.distinct, w.examples, w.passes, w.even),
        (6, 10, (4, 4, 2, 4, 4, 2), 2, True),
    ),
    (
        validating_with_gradients,
        lambda w: (w.inputs[0].shape[0], w.loader and w.loader.examples, w.layers[0].training),
        (4, 10, True),
    ),
    (without_tensors, lambda w: (w.forwards, w.distinct, w.examples), (1, 10, (10,))),
    (by_autograd_alone, lambda w: (w.distinct, w.examples), (10, (10,))),
    (
        two_optimizers,
        lambda w: [(o.name, o.steps) for o in w.optimizers],
        [("SGD", 2), ("Adam", 2)],
    ),
    (two_optimizers, lambda w: (w.steps, w.examples), (4, (10, 10))),
]


@pytest.mark.parametrize(("train", "read", "expected"), SEEN, ids=[t.__name__ for t, _, _ in SEEN])
def test_it_is_seen(
    train: Callable[[Any], None],
    read: Callable[[Work], Any],
    expected: Any,
    message: Message,
    tmp_path: Path,
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        train(net)
    found = read(seen(tmp_path))
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


class Lightning(nn.Module):
    """A module that trains itself, and whose own forward is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = network()
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        found: Tensor = self.criterion(self.backbone(x), y)
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def test_a_module_that_calls_a_part_of_itself_is_seen(message: Message, tmp_path: Path) -> None:
    module = Lightning()
    optimizer = module.configure_optimizers()
    with witness(module, message, context(), tmp_path):
        for batch in loader():

            def closure(batch: Any = batch) -> Any:
                optimizer.zero_grad()
                loss = module.training_step(batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    work = seen(tmp_path)
    assert work.distinct == 10 and work.examples == (4, 4, 2) and work.terms[0].scale == 1.0
    assert all(name.startswith("backbone.") for name in work.moved)


def test_a_compiled_model_is_seen_under_its_own_names(message: Message, tmp_path: Path) -> None:
    net = network()
    model: Any = torch.compile(net, backend="eager", fullgraph=True)
    with witness(model, message, context(), tmp_path):
        plain(model, loader(), sgd(net))
    work = seen(tmp_path)
    assert (work.steps, work.forwards, work.distinct, work.passes) == (3, 3, 10, 1)
    assert set(work.moved) == {n for n, _ in net.named_parameters()}
    assert [layer.name for layer in work.layers] == ["1", "4"]


def test_what_a_compiled_function_calls_is_not_seen_and_said(
    message: Message, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        called: Any = torch.compile(net, backend="eager", fullgraph=True)
        plain(called, loader(), sgd(net))
    work = seen(tmp_path)
    assert (work.steps, work.forwards, work.distinct) == (3, 0, 0)
    assert caplog.text.count("torch.compile") == 1


class Counted(nn.Module):
    """A language model whose trainer hands it a count, as that of `transformers` does."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 3)

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        outputs = self.words(input_ids).flatten(0, 1)
        return F.cross_entropy(outputs, labels.flatten(), reduction="sum") / num_items_in_batch


def test_a_count_beside_the_inputs_is_none_of_them(message: Message, tmp_path: Path) -> None:
    net, texts = Counted(), torch.arange(12).view(3, 4) % 3
    with witness(net, message, context(), tmp_path):
        net(input_ids=texts, labels=texts, num_items_in_batch=torch.tensor(12.0)).backward()
        sgd(net).step()
    assert seen(tmp_path).distinct == 3
    (path,) = tmp_path.rglob("*.safetensors")
    assert load_file(path)["inputs"].shape[0] == 3


def test_another_models_optimizer_is_not_recorded(message: Message, tmp_path: Path) -> None:
    net, other = network(), network()
    with witness(net, message, context(), tmp_path):
        plain(other, loader(), sgd(other))
        plain(net, loader(), sgd(net, lr=0.01))
    work = seen(tmp_path)
    assert [o.groups[0].settings["lr"] for o in work.optimizers] == [0.01]


def test_rounds_without_a_number_are_counted(tmp_path: Path) -> None:
    mine = context()
    for _ in range(2):
        net = network()
        with witness(net, None, mine, tmp_path):
            plain(net, loader(), sgd(net))
    assert sorted(p.name for p in tmp_path.rglob("*.work.json")) == [
        "round-0001.work.json",
        "round-0002.work.json",
    ]


@pytest.mark.parametrize("mods", [[], [DefenseMod("noise", std=0.01)]], ids=["plain", "defended"])
def test_it_sees_the_training_of_an_app_under_a_mod(mods: Any, tmp_path: Path) -> None:
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net = network()
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        with witness(net, message, context, tmp_path):
            plain(net, loader(), sgd(net))
        content: Any = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": 10}),
        }
        return Message(RecordDict(content), reply_to=message)

    config = ConfigRecord({"server-round": 1})
    sent = RecordDict({"arrays": ArrayRecord(network().state_dict()), "config": config})
    grid = LoopbackGrid(app, [{}], run_id=5)
    (node,) = grid.get_node_ids()
    (answer,) = grid.send_and_receive([Message(sent, node, "train")])
    assert not answer.has_error()
    work = seen(tmp_path)
    assert (work.steps, work.distinct) == (3, 10) and work.optimizers[0].name == "SGD"
