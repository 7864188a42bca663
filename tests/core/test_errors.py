"""Errors on their way from one process to another."""

import pickle

import pytest

from bract.errors import BractError, RunStoppedError
from bract.schema.record import RecordError


@pytest.mark.parametrize(
    "error", [BractError("no such folder"), RecordError("a.json", "no JSON"), RunStoppedError(3, 2)]
)
def test_an_error_of_another_process_comes_as_it_is(error: BractError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)
