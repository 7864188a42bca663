"""What returned buffers tell of several local steps, by hand and against a loop that trains."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from observing import one_step, returning
from torch import nn
from torch.nn import functional as F

from bract import Observation
from bract.attacks import IG, Budget, Problem, Reconstruction
from bract.attacks.methods.statistics import Statistics
from bract.attacks.problem.case import open_case
from bract.attacks.problem.over_rounds import OverRounds
from bract.attacks.problem.returned_buffers import observed_share
from bract.attacks.solve.local_statistics import (
    LocalStatistics,
    local_statistics,
    simulated_statistics,
    step_weights,
)
from bract.attacks.solve.own_statistics import OwnStatistics
from bract.attacks.solve.regularizers import BatchNormStatistics, known_statistics
from bract.models import MODELS, create_model
from bract_papers.gradinversion.gradinversion import GradInversion


class NormFirst(nn.Module):
    """A model whose first layer normalises the images themselves."""

    def __init__(
        self, classes: int, channels: int, image_size: int, activation: str = "sigmoid"
    ) -> None:
        super().__init__()
        del activation
        self.norm = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels * image_size**2, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.norm(images).flatten(1))
        return logits


def client(
    model: Any,
    name: str,
    images: Any,
    labels: Any,
    *,
    steps: int,
    batch: int,
    activation: str = "relu",
    **settings: Any,
) -> Observation:
    """A client that trains in order, epoch after epoch alike, and what it sends."""
    model.train()
    settings |= {"batch_size": batch, "activation": activation}
    return returning(model, name, images, labels, steps=steps, **settings)


def problem_of(*seen: Any) -> Any:
    cases = [open_case(one, tier="oblivious", max_images=8) for one in seen]
    return Problem.stack([(case, 0) for case in cases], seed=0, device=torch.device("cpu"))


def test_two_steps_weigh_nine_to_ten() -> None:
    # m = 0.1: r_2 = 0.81 r_0 + 0.09 s_0 + 0.1 s_1, and 0.09 + 0.1 = 0.19 = 1 - 0.81.
    assert observed_share(0.1, 2) == pytest.approx(0.19)
    assert step_weights(0.1, 2) == pytest.approx((0.09 / 0.19, 0.1 / 0.19))
    assert step_weights(1.0, 3) == (0.0, 0.0, 1.0)
    assert step_weights(0.1, 1) == pytest.approx((1.0,))
    assert sum(step_weights(0.03, 400)) == pytest.approx(1.0)


def test_buffers_tell_the_weighted_mean_of_the_steps(
    digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS._entries, "test-norm-first-steps", NormFirst)
    images, labels = digits[0][:2], digits[1][:2]
    torch.manual_seed(0)
    network = NormFirst(classes=10, channels=1, image_size=16)
    name = "test-norm-first-steps"
    seen = client(network, name, images, labels, steps=2, batch=1, activation="sigmoid")
    case = open_case(seen, tier="oblivious", max_images=2)
    known = local_statistics(seen, case.target_model)
    assert known is not None and known.steps == 2
    # What enters the layer are the images, whatever the steps did to the weights.
    means = [float(image.mean()) for image in images]
    variances = [float(image.var()) for image in images]
    for found, (first, second) in zip(known.layers["norm"], (means, variances), strict=True):
        assert float(found) == pytest.approx((9 * first + 10 * second) / 19, rel=1e-4)
    seen_by = simulated_statistics(problem_of(seen), images[None], [known])["norm"]
    assert torch.allclose(torch.cat(seen_by), torch.stack(known.layers["norm"]), rtol=1e-4)
    # The other order weighs otherwise.
    assert BatchNormStatistics(weight=1.0)(problem_of(seen), images[None]) < 1e-6
    assert BatchNormStatistics(weight=1.0)(problem_of(seen), images[None].flip(1)) > 1e-5


@pytest.mark.parametrize(
    ("count", "steps", "batch", "momentum"), [(1, 3, 1, 0.0), (2, 2, 1, 0.0), (3, 2, 2, 0.9)]
)
def test_unrolled_steps_meet_the_statistics_to_rounding(
    digits: Any, count: int, steps: int, batch: int, momentum: float
) -> None:
    images, labels = digits[0][:count], digits[1][:count]
    torch.manual_seed(0)
    name = "lenet-strided-bn"
    network = create_model(name, classes=10, channels=1, image_size=16, activation="relu")
    seen = client(network, name, images, labels, steps=steps, batch=batch, momentum=momentum)
    problem = problem_of(seen)
    own = OwnStatistics.of(problem)
    assert own is not None and own.known[0].steps == steps
    rows = F.one_hot(labels, 10).float()[None]
    assert float(own.error(problem, images[None], rows)) < 1e-5
    # Without labels the way is a line, which is right to first order.
    assert float(own.error(problem, images[None])) > 1e-5


def test_the_line_is_the_better_the_smaller_the_steps(digits: Any) -> None:
    name = "lenet-strided-bn"
    other: dict[str, Any] = {"activation": "sigmoid"}
    errors = []
    for lr in (0.02, 0.01):
        torch.manual_seed(0)
        network = create_model(name, classes=10, channels=1, image_size=16, activation="sigmoid")
        seen = client(network, name, digits[0][:1], digits[1][:1], steps=3, batch=1, lr=lr, **other)
        problem = problem_of(seen)
        own = OwnStatistics.of(problem)
        assert own is not None
        errors.append(float(own.error(problem, digits[0][None, :1])))
    # Half the rate, a quarter of what the way is off.
    assert errors[1] < errors[0] / 4


def test_long_training_is_held_at_the_mean_of_its_way(digits: Any) -> None:
    name = "lenet-strided-bn"
    torch.manual_seed(0)
    network = create_model(name, classes=10, channels=1, image_size=16, activation="relu")
    images, labels = digits[0][:4], digits[1][:4]
    seen = client(network, name, images, labels, steps=24, batch=2, lr=0.01)
    problem = problem_of(seen)
    own = OwnStatistics.of(problem)
    assert own is not None
    truth, other = (float(own.error(problem, x[None])) for x in (images, digits[0][4:8]))
    assert truth < other / 2


@pytest.mark.parametrize(
    "change",
    [
        {"returned_buffers": {}},
        {"declared": {"norm_mode": "eval"}},
        {"count": 0},
        {"count": -3},
        {"count": 10**15},
        {"one": 7},
        {"one": [2, 2]},
    ],
)
def test_what_does_not_tell_the_steps_tells_nothing(digits: Any, change: Any) -> None:
    seen = one_step(digits[0][:1], digits[1][:1], steps=2)
    returned = dict(seen.returned_buffers)
    names = [name for name in returned if name.endswith("num_batches_tracked")]
    for name in names:
        returned[name] = torch.tensor(change.get("count", int(returned[name])))
    if "one" in change:
        returned[names[0]] = torch.tensor(change["one"])
    declared = seen.declaration.updated(change.get("declared", {}))
    seen = replace(
        seen,
        returned_buffers=change.get("returned_buffers", returned),
        declaration=declared,
    )
    case = open_case(seen, tier="oblivious", max_images=1)
    assert local_statistics(seen, case.target_model) is None


def test_clients_of_other_numbers_of_steps_are_simulated_each_for_itself(digits: Any) -> None:
    images, labels = digits[0][:1], digits[1][:1]
    seen = [one_step(images, labels, steps=n) for n in (2, 3)]
    # Of another optimizer both are matched by one gradient, as one batch.
    seen = [replace(o, declaration=o.declaration.updated({"optimizer": "adam"})) for o in seen]
    problem = problem_of(*seen)
    own = OwnStatistics.of(problem)
    assert own is not None and [k.steps for k in own.known] == [2, 3]
    both = own.error(problem, images.expand(2, 1, 1, 16, 16))
    for i, one in enumerate(seen):
        alone = problem_of(one)
        single = OwnStatistics.of(alone)
        assert single is not None
        assert torch.allclose(single.error(alone, images[None]), both[i], rtol=1e-3)


def test_defended_updates_tell_no_way(digits: Any) -> None:
    seen = one_step(digits[0][:1], digits[1][:1], steps=2, activation="relu")
    plain = problem_of(seen)
    defended = replace(
        seen,
        declaration=replace(seen.declaration, defenses=({"name": "clipping", "bound": 1.0},)),
        update={n: torch.full_like(v, 1e3) for n, v in seen.update.items()},
    )
    own = OwnStatistics.of(plain)
    assert own is not None
    held = replace(plain, cases=tuple(replace(c, observation=defended) for c in plain.cases))
    found = simulated_statistics(held, digits[0][None, :1], own.known)
    assert all(bool(v.isfinite().all()) and float(v.max()) < 1e3 for p in found.values() for v in p)


def test_of_several_rounds_the_last_ones_images_count(digits: Any) -> None:
    seen = one_step(digits[0][2:4], digits[1][2:4])
    problem = problem_of(seen)
    own = OwnStatistics.of(problem)
    assert own is not None
    forward = OverRounds((problem.forward,) * 2, ((0, 1), (2, 3)))
    case = replace(problem.cases[0], forward=forward, images=4)
    joint = replace(problem, cases=(case,))
    assert float(own.error(joint, digits[0][None, :4])) < 1e-5
    assert float(own.error(joint, digits[0][None, [2, 3, 0, 1]])) > 1e-3


def test_statistics_of_several_steps_are_descended_on(digits: Any) -> None:
    seen = one_step(digits[0][:1], digits[1][:1], steps=2, activation="relu")
    start, found = (Statistics()(seen, budget=Budget(iterations=n)) for n in (4, 30))
    assert found.final_loss < start.final_loss / 3
    rows = F.one_hot(digits[1][:1], 10).float()[None]
    problem = problem_of(seen)
    own = OwnStatistics.of(problem)
    assert own is not None
    before, after = (float(own.error(problem, r.images[None], rows)) for r in (start, found))
    assert after < before / 2


def test_attacks_of_several_steps_use_what_is_told(digits: Any) -> None:
    seen = one_step(digits[0][:1], digits[1][:1], steps=2)
    for attack in (IG(bn=0.1), GradInversion()):
        found = attack(seen, budget=Budget(iterations=2))
        assert "batch statistics" in found.components


def test_the_weights_of_a_layer_follow_its_momentum() -> None:
    known = LocalStatistics({"a": (torch.ones(1), torch.ones(1))}, {"a": 0.5}, 2)
    # 0.25 and 0.5 of 0.75.
    assert known.weights("a") == pytest.approx((1 / 3, 2 / 3))


def with_declared(seen: Observation, kind: str, value: Any) -> Observation:
    """The same upload, whose last normalisation came back with other statistics."""
    name = [n for n in seen.returned_buffers if n.endswith(kind)][-1]
    own = seen.returned_buffers[name]
    other = value(own, seen.buffers[name])
    return replace(seen, returned_buffers=seen.returned_buffers | {name: other})


def first(value: float) -> Any:
    """Another value in the first channel."""

    def changed(own: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        other = own.clone()
        other[0] = value
        return other

    return changed


LIES: dict[str, tuple[str, Any, str]] = {
    "shape": ("running_var", lambda own, _: torch.ones(7), "returned as (7,)"),
    "variance below zero": ("running_var", first(-0.25), "running_var is -0.25"),
    # Sent 1 with a share of 0.9: a running variance of 0.5 takes one of -4 of the batch.
    "no batch has it": ("running_var", first(0.5), "gives a variance of -4"),
    "nan": ("running_mean", first(float("nan")), "running_mean holds NaN, infinite"),
    "infinite": ("running_var", first(float("inf")), "running_var holds NaN, infinite"),
    "overflow": ("running_mean", first(1e25), "running_mean holds NaN, infinite"),
    "overflow of the batch": ("running_mean", first(1.5e19), "gives overflowing values"),
    "count": ("num_batches_tracked", lambda own, _: own - 9, "fell from 0 to -8"),
    "count is none": ("num_batches_tracked", lambda own, _: own * float("nan"), "holds NaN"),
}


@pytest.mark.parametrize("lie", LIES)
def test_statistics_that_no_training_leaves_are_left_out_and_named(digits: Any, lie: str) -> None:
    kind, value, why = LIES[lie]
    honest = one_step(digits[0][:1], digits[1][:1])
    case = open_case(honest, tier="oblivious", max_images=1)
    assert "batch_statistics" not in case.evidence.notes
    assert local_statistics(honest, case.target_model) is not None
    assert known_statistics(honest, case.target_model)[1]
    seen = with_declared(honest, kind, value)
    case = open_case(seen, tier="oblivious", max_images=1)
    assert why in case.evidence.notes["batch_statistics"]
    assert local_statistics(seen, case.target_model) is None
    running, own = known_statistics(seen, case.target_model)
    assert not own
    for layer, (mean, variance) in running.items():
        assert torch.equal(mean, honest.buffers[f"{layer}.running_mean"])
        assert torch.equal(variance, honest.buffers[f"{layer}.running_var"])
    found = IG()(seen, budget=Budget(iterations=2), device="cpu")
    assert isinstance(found, Reconstruction) and found.images.isfinite().all()
    assert why in found.settings["evidence"]["batch_statistics"]


def test_rounding_of_a_channel_without_any_variance_is_believed(digits: Any) -> None:
    honest = one_step(digits[0][:1], digits[1][:1])
    seen = with_declared(honest, "running_var", lambda own, sent: 0.9 * sent - 1e-6)
    case = open_case(seen, tier="oblivious", max_images=1)
    assert "batch_statistics" not in case.evidence.notes
    assert local_statistics(seen, case.target_model) is not None


def test_without_normalisation_by_the_batch_nothing_is_read_or_disbelieved(digits: Any) -> None:
    seen = with_declared(one_step(digits[0][:1], digits[1][:1]), "running_var", first(-1.0))
    seen = replace(seen, declaration=seen.declaration.updated({"norm_mode": "eval"}))
    case = open_case(seen, tier="oblivious", max_images=1)
    assert "batch_statistics" not in case.evidence.notes
