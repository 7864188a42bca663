"""YAML from a third party: plain values only, bounded, and no key twice."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from bract.errors import BractError, one_line, shown
from bract.parse.strict_json import in_64_bits

MOST_CHARACTERS = 1 << 20
_MOST_DEPTH = 64
_MOST_NODES = 100_000


def parse_yaml(text: str) -> Any:
    """Read one YAML document of maps, lists, text, numbers, dates, truth values and nulls.

    Raises
    ------
    BractError
        If it is no YAML, longer than `MOST_CHARACTERS`, nested more than 64 deep, larger than
        100,000 values once its aliases are written out, gives a key twice, or holds a tag of
        something else, a value that its tag does not fit, or a whole number beyond 64 bits.
    """
    if len(text) > MOST_CHARACTERS:
        raise BractError(
            f"{len(text)} characters of YAML, expected at most {MOST_CHARACTERS}",
            code="text-malformed",
        )
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        what = ", ".join(filter(None, (error.context, error.problem)))
        raise BractError(
            f"not valid YAML: {one_line(what, 300)}{where}", code="text-malformed"
        ) from None
    except yaml.YAMLError as error:
        raise BractError(f"not valid YAML: {one_line(error, 300)}", code="text-malformed") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Maps and lists are filled after `construct_object` has returned.
        raise BractError(f"not valid YAML: {one_line(error, 300)}", code="text-malformed") from None


def parse_mapping(text: str, *, source: str) -> dict[Any, Any]:
    """Read a YAML document of keys and values; an empty one has none.

    Parameters
    ----------
    source
        Name of the text in errors.

    Raises
    ------
    BractError
        As `parse_yaml`, or if it is no mapping; it begins with ``source``.
    """
    try:
        content = parse_yaml(text)
    except BractError as error:
        raise BractError(f"{source}: {error}", code=error.code) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise BractError(
            f"{source}: expected keys and values at the top level, "
            f"found a {type(content).__name__}",
            code="text-malformed",
        )
    return content


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader`, which builds no objects, with bounds and without its other exceptions."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth >= _MOST_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"nested more than {_MOST_DEPTH} deep", problem_mark=self.get_mark()
            )
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _size(node, {})
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and not in_64_bits(value):
                raise ValueError("no whole number of 64 bits")
            return value
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            tag = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"{shown(node.value)} is no {one_line(tag, 40)}",
                problem_mark=node.start_mark,
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name is not None and name in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {shown(key.value)} is given twice", problem_mark=key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values that a node represents, every alias written out."""
    found = sizes.get(id(node))
    if found == 0:
        raise yaml.MarkedYAMLError(
            problem="an alias refers to itself", problem_mark=node.start_mark
        )
    if found is not None:
        return found
    sizes[id(node)] = 0  # open: a node met again here contains itself
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    total = 1
    for part in parts:
        total += _size(part, sizes)
        if total > _MOST_NODES:
            raise yaml.MarkedYAMLError(
                problem=f"more than {_MOST_NODES} values", problem_mark=node.start_mark
            )
    sizes[id(node)] = total
    return total
