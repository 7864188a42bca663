"""A witness counts and keeps what a step took, and neither what none took nor what is no data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.nn import functional as F
from witnessed import IMAGES, LABELS, Trained, context, kept, network, places, seen, sgd

from bract.client import witness
from bract.schema import Work


def scaler(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=4.0, **settings)


def scaled(
    skipped: set[int],
    *,
    zeroed: str = "first",
    clipped: bool = False,
    to_none: bool = True,
    fused: bool = False,
) -> Callable[[Any], None]:
    """Return a training of four steps, some of which a scaler skips for infinite gradients."""

    def train(net: nn.Module) -> None:
        optimizer, scales = sgd(net, fused=fused), scaler()
        for step in range(4):
            x, y = IMAGES[4 * step : 4 * step + 4], LABELS[4 * step : 4 * step + 4]
            if zeroed == "first":
                optimizer.zero_grad(set_to_none=to_none)
            loss = F.cross_entropy(net(x), y) * (float("inf") if step in skipped else 1.0)
            if zeroed == "between":
                optimizer.zero_grad(set_to_none=to_none)
            scales.scale(loss).backward()
            if clipped:
                scales.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            scales.step(optimizer)
            scales.update()
            if zeroed == "last":
                optimizer.zero_grad(set_to_none=to_none)

    return train


def skipped_by_hand(net: nn.Module) -> None:
    """Skip a step whose gradients are not finite, as loops without a scaler do."""
    optimizer = sgd(net)
    for step in range(4):
        x, y = IMAGES[4 * step : 4 * step + 4], LABELS[4 * step : 4 * step + 4]
        (F.cross_entropy(net(x), y) * (float("nan") if step == 1 else 1.0)).backward()
        if all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None):
            optimizer.step()
        net.zero_grad()


SKIPPING: dict[str, tuple[Callable[[Any], None], set[int]]] = {
    "the first": (scaled({0}), {0}),
    "a later one": (scaled({1}), {1}),
    "the last": (scaled({3}), {3}),
    "two, zeroed behind the pass": (scaled({0, 1}, zeroed="between"), {0, 1}),
    "zeroed behind the step": (scaled({2}, zeroed="last"), {2}),
    "clipped": (scaled({1}, clipped=True), {1}),
    "two, zeroed in place": (scaled({0, 2}, to_none=False), {0, 2}),
    "zeroed in place behind the pass": (scaled({0}, zeroed="between", to_none=False), {0}),
    "fused": (scaled({1}, fused=True), {1}),
    "fused and clipped": (scaled({3}, fused=True, clipped=True), {3}),
    "by the loop": (skipped_by_hand, {1}),
}


@pytest.mark.parametrize(("train", "skipped"), SKIPPING.values(), ids=SKIPPING)
def test_a_step_that_was_skipped_is_not_counted_and_nothing_of_it_is_kept(
    train: Callable[[Any], None], skipped: set[int], message: Message, tmp_path: Path
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        train(net)
    taken = [step for step in range(4) if step not in skipped]
    assert kept(tmp_path) == places(*(4 * s + k for s in taken for k in range(4)))
    work = seen(tmp_path)
    assert work.examples == (4,) * len(taken) and work.dropped == len(skipped)
    assert (work.steps, work.forwards, work.backwards) == (len(taken),) * 3
    (term,) = work.terms
    assert term.scale == 1.0 and work.even and not work.edited and not work.turned
    assert [layer.training for layer in work.layers] == [True] and work.inputs[0].shape[0] == 4
    assert all(clip.steps == len(taken) and clip.least for clip in work.clips)


def by_hand(update: Callable[[Tensor, Tensor], Any]) -> Trained:
    def train(net: nn.Module) -> None:
        for at in (0, 4):
            F.cross_entropy(net(IMAGES[at : at + 4]), LABELS[at : at + 4]).backward()
            with torch.no_grad():
                for value in net.parameters():
                    assert value.grad is not None
                    update(value, 0.1 * value.grad)
                    value.grad = None

    return train


@pytest.mark.parametrize(
    "update",
    [lambda value, by: value.sub_(by), lambda value, by: value.data.sub_(by)],
    ids=["in place", "of the data"],
)
def test_what_a_step_by_hand_took_is_kept(
    update: Callable[[Tensor, Tensor], Any], message: Message, tmp_path: Path
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        by_hand(update)(net)
    assert kept(tmp_path) == places(*range(8))
    assert (seen(tmp_path).forwards, seen(tmp_path).dropped) == (2, 0)


def collecting(zeroes: bool) -> Trained:
    """Return a client that sends the mean of its gradients, and makes no step."""

    def train(net: nn.Module) -> None:
        for at in (0, 4):
            F.cross_entropy(net(IMAGES[at : at + 4]), LABELS[at : at + 4]).backward()
            if zeroes and not at:
                net.zero_grad()

    return train


@pytest.mark.parametrize("zeroes", [True, False])
def test_what_a_client_that_sends_gradients_took_is_kept(
    zeroes: bool, message: Message, tmp_path: Path
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        collecting(zeroes)(net)
    assert kept(tmp_path) == places(*range(8))
    work = seen(tmp_path)
    assert (work.steps, work.forwards, work.dropped, work.edited) == (0, 2, 0, False)


def sharpness_aware(net: nn.Module) -> None:
    """Climb along the gradient, and step by the one that is found there."""
    optimizer = sgd(net)
    for at in (0, 4):
        x, y = IMAGES[at : at + 4], LABELS[at : at + 4]
        F.cross_entropy(net(x), y).backward()
        slopes: list[Any] = [p.grad for p in net.parameters()]
        with torch.no_grad():
            for value, slope in zip(net.parameters(), slopes, strict=True):
                value.add_(0.05 * slope)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for value, slope in zip(net.parameters(), slopes, strict=True):
                value.sub_(0.05 * slope)
        optimizer.step()
        optimizer.zero_grad()


def test_a_change_of_parameters_within_a_step_is_seen(message: Message, tmp_path: Path) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        sharpness_aware(net)
    work = seen(tmp_path)
    assert (work.steps, work.edited, work.dropped) == (2, True, 0)
    assert kept(tmp_path) == places(*range(8))


def generator() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Unflatten(1, (1, 4, 4)))


def adversarial(net: nn.Module, makes: nn.Module, *, joins: bool = False) -> None:
    """Train a discriminator on real images and on a generator's, and the generator by it."""
    optimizer, other = sgd(net), sgd(makes)
    for at in (0, 4):
        real = IMAGES[at : at + 4]
        fake = makes(torch.randn(4, 5))
        optimizer.zero_grad()
        if joins:
            both = torch.cat([real, fake.detach()]) * 2 - 1
            F.cross_entropy(net(both), torch.tensor([0] * 4 + [1] * 4)).backward()
        else:
            F.cross_entropy(net(real), LABELS[at : at + 4]).backward()
            F.cross_entropy(net(fake.detach()), torch.ones(4).long()).backward()
        optimizer.step()
        other.zero_grad()
        F.cross_entropy(net(fake), torch.zeros(4).long()).backward()
        other.step()


