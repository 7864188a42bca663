"""Parse text from another party, within bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bract.lazy import lazily

if TYPE_CHECKING:
    from bract.parse.strict_json import dump_json, in_64_bits, json_ready, parse_json
    from bract.parse.strict_yaml import MOST_CHARACTERS, parse_yaml

__all__ = [
    "MOST_CHARACTERS",
    "dump_json",
    "in_64_bits",
    "json_ready",
    "parse_json",
    "parse_yaml",
]

_PLACES = {
    "MOST_CHARACTERS": "bract.parse.strict_yaml",
    "dump_json": "bract.parse.strict_json",
    "in_64_bits": "bract.parse.strict_json",
    "json_ready": "bract.parse.strict_json",
    "parse_json": "bract.parse.strict_json",
    "parse_yaml": "bract.parse.strict_yaml",
}

__getattr__ = lazily(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
