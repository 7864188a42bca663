from typing import Any

import pytest
import torch
from torch import Tensor

from bract.attacks import GRNN, IG, Budget, Engine, Reconstruction, reconstruct
from bract.attacks.base import Attacker
from bract.attacks.problem.constants import constant
from bract.attacks.solve import recorded
from bract.attacks.solve.recorded import Recorded

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_a_number_is_copied_to_a_device_once() -> None:
    cpu = torch.device("cpu")
    first = constant((0.5, 0.25), torch.float32, cpu)
    assert first is constant((0.5, 0.25), torch.float32, cpu)
    assert first.tolist() == [0.5, 0.25] and not first.is_inference()
    assert constant((0.5, 0.25), torch.float64, cpu).dtype == torch.float64
    with torch.inference_mode():
        assert not constant((0.125,), torch.float32, cpu).is_inference()


@gpu
@pytest.mark.parametrize("using", [IG(signed=False), GRNN()], ids=["ig", "grnn"])
def test_a_recorded_descent_finds_what_a_descent_finds(
    using: Attacker, observe: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = observe(tiny[0][:1], tiny[1][:1])
    made: list[Recorded] = []

    class Watched(Recorded):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("bract.attacks.solve.descent.Recorded", Watched)
    both = []
    for record in (True, False):
        engine = Engine(device="cuda", record=record)
        (found,) = reconstruct(seen, using, budget=Budget(iterations=60, restarts=3), engine=engine)
        assert isinstance(found, Reconstruction)
        both.append(found)
    assert len(made) == 1 and made[0].recorded
    for one, other in zip(both[0].trials, both[1].trials, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-2)
        assert torch.allclose(one.images, other.images, atol=2e-2)


@gpu
def test_an_evaluation_that_waits_for_the_host_is_not_recorded() -> None:
    value = torch.ones(3, device="cuda", requires_grad=True)

    def evaluate() -> Tensor:
        value.grad = None
        losses = value.square() * float(value.detach().sum())
        losses.sum().backward()
        return losses.detach()

    made = Recorded(evaluate, [value], after=2)
    for _ in range(4):
        losses = made()
        assert losses.tolist() == [3.0] * 3 and value.grad is not None
        assert value.grad.tolist() == [6.0] * 3
    assert not made.recorded


@gpu
def test_an_evaluation_that_follows_more_than_its_variables_is_not_recorded() -> None:
    value = torch.ones(3, device="cuda", requires_grad=True)
    calls = 0

    def evaluate() -> Tensor:
        nonlocal calls
        calls += 1
        value.grad = None
        losses = value * calls
        losses.sum().backward()
        return losses.detach()

    made = Recorded(evaluate, [value], after=2)
    made(), made()
    assert not made.recorded


@gpu
def test_a_replay_follows_its_variables() -> None:
    value = torch.ones(3, device="cuda", requires_grad=True)

    def evaluate() -> Tensor:
        value.grad = None
        losses = value.square()
        losses.sum().backward()
        return losses.detach()

    made = Recorded(evaluate, [value], after=1)
    made()
    assert made.recorded
    kept = made()
    with torch.no_grad():
        value.mul_(3.0)
    assert made().tolist() == [9.0] * 3 and kept.tolist() == [1.0] * 3
    assert value.grad is not None and value.grad.tolist() == [6.0] * 3


def test_where_there_is_no_gpu_nothing_is_recorded(
    observe: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("recorded on a CPU")

    monkeypatch.setattr(recorded.Recorded, "__call__", refuse)
    seen = observe(tiny[0][:1], tiny[1][:1])
    assert reconstruct(seen, IG(), budget=Budget(iterations=25), engine=Engine(device="cpu"))
