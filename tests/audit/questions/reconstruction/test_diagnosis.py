"""Signals with known answers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bract import Observation
from bract.attacks import IG, Budget, Case, Engine, Known, Outcome, Problem, Reconstruction, Run
from bract.attacks.problem.case import open_case
from bract.attacks.problem.joint_case import join_rounds
from bract.attacks.problem.target_model import TargetModel
from bract.audit.questions.reconstruction.diagnosis import dead_units, signals
from bract.models.frozen import with_frozen_backbone
from bract.schema import ClientDeclaration


def found_exactly(
    case: Case, images: Any, labels: Any, curve: Any = (), *, restart: int = 0
) -> Reconstruction:
    """What an attack that found exactly these images hands back, matched by the engine."""

    def solve(problem: Problem, run: Run) -> Outcome:
        del run
        return Outcome(
            images=images[None],
            labels=nn.functional.one_hot(labels, problem.classes).float()[None],
            losses=torch.zeros(1),
            unknowns={},
            curves=[list(curve)],
            iterations=1,
        )

    ((trial,),) = Engine().run(
        solve,
        [case],
        budget=Budget(chosen_restarts=(restart,)),
        default_iterations=1,
        seed=0,
        identity="given",
    )
    return Reconstruction(
        attack="ig",
        observation=case.observation.key,
        tier="oblivious",
        seed=0,
        trials=(replace(trial, unroll=case.unroll),),
    )


def measure(
    observation: Any,
    images: Any,
    labels: Any,
    curve: Any = (),
    *,
    max_images: Any = 8,
    unroll: Any = 16,
    history: Any = (),
) -> Any:
    case = open_case(
        observation, tier="oblivious", max_images=max_images, known=Known(history=history)
    )
    found = found_exactly(case.simulating(unroll=unroll), images, labels, curve)
    return signals(case, found).to_dict()


def test_the_true_images_match_every_layer_at_scale_one(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:2], digits[1][:2]
    found = measure(observe(images, labels), images, labels)
    assert found["scale"] == pytest.approx(1.0, abs=1e-4)
    assert all(layer["cosine"] > 1 - 1e-5 for layer in found["layers"].values())
    assert max(layer["size"] for layer in found["layers"].values()) == 1.0
    assert found["images"] == {"declared": 2, "searched": 2}
    assert found["steps"] == {"declared": 1, "simulated": 1}
    assert found["unbalanced"] < 1e-5


def test_a_wrong_learning_rate_shows_as_scale(observe: Any, digits: Any) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    right = observe(images, labels, steps=1, lr=0.5)
    wrong = replace(right, declaration=replace(right.declaration, lr=0.1))
    assert measure(wrong, images, labels)["scale"] == pytest.approx(5.0, rel=1e-3)


def test_one_example_has_one_negative_class_and_the_wrong_sign_has_nine(
    observe: Any, digits: Any
) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    right = observe(images, labels)
    assert measure(right, images, labels)["negative"] == 1
    turned = replace(right, update={n: -v for n, v in right.update.items()})
    assert measure(turned, images, labels)["negative"] == 9


def test_more_images_and_steps_than_the_attack_handles_are_counted(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:6], tiny[1][:6]
    long = observe(images, labels, steps=6, batch_size=1, lr=0.1)
    found = measure(long, images[:2], labels[:2], max_images=2, unroll=3)
    assert found["images"] == {"declared": 6, "searched": 2}
    assert found["steps"] == {"declared": 6, "simulated": 1}
    unrolled = measure(long, images, labels, unroll=6)
    assert unrolled["steps"] == {"declared": 6, "simulated": 6}


def test_the_probability_of_wrong_classes_is_read_from_the_last_bias(
    observe: Any, tiny: Any
) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    observation = observe(images, labels)
    bias = observation.update["classifier.bias" if "classifier.bias" in observation.update else
                              list(observation.update)[-1]]  # fmt: skip
    found = measure(observation, images, labels)
    # The gradient is p - y, so the positive part is 1 - p of the true class.
    assert found["unsure"] == pytest.approx(-float(bias[labels[0]]), rel=1e-5)


def test_how_much_the_gradient_shrank_since_the_first_round(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    now = observe(images, labels)
    first = replace(now, update={n: 4.0 * v for n, v in now.update.items()})
    found = measure(now, images, labels, history=[first])
    assert found["norm_ratio"] == pytest.approx(0.25)
    assert measure(now, images, labels)["norm_ratio"] is None


def test_a_loss_that_still_falls_at_the_end_is_seen(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    observation = observe(images, labels)
    falling = [(i, 0.9**i) for i in range(20)]
    # Two of twenty points back it was 1 / 0.81 times as high.
    assert measure(observation, images, labels, falling)["falling"] == pytest.approx(0.19)
    flat = [(i, 1.0) for i in range(20)]
    assert measure(observation, images, labels, flat)["falling"] == 0.0
    assert measure(observation, images, labels, flat[:5])["falling"] is None


def sent(model: nn.Module, declaration: ClientDeclaration) -> tuple[TargetModel, Observation]:
    """A model, and a capture of its parameters."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    return TargetModel(model, declaration), Observation(1, "a", parameters, {}, declaration)


