"""What enters and leaves modules is seen in any style of call, and may be replaced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bract.models import tap


class Net(nn.Module):
    """Two linear layers; the second is called by keyword, and a third never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1)
        self.finished = 0

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(input=self.first(x).relu())
        self.finished += 1
        return made


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.tensor([[1.0, 2.0]])


def hooks(net: Net) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


def test_inputs_are_those_of_the_first_call_and_the_model_runs_no_further(net: Net) -> None:
    seen = tap.inputs(lambda: net(X), net, ["first", "second"])
    assert torch.equal(seen["first"], X)
    assert torch.equal(seen["second"], net.first(X).relu()) and seen["second"].requires_grad
    assert net.finished == 0 and hooks(net) == 0


def test_a_module_that_does_not_run_is_left_out(net: Net) -> None:
    assert set(tap.inputs(lambda: net(X), net, ["first", "unused"])) == {"first"}
    assert net.finished == 1


def test_inputs_that_are_not_accepted_are_passed_over(net: Net) -> None:
    both = torch.cat([X, X])
    seen = tap.inputs(lambda: (net(X), net(both)), net, ["first"], lambda v: len(v) == 2)
    assert torch.equal(seen["first"], both)


def test_what_enters_and_leaves_may_be_replaced(net: Net) -> None:
    with tap.entering(net, ["second"], lambda _, value: 2.0 * value):
        doubled = net(X)
    assert torch.equal(doubled, net.second(2.0 * net.first(X).relu()))
    with tap.leaving(net, ["first"], lambda _, made: torch.zeros_like(made)):
        silent = net(X)
    assert torch.equal(silent, net.second(torch.zeros(1, 3)))


def test_hooks_are_gone_after_an_error(net: Net) -> None:
    def fail(name: str, _: Tensor) -> None:
        raise ValueError(name)

    with pytest.raises(ValueError, match="second"), tap.entering(net, ["second"], fail):
        net(X)
    assert hooks(net) == 0


def test_modules_are_named_in_their_order(net: Net) -> None:
    assert tap.named(net, nn.Linear) == ["first", "second", "unused"]
