"""SPEAR: exact batches behind a linear layer and a ReLU."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import refusals
import torch
from audited import audited_run
from torch import Tensor, nn

from bract.attacks import Budget, Reconstruction, Refusal, reconstruct
from bract.attacks.methods.spear import slope_labels, spear
from bract.attacks.methods.spear.spear import Spear
from bract.attacks.result import SeedBudget
from bract.audit.audit import Audit
from bract.client.defenses import ProtectContext, build_defenses
from bract.config.config import AuditRequest
from bract.models import MODELS
from bract.models.fully_connected import perceptron
from bract.report import write_report
from bract.rundir import RunDirectory
from bract.schema import AuditResult
from bract.scores import match, psnr
from experiments.harness.rows import send_rows


def worst(found: Tensor, originals: Tensor) -> float:
    return float(psnr(found[match(found, originals)], originals).min())


@pytest.fixture
def seen_by(observe: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make observations of a network that is registered as ``test-mlp``."""

    def make(network: nn.Module, images: Tensor, labels: Tensor, **settings: Any) -> Any:
        monkeypatch.setitem(MODELS._entries, "test-mlp", lambda **_: network)
        seen = observe(images, labels, model=network, **settings)
        declared = seen.declaration.updated({"model": "test-mlp", "activation": "relu"})
        return replace(seen, declaration=declared)

    return make


def network(*hidden: int, activation: str = "relu", seed: int = 0, **sizes: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"classes": 10, "channels": 1, "image_size": 16} | sizes
    return perceptron(hidden, activation=activation, signal=None, **sizes)


@pytest.mark.parametrize("batch", [2, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_a_batch_of_digits_is_exact_behind_two_hidden_layers(
    seen_by: Any, digits: Any, batch: int
) -> None:
    images, labels = digits[0][:batch], digits[1][:batch]
    found = Spear()(seen_by(network(200, 200), images, labels))
    assert worst(found.images, images) > 60
    assert found.labels[match(found.images, images)].tolist() == labels.tolist()
    assert found.gradient_residual is not None and found.gradient_residual < 1e-3


def test_a_batch_of_noise_is_exact(seen_by: Any) -> None:
    images = torch.rand(16, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    found = Spear()(seen_by(network(200, 200), images, torch.arange(16) % 10))
    assert worst(found.images, images) > 60


def test_colour_and_a_third_hidden_layer_change_nothing(seen_by: Any) -> None:
    images = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model = network(200, 100, 50, channels=3, image_size=8)
    found = Spear()(seen_by(model, images, torch.arange(8)))
    assert worst(found.images, images) > 60


@pytest.mark.thorough
def test_one_local_step_is_exact_though_weights_are_rounded(seen_by: Any, digits: Any) -> None:
    images, labels = digits[0][:16], digits[1][:16]
    found = Spear()(seen_by(network(200, 200), images, labels, steps=1, lr=0.1))
    assert worst(found.images, images) > 60


def test_a_trained_network_gives_its_batch_away(seen_by: Any, digits: Any) -> None:
    model = network(400, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        part = slice(100 + step % 8 * 32, 132 + step % 8 * 32)
        optimizer.zero_grad()
        logits = model((digits[0][part] - 0.3) / 0.4)
        nn.functional.cross_entropy(logits, digits[1][part]).backward()
        optimizer.step()
    images, labels = digits[0][:8], digits[1][:8]
    found = Spear()(seen_by(model, images, labels))
    assert worst(found.images, images) > 60
    assert found.labels[match(found.images, images)].tolist() == labels.tolist()


def test_the_order_of_the_batch_changes_nothing(seen_by: Any, digits: Any) -> None:
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    images, labels = digits[0][:8], digits[1][:8]
    one, other = (
        Spear()(seen_by(network(200, 200), images[kept], labels[kept]))
        for kept in (torch.arange(8), order)
    )
    paired = match(other.images, one.images)
    assert torch.allclose(other.images[paired], one.images, atol=1e-4)
    assert torch.equal(other.labels[paired], one.labels)


def test_an_image_that_stands_twice_in_a_batch_is_returned_twice(seen_by: Any, digits: Any) -> None:
    kept = torch.tensor([0, 1, 2, 1])
    images, labels = digits[0][kept], digits[1][kept]
    found = Spear()(seen_by(network(200, 200), images, labels))
    assert worst(found.images, images) > 60


def test_all_images_are_looked_for_whatever_the_limit(seen_by: Any, digits: Any) -> None:
    seen = seen_by(network(200, 200), digits[0][:10], digits[1][:10])
    found = Spear()(seen, budget=Budget(max_images=4))
    assert len(found.images) == 10


def test_behind_average_pooling_the_pooled_image_is_exact(seen_by: Any, digits: Any) -> None:
    images, labels = digits[0][:4], digits[1][:4]
    model = nn.Sequential(nn.AvgPool2d(2), network(200, 200, image_size=8))
    found = Spear()(seen_by(model, images, labels))
    pool = nn.AvgPool2d(2)
    # Clipping to [0, 1] does not move an image of least norm here: it repeats each pooled pixel.
    assert worst(pool(found.images), pool(images)) > 60
    assert "least-norm image of a fixed map" in found.components


def test_clipping_does_not_hide_the_batch(seen_by: Any, digits: Any) -> None:
    images, labels = digits[0][:8], digits[1][:8]
    seen = seen_by(network(200, 200), images, labels)
    norm = torch.cat([v.flatten() for v in seen.update.values()]).norm()
    clipped = {name: value * (0.1 / norm) for name, value in seen.update.items()}
    assert worst(Spear()(replace(seen, update=clipped)).images, images) > 60


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (network(200, 200, activation="sigmoid"), "no ReLU follows 1"),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(392, 10)),
            "begins with Conv2d at 0.weight",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(256, 10)), "no ReLU follows 1"),
        (
            nn.Sequential(
                nn.Flatten(), nn.Linear(256, 50, bias=False), nn.ReLU(), nn.Linear(50, 10)
            ),
            "1 has no bias",
        ),
        (
            nn.Sequential(nn.MaxPool2d(2), network(50, image_size=8)),
            "more than an affine map",
        ),
        (network(8), "spear needs fewer images than either"),
    ],
    ids=["sigmoid", "convolution", "no hidden layer", "no bias", "max pooling", "narrow"],
)
def test_what_does_not_factor_is_refused_with_the_reason(
    seen_by: Any, digits: Any, model: nn.Module, reason: str
) -> None:
    (refused,) = reconstruct(seen_by(model, digits[0][:8], digits[1][:8]), "spear", device="cpu")
    assert isinstance(refused, Refusal)
    assert reason in refused.reason


