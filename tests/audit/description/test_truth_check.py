"""The truth check against real clients: right and wrong declarations, defenses, optimizers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bract import Observation
from bract.attacks import Case
from bract.attacks.task import AttackTask, open_cases
from bract.audit.description.truth_check import truth_check, truth_match
from bract.client.defenses import ProtectContext, build_defenses
from bract.client.training import train_locally
from bract.config import DataConfig
from bract.config.config import TrainingConfig
from bract.data.views import DataSpec
from bract.data.views import test_data as load_test_data
from bract.models import create_model
from bract.models.dropout import dropout_rate, with_dropout
from bract.models.initialise import initialise
from bract.schema import ClientDeclaration
from bract.updates.update import buffers_of, parameters_of

SPEC = DataSpec((1, 8, 8), 10, (0.3,), (0.4,))
TINY = load_test_data(DataConfig(name="digits", image_size=8))


def check_truth(seen: Any, images: Any, labels: Any, *, tier: Any = "oblivious") -> Any:
    return truth_check(opened(seen, tier), images, labels)


def opened(seen: Any, tier: Any = "oblivious") -> Case:
    ((case,), _) = open_cases([seen], AttackTask(tier=tier), attack="ig")
    assert isinstance(case, Case)
    return case


def client(
    count: Any,
    *defenses: Any,
    model: Any = "lenet-strided",
    spec: Any = SPEC,
    mu: Any = 0.0,
    activation: str = "sigmoid",
    **training: Any,
) -> Any:
    """Train and protect as a client does; return the capture and what it kept."""
    config = TrainingConfig(**{"algorithm": "fedsgd", "batch_size": count, "lr": 0.3, **training})
    chain = build_defenses(list(defenses))
    network = create_model(model, classes=10, channels=1, image_size=8, activation=activation)
    network = initialise(chain.prepare_model(network), "default", 0)
    network = with_dropout(network, config.dropout, classes=10)
    images, labels = TINY[0][:count], TINY[1][:count]
    state: dict[str, Any]
    context, state = ProtectContext(round=1, seed=5), {}
    chain.attach(network, state, context)
    sent, buffers = parameters_of(network), buffers_of(network)
    fit = train_locally(
        network,
        images,
        labels,
        config=config,
        spec=spec,
        seed=0,
        device=torch.device("cpu"),
        proximal_mu=mu,
    )
    context = replace(context, model=network, images=images, labels=labels)
    declaration = ClientDeclaration(
        algorithm=config.algorithm,
        model=model,
        activation=activation,
        image_shape=SPEC.image_shape,
        classes=10,
        mean=SPEC.mean,
        std=SPEC.std,
        optimizer=config.optimizer,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        augmentation=tuple(config.augmentation),
        dropout=dropout_rate(network),
        proximal_mu=mu or None,
        local_steps=fit.steps,
        batch_size=min(config.batch_size, len(fit.used)),
        num_examples=len(fit.used),
        defenses=tuple(chain.public()),
    )
    update = chain.protect(fit.update, state, context)
    seen = Observation(1, "client-0", sent, update, declaration, buffers=buffers)
    return seen, fit.trained_on(images), labels[fit.used]


def declared(made: Any, **changes: Any) -> Any:
    seen, images, labels = made
    return replace(seen, declaration=replace(seen.declaration, **changes)), images, labels


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"algorithm": "fedavg", "local_steps": 1},
        {"algorithm": "fedavg", "batch_size": 2, "momentum": 0.5},
        {"algorithm": "fedavg", "batch_size": 2, "mu": 0.7},
        {"algorithm": "fedavg", "batch_size": 2, "mu": 0.7, "momentum": 0.5},
        {"algorithm": "fedavg", "local_steps": 1, "weight_decay": 0.05},
        {"algorithm": "fedavg", "batch_size": 2, "mu": 0.7, "momentum": 0.5, "weight_decay": 0.05},
        {"augmentation": ["horizontal-flip", "random-crop"]},
        {"algorithm": "fedavg", "batch_size": 2, "augmentation": ["random-crop"]},
        {"algorithm": "fedavg", "batch_size": 4},  # and one of 2: the epoch does not divide
    ],
)
def test_the_true_images_repeat_what_the_client_sent(training: Any) -> None:
    check = check_truth(*client(6, **training))
    assert check.cosine > 1 - 1e-6
    assert check.scale == pytest.approx(1.0, abs=1e-4)
    assert check.exact is True and check.tried == {}


@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
@pytest.mark.parametrize("model", ["lenet-strided", "mlp"])
@pytest.mark.parametrize(
    "training",
    [
        {},
        {"algorithm": "fedavg", "local_steps": 1},
        {"algorithm": "fedavg", "local_steps": 1, "weight_decay": 0.05},
    ],
)
def test_the_mask_of_one_image_is_read_and_repeated(
    model: str, activation: str, training: Any
) -> None:
    made = client(1, model=model, activation=activation, dropout=0.4, **training)
    check = check_truth(*made)
    assert check.cosine > 1 - 1e-6
    assert check.scale == pytest.approx(1.0, abs=1e-4)
    assert check.exact is True and check.tried == {}


@pytest.mark.parametrize("training", [{}, {"algorithm": "fedavg", "batch_size": 1}])
def test_what_unread_masks_leave_open_is_no_exact_check(training: Any) -> None:
    check = check_truth(*client(4, dropout=0.5, **training))
    assert check.exact is False
    assert check.cosine < 1 - 1e-4


@pytest.mark.parametrize(("real", "said"), [(0.5, 0.0), (0.5, None), (0.5, 0.2), (0.1, 0.5)])
@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_dropout_that_is_missing_or_wrong_is_found_out_with_its_rate(
    real: float, said: Any, algorithm: str
) -> None:
    made = client(1, algorithm=algorithm, dropout=real)
    check = check_truth(*declared(made, dropout=said))
    assert check.cosine < 1 - 1e-5
    fitting = max(check.tried, key=lambda name: check.tried[name])
    assert check.tried[fitting] > 1 - 1e-6
    assert fitting.startswith("dropout: ")
    assert float(fitting.split()[1]) == pytest.approx(real, abs=2e-3)


def test_dropout_that_nobody_used_is_found_out() -> None:
    check = check_truth(*declared(client(1), dropout=0.3))
    assert check.cosine < 1 - 1e-5
    fitting = max(check.tried, key=lambda name: check.tried[name])
    assert fitting.startswith("dropout: ")
    assert float(fitting.split()[1]) == pytest.approx(0.0, abs=2e-3)


@pytest.mark.parametrize(
    ("decay", "momentum", "said"), [(0.0, 0.0, 1.0), (0.05, 0.0, 0.6), (0.05, 0.5, 0.03)]
)
def test_the_rate_of_another_round_is_found_out_over_several_steps(
    decay: float, momentum: float, said: float
) -> None:
    """A step schedule that halves: the server declares what the round before had."""
    made = client(
        *(6,),
        algorithm="fedavg",
        batch_size=1,
        lr=0.5,
        weight_decay=decay,
        momentum=momentum,
        activation="relu",
    )
    check = check_truth(*declared(made, lr=said))
    assert check.cosine < 1 - 1e-5
    fitting = max(check.tried, key=lambda name: check.tried[name])
    assert check.tried[fitting] > 1 - 1e-6
    assert fitting == "lr: 0.5"


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_the_rate_of_another_round_is_named_for_a_single_step(decay: float) -> None:
    made = client(1, algorithm="fedavg", local_steps=1, lr=0.5, weight_decay=decay)
    check = check_truth(*declared(made, lr=0.1))
    fitting = max(check.tried, key=lambda name: check.tried[name])
    assert fitting == "lr: 0.5"
    assert check.tried[fitting] > 1 - 1e-6


def test_later_epochs_are_not_called_exact() -> None:
    again = client(4, algorithm="fedavg", batch_size=2, local_epochs=2)
    assert check_truth(*again).exact is False


def test_a_wrong_learning_rate_and_the_wrong_sign_show() -> None:
    made = client(1, algorithm="fedavg", local_steps=1, lr=0.5)
    assert check_truth(*declared(made, lr=0.1)).scale == pytest.approx(5.0, rel=1e-3)
    seen, images, labels = client(1)
    turned = replace(seen, update={n: -v for n, v in seen.update.items()})
    assert check_truth(turned, images, labels).cosine == pytest.approx(-1.0, abs=1e-5)


@pytest.mark.parametrize(("real", "said"), [(0.7, None), (0.7, 0.1), (0.0, 0.7)])
def test_a_wrong_or_missing_proximal_term_is_found_out_with_its_value(real: Any, said: Any) -> None:
    made = client(6, algorithm="fedavg", batch_size=1, mu=real)
    check = check_truth(*declared(made, proximal_mu=said))
    assert check.cosine < 1 - 1e-5
    assert check.tried[f"proximal_mu: {real:.3g}"] > 1 - 1e-6


@pytest.mark.parametrize(("real", "said"), [(0.9, 0.0), (0.5, 0.0), (0.0, 0.9)])
def test_a_wrong_or_missing_momentum_is_found_out_with_its_value(real: Any, said: Any) -> None:
    made = client(6, algorithm="fedavg", batch_size=1, momentum=real)
    check = check_truth(*declared(made, momentum=said))
    assert check.cosine < 1 - 1e-5
    fitting = max(check.tried, key=lambda name: check.tried[name])
    assert check.tried[fitting] > 1 - 1e-6
    assert fitting.startswith("momentum: ")
    assert float(fitting.split()[1]) == pytest.approx(real, abs=1e-3)


@pytest.mark.parametrize(("real", "said"), [(0.05, 0.0), (0.05, 0.01), (0.0, 0.05)])
@pytest.mark.parametrize("steps", [1, 6])
def test_a_wrong_or_missing_weight_decay_is_found_out_with_its_value(
    real: float, said: float, steps: int
) -> None:
    made = client(6, algorithm="fedavg", batch_size=1, local_steps=steps, weight_decay=real)
    check = check_truth(*declared(made, weight_decay=said))
    assert check.cosine < 1 - 1e-5
    fitting = max(check.tried, key=lambda name: check.tried[name])
    assert check.tried[fitting] > 1 - 1e-6
    assert fitting.startswith("weight_decay: ")
    assert float(fitting.split()[1]) == pytest.approx(real, abs=1e-3)


def test_the_mode_of_batch_normalisation_that_fits_is_named() -> None:
    check = check_truth(*declared(client(4, model="lenet-strided-bn"), norm_mode="eval"))
    assert check.cosine < 0.99
    assert check.tried["norm_mode: train"] > 1 - 1e-6


def test_pixels_that_were_never_normalised_are_found_out() -> None:
    plain = client(2, spec=replace(SPEC, mean=(0.0,), std=(1.0,)))
    check = check_truth(*plain)
    # Fresh sigmoids hardly see the difference, but it is far above rounding.
    assert 0.999 < check.cosine < 1 - 3e-6
    assert check.tried["pixels without normalisation"] > 1 - 1e-9


@pytest.mark.parametrize("steps", [1, 2])
def test_another_optimizer_is_not_taken_for_a_wrong_context(steps: Any) -> None:
    made = client(2, algorithm="fedavg", batch_size=1, local_steps=steps, optimizer="adam")
    assert check_truth(*made).cosine > 1 - 1e-6
    assert check_truth(*declared(made, optimizer="sgd")).cosine < 0.9
    assert check_truth(*declared(made, optimizer="adagrad")) is None


def test_what_is_too_long_to_repeat_is_left_out() -> None:
    made = client(2, algorithm="fedavg", batch_size=1, local_steps=2)
    assert check_truth(*declared(made, local_steps=65)) is None


def test_precode_is_repeated_with_the_noise_that_the_attacker_recovered() -> None:
    made = client(1, {"name": "precode", "weight": 0.1})
    adaptive = check_truth(*made, tier="adaptive")
    assert adaptive.cosine > 1 - 1e-6
    assert adaptive.scale == pytest.approx(1.0, abs=1e-3)
    assert check_truth(*made, tier="oblivious").cosine < 1 - 1e-5


def test_noise_that_nobody_recovered_leaves_the_check_open() -> None:
    assert check_truth(*client(3, {"name": "precode"}), tier="adaptive") is None


@pytest.mark.parametrize("tier", ["oblivious", "adaptive"])
def test_a_lock_that_stays_at_the_client_leaves_the_check_open(tier: Any) -> None:
    made = client(1, {"name": "fedkl"}, model="lenet-strided-bn")
    assert check_truth(*made, tier=tier) is None


@pytest.mark.thorough
def test_readings_that_the_evidence_leaves_open_are_taken_in_the_truth_s_favour() -> None:
    made = client(1, {"name": "guardian"})
    distorted, recovered = (check_truth(*made, tier=t) for t in ("oblivious", "adaptive"))
    assert recovered.cosine > max(0.9, distorted.cosine)


@pytest.mark.parametrize("unroll", [16, 1])
def test_true_images_beat_wrong_ones_where_every_step_is_simulated_and_not_where_their_mean_is(
    unroll: int,
) -> None:
    """The known causes: a search that stayed at black images, and steps that are not simulated."""
    seen, images, labels = client(6, algorithm="fedavg", batch_size=2, lr=2.0, activation="relu")
    case = opened(seen).simulating(unroll=unroll)
    right, wrong = (truth_match(case, each, labels) for each in (images, torch.zeros_like(images)))
    assert right is not None and wrong is not None
    if unroll == 16:
        assert right > 1 - 1e-6 and wrong < right - 0.01
    else:
        assert right < 0.9 and wrong >= right


def test_another_number_of_images_than_was_looked_for_matches_nothing() -> None:
    seen, images, labels = client(6)
    assert truth_match(opened(seen).simulating(max_images=2, unroll=1), images, labels) is None
