"""A rule: what it replaces in Flower, in which processes, and what is lost without it.

A rule names every place of Flower that it reads or replaces (`Rule.needs`). `hold` checks the
places of all rules of a command first, and replaces afterwards, each place once: a missing place of
a security rule is a refusal before anything was replaced; a rule for reliability or speed stays off
where Flower lacks a place of it, and Flower's own way is followed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any, Literal

from bract.errors import BractError
from bract.installed import flower
from bract.installed.flower import COMMANDS, SERIES, is_supported

Kind = Literal["security", "reliability", "speed"]

Layer = Callable[[Any], Any]
"""Takes what a place holds, Flower's own or an earlier rule's; returns what is to be there."""

Put = Callable[[str], Mapping[str, Layer]]
"""Takes a command; returns a layer for each place that is replaced in its process."""

PLACE = re.compile(r"([\w.]+):([\w.]+)(?:\(([\w, ]+)\))?")


def _nothing(_: str) -> Mapping[str, Layer]:
    return {}


@dataclass(frozen=True)
class Rule:
    """One thing that bract changes in Flower's processes.

    Attributes
    ----------
    kind
        ``security`` refuses a Flower that lacks a place; the others stay off there.
    commands
        Processes in which the rule holds: some of `bract.installed.flower.COMMANDS`, or ``bract``
        for those of bract's own commands.
    needs
        Places of Flower that the rule reads or replaces: ``module:name.attribute``, where it relies
        on parameters of a function or fields of a message followed by those in parentheses.
    does, without
        What it brings, and what is lost without it: a sentence each.
    after
        Names of rules that come before it: its layers are outside of theirs.
    put
        Returns the layers for a command; changes nothing itself, and may raise BractError.
    copied
        Whether modules of Flower import the places by name, so that all of them are changed.
    """

    name: str
    kind: Kind
    commands: tuple[str, ...]
    needs: tuple[str, ...]
    does: str
    without: str
    after: tuple[str, ...] = ()
    put: Put = _nothing
    copied: bool = False

    def lacking(self) -> list[str]:
        """Return the places of `needs` that the installed Flower lacks."""
        return [place for place in self.needs if not is_there(place)]


@dataclass(frozen=True)
class Off:
    """A rule that stays off, and the places that Flower lacks for it."""

    rule: Rule
    lacking: tuple[str, ...]


def hold(command: str, rules: Iterable[Rule]) -> list[Off]:
    """Put the rules of a command in place; return those that stay off.

    Raises
    ------
    BractError
        If Flower lacks a place of a security rule: then nothing is replaced.
    """
    chosen = [rule for rule in ordered(rules) if command in rule.commands]
    off = [Off(rule, tuple(lacking)) for rule in chosen if (lacking := rule.lacking())]
    for missing in off:
        if missing.rule.kind == "security":
            raise refusal(missing)
    left = {missing.rule.name for missing in off}
    layers: dict[str, list[Layer]] = {}
    copied = set()
    for rule in chosen:
        if rule.name in left:
            continue
        for place, layer in rule.put(command).items():
            layers.setdefault(place, []).append(layer)
            if rule.copied:
                copied.add(place)
    for place, stacked in layers.items():
        _assign(place, stacked, copied=place in copied)
    return off


def ordered(rules: Iterable[Rule]) -> list[Rule]:
    """Return rules in the order of their layers, the innermost first."""
    by_name = {rule.name: rule for rule in rules}
    graph = {rule.name: [n for n in rule.after if n in by_name] for rule in by_name.values()}
    return [by_name[name] for name in TopologicalSorter(graph).static_order()]


def refusal(missing: Off) -> BractError:
    """Return the error for a security rule that would not hold."""
    return BractError(
        f"Flower {flower.installed() or 'none'} lacks {', '.join(missing.lacking)}, which the "
        f"security rule '{missing.rule.name}' needs, so the process does not start: "
        f"{missing.rule.without}; {ADVICE}",
        code="flower-version",
    )


ADVICE = f"install a Flower whose source was read, {' or '.join(SERIES)}"


def report(off: Iterable[Off]) -> list[str]:
    """Return one line for each kind of rules that stay off, and one for an unread Flower."""
    found = flower.installed()
    lines = []
    if not is_supported(found):
        lines.append(
            f"Flower {found}: bract's rules were read against {' and '.join(SERIES)}, and this one "
            "has every name that its security rules need"
        )
    for kind, runtime in (("speed", "faster"), ("reliability", "more reliable")):
        some = [missing for missing in off if missing.rule.kind == kind]
        if some:
            lines.append(
                f"Flower {found}: the {runtime} runtime is off ({named(some)}); "
                "Flower's own is used"
            )
    return lines


def named(off: Iterable[Off]) -> str:
    """Return each rule that stays off, with the first place that it misses, and how many more.

    `python -m bract.runtime.rules` lists them all.
    """
    return "; ".join(
        f"{one.rule.name}, missing {one.lacking[0]}"
        + (f" and {len(one.lacking) - 1} more" if one.lacking[1:] else "")
        for one in off
    )


_placed: dict[tuple[int, str], tuple[Any, Any]] = {}
"""What is in each place by a rule, and what Flower has there, by the holder's id and the name."""