def test_dead_rectifiers_and_saturated_sigmoids_are_counted_by_hand() -> None:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([-1.0, 1.0, 1.0, 9.0]))
    image = torch.rand(2, 1, 2, 2)

    def share(activation: Any) -> Any:
        model = nn.Sequential(nn.Flatten(), layer, activation)
        return dead_units(*sent(model, ClientDeclaration(classes=4)), image)

    assert share(nn.ReLU()) == 0.25
    assert share(nn.Sigmoid()) == 0.25  # of 9: 0.9999 * 0.0001 is below a hundredth
    assert share(nn.Tanh()) is None


def test_a_channel_that_shows_anything_anywhere_is_alive() -> None:
    conv = nn.Conv2d(1, 2, 1)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))
        assert conv.bias is not None
        conv.bias.copy_(torch.tensor([-0.9, 0.0]))
    image = torch.zeros(1, 1, 2, 2)
    image[0, 0, 0, 0] = 1.0
    model = nn.Sequential(conv, nn.ReLU())
    assert dead_units(*sent(model, ClientDeclaration()), image) == 0.5


def test_units_behind_frozen_layers_are_counted_after_an_attack_in_float64() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
    with_frozen_backbone(model, ["2"])
    target_model, seen = sent(model, ClientDeclaration(classes=4))
    before = dead_units(target_model, seen, image := torch.rand(2, 1, 2, 2))
    target_model.model.double()
    assert dead_units(target_model, seen, image) == before


def test_an_optimizer_that_is_not_simulated_is_named(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:2], tiny[1][:2]
    trained = observe(images, labels, steps=2, batch_size=1, lr=0.1)
    assert measure(trained, images, labels)["optimizer"] is None
    adam = replace(trained, declaration=replace(trained.declaration, optimizer="adagrad"))
    assert measure(adam, images, labels)["optimizer"] == "adagrad"
    gradient = observe(images, labels, optimizer="adagrad")
    assert measure(gradient, images, labels)["optimizer"] is None


def test_an_attack_s_own_result_can_be_measured(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    observation = observe(images, labels)
    result = IG()(observation, budget=Budget(iterations=30))
    found = signals(open_case(observation, tier="oblivious", max_images=8), result).to_dict()
    assert found["scale"] > 0.0
    assert found["falling"] is not None
    assert found["dead"] is not None


def test_the_match_is_that_of_the_chosen_restarts_order_of_later_epochs(
    observe: Any, digits: Any
) -> None:
    images, labels = digits[0][:4], digits[1][:4]
    seen = observe(images, labels, steps=4, batch_size=2, lr=0.5)
    case = open_case(seen, tier="oblivious", max_images=8)
    matches = []
    for restart in (0, 1):
        found = signals(case, found_exactly(case, images, labels, restart=restart))
        matches.append(min(layer.cosine or 0.0 for layer in found.layers.values()))
    # One of the first two restarts takes the images of later epochs in the order of the first.
    assert max(matches) > 1 - 1e-5
    assert min(matches) < 1 - 1e-4


def test_of_several_rounds_the_match_is_that_of_the_last(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:1], tiny[1][:1]
    first = observe(images, labels)
    longer = replace(first, round=2, update={n: 2.0 * v for n, v in first.update.items()})
    cases = [open_case(seen, tier="oblivious", max_images=8) for seen in (first, longer)]
    joint = join_rounds(cases)
    found = signals(joint.rounds[-1], found_exactly(joint, images, labels))
    assert found.scale == pytest.approx(2.0, rel=1e-5)
    assert set(found.layers) == set(first.update)
    assert all(layer.cosine == pytest.approx(1.0) for layer in found.layers.values())