@pytest.mark.parametrize(("steps", "batch"), [(5, 8), (10, 4)], ids=["one batch", "two batches"])
def test_several_epochs_are_exact_though_units_switch(
    seen_by: Any, digits: Any, steps: int, batch: int
) -> None:
    images, labels = digits[0][:8], digits[1][:8]
    seen = seen_by(network(200, 200), images, labels, steps=steps, batch_size=batch, lr=0.02)
    found = Spear()(seen)
    assert worst(found.images, images) > 60
    assert found.labels[match(found.images, images)].tolist() == labels.tolist()
    assert "sparse factors of a sum" in found.components


def test_momentum_over_several_steps_changes_nothing(seen_by: Any, digits: Any) -> None:
    images, labels = digits[0][:8], digits[1][:8]
    seen = seen_by(network(200, 200), images, labels, steps=3, lr=0.02, momentum=0.9)
    assert worst(Spear()(seen).images, images) > 60


def test_steps_of_adam_are_refused_by_name(seen_by: Any, digits: Any) -> None:
    seen = seen_by(
        network(200, 200), digits[0][:8], digits[1][:8], steps=3, lr=0.01, optimizer="adam"
    )
    with refusals.refused("attack-unsuited", 3, "steps", "adam"):
        Spear()(seen)


def test_more_images_than_are_separated_over_several_steps_are_refused(
    seen_by: Any, digits: Any
) -> None:
    images = digits[0][:1].expand(33, -1, -1, -1)
    seen = seen_by(network(200, 200), images, digits[1][:33], steps=2, lr=0.02)
    with refusals.refused("attack-unsuited", 33):
        Spear()(seen)


def noised(seen: Any, multiplier: float, **settings: Any) -> Any:
    """Clip an observation's gradient to half its norm, and add noise that the server knows of."""
    norm = float(torch.cat([v.flatten() for v in seen.update.values()]).norm())
    clip = 0.5 * norm
    chain = build_defenses([{"name": "noise", "clip": clip, "std": multiplier * clip, **settings}])
    return replace(
        seen,
        update=chain.protect(seen.update, {}, ProtectContext(seed=1 << 90)),
        declaration=replace(seen.declaration, defenses=tuple(chain.public())),
    )


