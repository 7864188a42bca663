from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bract.client.training import train_locally
from bract.config.config import TrainingConfig
from bract.data.views import DataSpec
from bract.updates.update import parameters_of

SPEC = DataSpec((1, 4, 4), 3, (0.25,), (0.5,))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def data(count: int = 10) -> Any:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.rand(count, 1, 4, 4, generator=generator),
        torch.randint(3, (count,), generator=generator),
    )


def train(config: TrainingConfig, count: int = 10, seed: int = 5) -> Any:
    images, labels = data(count)
    network = model()
    result = train_locally(
        network, images, labels, config=config, spec=SPEC, seed=seed, device=torch.device("cpu")
    )
    return network, result


def test_fedsgd_uploads_the_gradient_of_one_normalised_batch() -> None:
    _, result = train(TrainingConfig(algorithm="fedsgd", batch_size=4))
    images, labels = data()
    network = model()
    inputs = (images[result.used] - 0.25) / 0.5
    F.cross_entropy(network(inputs), labels[result.used]).backward()
    assert len(result.used) == 4
    assert result.steps == 1
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(result.update[name], parameter.grad)


def test_fedavg_uploads_what_was_sent_minus_what_training_made() -> None:
    before = parameters_of(model())
    trained, result = train(TrainingConfig(batch_size=4, lr=0.5))
    for name, value in parameters_of(trained).items():
        torch.testing.assert_close(result.update[name], before[name] - value)
    assert result.steps == 3
    assert sorted(result.used) == list(range(10))


def test_one_plain_step_is_the_learning_rate_times_the_gradient() -> None:
    _, step = train(TrainingConfig(batch_size=4, lr=0.5, local_steps=1))
    _, gradient = train(TrainingConfig(algorithm="fedsgd", batch_size=4))
    for name, value in step.update.items():
        torch.testing.assert_close(value, 0.5 * gradient.update[name], rtol=1e-4, atol=1e-7)


def test_steps_go_over_epochs_until_their_number_is_reached() -> None:
    _, result = train(TrainingConfig(batch_size=4, local_steps=7))
    assert result.steps == 7
    _, epochs = train(TrainingConfig(batch_size=4, local_epochs=2))
    assert epochs.steps == 6


def test_the_seed_alone_decides_the_order() -> None:
    _, first = train(TrainingConfig(local_steps=1, batch_size=3), seed=5)
    _, again = train(TrainingConfig(local_steps=1, batch_size=3), seed=5)
    _, other = train(TrainingConfig(local_steps=1, batch_size=3), seed=6)
    assert first.used == again.used
    assert first.used != other.used
    for name, value in first.update.items():
        assert torch.equal(value, again.update[name])