def _assign(place: str, layers: list[Layer], *, copied: bool) -> None:
    """Replace what is in a place by all layers around Flower's own; the only way to replace."""
    holder, name = _holder(place)
    there = inspect.getattr_static(holder, name)
    new = flowers = _flowers(holder, name)
    for layer in layers:
        new = layer(new)
    setattr(holder, name, new)
    _placed[id(holder), name] = (inspect.getattr_static(holder, name), flowers)
    if copied:
        for module in tuple(sys.modules.values()):
            known = getattr(module, "__name__", "").startswith("flwr.")
            copy = vars(module).get(name) if known and module is not holder else None
            if copy is not None and (copy is there or copy is flowers):
                setattr(module, name, new)


def at(place: str) -> Any:
    """Return what is in a place now."""
    holder, name = _holder(place)
    return getattr(holder, name)


def _flowers(holder: Any, name: str) -> Any:
    """Return what Flower has in a place, whatever rules are there."""
    ours, flowers = _placed.get((id(holder), name), (None, None))
    if ours is not None and inspect.getattr_static(holder, name) is ours:
        return flowers
    return getattr(holder, name)


def _holder(place: str) -> tuple[Any, str]:
    module, path, _ = _parts(place)
    *inner, name = path
    holder: Any = flower.module(module)
    for attribute in inner:
        holder = getattr(holder, attribute)
    return holder, name


def _parts(place: str) -> tuple[str, list[str], list[str]]:
    found = PLACE.fullmatch(place)
    if found is None:
        raise ValueError(f"{place!r} is no place, module:name.attribute(parameter)")
    return found[1], found[2].split("."), re.findall(r"\w+", found[3] or "")


def top(place: str) -> str:
    """Return ``module:name`` of a place, without what is inside the name."""
    module, path, _ = _parts(place)
    return f"{module}:{path[0]}"


def is_there(place: str) -> bool:
    """Return whether what is installed has a place, with the parameters that are relied upon."""
    _, _, parameters = _parts(place)
    try:
        found = _flowers(*_holder(place))
    except ImportError:
        return False
    except AttributeError:
        return not parameters and _is_set_when_made(place)
    return not parameters or _takes(found, set(parameters))


def _is_set_when_made(place: str) -> bool:
    """Return whether an attribute is one that its class's constructors name."""
    try:
        holder, name = _holder(place)
    except AttributeError:
        return False
    for kind in getattr(holder, "__mro__", ()):
        code = getattr(_flowers(kind, "__init__"), "__code__", None)
        if name in getattr(code, "co_names", ()):
            return True
    return False


def _takes(found: Any, names: set[str]) -> bool:
    """Return whether a function takes parameters by these names, or a message has such fields."""
    fields = getattr(getattr(found, "DESCRIPTOR", None), "fields_by_name", None)
    if fields is not None:
        return names <= set(fields)
    if isinstance(found, dict):
        return names <= set(found)
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False
    any_name = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return any_name or names <= set(parameters)


ALL = COMMANDS
"""Commands of a rule that holds in each of Flower's processes."""

BRACT = "bract"
"""Stands for the processes of bract's own commands."""