UNGUESSED = Budget(weak_seeds=SeedBudget(candidates=0))


@pytest.mark.parametrize("kind", ["gaussian", pytest.param("laplace", marks=pytest.mark.slow)])
def test_under_clipping_and_known_noise_a_batch_is_seen(
    seen_by: Any, digits: Any, kind: str
) -> None:
    images, labels = digits[0][:8], digits[1][:8]
    seen = noised(seen_by(network(200, 200), images, labels), 2e-4, kind=kind)
    found = Spear()(seen, tier="adaptive", budget=UNGUESSED)
    assert worst(found.images, images) > 22
    assert found.labels[match(found.images, images)].tolist() == labels.tolist()
    assert any("times the noise's" in part for part in found.components)


@pytest.mark.slow
def test_the_prior_on_images_brings_them_closer_under_noise(
    seen_by: Any, digits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = digits[0][:4], digits[1][:4]
    seen = noised(seen_by(network(200, 200), images, labels), 1e-3)
    likely = Spear()(seen, tier="adaptive", budget=UNGUESSED).images
    monkeypatch.setattr(spear, "likely_images", lambda *given: given[-1].clamp(0.0, 1.0))
    plain = Spear()(seen, tier="adaptive", budget=UNGUESSED).images
    gained = psnr(likely[match(likely, images)], images) - psnr(plain[match(plain, images)], images)
    assert float(gained.min()) > 0.0 and float(gained.mean()) > 0.2


def test_noise_over_several_steps_is_read_too(seen_by: Any, digits: Any) -> None:
    images, labels = digits[0][:4], digits[1][:4]
    seen = noised(seen_by(network(200, 200), images, labels, steps=2, lr=0.02), 1e-4)
    assert worst(Spear()(seen, tier="adaptive", budget=UNGUESSED).images, images) > 25


def test_an_update_of_one_unit_over_several_steps_costs_no_other_observation(
    seen_by: Any, tiny: Any
) -> None:
    model = network(100, 100, image_size=8)
    seen = seen_by(model, tiny[0][:4], tiny[1][:4], steps=3, lr=0.02)
    update = {name: value.clone() for name, value in seen.update.items()}
    for name in list(update)[:2]:
        update[name][1:] = 0.0
    bad = replace(seen, client="bad", update=update)
    _, second = reconstruct([bad, seen], "spear")
    assert isinstance(second, Reconstruction)
    assert worst(second.images, tiny[0][:4]) > 60


def test_a_search_under_noise_ends_with_its_time(seen_by: Any) -> None:
    images = torch.rand(24, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    seen = noised(seen_by(network(2000), images, torch.arange(24) % 10), 1e-6)
    begun = time.monotonic()
    reconstruct([seen], "spear", tier="adaptive", budget=replace(UNGUESSED, seconds=1.0))
    assert time.monotonic() - begun < 30.0


@pytest.mark.thorough
def test_what_was_not_found_surely_is_named_among_the_parts(seen_by: Any, digits: Any) -> None:
    seen = noised(seen_by(network(20, 20), digits[0][:6], digits[1][:6]), 1e-3)
    (found,) = reconstruct([seen], "spear", tier="adaptive", budget=replace(UNGUESSED, seconds=3.0))
    if isinstance(found, Reconstruction):
        assert any("rows agree with the layer" in part for part in found.components)


@pytest.mark.parametrize("shares", [[1.0, 1.0, 1e9], [1e-12, 1.0, 1e-12, 1.0]])
def test_shares_of_any_size_ask_for_no_memory(shares: list[float]) -> None:
    given = torch.tensor(shares, dtype=torch.float64)
    assert slope_labels.repeated(given, len(shares)) == list(range(len(shares)))


def test_rows_of_a_table_under_noise_are_no_failure() -> None:
    seen = noised(send_rows("diabetes", 4, seed=0).captured, 1e-6)
    (found,) = reconstruct([seen], "spear", tier="adaptive", budget=UNGUESSED)
    assert isinstance(found, Reconstruction)
    assert not found.failed
    assert math.isfinite(found.final_loss)
    assert "targets but for the clip" in found.components


def test_noise_that_drowns_the_factors_is_refused(seen_by: Any, digits: Any) -> None:
    seen = noised(seen_by(network(200, 200), digits[0][:8], digits[1][:8]), 0.1)
    with refusals.refused("attack-evidence", "singular"):
        Spear()(seen, tier="adaptive", budget=UNGUESSED)


def test_results_under_noise_do_not_depend_on_batch_companions(seen_by: Any, digits: Any) -> None:
    model = network(200, 200)
    one, other = (
        replace(
            noised(seen_by(model, digits[0][at : at + 2], digits[1][at : at + 2]), 1e-4),
            client=f"c{at}",
        )
        for at in (0, 2)
    )
    one = replace(one, declaration=other.declaration, update=other.update)
    both = reconstruct([one, other], "spear", tier="adaptive", device="cpu", budget=UNGUESSED)
    assert isinstance(both[1], Reconstruction)
    alone = Spear()(other, tier="adaptive", budget=UNGUESSED)
    assert torch.equal(both[1].images, alone.images)


def test_noise_of_which_nothing_is_known_is_refused(seen_by: Any, digits: Any) -> None:
    seen = seen_by(network(200, 200), digits[0][:8], digits[1][:8])
    generator = torch.Generator().manual_seed(0)
    noisy = {
        n: v + 1e-3 * torch.randn(v.shape, generator=generator) for n, v in seen.update.items()
    }
    with refusals.refused("attack-evidence", "outside"):
        Spear()(replace(seen, update=noisy))


def test_evidence_that_leaves_the_layer_open_is_refused(seen_by: Any, digits: Any) -> None:
    seen = seen_by(network(200, 200), digits[0][:8], digits[1][:8])
    declared = seen.declaration.updated(
        {"defenses": [{"name": "pruning", "ratio": 0.5, "scope": "tensor"}]}
    )
    pruned = {n: v.clone() for n, v in seen.update.items()}
    for value in pruned.values():
        smallest = value.abs().flatten().argsort()[: round(0.5 * value.numel())]
        value.view(-1)[smallest] = 0.0
    (refused,) = reconstruct(
        replace(seen, update=pruned, declaration=declared), "spear", tier="adaptive", device="cpu"
    )
    assert isinstance(refused, Refusal)
    refusals.check_refusal(refused, "attack-evidence", "1.weight")


def test_a_budget_that_ends_too_soon_is_refused(seen_by: Any, digits: Any) -> None:
    seen = seen_by(network(200, 200), digits[0][:16], digits[1][:16])
    with refusals.refused("budget-spent", 16):
        Spear()(seen, budget=Budget(iterations=1))


def test_auto_takes_it_and_stops_there(seen_by: Any, digits: Any) -> None:
    images, labels = digits[0][:4], digits[1][:4]
    (found,) = reconstruct(
        seen_by(network(200, 200), images, labels), budget=Budget(iterations=2), device="cpu"
    )
    assert isinstance(found, Reconstruction)
    assert found.method == "spear"
    assert worst(found.images, images) > 60


def test_auto_prefers_it_under_noise_by_the_posterior(seen_by: Any, digits: Any) -> None:
    images, labels = digits[0][:4], digits[1][:4]
    seen = noised(seen_by(network(200, 200), images, labels), 2e-4)
    budget = Budget(iterations=2, weak_seeds=SeedBudget(candidates=0))
    (found,) = reconstruct(seen, tier="adaptive", budget=budget, device="cpu")
    assert isinstance(found, Reconstruction)
    assert found.method == "spear"
    assert worst(found.images, images) > 22


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """One client's gradient of sixteen digits through ``mlp``, and its truth."""
    return audited_run(
        tmp_path / "dense",
        1,
        clients=3,
        model={"name": "mlp", "activation": "relu"},
        training={"algorithm": "fedsgd", "batch_size": 16},
    )


@pytest.mark.parametrize("attack", ["spear", "auto"])
def test_an_audit_scores_all_images_and_the_page_names_them(run: RunDirectory, attack: str) -> None:
    audit = Audit(run, AuditRequest(attacks=[attack], iterations=2 if attack == "auto" else None))
    (result,) = audit.execute(audit.plan())
    assert isinstance(result, AuditResult) and result.method == "spear"
    assert len(result.images) == 16
    scores = [image.scores.psnr for image in result.images if image.scores]
    assert len(scores) == 16
    assert all(score is not None and score > 60 for score in scores)
    assert result.label_accuracy == 1.0
    write_report(run.root)
    assert "SPEAR" in (run.root / "report.html").read_text()
