"""Whatever a parser is given, it returns an object or raises its documented error."""

import pytest
from fuzz.outcome import Parser, Tally
from fuzz.parsers import PARSERS
from hypothesis import HealthCheck, given, settings


@pytest.mark.thorough
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_parser_accepts_or_refuses_and_does_nothing_else(
    parser: Parser, pytestconfig: pytest.Config, bounded_memory: None
) -> None:
    wanted = pytestconfig.getoption("--fuzz-examples", None)
    tally = Tally()

    @settings(
        max_examples=wanted or parser.examples,
        derandomize=wanted is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(parser.inputs)
    def feed(value: object) -> None:
        tally.feed(parser, value)

    feed()
    assert tally.counts["accepted"] > 0, "nothing got past the first check"
    assert tally.counts["refused"] > 0
    assert not tally.counts["other"]
