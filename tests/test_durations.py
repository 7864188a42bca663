"""The quick tests are quick, by the run that `tests/durations.json` keeps."""

import json

from durations import RESULT

LONGEST = 5.0
"""Seconds of a worker: set-up, call and clean-up."""
MODULES = ("tests.test_coupling", "tests.core.test_references")
"""They read all sources, once for all of their tests."""


def test_a_test_that_takes_longer_is_thorough() -> None:
    kept = json.loads(RESULT.read_text(encoding="utf-8"))
    long = {name: taken for name, taken in kept["dearest"].items() if taken > LONGEST}
    assert not {name for name in long if not name.startswith(MODULES)}
