import pytest
from refusals import refused

from bract.parse import parse_json, parse_yaml

HUGE = [10**400, 2**64, -(2**63) - 1, 10**30]


@pytest.mark.parametrize("value", HUGE)
def test_a_whole_number_beyond_64_bits_is_refused_where_it_is_parsed(value: int) -> None:
    with refused("text-malformed", 64):
        parse_json(f'{{"clip": {value}}}')
    with refused("text-malformed"):
        parse_yaml(f"clip: {value}")


def test_whole_numbers_of_64_bits_are_read_as_they_are() -> None:
    for value in (0, -1, 2**53 + 1, 2**64 - 1, -(2**63)):
        assert parse_json(str(value)) == parse_yaml(str(value)) == value


def test_a_float_beyond_the_largest_is_refused_like_infinity() -> None:
    with refused("text-malformed", "1e999"):
        parse_json("[1e999]")
    assert parse_json("[1e999]", constants=True) == [float("inf")]


def test_a_key_that_stands_twice_is_refused_at_any_depth() -> None:
    for text in ('{"a": 1, "a": 2}', '{"b": [{"a": 1, "c": 0, "a": 1}]}'):
        with refused("text-malformed", "'a'"):
            parse_json(text)
        with refused("text-malformed"):
            parse_yaml(text)
    assert parse_json('{"a": {"a": 1}, "b": {"a": 1}}') == {"a": {"a": 1}, "b": {"a": 1}}
