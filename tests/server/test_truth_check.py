"""The truth check against real clients: right and wrong declarations, defenses, optimizers."""

from dataclasses import replace

import pytest
import torch

from bract.client.defenses import ProtectContext, build_defenses
from bract.client.training import train_locally
from bract.config import DataConfig, TrainingConfig
from bract.data import DataSpec
from bract.data import test_data as load_test_data
from bract.models import create_model, initialise
from bract.observation import Observation, Protocol
from bract.server.truth_check import truth_check
from bract.update import buffers_of, parameters_of

SPEC = DataSpec((1, 8, 8), 10, (0.3,), (0.4,))
TINY = load_test_data(DataConfig(name="digits", image_size=8))


def client(count, *defenses, model="lenet-strided", spec=SPEC, **training):
    """Train and protect as a client does; return the capture and what it kept."""
    config = TrainingConfig(**{"algorithm": "fedsgd", "batch_size": count, "lr": 0.3, **training})
    chain = build_defenses(list(defenses))
    network = create_model(model, classes=10, channels=1, image_size=8)
    network = initialise(chain.prepare_model(network), "default", 0)
    images, labels = TINY[0][:count], TINY[1][:count]
    context, state = ProtectContext(round=1, seed=5), {}
    chain.attach(network, state, context)
    sent, buffers = parameters_of(network), buffers_of(network)
    fit = train_locally(
        network, images, labels, config=config, spec=spec, seed=0, device=torch.device("cpu")
    )
    context = replace(context, model=network, images=images, labels=labels)
    protocol = Protocol(
        algorithm=config.algorithm,
        model=model,
        image_shape=SPEC.image_shape,
        classes=10,
        mean=SPEC.mean,
        std=SPEC.std,
        optimizer=config.optimizer,
        lr=config.lr,
        momentum=config.momentum,
        local_steps=fit.steps,
        batch_size=min(config.batch_size, len(fit.used)),
        num_examples=len(fit.used),
        defenses=tuple(chain.public()),
    )
    update = chain.protect(fit.update, state, context)
    seen = Observation(1, "client-0", sent, update, protocol, buffers=buffers)
    return seen, images[fit.used], labels[fit.used]


def declared(made, **changes):
    seen, images, labels = made
    return replace(seen, protocol=replace(seen.protocol, **changes)), images, labels


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"algorithm": "fedavg", "local_steps": 1},
        {"algorithm": "fedavg", "batch_size": 2, "momentum": 0.5},
        {"algorithm": "fedavg", "batch_size": 4},  # and one of 2: the epoch does not divide
    ],
)
def test_the_true_images_repeat_what_the_client_sent(training):
    check = truth_check(*client(6, **training))
    assert check["cosine"] > 1 - 1e-6
    assert check["scale"] == pytest.approx(1.0, abs=1e-4)
    assert check["exact"] is True and check["tried"] == {}


def test_later_epochs_are_not_called_exact():
    again = client(4, algorithm="fedavg", batch_size=2, local_epochs=2)
    assert truth_check(*again)["exact"] is False


def test_a_wrong_learning_rate_and_the_wrong_sign_show():
    made = client(1, algorithm="fedavg", local_steps=1, lr=0.5)
    assert truth_check(*declared(made, lr=0.1))["scale"] == pytest.approx(5.0, rel=1e-3)
    seen, images, labels = client(1)
    turned = replace(seen, update={n: -v for n, v in seen.update.items()})
    assert truth_check(turned, images, labels)["cosine"] == pytest.approx(-1.0, abs=1e-5)


def test_the_mode_of_batch_normalisation_that_fits_is_named():
    check = truth_check(*declared(client(4, model="lenet-strided-bn"), norm_mode="eval"))
    assert check["cosine"] < 0.99
    assert check["tried"]["norm_mode: train"] > 1 - 1e-6


def test_pixels_that_were_never_normalised_are_found_out():
    plain = client(2, spec=replace(SPEC, mean=(0.0,), std=(1.0,)))
    check = truth_check(*plain)
    # Fresh sigmoids hardly see the difference, but it is far above rounding.
    assert 0.999 < check["cosine"] < 1 - 3e-6
    assert check["tried"]["pixels without normalisation"] > 1 - 1e-9


@pytest.mark.parametrize("steps", [1, 2])
def test_another_optimizer_is_not_taken_for_a_wrong_context(steps):
    made = client(2, algorithm="fedavg", batch_size=1, local_steps=steps, optimizer="adam")
    assert truth_check(*made) is None
    assert truth_check(*declared(made, optimizer="sgd")) is not None


def test_what_is_too_long_to_repeat_is_left_out():
    made = client(2, algorithm="fedavg", batch_size=1, local_steps=2)
    assert truth_check(*declared(made, local_steps=65)) is None


def test_precode_is_repeated_with_the_noise_that_the_attacker_recovered():
    made = client(1, {"name": "precode", "weight": 0.1})
    adaptive = truth_check(*made, tier="adaptive")
    assert adaptive["cosine"] > 1 - 1e-6
    assert adaptive["scale"] == pytest.approx(1.0, abs=1e-3)
    assert truth_check(*made, tier="oblivious")["cosine"] < 1 - 1e-5


def test_noise_that_nobody_recovered_leaves_the_check_open():
    assert truth_check(*client(3, {"name": "precode"}), tier="adaptive") is None


@pytest.mark.parametrize("tier", ["oblivious", "adaptive"])
def test_a_lock_that_stays_at_the_client_leaves_the_check_open(tier):
    made = client(1, {"name": "fedkl"}, model="lenet-strided-bn")
    assert truth_check(*made, tier=tier) is None


def test_readings_that_the_evidence_leaves_open_are_taken_in_the_truth_s_favour():
    made = client(1, {"name": "guardian"})
    distorted, recovered = (truth_check(*made, tier=t) for t in ("oblivious", "adaptive"))
    assert recovered["cosine"] > max(0.9, distorted["cosine"])
