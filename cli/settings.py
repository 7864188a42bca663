"""``--set KEY=VALUE``: any key of a YAML file, from the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from bract.errors import BractError, shown
from bract.parse.strict_yaml import parse_yaml
from bract.registry import unknown

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="One key of the file, dotted; the value is YAML. Repeat."
    ),
]


def read_settings(options: Iterable[str] | None) -> dict[str, Any]:
    """Return the values of ``--set`` by their dotted key; the last one of a key counts.

    Errors name the option if it has no key, or a value that is not YAML.
    """
    found: dict[str, Any] = {}
    for option in options or ():
        key, separator, text = option.partition("=")
        key = key.strip()
        if not separator or not all(key.split(".")):
            raise BractError(
                f"--set {shown(option)}: expected KEY=VALUE such as training.lr=0.1", code="usage"
            )
        try:
            found[key] = parse_yaml(text)
        except BractError as error:
            raise BractError(f"--set {shown(option)}: {error}", code=error.code) from None
    return found


def read_section(
    section: str, options: Iterable[str] | None, known: Iterable[str]
) -> dict[str, Any]:
    """Return the values of ``--set SECTION.KEY=VALUE`` by their key, which must be ``known``."""
    names = {f"{section}.{name}": name for name in known}
    found = read_settings(options)
    for key in found:
        if key not in names:
            raise BractError(f"--set: {unknown('key', key, names)}", code="config-key")
    return {names[key]: value for key, value in found.items()}
