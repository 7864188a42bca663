import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused
from torch import nn

from bract import Observation
from bract.attacks import Problem
from bract.attacks.problem.case import open_case
from bract.attacks.problem.client_model import (
    BatchGradient,
    LocalTraining,
    forward_model,
    images_in,
)
from bract.attacks.problem.epoch_orders import shuffle
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.solve.label_sequences import LastLayer, label_sequences
from bract.attacks.solve.labels import infer_labels
from bract.client.training import train_locally
from bract.config.config import TrainingConfig
from bract.data.views import DataSpec
from bract.models import create_model
from bract.models.initialise import initialise
from bract.schema import ClientDeclaration
from bract.updates.step_law import StepLaw
from bract.updates.update import parameters_of


def stacked(observations: Any, images: Any = 8) -> Any:
    cases = [open_case(o, tier="oblivious", max_images=images, unroll=16) for o in observations]
    return Problem.stack([(case, 0) for case in cases], seed=0, device=torch.device("cpu"))


def simulate(problem: Any, images: Any, labels: Any) -> Any:
    rows = nn.functional.one_hot(labels, 10).float()
    return problem.simulate(images, rows, problem.unknowns())


@pytest.mark.parametrize("model", ["lenet", "lenet-strided"])
def test_the_true_images_give_the_captured_gradient_in_every_trial(
    observe: Any, digits: Any, model: Any
) -> None:
    images, labels = digits[0][:6].view(3, 2, 1, 16, 16), digits[1][:6].view(3, 2)
    seen = [observe(images[i], labels[i], model=model, client=f"c{i}") for i in range(3)]
    problem = stacked(seen)
    made = simulate(problem, images, labels)
    for i, observation in enumerate(seen):
        for name, wanted in observation.gradient().items():
            assert torch.allclose(made[name][i], wanted, atol=1e-6), name


@pytest.mark.parametrize(
    ("optimizer", "momentum", "mu", "decay"),
    [
        ("sgd", 0.0, 0.0, 0.0),
        ("sgd", 0.9, 0.0, 0.0),
        ("sgd", 0.0, 0.7, 0.0),
        ("sgd", 0.0, 0.0, 0.05),
        ("sgd", 0.9, 0.7, 0.05),
        ("adam", 0.0, 0.0, 0.0),
        ("adam", 0.0, 0.7, 0.05),
    ],
)
def test_unrolled_steps_equal_real_local_training(
    observe: Any, digits: Any, optimizer: str, momentum: float, mu: float, decay: float
) -> None:
    images, labels = digits[0][:4], digits[1][:4]
    lr = 0.3 if optimizer == "sgd" else 0.01
    seen = observe(
        *(images, labels),
        **{"steps": 3, "batch_size": 2, "lr": lr, "optimizer": optimizer},
        **{"momentum": momentum, "proximal_mu": mu, "weight_decay": decay},
    )
    problem = stacked([seen])
    assert problem.forward == LocalTraining(
        steps=3,
        batch_size=2,
        lr=lr,
        optimizer=optimizer,
        momentum=momentum,
        proximal_mu=mu,
        weight_decay=decay,
        without=StepLaw.of(seen.declaration).decayed,
    )
    made = simulate(problem, images[None], labels[None])
    for name, wanted in seen.gradient().items():
        assert torch.allclose(made[name][0], wanted, atol=1e-5), name


def test_the_proximal_term_pulls_each_step_as_worked_by_hand() -> None:
    # A constant gradient g = 3 from w0 = 10 with lr = 0.5 and mu = 0.4:
    # w1 = 10 - 0.5 * 3 = 8.5
    # w2 = 8.5 - 0.5 * (3 + 0.4 * (8.5 - 10)) = 7.3
    # w3 = 7.3 - 0.5 * (3 + 0.4 * (7.3 - 10)) = 6.34
    start = {"w": torch.tensor([10.0]), "lock": torch.tensor([10.0])}
    training = LocalTraining(steps=3, batch_size=1, lr=0.5, proximal_mu=0.4)
    end = training.trajectory(
        start, lambda _, at: {n: torch.full_like(v, 3.0) for n, v in at.items()}, pulled=["w"]
    )
    assert end["w"].item() == pytest.approx(6.34)
    assert end["lock"].item() == pytest.approx(10 - 3 * 0.5 * 3)
    assert training.mean_direction(start, end)["w"].item() == pytest.approx((10 - 6.34) / 1.5)
    # With momentum 0.5 the velocities are 3, 0.5 * 3 + 3 - 0.6 = 3.9 and
    # 0.5 * 3.9 + 3 + 0.4 * (6.55 - 10) = 3.57, so w3 = 10 - 0.5 * 10.47.
    moving = LocalTraining(steps=3, batch_size=1, lr=0.5, proximal_mu=0.4, momentum=0.5)
    end = moving.trajectory(
        start, lambda _, at: {n: torch.full_like(v, 3.0) for n, v in at.items()}
    )
    assert end["w"].item() == pytest.approx(4.765)


