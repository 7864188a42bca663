"""Invariants of an upload without truth: planted faults fail, what arithmetic leaves does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from encrypted_runs import tied
from observing import Made, observed, own_loop, sgd
from pack import uploads
from torch.nn import functional as F

from bract import Observation
from bract.attacks.task import AttackTask
from bract.audit.description.check import check_upload
from bract.audit.description.label_counts import label_counts


def failing_invariants(seen: Observation, earlier: Sequence[Observation] = ()) -> list[str]:
    return check_upload(seen, None, AttackTask(), earlier=earlier).failing


def test_no_upload_of_the_pack_fails() -> None:
    assert [(one.name, found) for one in uploads() if (found := failing_invariants(one.seen))] == []


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("clip", [None, 10.0])
def test_clipping_momentum_smoothing_and_bfloat16_fail_nothing(
    half: bool, clip: float | None
) -> None:
    seen, _, _ = own_loop(
        sgd(momentum=0.9),
        loss=lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1),
        clip=clip,
        half=half,
    )
    described = replace(seen.declaration, momentum=0.9)
    assert failing_invariants(replace(seen, declaration=described)) == []


OTHERS: dict[str, Made] = {
    "rate": own_loop(sgd(0.2), batch=4),
    "momentum": own_loop(sgd(momentum=0.9), batch=2),
    "clipped": own_loop(sgd(), batch=4, clip=0.1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_counts_of_classes_that_are_no_whole_numbers_fail_in_a_fresh_model(name: str) -> None:
    seen, _, _ = OTHERS[name]
    assert any("classifier.1.bias" in reason for reason in failing_invariants(seen))


def test_the_opposite_sign_fails_in_a_fresh_model_alone() -> None:
    seen, _, _ = own_loop(sgd(), batch=4)
    turned = replace(seen, update={name: -value for name, value in seen.update.items()})
    assert failing_invariants(seen) == []
    assert failing_invariants(turned)
    learnt = {name: 3.0 * value for name, value in turned.parameters.items()}
    assert failing_invariants(replace(turned, parameters=learnt)) == []


@pytest.mark.parametrize(("rate", "batch"), [(0.1, 8), (0.03, 8), (0.1, 4), (0.05, 2)])
def test_counts_of_classes_give_the_labels_and_the_learning_rate(rate: float, batch: int) -> None:
    seen, _, labels = own_loop(sgd(rate), lr=rate, batch=batch)
    found = label_counts(seen)
    assert found is not None and found.is_whole(rate)
    counts = found.examples * (found.probabilities - found.moved / rate)
    assert torch.equal(counts.round().long(), torch.bincount(labels, minlength=10))
    assert found.fitting_rate(rate / 16, rate * 16) == pytest.approx(rate, rel=0.05)


def test_noise_on_the_update_fails() -> None:
    seen, _, _ = own_loop(sgd())
    generator = torch.Generator().manual_seed(0)
    noisy = {
        n: v + v.square().mean().sqrt() * torch.randn(v.shape, generator=generator)
        for n, v in seen.update.items()
    }
    reasons = failing_invariants(replace(seen, update=noisy))
    assert any(reason.startswith("classifier.1.bias") for reason in reasons)


def test_a_summed_loss_and_weights_in_the_place_of_an_update_fail() -> None:
    seen, _, _ = own_loop(
        sgd(), loss=lambda o, y: 8 * F.cross_entropy(o, y, reduction="sum"), batch=8
    )
    assert failing_invariants(seen)
    assert failing_invariants(replace(seen, update=dict(seen.parameters)))


def test_one_step_of_adam_is_told_from_one_of_sgd_both_ways() -> None:
    def adam(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.001)  # type: ignore[arg-type]

    seen, _, _ = own_loop(adam, batch=8)
    assert any("Adam" in reason for reason in failing_invariants(seen))
    right = replace(seen.declaration, optimizer="adam", lr=0.001)
    assert failing_invariants(replace(seen, declaration=right)) == []
    plain, _, _ = own_loop(sgd(0.01), batch=8)
    wrong = replace(plain.declaration, optimizer="adam", lr=1.0)
    assert any("adam" in reason for reason in failing_invariants(replace(plain, declaration=wrong)))


def test_an_update_that_was_sent_before_from_another_model_fails() -> None:
    seen, _, _ = own_loop(sgd())
    moved = {name: value + 0.1 for name, value in seen.parameters.items()}
    again = replace(seen, round=2, parameters=moved)
    assert any("round 1" in reason for reason in failing_invariants(again, [seen]))
    assert failing_invariants(replace(seen, round=2), [seen]) == []


def test_a_defended_upload_is_held_to_none() -> None:
    seen, _, _ = own_loop(sgd())
    declared = replace(seen.declaration, defenses=({"name": "noise", "std": 1.0},))
    defended = replace(seen, declaration=declared, update=dict(seen.parameters))
    assert failing_invariants(defended) == []


def noisy(seen: Observation, share: float) -> Observation:
    """Add normal noise of a share of the update's root mean square to every coordinate."""
    whole = torch.cat([v.flatten() for v in seen.update.values()])
    size = share * float(whole.square().mean().sqrt())
    generator = torch.Generator().manual_seed(1)
    update = {
        n: v + size * torch.randn(v.shape, generator=generator) for n, v in seen.update.items()
    }
    return replace(seen, update=update)


@pytest.mark.parametrize("share", [0.03, 0.3, 5.0])
def test_noise_is_measured_to_a_fifth_without_truth(share: float) -> None:
    seen, _, _ = own_loop(sgd(), batch=8)
    whole = torch.cat([v.flatten() for v in seen.update.values()])
    size = share * float(whole.square().mean().sqrt())
    found = check_upload(noisy(seen, share), None, AttackTask())
    assert found.noise == pytest.approx(size, rel=0.2)
    assert bool(found.failing) == (share > 0.1)
    assert check_upload(seen, None, AttackTask()).noise is None


def test_weight_decay_is_no_noise() -> None:
    seen, _, _ = own_loop(sgd(weight_decay=0.5), batch=8)
    found = check_upload(seen, None, AttackTask())
    assert found.noise is None
    assert found.failing


def test_a_pruned_upload_fails_and_dead_units_do_not() -> None:
    seen, _, _ = own_loop(sgd(), batch=8)
    whole = torch.cat([v.flatten().abs() for v in seen.update.values()])
    least = whole.quantile(0.7)
    pruned = {n: v * (v.abs() > least) for n, v in seen.update.items()}
    assert failing_invariants(replace(seen, update=pruned))
    dead = {
        n: v * (torch.arange(len(v)) % 2).view(-1, *[1] * (v.dim() - 1))
        for n, v in seen.update.items()
    }
    last = {n: v for n, v in seen.update.items() if n.startswith("classifier")}
    assert failing_invariants(replace(seen, update=dead | last)) == []


def test_a_matrix_of_two_layers_has_the_rank_of_both() -> None:
    """A tied matrix has the gradients of two layers, of as many examples each."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(2, 1, 8, 8, generator=generator)
    labels = torch.tensor([3, 5])
    name = "encrypted_runs:tied"
    seen = observed(images, labels, model=tied(), name=name)
    seen = replace(seen, declaration=seen.declaration.trusting({name}))
    assert "3.weight" not in seen.update
    assert failing_invariants(seen) == []
