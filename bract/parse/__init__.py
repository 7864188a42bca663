"""Parse text from another party, within bounds."""

from bract.parse.strict_json import dump_json, in_64_bits, json_ready, parse_json
from bract.parse.strict_yaml import MOST_CHARACTERS, parse_mapping, parse_yaml

__all__ = [
    "MOST_CHARACTERS",
    "dump_json",
    "in_64_bits",
    "json_ready",
    "parse_json",
    "parse_mapping",
    "parse_yaml",
]
