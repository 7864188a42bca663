"""The contract of every reading: what entered with its certificate and errors, or a refusal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pack
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from bract.attacks import (
    ATTACKS,
    Case,
    Entered,
    Errors,
    InvertingAttack,
    Outcome,
    Problem,
    Reading,
    ReadingBudget,
    Reconstruction,
    Refusal,
    Run,
    attack,
)
from bract.models import tap

READINGS = sorted(name for name in ATTACKS if issubclass(ATTACKS[name], Reading))
NEAR = 0.35
"""Most that returned examples leave of what was read, as a share of what others leave; images that
are found by a few steps of a descent have a third, the others a millionth."""


def read(name: str, upload: str) -> Entered | Refusal:
    method = attack(name)
    assert isinstance(method, Reading)
    return method.read(pack.opened(upload), ReadingBudget(iterations=100))


def rows() -> Iterator[Any]:
    for name, upload in pack.pairs():
        if name in READINGS:
            yield name, upload


def test_attacks_that_read_a_layer_are_readings() -> None:
    known = {"row-span", "spear", "token-span", "patch-span", "maui", "pooled-places"}
    known |= {"feature-regression"}
    assert known <= set(READINGS)


@pytest.mark.parametrize(("name", "upload"), list(rows()))
def test_a_reading_returns_what_entered_with_certificate_and_errors_or_a_refusal(
    name: str, upload: str
) -> None:
    found = read(name, upload)
    if isinstance(found, Refusal):
        assert found.attack == name and found.reason and found.code
        return
    target = pack.opened(upload).evidence.target
    for one in found.layers:
        assert one.site.weight in target and one.component
        assert isinstance(one.errors, Errors) and one.errors.level in ("exact", "rounded", "noisy")
        assert (one.values is None) is not (one.space is None)
        assert one.values is None or bool(one.values.isfinite().all())
        known = one.certificate
        assert known.equations > 0 and known.rounding >= 0.0
        assert 0.0 <= known.residual < math.inf
    # Every upload of the pack that is read is exact, or rounded by local training.
    assert found.certificate.sure


@pytest.mark.parametrize("upload", [names[0] for names in pack.STANDARD.values()])
@pytest.mark.parametrize("name", READINGS)
def test_a_reading_raises_on_no_input(name: str, upload: str) -> None:
    assert isinstance(read(name, upload), Entered | Refusal)


@pytest.mark.parametrize(("name", "upload"), list(rows()))
def test_a_reading_agrees_with_what_its_attack_returns(name: str, upload: str) -> None:
    entered, found = read(name, upload), pack.attacked(name, pack.upload(upload))
    assert isinstance(entered, Refusal) == isinstance(found, Refusal)
    if isinstance(entered, Refusal):
        assert isinstance(found, Refusal) and found.reason == entered.reason
        return
    assert isinstance(found, Reconstruction)
    case = pack.opened(upload)
    other = unlike(case)
    # Estimates, which are never taken for the client's images, are nearer than others alone.
    near = 1.0 if ATTACKS[name].found_below == 0.0 else NEAR
    for one in entered.layers:
        own, others = left(case, one, found.images), left(case, one, other)
        assert own < near * others, one.site.layer


def unlike(case: Case) -> Tensor:
    """Return random examples of a case's shape."""
    return torch.rand(4, *case.target_model.image_shape, generator=torch.Generator().manual_seed(1))


def left(case: Case, one: Entered, examples: Tensor) -> float:
    """Return what examples leave of what entered a layer, by its size: the worst example's."""
    model, state = case.target_model, case.target_model.captured(case.observation)
    text = case.observation.declaration.text
    inputs = model.normalise(examples)
    with torch.no_grad():
        seen = tap.inputs(
            lambda: functional_call(model.model, state, (inputs,)), model.model, [one.site.layer]
        )[one.site.layer].double()
    if text is not None:
        ids = (examples.flatten(1) * (text.vocabulary - 1)).round()
        seen = seen[ids != text.padding]
    if one.space is not None:
        if one.site.biased:
            seen = torch.cat([seen, torch.ones_like(seen[..., :1])], dim=-1)
        apart = [float(one.space.distance(each)) for each in seen]
    else:
        assert one.values is not None
        whole = seen[0].numel() == one.values.shape[1]  # else the mean of tokens is read
        seen = seen if whole else seen.mean(dim=1)
        apart = [
            float((one.values - each).norm(dim=1).min() / each.norm()) for each in seen.flatten(1)
        ]
    return max(apart)


@dataclass(frozen=True, kw_only=True)
class Broken(InvertingAttack):
    """A reading of another package, which meets numbers that it cannot decompose."""

    name: ClassVar[str] = "broken"

    def entered(self, case: Case, budget: ReadingBudget) -> Entered:
        del case, budget
        raise RuntimeError("singular")

    def inverted(self, problem: Problem, run: Run, read: Any) -> Outcome:
        raise AssertionError("nothing was read")


def test_a_reading_that_breaks_off_is_a_refusal() -> None:
    found = Broken().read(pack.opened("lenet-strided-b1"))
    assert isinstance(found, Refusal) and found.attack == "broken"
    (result,) = Broken().attack([pack.upload("lenet-strided-b1")], pack.task_of("ig"))
    assert isinstance(result, Refusal) and result.reason == found.reason
