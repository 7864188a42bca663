"""What a witness holds of forward passes, and which pass a loss belongs to."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from witnessed import IMAGES, LABELS, context, kept, seen, sgd
from witnessed import places as images

from bract.client import witness


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


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


def witness_of(net: nn.Module) -> Any:
    hook: Any = next(iter(net._forward_pre_hooks.values()))
    return hook.method().__self__


def test_passes_that_no_backward_ends_are_noted_as_they_come(
    message: Message, tmp_path: Path
) -> None:
    net, waiting = network(), []
    with witness(net, message, context(), tmp_path):
        own = witness_of(net)
        for x, y in zip(IMAGES, LABELS, strict=True):
            loss = F.cross_entropy(net(x[None]), y[None])
            slopes = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for value, slope in zip(net.parameters(), slopes, strict=True):
                    value.sub_(0.1 * slope)
            waiting.append(len(own._differentiated) + len(own._apart))
    assert max(waiting) < 20 and seen(tmp_path).forwards == 40


def test_a_witness_that_stops_holds_no_passes(message: Message, tmp_path: Path) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        own = witness_of(net)
        F.cross_entropy(net(IMAGES), LABELS)
        own._stop(RuntimeError("mine"))
        assert own._last is None and not own._differentiated and not own._terms._open


def copied(net: nn.Module) -> nn.Module:
    return copy.deepcopy(net)


def averaged(net: nn.Module) -> nn.Module:
    return AveragedModel(net)


def saved(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    assert b"bract" not in file.getvalue()
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


@pytest.mark.parametrize("copies", [copied, averaged, saved])
def test_a_copy_of_a_witnessed_model_holds_nothing_of_the_witness(
    copies: Callable[[nn.Module], nn.Module], message: Message, tmp_path: Path
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        found = [copies(net)]
        F.cross_entropy(net(IMAGES[:4]), LABELS[:4])
        found.append(copies(net))
        loss = F.cross_entropy(net(IMAGES[4:]), LABELS[4:])
        found.append(copies(net))
        loss.backward()
        sgd(net).step()
        found.append(copies(net))
        for one in found:
            file = io.BytesIO()
            torch.save(one, file)
            assert IMAGES[4].numpy().tobytes() not in file.getvalue()
            assert one(IMAGES).shape == (40, 3)
            for module in one.modules():
                for hook in [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]:
                    assert "bract" not in str(hook)
    work = seen(tmp_path)
    assert (work.forwards, work.distinct, work.steps) == (1, 36, 1)


def drawing(part: int | None, drop_last: bool, size: int, shift: int) -> Callable[[Any], None]:
    """Return a training of two passes that draw a part, and shift images in the second."""

    def train(net: nn.Module) -> None:
        optimizer, data = sgd(net), TensorDataset(IMAGES, LABELS)
        generator = torch.Generator().manual_seed(0)
        sampler = RandomSampler(data, num_samples=part, generator=generator)
        for number in range(2):
            for x, y in DataLoader(data, size, sampler=sampler, drop_last=drop_last):
                optimizer.zero_grad()
                F.cross_entropy(net(x.roll(number * shift, -1)), y).backward()
                optimizer.step()

    return train


@pytest.mark.parametrize(
    ("part", "drop_last", "size", "shift", "anew"),
    [
        (None, True, 16, 0, False),
        (20, False, 10, 0, False),
        (4, False, 2, 0, False),
        (None, False, 16, 0, False),
        (None, True, 16, 1, True),
        (None, False, 16, 1, True),
        (30, False, 10, 1, True),
    ],
)
def test_inputs_are_other_ones_only_where_the_first_pass_cannot_have_left_them_out(
    part: int | None,
    drop_last: bool,
    size: int,
    shift: int,
    anew: bool,
    message: Message,
    tmp_path: Path,
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        drawing(part, drop_last, size, shift)(net)
    work = seen(tmp_path)
    assert (work.passes, work.anew) == (2, anew)


def two_passes(net: nn.Module) -> None:
    a, b = net(IMAGES[:20]), net(IMAGES[20:])
    (F.cross_entropy(a, LABELS[:20]) + F.cross_entropy(b, LABELS[20:])).backward()


def two_passes_in_float(net: nn.Module) -> None:
    a, b = net(IMAGES[:20]), net(IMAGES[20:])
    second = F.cross_entropy(b.double() * 2, LABELS[20:])
    (F.cross_entropy(torch.relu(a).double(), LABELS[:20]) + second).backward()


def a_penalty_first(net: Any) -> None:
    outputs = net(IMAGES)
    penalty = F.mse_loss(net[3].weight, torch.zeros_like(net[3].weight))
    (F.cross_entropy(outputs, LABELS) + penalty).backward()


def joined(net: nn.Module) -> None:
    outputs = torch.cat([net(IMAGES[:20]), net(IMAGES[20:])])
    F.cross_entropy(outputs, LABELS).backward()


def far_away(net: nn.Module) -> None:
    found = [net(IMAGES[:20]), net(IMAGES[20:])]
    for _ in range(1000):
        found = [each + 0.0 for each in found]
    a, b = found
    (F.cross_entropy(a, LABELS[:20]) + F.cross_entropy(b, LABELS[20:])).backward()


def validating_joined(net: nn.Module) -> None:
    F.cross_entropy(torch.cat([net(IMAGES[:20]), net(IMAGES[20:])]), LABELS)
    F.cross_entropy(net(IMAGES), LABELS).backward()


@pytest.mark.parametrize(
    ("train", "places", "unclear"),
    [
        (two_passes, range(40), False),
        (two_passes_in_float, range(40), False),
        (a_penalty_first, range(40), False),
        (joined, (), True),
        (far_away, (), True),
        (validating_joined, range(40), False),
    ],
)
def test_a_target_goes_to_the_pass_whose_output_entered_its_loss(
    train: Callable[[Any], None],
    places: Any,
    unclear: bool,
    message: Message,
    tmp_path: Path,
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        train(net)
        sgd(net).step()
    assert kept(tmp_path) == images(*places)
    work = seen(tmp_path)
    assert work.unclear == unclear


class Raising(dict[str, Tensor]):
    """A mapping whose values cannot be read."""

    def values(self) -> Any:
        raise RuntimeError("theirs")


class Counted(dict[str, Any]):
    """Counts how often the values of any are read."""

    reads = 0

    def values(self) -> Any:
        Counted.reads += 1
        return super().values()


class Wide(nn.Module):
    """Returns many objects beside its outputs, and some that hold no outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        data: Any = TensorDataset(IMAGES)
        data.more = Counted()
        self.data = data

    def forward(self, x: Tensor) -> Any:
        outputs = self.net(x)
        return SimpleNamespace(logits=outputs, data=self.data, parts=[Counted()] * 100_000)


