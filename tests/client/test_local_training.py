import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from torch import nn

from bract.client.steps import Steps
from bract.client.training import smallest_batch, train_locally
from bract.config.config import TrainingConfig
from bract.data.views import DataSpec
from bract.models.single_values import single_value_norm

SPEC = DataSpec((1, 2, 2), 3, (0.0,), (1.0,))


def data(count: Any = 12) -> Any:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 1, 2, 2, generator=generator)
    return images, torch.randint(0, 3, (count,), generator=generator)


def model() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


def train(mu: Any, **options: Any) -> Any:
    config = TrainingConfig(**({"batch_size": 4, "local_epochs": 2, "lr": 0.5} | options))
    net = model()
    return train_locally(
        net, *data(), config=config, spec=SPEC, seed=7, device=torch.device("cpu"), proximal_mu=mu
    )


def reference(mu: Any) -> Any:
    """The same steps with the gradient of mu/2 ||w - w0||^2 written out as mu (w - w0)."""
    net, (images, labels) = model(), data()
    start = [p.detach().clone() for p in net.parameters()]
    generator = torch.Generator().manual_seed(7)
    for _ in range(2):
        order = torch.randperm(len(images), generator=generator)
        for batch in order.split(4):
            loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for p, p0, g in zip(net.parameters(), start, gradients, strict=True):
                    p -= 0.5 * (g + mu * (p - p0))
    return {n: s - p.detach() for (n, p), s in zip(net.named_parameters(), start, strict=True)}


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_the_proximal_term_pulls_every_step_back_by_mu_times_the_distance(mu: Any) -> None:
    expected = reference(mu)
    for name, value in train(mu).update.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_the_training_loss_is_reported_without_the_proximal_term() -> None:
    first = {"local_epochs": 1, "batch_size": 12}
    assert train(100.0, **first).loss == train(0.0, **first).loss


def test_the_training_accuracy_is_the_share_of_right_answers_as_they_were_given() -> None:
    images, labels = data()
    with torch.no_grad():
        right = (model()(images).argmax(1) == labels).float().mean().item()
    result = train(0.0, algorithm="fedsgd", batch_size=12)
    assert result.accuracy == pytest.approx(right)


@pytest.mark.parametrize(
    ("settings", "count", "smallest"),
    [
        ({"batch_size": 8}, 17, 1),
        ({"batch_size": 8}, 16, 8),
        ({"batch_size": 8}, 3, 3),
        ({"batch_size": 8, "local_steps": 2}, 17, 8),
        ({"batch_size": 8, "local_steps": 3}, 17, 1),
        ({"batch_size": 8, "algorithm": "fedsgd"}, 17, 8),
        ({"batch_size": 8, "algorithm": "fedsgd"}, 1, 1),
    ],
)
def test_the_smallest_batch_is_that_of_the_batches_that_are_trained_on(
    settings: Any, count: Any, smallest: Any
) -> None:
    config = TrainingConfig(**settings)
    assert smallest_batch(config, count) == smallest
    sizes: list[int] = []
    net = model()
    net.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    train_locally(net, *data(count), config=config, spec=SPEC, seed=0, device=torch.device("cpu"))
    assert min(sizes) == smallest


def test_a_batch_of_one_image_that_cannot_be_normalised_is_one_clear_error() -> None:
    with torch.device("meta"):
        large = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3))
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 3))
    assert single_value_norm(copy.deepcopy(net).to("meta"), (1, 2, 2)) == "1"
    assert single_value_norm(large, (1, 3, 3)) is None
    with refused("config-conflict", "training.batch_size", 2, 3):
        train_locally(
            net,
            *data(3),
            config=TrainingConfig(batch_size=2),
            spec=SPEC,
            seed=0,
            device=torch.device("cpu"),
        )


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"optimizer": "adam", "weight_decay": 0.01},
    ],
)
def test_steps_are_those_of_torch_s_optimizers(options: Any) -> None:
    config = TrainingConfig(lr=0.1, **options)
    mine, theirs = model(), model()
    if config.optimizer == "adam":
        kind: Any = torch.optim.Adam
        optimizer = kind(theirs.parameters(), lr=0.1, weight_decay=config.weight_decay)
    else:
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, **options)
    steps = Steps(list(mine.parameters()), config)
    images, labels = data()
    for number in range(4):
        for net, by in ((mine, steps), (theirs, optimizer)):
            by.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            # A parameter without a gradient is left as it is, and its momentum too.
            (loss if number != 2 else net[1].bias.sum()).backward()
            by.step()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.processes
def test_training_does_not_import_torch_s_compiler() -> None:
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/client']\n"
        "from test_local_training import train\n"
        "train(0.1, optimizer='adam'); train(0.0)\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    root = Path(__file__).parent.parent.parent
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
