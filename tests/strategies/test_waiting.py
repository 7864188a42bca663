"""A run waits for its clients, names who is missing, and gives up in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused
from toy_clients import toy_app, toy_arrays, toy_grid

from bract.errors import RunFailedError
from bract.strategies import FedAvg, waiting
from bract.strategies.waiting import Waiting


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were slept, on a clock of their own."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(waiting, "time", clock)
    return slept


def test_who_is_missing_is_named_once_for_each_change(seconds: list[float]) -> None:
    arriving = iter([["b"], ["b"], ["b", "a"], ["b", "a", "c"]])
    announced: list[str | None] = []
    one = Waiting()
    one.expected, one.announce = frozenset("abc"), announced.append
    one.until(lambda: next(arriving), 3)
    assert announced == [
        "waiting for clients: 1 of 3 are connected (b), missing: a, c",
        "waiting for clients: 2 of 3 are connected (a, b), missing: c",
        None,
    ]
    assert len(seconds) == 3


def test_the_timeout_of_the_strategy_ends_the_wait(seconds: list[float]) -> None:
    grid = toy_grid(toy_app((1.0, 2.0)), 2)
    with refused("clients-missing", "strategy.timeout", 10, 2, 3, kind=RunFailedError):
        FedAvg(min_nodes=3).start(grid, toy_arrays(0.0), num_rounds=1, timeout=10)
    assert 10 <= sum(seconds) <= 12
    assert not grid.log


def test_nobody_is_called_missing_where_a_node_without_a_name_may_be_it(
    seconds: list[float],
) -> None:
    arriving = iter([["node-7"], ["a", "b"]])
    announced: list[str | None] = []
    one = Waiting()
    one.expected, one.announce = frozenset("ab"), announced.append
    one.until(lambda: next(arriving), 2)
    assert announced == ["waiting for clients: 1 of 2 are connected (node-7)", None]
    assert seconds


def test_clients_that_are_there_are_not_waited_for(seconds: list[float]) -> None:
    announced: list[Any] = []
    one = Waiting()
    one.announce = announced.append
    one.until(lambda: ["a"], 1)
    assert not seconds and not announced
