"""A witness sees what a training does to weights, gradients and outputs by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.nn import functional as F
from witnessed import context, seen

from bract.client import witness
from bract.schema import Work

IMAGES = torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8) % 3
Between = Callable[[Any], None]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def nothing(net: Any) -> None:
    del net


def loop(
    before: Between = nothing,
    after: Between = nothing,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    **settings: Any,
) -> Callable[[Any], None]:
    """Return a training with something before each step, and behind it."""

    def train(net: Any) -> None:
        optimizer = torch.optim.SGD(net.parameters(), **({"lr": 0.1} | settings))
        for at in (0, 4):
            optimizer.zero_grad()
            loss(net(IMAGES[at : at + 4]), LABELS[at : at + 4]).backward()
            before(net)
            optimizer.step()
            after(net)

    return train


@torch.no_grad()
def halved(net: Any) -> None:
    for value in net.parameters():
        value.data.mul_(0.5)


@torch.no_grad()
def clamped(net: Any) -> None:
    for value in net.parameters():
        value.clamp_(-0.05, 0.05)


def sharpness_aware(net: Any) -> None:
    """Step by the gradient of weights that were moved uphill, and moved back."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    F.cross_entropy(net(IMAGES), LABELS).backward()
    moves = [0.5 * value.grad for value in net.parameters()]
    for sign in (1, -1):
        with torch.no_grad():
            for value, move in zip(net.parameters(), moves, strict=True):
                value.add_(sign * move)
        if sign == 1:
            optimizer.zero_grad()
            F.cross_entropy(net(IMAGES), LABELS).backward()
    optimizer.step()


def best_epoch(net: Any) -> None:
    loop()(net)
    best = copy.deepcopy(net.state_dict())
    loop()(net)
    net.load_state_dict(best)


def noisy(net: Any) -> None:
    for value in net.parameters():
        value.grad += 0.1 * torch.randn_like(value)


def centred(net: Any) -> None:
    net[3].weight.grad -= net[3].weight.grad.mean(dim=1, keepdim=True)


def pulled(net: Any) -> None:
    for value in net.parameters():
        value.grad.add_(value.data, alpha=0.5)


def unscaled(net: Any) -> None:
    for value in net.parameters():
        value.grad.mul_(0.5)


def clipped(net: Any) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


def clipped_by_value(net: Any) -> None:
    nn.utils.clip_grad_value_(net.parameters(), 1e-3)


def with_closures(net: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.5)
    for at in (0, 4):

        def closure(at: int = at) -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(IMAGES[at : at + 4]), LABELS[at : at + 4])
            loss.backward()
            clipped(net)
            return float(loss.detach())

        optimizer.step(closure)


def by_two_optimizers(net: Any) -> None:
    optimizers = [torch.optim.Adam(net[part].parameters(), lr=0.1) for part in (0, 3)]
    for _ in range(2):
        F.cross_entropy(net(IMAGES), LABELS).backward()
        clipped(net)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def validated_with_others(net: Any) -> None:
    """Validate an average of the weights, which are put back before the training goes on."""
    held = copy.deepcopy(net.state_dict())
    loop()(net)
    now = copy.deepcopy(net.state_dict())
    net.load_state_dict(held)
    with torch.no_grad():
        net(IMAGES)
    net.load_state_dict(now)
    loop()(net)


def scaled(net: Any, *, fused: bool = False) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(F.cross_entropy(net(IMAGES), LABELS)).backward()
    scaler.step(optimizer)
    scaler.update()


def accumulated(net: Any) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    for at in (0, 4):
        F.cross_entropy(net(IMAGES[at : at + 4]), LABELS[at : at + 4]).backward()
    optimizer.step()


SEEN: list[tuple[str, Callable[[Any], None], tuple[bool, bool]]] = [
    ("weights halved", loop(after=halved), (True, False)),
    ("weights clamped", loop(after=clamped), (True, False)),
    ("sharpness aware", sharpness_aware, (True, False)),
    ("best epoch", best_epoch, (True, False)),
    ("noise", loop(noisy), (False, True)),
    ("gradient centralisation", loop(centred), (False, True)),
    ("a term in the gradient", loop(pulled), (False, True)),
    ("one factor", loop(unscaled), (False, True)),
    ("clipped", loop(clipped, weight_decay=0.5), (False, False)),
    ("clipped by value", loop(clipped_by_value), (False, False)),
    ("maximised", loop(maximize=True, weight_decay=0.5, momentum=0.9), (False, False)),
    ("closures", with_closures, (False, False)),
    ("two optimizers", by_two_optimizers, (False, False)),
    ("validated with others", validated_with_others, (False, False)),
    ("a scaler", scaled, (False, False)),
    ("a scaler of a fused step", partial(scaled, fused=True), (False, False)),
    ("accumulated", accumulated, (False, False)),
]


def work_of(train: Callable[[Any], None], message: Message, folder: Path) -> Work:
    net = network()
    with witness(net, message, context(), folder):
        train(net)
    return seen(folder)


@pytest.mark.parametrize(("train", "expected"), [s[1:] for s in SEEN], ids=[s[0] for s in SEEN])
def test_weights_and_gradients_that_change_between_calls_are_seen(
    train: Callable[[Any], None], expected: tuple[bool, bool], message: Message, tmp_path: Path
) -> None:
    work = work_of(train, message, tmp_path)
    assert (work.edited, work.turned) == expected


def margins(outputs: Tensor, labels: Tensor) -> Tensor:
    cosines = F.normalize(outputs, dim=1)
    return F.cross_entropy(30.0 * (cosines - 0.3 * F.one_hot(labels, 3)), labels)


def between_views(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(labels)))


LOSSES: list[tuple[str, Callable[[Tensor, Tensor], Tensor], str]] = [
    ("as it is", F.cross_entropy, ""),
    ("in another shape", lambda z, y: F.cross_entropy(z.view(4, 3, 1)[:, :, 0].double(), y), ""),
    ("log softmax", lambda z, y: F.nll_loss(F.log_softmax(z, 1), y), "logsoftmax"),
    ("a temperature", lambda z, y: F.cross_entropy(z / 0.1, y), "div"),
    ("margins", margins, "mul"),
    ("contrasts", between_views, "mm"),
    ("a part", lambda z, y: F.cross_entropy(z[:, :2], y.clamp(max=1)), "slice"),
    ("squared", lambda z, y: F.mse_loss(z.softmax(1), F.one_hot(y, 3).float()), "softmax"),
]


@pytest.mark.parametrize(("loss", "through"), [s[1:] for s in LOSSES], ids=[s[0] for s in LOSSES])
def test_what_changes_an_output_before_its_loss_is_seen(
    loss: Callable[[Tensor, Tensor], Tensor], through: str, message: Message, tmp_path: Path
) -> None:
    (term,) = work_of(loop(loss=loss), message, tmp_path).terms
    assert through in term.through if through else term.through == ()


def test_what_a_part_of_a_model_returns_is_not_taken_for_its_output(
    message: Message, tmp_path: Path
) -> None:
    def by_parts(net: Any) -> None:
        F.cross_entropy(net[3](net[:3](IMAGES)), LABELS).backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()

    assert work_of(by_parts, message, tmp_path).terms[0].through == ()


def test_gradients_that_change_before_another_models_backward_pass_are_seen(
    message: Message, tmp_path: Path
) -> None:
    def beside_another(net: Any) -> None:
        F.cross_entropy(net(IMAGES), LABELS).backward()
        noisy(net)
        network()(IMAGES).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()

    work = work_of(beside_another, message, tmp_path)
    assert (work.turned, work.edited, work.backwards) == (True, False, 1)
