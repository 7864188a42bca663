from typing import Any

import pytest
import torch
from torch import nn

from bract.client.training import train_locally
from bract.config import TrainingConfig
from bract.data import DataSpec

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
