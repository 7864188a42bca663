import pytest
import torch
from torch import nn

from bract.attacks.problem import Problem, open_case
from bract.attacks.simulation import BatchGradient, LocalTraining, forward_model, images_in
from bract.errors import BractError
from bract.observation import Protocol


def stacked(observations, images=8):
    cases = [open_case(o, tier="oblivious", max_images=images, unroll=16) for o in observations]
    return Problem.stack([(case, 0) for case in cases], seed=0, device=torch.device("cpu"))


def simulate(problem, images, labels):
    rows = nn.functional.one_hot(labels, 10).float()
    return problem.simulate(images, rows, problem.unknowns())


@pytest.mark.parametrize("model", ["lenet", "lenet-strided"])
def test_the_true_images_give_the_captured_gradient_in_every_lane(observe, digits, model):
    images, labels = digits[0][:6].view(3, 2, 1, 16, 16), digits[1][:6].view(3, 2)
    seen = [observe(images[i], labels[i], model=model, client=f"c{i}") for i in range(3)]
    problem = stacked(seen)
    made = simulate(problem, images, labels)
    for i, observation in enumerate(seen):
        for name, wanted in observation.gradient().items():
            assert torch.allclose(made[name][i], wanted, atol=1e-6), name


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_unrolled_steps_equal_real_local_training(observe, digits, momentum):
    images, labels = digits[0][:4], digits[1][:4]
    seen = observe(images, labels, steps=3, batch_size=2, lr=0.3, momentum=momentum)
    problem = stacked([seen])
    assert problem.forward == LocalTraining(steps=3, batch_size=2, lr=0.3, momentum=momentum)
    made = simulate(problem, images[None], labels[None])
    for name, wanted in seen.gradient().items():
        assert torch.allclose(made[name][0], wanted, atol=1e-5), name


def test_a_single_step_is_matched_as_a_gradient_with_the_right_sign(observe, digits):
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
def test_the_number_of_images_follows_from_the_protocol(declared, wanted):
    assert images_in(Protocol(**declared), 50) == wanted


def test_undeclared_sizes_are_refused():
    with pytest.raises(BractError, match="batch_size"):
        images_in(Protocol(), 8)


def test_long_training_and_other_optimizers_are_matched_by_their_mean_direction():
    sgd = Protocol(local_steps=4, lr=0.1, batch_size=2)
    assert forward_model(sgd, images=8, unroll=4) == LocalTraining(steps=4, batch_size=2, lr=0.1)
    assert forward_model(sgd, images=8, unroll=3) == BatchGradient()
    adam = sgd.updated({"optimizer": "adam"})
    assert forward_model(adam, images=8, unroll=4) == BatchGradient()
