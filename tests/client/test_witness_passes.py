"""What a witness holds of forward passes, and which pass a loss belongs to."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn
from torch.nn import functional as F

from bract.client import witness
from bract.client.witnessing import _Witness
from bract.schema import Work, read_work

IMAGES = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(40) % 3


@pytest.fixture
def message() -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
    config = ConfigRecord({"server-round": 2, "lr": 0.1})
    return Message(RecordDict({"config": config}), dst_node_id=7, message_type="train")


def context() -> Context:
    return Context(1, 7, {}, RecordDict(), {})


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def seen(folder: Path) -> Work:
    (path,) = folder.rglob("*.work.json")
    return read_work(path)


def test_a_loss_of_forty_micro_batches_is_whole(message: Message, tmp_path: Path) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        losses = [
            F.cross_entropy(net(x[None]), y[None]) for x, y in zip(IMAGES, LABELS, strict=True)
        ]
        (torch.stack(losses).sum() / 40).backward()
        sgd(net).step()
    work = seen(tmp_path)
    assert (len(work.terms), work.remainder) == (40, False)


def test_no_graph_of_a_validation_is_held(message: Message, tmp_path: Path) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        held = []
        for x, y in zip(IMAGES, LABELS, strict=True):
            loss = F.cross_entropy(net(x[None]), y[None])
            held.append(weakref.ref(loss))
        del loss
        gc.collect()
        assert not any(one() is not None for one in held)
        F.cross_entropy(net(IMAGES), LABELS).backward()
        sgd(net).step()
    work = seen(tmp_path)
    assert (len(work.terms), work.remainder, work.examples) == (1, False, (40,))


def test_passes_that_no_backward_ends_are_noted_as_they_come(
    message: Message, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    own = _Witness.__init__

    def noted(self: Any, *given: Any) -> None:
        begun.append(self)
        own(self, *given)

    monkeypatch.setattr(_Witness, "__init__", noted)
    net, waiting = network(), []
    with witness(net, message, context(), tmp_path):
        for x, y in zip(IMAGES, LABELS, strict=True):
            loss = F.cross_entropy(net(x[None]), y[None])
            slopes = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for value, slope in zip(net.parameters(), slopes, strict=True):
                    value -= 0.1 * slope
            waiting.append(len(begun[0]._differentiated))
    assert max(waiting) < 20 and seen(tmp_path).forwards == 40


def test_a_witness_that_stops_holds_no_passes(
    message: Message, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        one: Any = next(iter(net._forward_pre_hooks.values()))
        own = one.__self__ if hasattr(one, "__self__") else one.method().__self__
        F.cross_entropy(net(IMAGES), LABELS)
        own._stop(RuntimeError("mine"))
        assert own._last is None and not own._differentiated and not own._terms._open
