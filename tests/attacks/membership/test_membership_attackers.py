"""Attackers' scores against their formulas, and models against slow references."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import refused
from scipy.stats import norm
from torch.nn import functional as F

from bract.attacks import membership
from bract.attacks.membership import (
    MEMBERSHIP,
    RoundView,
    Training,
    local_model,
    measuring,
    train_references,
)
from bract.attacks.membership.attackers import spread_of
from bract.attacks.membership.combined import combine
from bract.attacks.membership.measuring import (
    alignments,
    coefficients,
    gradients_on_the_way,
    logits_of,
)
from bract.attacks.membership.shares import apart, group_shares
from bract.attacks.membership.view import losses, scaled_confidence
from bract.models import create_model
from bract.models.losses import loss_of
from bract.updates.update import flatten


def view(others: int = 5, references: int = 4, shadows: int = 8) -> RoundView:
    generator = torch.Generator().manual_seed(0)

    def logits(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 10, generator=generator)

    count, population = 30, 12
    return RoundView(
        kind="cross_entropy",
        labels=torch.randint(10, (count,), generator=generator),
        sent=logits(count),
        local=logits(count),
        others=logits(others, count),
        alignment=torch.rand(count, generator=generator),
        others_alignment=torch.rand(others, count, generator=generator),
        coefficients=torch.rand(count, generator=generator),
        references=logits(references, count),
        population=logits(population),
        population_references=logits(references, population),
        population_labels=torch.randint(10, (population,), generator=generator),
        shadows=logits(shadows, count),
        inside=membership.parts(count, shadows, share=0.5, seed=0),
    )


@pytest.mark.parametrize("name", list(MEMBERSHIP))
def test_every_attacker_gives_each_candidate_a_finite_score(name: str) -> None:
    attacker = MEMBERSHIP[name]()
    assert attacker.lacks(view()) is None
    scores = attacker.score(view())
    assert scores.shape == (30,) and scores.dtype == torch.float64 and scores.isfinite().all()
    lacking = attacker.lacks(view(others=0, references=0, shadows=0))
    needs_shadows = isinstance(attacker, membership.ShadowAttacker)
    assert (lacking is not None) == (name[:4] in ("fedm", "lira", "rmia") or needs_shadows)


def test_confidence_is_the_logit_of_the_label_s_probability() -> None:
    logits, labels = torch.randn(2, 6, 10).double(), torch.arange(6)
    p = logits.softmax(-1)[:, torch.arange(6), labels]
    torch.testing.assert_close(scaled_confidence(logits, labels), (p / (1 - p)).log())
    torch.testing.assert_close(losses(logits, labels), -p.log())
    sure = torch.zeros(1, 3)
    sure[0, 0] = 300.0
    assert float(scaled_confidence(sure, torch.tensor([0]))) == pytest.approx(300 - 0.6931, 1e-4)


def test_fedmia_is_the_normal_distribution_function_of_the_other_clients() -> None:
    seen = view()
    own = -F.cross_entropy(seen.local.double(), seen.labels, reduction="none")
    null = torch.stack(
        [-F.cross_entropy(o.double(), seen.labels, reduction="none") for o in seen.others]
    )
    expected = norm.cdf(own.numpy(), null.mean(0).numpy(), null.std(0).numpy())
    torch.testing.assert_close(MEMBERSHIP["fedmia-loss"]().score(seen), torch.tensor(expected))


def test_rmia_counts_the_public_records_that_a_candidate_dominates() -> None:
    seen = view()
    a, gamma = 0.3, 1.0

    def ratio(target: torch.Tensor, references: torch.Tensor, label: int) -> float:
        out = float(references.double().softmax(-1)[:, label].mean())
        return float(target.double().softmax(-1)[label]) / (0.5 * ((1 + a) * out + 1 - a))

    expected = []
    for i, label in enumerate(seen.labels.tolist()):
        own = ratio(seen.local[i], seen.references[:, i], label)
        over = [
            own / ratio(seen.population[z], seen.population_references[:, z], other) > gamma
            for z, other in enumerate(seen.population_labels.tolist())
        ]
        expected.append(sum(over) / len(over))
    assert MEMBERSHIP["rmia"]().score(seen).tolist() == pytest.approx(expected)


def test_few_nulls_share_one_spread() -> None:
    null = torch.tensor([[0.0, 5.0], [2.0, 5.0]]).double()
    assert spread_of(null).tolist() == pytest.approx([1.0, 1.0])
    assert bool((spread_of(torch.zeros(5, 3)) > 0).all())


def test_the_local_model_is_what_the_client_trained(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:6], tiny[1][:6]
    seen = observe(images, labels, steps=3, lr=0.1)
    found = local_model(seen)
    for name, value in seen.parameters.items():
        torch.testing.assert_close(found.local[name], value - seen.update[name])
    gradient = observe(images, labels)
    gradient = replace(gradient, declaration=replace(gradient.declaration, lr=0.1))
    stepped = local_model(gradient)
    for name, value in gradient.parameters.items():
        torch.testing.assert_close(stepped.local[name], value - 0.1 * gradient.update[name])


def test_an_encrypted_upload_is_refused_by_name(observe: Any, tiny: Any) -> None:
    sealed = {"header": torch.zeros(4, dtype=torch.uint8)}
    seen = replace(observe(tiny[0][:2], tiny[1][:2]), update={}, ciphertexts=sealed)
    with refused("capture-encrypted"):
        local_model(seen)


def test_alignment_is_the_cosine_of_single_gradients(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:70], tiny[1][:70]
    seen = observe(images[:3], labels[:3])
    found = local_model(seen)
    inputs = found.target.normalise(images)
    fast = alignments(found, inputs, labels, [found.update])
    for position in (0, 2, 69):
        own = observe(images[position : position + 1], labels[position : position + 1]).update
        cosine = F.cosine_similarity(flatten(own), flatten(seen.update), dim=0)
        assert float(fast[0, position]) == pytest.approx(float(cosine), abs=1e-5)


def test_regression_gives_each_member_of_a_batch_its_share(observe: Any, tiny: Any) -> None:
    images, labels = tiny[0][:24], tiny[1][:24]
    found = local_model(observe(images[:8], labels[:8]))
    inputs = found.target.normalise(images)
    shares = coefficients(*gradients_on_the_way(found, inputs, labels, seed=0))
    assert float(shares[:8].min()) > float(shares[8:].max())


@pytest.mark.thorough
def test_references_train_on_public_records_alone(tiny: Any) -> None:
    model = create_model("lenet-strided", classes=10, channels=1, image_size=8, activation="relu")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    images, labels = tiny
    loss = loss_of("cross_entropy")
    training = Training(loss, 0.5, 0.0, "sgd", batch=20, steps=300, examples=200)
    states = list(train_references(model, start, images, labels, training, count=2, seed=0))
    assert len(states) == 2
    for name, value in model.state_dict().items():
        assert torch.equal(value, start[name])
    losses = [
        float(F.cross_entropy(logits_of(model, state, tiny[0]), tiny[1]))
        for state in (start, *states)
    ]
    assert max(losses[1:]) < losses[0]
    again = list(train_references(model, start, images, labels, training, count=2, seed=0))
    assert all(torch.equal(a[n], b[n]) for a, b in zip(states, again, strict=True) for n in a)


def test_a_combination_never_fits_the_client_that_it_scores() -> None:
    generator = torch.Generator().manual_seed(1)
    members = {c: (torch.arange(60) < 30).numpy() for c in "abc"}
    scores = {
        c: {
            "good": (torch.randn(60, generator=generator) + 2.0 * torch.tensor(members[c])).numpy(),
            "noise": torch.randn(60, generator=generator).numpy(),
        }
        for c in "abc"
    }
    found = combine(scores, members)
    assert found["a"][members["a"]].mean() > found["a"][~members["a"]].mean()
    turned = combine(scores, members | {"a": ~members["a"]})
    assert turned["a"].tolist() == found["a"].tolist()
    assert combine({"a": scores["a"]}, members) == {}


def test_shares_of_an_update_that_is_a_mixture_of_groups_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 300, generator=generator).double()
    groups = torch.arange(40) % 3  # nothing is known of the fourth
    rows = centres[groups]
    wanted = torch.tensor([0.7, 0.0, 0.3, 0.0]).double()
    found = group_shares(rows, groups, 4, 5.0 * wanted @ centres)
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=0.0)
    assert apart(found, wanted) < 2e-3 and apart(wanted, wanted.flip(0)) == 1.0
    assert group_shares(rows, groups, 4, -centres.sum(0)).sum() == 0.0


def test_a_model_that_cannot_be_batched_has_the_gradients_that_it_would_have(
    observe: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = local_model(observe(tiny[0][:4], tiny[1][:4]))
    inputs, labels = found.target.normalise(tiny[0][:6]), tiny[1][:6]
    together, _ = gradients_on_the_way(found, inputs, labels, seed=0)

    def refused(*_: Any, **__: Any) -> Any:
        def call(*_: Any) -> Any:
            raise RuntimeError("vmap: data-dependent control flow")

        return call

    monkeypatch.setattr(measuring, "vmap", refused)
    in_turn, _ = gradients_on_the_way(found, inputs, labels, seed=0)
    torch.testing.assert_close(in_turn, together, rtol=1e-5, atol=1e-6)