def test_a_discriminators_fakes_are_no_examples_and_its_real_ones_are_kept(
    message: Message, tmp_path: Path
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        adversarial(net, generator())
    assert kept(tmp_path) == places(*range(8))
    work = seen(tmp_path)
    assert (work.steps, work.forwards, work.computed, work.examples) == (2, 4, 2, (4, 4))
    assert work.dropped == 2


def test_a_batch_of_real_and_made_images_is_not_kept(
    message: Message, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        adversarial(net, generator(), joins=True)
    assert not kept(tmp_path)
    assert (seen(tmp_path).computed, seen(tmp_path).forwards) == (2, 2)
    assert caplog.text.count("network's outputs") == 1


def test_a_generators_noise_is_no_example(message: Message, tmp_path: Path) -> None:
    net = generator()
    with witness(net, message, context(), tmp_path):
        adversarial(network(), net)
    work = seen(tmp_path)
    assert not kept(tmp_path) and (work.steps, work.forwards, work.drawn) == (2, 2, 2)
    assert work.backwards == 2


def on_features(net: nn.Module, body: nn.Module) -> None:
    optimizer = sgd(net)
    for at in (0, 4):
        with torch.no_grad():
            features = F.relu(body(IMAGES[at : at + 4])).view(4, 1, 4, 4)
        optimizer.zero_grad()
        F.cross_entropy(net(features.clone()), LABELS[at : at + 4]).backward()
        optimizer.step()


def on_features_with_gradients(net: nn.Module, body: nn.Module) -> None:
    features = body(IMAGES).view(-1, 1, 4, 4)
    F.cross_entropy(net(features), LABELS).backward()
    sgd(net).step()


def on_stored_features(net: nn.Module, body: nn.Module) -> None:
    with torch.no_grad():
        features = [body(x[None]).view(1, 4, 4) for x in IMAGES]
    optimizer = sgd(net)
    data: Any = list(zip(features, LABELS, strict=True))
    for x, y in torch.utils.data.DataLoader(data, 4):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def refining(net: Any, body: nn.Module) -> None:
    """Put back into the network what it returned."""
    del body
    optimizer, shown = sgd(net), IMAGES[:4]
    for _ in range(2):
        optimizer.zero_grad()
        found = net(shown)
        F.mse_loss(found, IMAGES[4:8]).backward()
        optimizer.step()
        shown = found.detach()


def diffusing(net: nn.Module, body: nn.Module) -> None:
    """Learn the noise that was added to images."""
    del body
    optimizer = sgd(net)
    for at in (0, 4):
        noise = torch.randn_like(IMAGES[at : at + 4])
        optimizer.zero_grad()
        F.mse_loss(net(0.8 * IMAGES[at : at + 4] + 0.6 * noise), noise).backward()
        optimizer.step()


def filters() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))