def test_clipping_and_a_schedule_as_worked_by_hand() -> None:
    # A constant gradient (3, 4) of norm 5 is clipped to (0.6, 0.8); rates are 2 * 1.5 and 2 * 0.5.
    start = {"a": torch.tensor([[10.0]]), "b": torch.tensor([[10.0]])}
    training = LocalTraining(
        steps=2, batch_size=1, lr=2.0, lr_factors=(1.5, 0.5), max_grad_norm=1.0
    )
    end = training.trajectory(
        start, lambda *_: {"a": torch.tensor([[3.0]]), "b": torch.tensor([[4.0]])}
    )
    assert (end["a"].item(), end["b"].item()) == pytest.approx((10 - 4 * 0.6, 10 - 4 * 0.8))
    assert training.mean_direction(start, end)["a"].item() == pytest.approx(0.6)


def test_clipping_by_value_as_worked_by_hand() -> None:
    # A constant gradient (3, -0.5) is clipped to (1, -0.5); two steps at a rate of 2.
    start = {"a": torch.tensor([[10.0]]), "b": torch.tensor([[10.0]])}
    training = LocalTraining(steps=2, batch_size=1, lr=2.0, max_grad_value=1.0)
    end = training.trajectory(
        start, lambda *_: {"a": torch.tensor([[3.0]]), "b": torch.tensor([[-0.5]])}
    )
    assert (end["a"].item(), end["b"].item()) == pytest.approx((6.0, 12.0))


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam", "adamw"])
def test_clipping_a_schedule_and_betas_are_those_of_a_loop_in_torch(optimizer: str) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(4, 2, 5, generator=generator, dtype=torch.float64)
    factors, betas = (0.0, 1.5, 0.7, 1.8), (0.6, 0.95)
    weights = [torch.ones(5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    made: Any = {
        "sgd": lambda: torch.optim.SGD(weights, lr=0.2, momentum=0.9, weight_decay=0.1),
        "nesterov": lambda: torch.optim.SGD(weights, lr=0.2, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.Adam(weights, lr=0.2, betas=betas, weight_decay=0.1),
        "adamw": lambda: torch.optim.AdamW(weights, lr=0.2, betas=betas, weight_decay=0.1),
    }
    stepper = made[optimizer]()
    schedule = torch.optim.lr_scheduler.LambdaLR(stepper, lambda step: (*factors, 1.0)[step])
    for pair in targets:
        stepper.zero_grad()
        sum(((w - t) ** 2).sum() for w, t in zip(weights, pair, strict=True)).backward()
        nn.utils.clip_grad_norm_(weights, 3.0)
        stepper.step()
        schedule.step()
    training = LocalTraining(
        steps=4,
        batch_size=1,
        lr=0.2,
        optimizer=optimizer,
        momentum=0.9 if optimizer in ("sgd", "nesterov") else 0.0,
        weight_decay=0.0 if optimizer == "nesterov" else 0.1,
        lr_factors=factors,
        max_grad_norm=3.0,
        betas=betas,
    )
    start = {n: torch.ones(1, 5, dtype=torch.float64) for n in "ab"}

    def gradient(step: int, at: Any) -> Any:
        return {n: 2.0 * (at[n] - targets[step, k]) for k, n in enumerate("ab")}

    end = training.trajectory(start, gradient)
    for name, weight in zip("ab", weights, strict=True):
        assert torch.allclose(end[name][0], weight.detach(), atol=1e-9), name


def test_factors_of_another_number_of_steps_are_refused() -> None:
    declared = ClientDeclaration(local_steps=3, lr=0.1, lr_factors=(1.5, 0.5), momentum=0.9)
    with refused("declaration-wrong", "lr_factors", "2", "3"):
        forward_model(declared, images=4, unroll=8)
    with refused("declaration-wrong", "momenta", "1", "3"):
        forward_model(replace(declared, lr_factors=(), momenta=(0.5,)), images=4, unroll=8)


def test_a_single_step_that_is_clipped_by_value_is_no_gradient() -> None:
    declared = ClientDeclaration(local_steps=1, batch_size=2, lr=0.1, max_grad_value=0.5)
    wanted = LocalTraining(steps=1, batch_size=2, lr=0.1, max_grad_value=0.5)
    assert forward_model(declared, images=2, unroll=8) == wanted


def trained(images: Any, labels: Any, *, batch: Any, epochs: Any, seed: Any = 0) -> Any:
    """What bract's own client uploads, and its images and labels in the order of first use."""
    spec = DataSpec((1, 16, 16), 10, (0.3,), (0.4,))
    network = initialise(
        create_model("lenet-strided", classes=10, channels=1, image_size=16), "default", 0
    )
    sent = parameters_of(network)
    config = TrainingConfig(algorithm="fedavg", batch_size=batch, lr=0.3, local_epochs=epochs)
    result = train_locally(
        network, images, labels, config=config, spec=spec, seed=seed, device=torch.device("cpu")
    )
    seen = Observation(
        round=1,
        client="client-0",
        parameters=sent,
        update=result.update,
        declaration=ClientDeclaration(
            model="lenet-strided",
            image_shape=spec.image_shape,
            classes=10,
            mean=spec.mean,
            std=spec.std,
            batch_size=min(batch, len(result.used)),
            num_examples=len(result.used),
            lr=0.3,
            local_steps=result.steps,
        ),
    )
    return seen, images[result.used], labels[result.used]


def residuals(seen: Any, images: Any, labels: Any, restarts: Any = 1) -> Any:
    """Relative distance to the capture at the truth, each restart."""
    case = open_case(seen, tier="oblivious", max_images=8, unroll=16)
    trials = [(case, restart) for restart in range(restarts)]
    problem = Problem.stack(trials, seed=0, device=torch.device("cpu"), dtype=torch.float64)
    rows = nn.functional.one_hot(labels, 10).double()
    made = problem.simulate(
        images.double().expand(restarts, *images.shape), rows.expand(restarts, *rows.shape), {}
    )
    return problem.distance(RelativeError(), made).sqrt().tolist()


@pytest.mark.parametrize(("count", "batch"), [(4, 2), (5, 2), (5, 4), (3, 5)])
def test_one_epoch_of_the_real_client_is_simulated_to_rounding(
    digits: Any, count: Any, batch: Any
) -> None:
    seen, images, labels = trained(digits[0][:count], digits[1][:count], batch=batch, epochs=1)
    assert residuals(seen, images, labels)[0] < 1e-5


@pytest.mark.parametrize(("count", "batch", "epochs"), [(4, 2, 2), (3, 2, 2), (2, 1, 3)])
@pytest.mark.parametrize("seed", [0, 1])
def test_some_restart_shuffles_later_epochs_as_the_real_client_did(
    digits: Any, count: Any, batch: Any, epochs: Any, seed: Any
) -> None:
    seen, images, labels = trained(
        digits[0][:count], digits[1][:count], batch=batch, epochs=epochs, seed=seed
    )
    # Names within the first batch are arbitrary, so every naming counts.
    namings = [
        list(p)
        for p in itertools.permutations(range(count))
        if all(i // batch == j // batch for i, j in enumerate(p))
    ]
    found = [residuals(seen, images[p], labels[p], restarts=8) for p in namings]
    best = min(min(row) for row in found)
    assert best < 1e-5
    assert max(max(row) for row in found) > 1e-3


def test_orders_that_differ_by_the_names_of_images_alone_are_tried_once() -> None:
    # Two of the four images meet again in the first batch of the second epoch: the first batch's
    # two, the second batch's two, or one of each.
    orders = [shuffle(4, 2, 4, choice) for choice in range(4)]
    assert [again for _, again in orders] == [0, 0, 0, 1]
    together = {frozenset(i // 2 for i in order[1][:2]) for order, _ in orders}
    assert together == {frozenset({0}), frozenset({1}), frozenset({0, 1})}
    assert orders[3][0] == orders[0][0]
    assert all(order[0] == (0, 1, 2, 3) for order, _ in orders)


def test_a_client_that_does_not_shuffle_is_among_the_first_two_restarts() -> None:
    unshuffled = tuple(range(6))
    assert (unshuffled, unshuffled) in [shuffle(6, 2, 6, choice)[0] for choice in range(2)]


@pytest.mark.parametrize("mu", [0.0, 2.0])
def test_labels_are_searched_in_the_order_of_the_later_epochs(mu: Any) -> None:
    # A last layer that sees the same features of every image is the recursion itself.
    training = LocalTraining(steps=4, batch_size=2, lr=0.4, proximal_mu=mu)
    labels, order = torch.tensor([3, 1, 0, 1]), ((0, 1, 2, 3), (0, 2, 3, 1))
    features = torch.linspace(-1, 1, 6, dtype=torch.float64)
    layer = nn.Linear(6, 4, dtype=torch.float64)
    before, logits = layer.bias.detach().clone(), layer(features).detach()
    received = [p.detach().clone() for p in layer.parameters()]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.4)
    for taken in ([0, 1], [2, 3], [0, 2], [3, 1]):
        optimizer.zero_grad()
        distance = sum(
            (p - r).square().sum() for p, r in zip(layer.parameters(), received, strict=True)
        )
        loss = nn.functional.cross_entropy(layer(features.expand(2, 6)), labels[taken])
        (loss + mu / 2 * distance).backward()
        optimizer.step()
    slope = (before - layer.bias.detach()) / (0.4 * 4)
    square = float(features.square().sum())
    recursion = LastLayer(logits, square, slope, training, order)
    found = label_sequences(layer=recursion, images=4, initial=torch.tensor([0, 1, 1, 3]))[0]
    assert float(recursion.distance(labels[None])[0]) < 1e-12

    def batches(of: Any) -> Any:
        return [sorted(of[training.positions(step, 4, order)].tolist()) for step in range(4)]

    assert batches(found) == batches(labels)


def test_restarts_take_another_order_first_and_other_labels_when_those_are_used_up(
    digits: Any,
) -> None:
    seen, _, _ = trained(digits[0][:4], digits[1][:4], batch=2, epochs=2)
    case = open_case(seen, tier="oblivious", max_images=8, unroll=16)
    assert isinstance(case.forward, LocalTraining)
    orders = [case.forward.order(4, choice) for choice in range(6)]
    assert [again for _, again in orders] == [0, 0, 0, 1, 1, 1]
    labels = [infer_labels(case, choice=choice).labels.tolist() for choice in (0, 3)]
    assert labels[0] != labels[1]


@pytest.mark.parametrize("defended", [False, True])
def test_weight_decay_of_a_single_step_is_simulated_or_taken_away(
    observe: Any, digits: Any, defended: bool
) -> None:
    """Undefended, the gradient is left; a defense took the sum, so that is what is simulated."""
    seen = observe(digits[0][:2], digits[1][:2], steps=1, lr=0.3, weight_decay=0.05)
    plain = observe(digits[0][:2], digits[1][:2], steps=1, lr=0.3)
    if defended:
        declaration = seen.declaration.updated({"defenses": ({"name": "pruning"},)})
        model = forward_model(declaration, images=2, unroll=4)
        seen = replace(seen, declaration=declaration)
        assert model == LocalTraining(steps=1, batch_size=2, lr=0.3, weight_decay=0.05)
    for name, value in seen.gradient().items():
        wanted = plain.gradient()[name]
        if defended:
            wanted = wanted + 0.05 * seen.parameters[name]
        assert torch.allclose(value, wanted, atol=1e-5), name


def test_frozen_parameters_that_are_sent_neither_move_nor_decay(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:4], digits[1][:4]
    declared = {"steps": 3, "batch_size": 2, "lr": 0.3, "weight_decay": 0.05}
    seen = observe(images, labels, model="lenet-strided", **declared)
    network = create_model("lenet-strided", classes=10, channels=1, image_size=16)
    network.load_state_dict(seen.parameters)
    trained = [p for n, p in network.named_parameters() if n.startswith("classifier")]
    optimizer = torch.optim.SGD(trained, lr=0.3, weight_decay=0.05)
    for step in range(3):
        taken = slice(step % 2 * 2, step % 2 * 2 + 2)
        optimizer.zero_grad()
        logits = network((images[taken] - 0.3) / 0.4)
        torch.nn.functional.cross_entropy(logits, labels[taken]).backward()
        optimizer.step()
    ends = dict(network.named_parameters())
    seen = replace(seen, update={n: v - ends[n].detach() for n, v in seen.parameters.items()})
    frozen = {name for name in seen.parameters if not name.startswith("classifier")}
    assert not any(seen.gradient()[name].any() for name in frozen)
    problem = stacked([seen])
    assert isinstance(problem.forward, LocalTraining) and set(problem.forward.frozen) == frozen
    assert set(problem.target) == set(seen.parameters) - frozen
    made = simulate(problem, images[None], labels[None])
    for name, wanted in seen.gradient().items():
        assert torch.allclose(made[name][0], wanted, atol=1e-5), name
    still = replace(seen, update={n: torch.zeros_like(v) for n, v in seen.update.items()})
    with refused("attack-evidence", "coordinate"):
        stacked([still])


def test_an_update_that_is_no_finite_gradient_is_refused_by_what_is_declared(
    observe: Any, digits: Any
) -> None:
    seen = observe(digits[0][:2], digits[1][:2], steps=2, lr=0.3)
    seen = replace(seen, declaration=seen.declaration.updated({"lr": 1e-300}))
    with refused("declaration-wrong", "client-0", "1e-300"):
        stacked([seen])


def test_how_often_the_sent_weights_are_in_an_update_worked_by_hand() -> None:
    """Momentum 0.5, three steps, 0.1: the velocities hold it 0.1, 0.15 and 0.175 times."""
    declared = ClientDeclaration(lr=0.3, local_steps=3, momentum=0.5, weight_decay=0.1)
    assert StepLaw.of(declared).decayed == pytest.approx((0.1 + 0.15 + 0.175) / 3)
    assert StepLaw.of(declared.updated({"optimizer": "adam"})).decayed == 0.0
    assert StepLaw.of(declared.updated({"algorithm": "fedsgd"})).decayed == 0.0


def test_a_single_step_is_matched_as_a_gradient_with_the_right_sign(
    observe: Any, digits: Any
) -> None:
    seen = observe(digits[0][:2], digits[1][:2], steps=1, lr=0.3)
    problem = stacked([seen])
    assert problem.forward == BatchGradient()
    made = simulate(problem, digits[0][None, :2], digits[1][None, :2])
    for name, wanted in seen.gradient().items():
        assert torch.allclose(made[name][0], wanted, atol=1e-5), name


@pytest.mark.parametrize(
    ("declared", "wanted"),
    [
        ({"algorithm": "fedsgd", "batch_size": 4, "num_examples": 100}, 4),
        ({"algorithm": "fedsgd", "batch_size": 4, "num_examples": 3}, 3),
        ({"batch_size": 4, "local_steps": 3, "num_examples": 100}, 12),
        ({"batch_size": 4, "local_steps": 3, "num_examples": 6}, 6),
        ({"num_examples": 100}, 50),
    ],
)
def test_the_number_of_images_follows_from_the_protocol(declared: Any, wanted: Any) -> None:
    assert images_in(ClientDeclaration(**declared), 50) == wanted


def test_undeclared_sizes_are_refused() -> None:
    with refused("declaration-lacks", "batch_size"):
        images_in(ClientDeclaration(), 8)


def test_long_training_and_other_optimizers_are_matched_by_their_mean_direction() -> None:
    sgd = ClientDeclaration(local_steps=4, lr=0.1, batch_size=2)
    assert forward_model(sgd, images=8, unroll=4) == LocalTraining(steps=4, batch_size=2, lr=0.1)
    assert forward_model(sgd, images=8, unroll=3) == BatchGradient()
    adagrad = sgd.updated({"optimizer": "adagrad"})
    assert forward_model(adagrad, images=8, unroll=4) == BatchGradient()


def test_a_single_step_of_adam_is_no_gradient() -> None:
    adam = ClientDeclaration(local_steps=1, lr=0.1, batch_size=2, optimizer="adam")
    wanted = LocalTraining(steps=1, batch_size=2, lr=0.1, optimizer="adam")
    assert forward_model(adam, images=8, unroll=4) == wanted
