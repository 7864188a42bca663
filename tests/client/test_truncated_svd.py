"""Truncated SVD keeps the largest singular values, and its attacker what they say exactly."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from bract import Observation
from bract.attacks import ADAPTIVE, Known
from bract.attacks.problem.evidence import FORWARD
from bract.defenses import ProtectContext
from bract.schema import ClientDeclaration
from bract_papers.adaptive.truncated_svd import SentSubspaces, Truncate, sent_subspaces
from bract_papers.defenses.truncated_svd import TruncatedSVD


def truncated(update: Any, energy: float) -> Any:
    return TruncatedSVD(energy=energy).protect(update, {}, ProtectContext())


def gradient(images: int = 4) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.GroupNorm(2, 6), nn.Sigmoid(), nn.Flatten(), nn.Linear(24, 3)
    )
    loss = nn.functional.cross_entropy(model(torch.rand(images, 1, 4, 4)), torch.arange(images) % 3)
    names = [name for name, _ in model.named_parameters()]
    found = torch.autograd.grad(loss, list(model.parameters()))
    return model, dict(zip(names, found, strict=True))


def observed(model: nn.Module, sent: Any, energy: float) -> Observation:
    return Observation(
        round=1,
        client="client-0",
        parameters=dict(model.named_parameters()),
        update=sent,
        declaration=ClientDeclaration(
            algorithm="fedsgd", defenses=({"name": "truncated-svd", "energy": energy},)
        ),
    )


@pytest.mark.parametrize(("energy", "kept"), [(0.64, 1), (0.65, 2), (0.92, 2), (0.93, 3)])
def test_the_least_rank_that_holds_the_energy_is_sent(energy: float, kept: int) -> None:
    """Squares 9, 4 and 1: shares of 0.643, 0.929 and 1."""
    sent = truncated({"weight": torch.diag(torch.tensor([1.0, 3.0, 2.0]))}, energy)["weight"]
    by_rank = {1: [0.0, 3.0, 0.0], 2: [0.0, 3.0, 2.0], 3: [1.0, 3.0, 2.0]}
    torch.testing.assert_close(sent, torch.diag(torch.tensor(by_rank[kept])))


def test_a_layer_is_cut_together_with_its_bias() -> None:
    _, update = gradient()
    sent = truncated(update, 0.7)
    # The normalisation behind it has as many values.
    vectors = [update[name][:, None] for name in ("0.bias", "1.weight", "1.bias")]
    matrix = np.hstack([update["0.weight"].reshape(6, 9), *vectors])
    left, values, right = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    rank = int(np.searchsorted(np.cumsum(values**2), 0.7 * (values**2).sum()) + 1)
    assert rank < 6
    expected = (left[:, :rank] * values[:rank]) @ right[:rank]
    np.testing.assert_allclose(sent["0.weight"].reshape(6, 9), expected[:, :9], atol=1e-6)
    for place, name in enumerate(("0.bias", "1.weight", "1.bias")):
        np.testing.assert_allclose(sent[name], expected[:, 9 + place], atol=1e-6)


def test_a_vector_that_fits_no_matrix_is_sent_as_it_is() -> None:
    _, update = gradient()
    update = {"scale": torch.linspace(0.0, 1.0, 17), **update}
    torch.testing.assert_close(truncated(update, 0.7)["scale"], update["scale"])


def test_the_gradient_of_one_image_in_a_linear_layer_is_sent_as_it_is() -> None:
    _, update = gradient(images=1)
    sent = truncated(update, 0.1)
    torch.testing.assert_close(sent["4.weight"], update["4.weight"])
    torch.testing.assert_close(sent["4.bias"], update["4.bias"])
    assert float((sent["0.weight"] - update["0.weight"]).norm()) > 0.0


def test_what_the_attacker_compares_is_exact_for_the_clients_own_gradient() -> None:
    model, update = gradient()
    seen = observed(model, truncated(update, 0.7), 0.7)
    bases, equations, unknowns = sent_subspaces(seen)
    assert 0 < equations < unknowns == sum(v.numel() for v in update.values())
    other = {name: torch.randn_like(value) for name, value in update.items()}
    rows = {name: torch.stack([update[name], other[name]]) for name in update}
    found = SentSubspaces(bases)(rows)
    for name, value in seen.update.items():
        torch.testing.assert_close(found[name][0], value, atol=1e-6, rtol=1e-4)
    assert float((found["0.weight"][1] - seen.update["0.weight"]).norm()) > 0.1
    assert ADAPTIVE["truncated-svd"](seen, Known()).notes["equations"] == equations


def test_candidates_are_truncated_as_clients_do_it() -> None:
    model, update = gradient()
    expected = truncated(update, 0.7)
    found = Truncate(0.7)({name: torch.stack([v, -2.0 * v]) for name, v in update.items()})
    for name, value in expected.items():
        torch.testing.assert_close(found[name][0], value, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(found[name][1], -2.0 * value, atol=1e-6, rtol=1e-4)
    evidence = FORWARD["truncated-svd"](observed(model, expected, 0.7), Known())
    assert evidence.adapt is not None


def test_an_update_that_was_not_truncated_is_refused() -> None:
    model, update = gradient()
    seen = observed(model, update, 0.7)
    with refused("declaration-wrong", "0.weight", 6):
        ADAPTIVE["truncated-svd"](seen, Known())
    whole = replace(seen, update=truncated(update, 0.7))
    assert ADAPTIVE["truncated-svd"](whole, Known()).target.keys() == update.keys()


def test_a_layer_without_values_is_sent_and_attacked_as_it_is() -> None:
    from types import SimpleNamespace
    from typing import Any

    from bract_papers.adaptive import truncated_svd as adaptive

    update = {"a.weight": torch.zeros(0, 4), "b.weight": torch.eye(3)}
    sent = TruncatedSVD(energy=0.9).protect(update, {}, ProtectContext())
    assert {n: v.shape for n, v in sent.items()} == {n: v.shape for n, v in update.items()}
    entry = {"name": "truncated-svd", "energy": 0.9}
    declaration = SimpleNamespace(defenses=(entry,))
    seen: Any = SimpleNamespace(update=sent, key="k", declaration=declaration)
    bases, equations, _ = adaptive.sent_subspaces(seen)
    assert bases["a.weight"][0].shape == (0, 0)
    assert equations == 9