@pytest.mark.parametrize(
    ("train", "own", "computed", "drawn"),
    [
        (on_features, network, 2, 0),
        (on_features_with_gradients, network, 1, 0),
        (on_stored_features, network, 10, 0),
        (diffusing, filters, 0, 2),
    ],
)
def test_what_is_no_data_of_the_client_is_not_kept(
    train: Callable[[Any, Any], None],
    own: Callable[[], nn.Module],
    computed: int,
    drawn: int,
    message: Message,
    tmp_path: Path,
) -> None:
    net, body = own(), nn.Sequential(nn.Flatten(), nn.Linear(16, 16))
    with witness(net, message, context(), tmp_path):
        train(net, body)
    work = seen(tmp_path)
    assert not kept(tmp_path)
    assert (work.computed, work.drawn, work.examples) == (computed, drawn, ())


def test_a_networks_own_outputs_are_no_examples(message: Message, tmp_path: Path) -> None:
    net = filters()
    with witness(net, message, context(), tmp_path):
        refining(net, net)
    work = seen(tmp_path)
    assert (work.forwards, work.computed, work.distinct) == (2, 1, 4)


def noisy(net: nn.Module) -> None:
    """Add noise to images, and take those of an attack on the network, as augmentation does."""
    optimizer = sgd(net)
    x = (IMAGES[:4] + 0.1 * torch.randn(4, 1, 4, 4)).requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(net(x), LABELS[:4]), x)
    optimizer.zero_grad()
    F.cross_entropy(net(x.detach() + 0.1 * slope.sign()), LABELS[:4]).backward()
    optimizer.step()


def mined(net: nn.Module) -> None:
    """Choose the examples that another network finds hardest, and label them by it."""
    other = network()
    with torch.no_grad():
        outputs = other(IMAGES)
        hardest = F.cross_entropy(outputs, LABELS, reduction="none").topk(4).indices
    x = IMAGES[hardest]
    F.cross_entropy(net(x), outputs[hardest].argmax(1)).backward()
    sgd(net).step()


def drawn_data(net: nn.Module) -> None:
    """Train on data that a script draws at random, as one that is tried out."""
    data = torch.utils.data.TensorDataset(torch.randn(8, 1, 4, 4), LABELS[:8])
    for x, y in torch.utils.data.DataLoader(data, 4):
        F.cross_entropy(net(x), y).backward()
        sgd(net).step()


@pytest.mark.parametrize(("train", "distinct"), [(noisy, 4), (mined, 4), (drawn_data, 8)])
def test_data_that_was_changed_or_chosen_is_data(
    train: Trained, distinct: int, message: Message, tmp_path: Path
) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        train(net)
    work: Work = seen(tmp_path)
    assert (work.computed, work.drawn, work.distinct) == (0, 0, distinct)


def adapted(net: Any) -> None:
    """Freeze the network, and train a layer that it gets within the block."""
    net.requires_grad_(False)
    net.append(nn.Linear(3, 3))
    for at in (0, 4):
        F.cross_entropy(net(IMAGES[at : at + 4]), LABELS[at : at + 4]).backward()
        sgd(net[-1]).step()


def test_layers_that_are_added_later_are_seen(message: Message, tmp_path: Path) -> None:
    net = network()
    with witness(net, message, context(), tmp_path):
        adapted(net)
    assert kept(tmp_path) == places(*range(8))


def test_a_skipped_step_brings_back_nothing_that_entered_a_part_of_the_model(
    message: Message, tmp_path: Path
) -> None:
    """The body is trained by itself, and then the whole model, whose first step is skipped."""
    net = nn.Sequential(nn.Identity(), network())
    optimizer = sgd(net)
    with witness(net, message, context(), tmp_path):
        for step, called in enumerate((net[1], net, net)):
            at = slice(4 * step, 4 * step + 4 - (step == 2))
            optimizer.zero_grad()
            F.cross_entropy(called(IMAGES[at]), LABELS[at]).backward()
            if step != 1:
                optimizer.step()
    assert kept(tmp_path) == places(8, 9, 10)
    work = seen(tmp_path)
    assert (work.dropped, work.steps, work.inputs[0].shape[0]) == (1, 2, 3)
