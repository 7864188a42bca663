"""Scores against shadow models, and their training, against slow references."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import norm

from bract.attacks import membership
from bract.models import create_model, losses

COUNT, SHADOWS = 40, 12


def view(signal: float = 0.0) -> membership.ModelView:
    """Random outputs; a model is surer of the label of what it saw, by ``signal``."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(5, (COUNT,), generator=generator)
    inside = membership.parts(COUNT, SHADOWS + 1, share=0.5, seed=2)
    outputs = torch.randn(SHADOWS + 1, COUNT, 5, generator=generator)
    outputs += signal * inside[:, :, None] * torch.nn.functional.one_hot(labels, 5)
    none = torch.empty(0)
    return membership.ModelView(
        kind="cross_entropy",
        labels=labels,
        local=outputs[0],
        references=none,
        population=none,
        population_references=none,
        population_labels=none.long(),
        shadows=outputs[1:],
        inside=inside[1:],
    )


def attacker(name: str) -> membership.ModelAttacker:
    found = membership.MEMBERSHIP[name]()
    assert isinstance(found, membership.ModelAttacker)
    return found


def probability(outputs: torch.Tensor, label: int) -> float:
    return float(outputs.double().softmax(-1)[label])


def confidence(outputs: torch.Tensor, label: int) -> float:
    p = probability(outputs, label)
    return math.log(p / (1.0 - p))


def split(seen: membership.ModelView, candidate: int, of: Any) -> tuple[list[float], list[float]]:
    label = int(seen.labels[candidate])
    found: tuple[list[float], list[float]] = ([], [])
    for model in range(SHADOWS):
        value = of(seen.shadows[model, candidate], label)
        found[0 if seen.inside[model, candidate] else 1].append(value)
    return found


def test_lira_is_the_ratio_of_two_normal_densities_with_one_variance_each() -> None:
    seen = view()
    each = [split(seen, i, confidence) for i in range(COUNT)]

    def spread(side: int) -> float:
        squared = sum((v - sum(g[side]) / len(g[side])) ** 2 for g in each for v in g[side])
        return math.sqrt(squared / (sum(len(g[side]) for g in each) - COUNT))

    expected = []
    for i, group in enumerate(each):
        own = confidence(seen.local[i], int(seen.labels[i]))
        logs = [
            norm.logpdf(own, sum(group[side]) / len(group[side]), spread(side)) for side in (0, 1)
        ]
        expected.append(logs[0] - logs[1])
    assert attacker("lira-shadow").score(seen).tolist() == pytest.approx(expected)


def test_rmia_divides_by_the_mean_of_models_with_and_without_the_record() -> None:
    seen = view()
    expected = []
    for i in range(COUNT):
        inside, outside = split(seen, i, probability)
        whole = (sum(inside) / len(inside) + sum(outside) / len(outside)) / 2
        expected.append(math.log(probability(seen.local[i], int(seen.labels[i])) / whole))
    assert attacker("rmia-shadow").score(seen).tolist() == pytest.approx(expected)


def test_calibration_takes_off_the_mean_of_models_without_the_record() -> None:
    seen = view()
    expected = []
    for i in range(COUNT):
        _, outside = split(seen, i, confidence)
        own = confidence(seen.local[i], int(seen.labels[i]))
        expected.append(own - sum(outside) / len(outside))
    assert attacker("calibrated-shadow").score(seen).tolist() == pytest.approx(expected)


def test_the_stack_finds_members_by_shadow_models_alone() -> None:
    seen = view(signal=10.0)
    members = membership.parts(COUNT, SHADOWS + 1, share=0.5, seed=2)[0]
    scores = attacker("stacked").score(seen)
    assert float(scores[members].min()) > float(scores[~members].max())
    fewer = replace(seen, shadows=seen.shadows[:4], inside=seen.inside[:4])
    assert attacker("stacked").lacks(fewer) and not attacker("rmia-shadow").lacks(fewer)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_every_candidate_is_in_as_many_shadow_models_as_any_other(share: float) -> None:
    inside = membership.parts(30, 16, share=share, seed=0)
    assert {int(n) for n in inside.sum(1)} == {round(30 * min(0.75, max(0.25, share)))}
    times = inside.sum(0)
    assert int(times.max() - times.min()) <= 1 and 4 <= int(times.min()) <= int(times.max()) <= 12
    assert not torch.equal(inside, membership.parts(30, 16, share=share, seed=1))


def test_a_shadow_trains_as_the_federation_does(tiny: Any) -> None:
    images, labels = tiny[0][:9], tiny[1][:9]
    model = create_model("lenet-strided", classes=10, channels=1, image_size=8, activation="relu")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    training = membership.Training(
        losses.loss_of("cross_entropy"), 0.1, 0.0, "sgd", batch=8, steps=1, examples=4
    )
    sites = [torch.arange(6), torch.arange(6, 9), torch.arange(0)]
    found = membership.train_shadow(model, start, images, labels, sites, training, rounds=2, seed=0)
    state = dict(start)
    for _ in range(2):
        moved = []
        for site, steps in ((sites[0], 2), (sites[1], 1)):  # one step for each four records
            own = create_model(
                "lenet-strided", classes=10, channels=1, image_size=8, activation="relu"
            )
            own.load_state_dict(state)
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            for _ in range(steps):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(own(images[site]), labels[site]).backward()
                optimizer.step()
            moved.append({n: v.detach().clone() for n, v in own.state_dict().items()})
        state = {n: (6 * moved[0][n] + 3 * moved[1][n]) / 9 for n in state}
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)
