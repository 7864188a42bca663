import pytest
import torch

from bract.errors import BractError
from bract.records import from_arrays, to_arrays
from bract.strategies.ledger import Ledger


def aggregate(value):
    return to_arrays({"parameters": torch.full((2, 3), value, dtype=torch.uint8)})


def content(record):
    return {name: value.tolist() for name, value in from_arrays(record).items()}


@pytest.mark.parametrize("on_disk", [False, True])
def test_every_aggregate_is_kept_in_order(tmp_path, on_disk):
    ledger = Ledger(tmp_path / "aggregates" if on_disk else None)
    ledger.begin(to_arrays({"w": torch.ones(2)}))
    for value in (7, 8, 9):
        ledger.append(aggregate(value))
    assert ledger.last == 3
    assert [content(ledger.aggregate(n)) for n in (1, 2, 3)] == [
        content(aggregate(v)) for v in (7, 8, 9)
    ]


def test_a_ledger_on_disk_is_continued_with_its_session_and_the_order_of_its_tensors(tmp_path):
    first = Ledger(tmp_path)
    first.begin(to_arrays({"z": torch.ones(1), "a": torch.zeros(2)}))
    first.append(aggregate(1))
    again = Ledger(tmp_path)
    assert (again.last, again.session) == (1, first.session)
    again.begin(to_arrays({"other": torch.ones(1)}))
    assert list(from_arrays(again.initial)) == ["z", "a"]
    again.append(aggregate(2))
    assert Ledger(tmp_path).last == 2
    assert Ledger().session != first.session


def test_a_damaged_ledger_is_named(tmp_path):
    Ledger(tmp_path).begin(to_arrays({"w": torch.ones(1)}))
    (tmp_path / "initial.safetensors").write_bytes(b"cut")
    with pytest.raises(BractError, match=f"{tmp_path.name}: the aggregates.*cannot be read"):
        Ledger(tmp_path)
