from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused

from bract.captures.aggregates import Aggregates


def aggregate(value: Any) -> Any:
    return {"parameters": torch.full((2, 3), value, dtype=torch.uint8)}


def content(record: Any) -> Any:
    return {name: value.tolist() for name, value in record.items()}


@pytest.mark.parametrize("on_disk", [False, True])
def test_every_aggregate_is_kept_in_order(tmp_path: Path, on_disk: Any) -> None:
    aggregates = Aggregates(tmp_path / "aggregates" if on_disk else None)
    aggregates.begin({"w": torch.ones(2)})
    for value in (7, 8, 9):
        aggregates.append(aggregate(value))
    assert aggregates.last == 3
    assert [content(aggregates.aggregate(n)) for n in (1, 2, 3)] == [
        content(aggregate(v)) for v in (7, 8, 9)
    ]


def test_aggregates_on_disk_is_continued_with_its_session_and_the_order_of_its_tensors(
    tmp_path: Path,
) -> None:
    first = Aggregates(tmp_path)
    first.begin({"z": torch.ones(1), "a": torch.zeros(2)})
    first.append(aggregate(1))
    again = Aggregates(tmp_path)
    assert (again.last, again.session) == (1, first.session)
    again.begin({"other": torch.ones(1)})
    assert list(again.initial) == ["z", "a"]
    again.append(aggregate(2))
    assert Aggregates(tmp_path).last == 2
    assert Aggregates().session != first.session


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_runs_that_went_on_here_are_kept_in_order(tmp_path: Path, on_disk: bool) -> None:
    aggregates = Aggregates(tmp_path if on_disk else None)
    aggregates.begin({"w": torch.ones(1)})
    assert [aggregates.enter(run) for run in (5, 5, 7)] == [(), (), ("5",)]
    if on_disk:
        again = Aggregates(tmp_path)
        assert again.enter(9) == ("5", "7")
        assert again.session == aggregates.session


def test_a_damaged_store_of_aggregates_is_named(tmp_path: Path) -> None:
    Aggregates(tmp_path).begin({"w": torch.ones(1)})
    (tmp_path / "initial.safetensors").write_bytes(b"cut")
    with refused("file-unreadable", tmp_path.name):
        Aggregates(tmp_path)