def test_tensors_are_looked_for_within_a_budget(message: Message, tmp_path: Path) -> None:
    net = Wide()
    with witness(net, message, context(), tmp_path):
        F.cross_entropy(net(IMAGES).logits, LABELS).backward()
        sgd(net).step()
    assert 0 < Counted.reads <= 1000
    assert seen(tmp_path).distinct == 40


def test_a_model_that_returns_what_cannot_be_read_is_witnessed(
    message: Message, tmp_path: Path
) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(odd=Raising(), logits=self.net(x))

    net = Odd()
    with witness(net, message, context(), tmp_path):
        F.cross_entropy(net(IMAGES).logits, LABELS).backward()
        sgd(net).step()
    assert seen(tmp_path).distinct == 40


def test_inputs_are_those_of_the_model_where_a_part_of_it_is_called_before(
    message: Message, tmp_path: Path
) -> None:
    """A generator is called with noise, and then the model with images."""
    net = network()
    made = nn.ModuleDict({"generator": nn.Linear(2, 16), "body": net})
    made.forward = lambda x: net(x)
    optimizer = sgd(made)
    with witness(made, message, context(), tmp_path):
        for at in range(0, 12, 4):
            fake = made["generator"](torch.rand(4, 2)).view(4, 1, 4, 4)
            loss = F.cross_entropy(made(IMAGES[at : at + 4]), LABELS[at : at + 4])
            optimizer.zero_grad()
            (loss + F.mse_loss(fake, torch.zeros_like(fake))).backward()
            optimizer.step()
    assert seen(tmp_path).unclear
    assert kept(tmp_path) == images(*range(12))


def test_a_part_that_is_called_before_and_never_differentiated_is_no_matter(
    message: Message, tmp_path: Path
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        net[0](IMAGES)
        F.cross_entropy(net(IMAGES), LABELS).backward()
        sgd(net).step()
    work = seen(tmp_path)
    assert (work.unclear, work.forwards, work.distinct) == (False, 1, 40)
