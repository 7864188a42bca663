"""Read a description from the text of ``bract.yaml``, and write it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from bract.config.faults import code_of, fault, fields_at
from bract.disk.named import check_file
from bract.errors import BractError, listed, one_line
from bract.parse.strict_yaml import MOST_CHARACTERS, parse_mapping
from bract.schema.description import DESCRIPTION, AppDescription


def read_description(folder: Path) -> AppDescription | None:
    """Read ``bract.yaml`` of a folder; None where there is none."""
    path = folder / DESCRIPTION
    try:
        with check_file(path, bounded=True).open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BractError(
            f"{path}: cannot be read as text: {one_line(error, 200)}", code="file-unreadable"
        ) from None
    return parse_description(text, source=str(path))


def parse_description(text: str, *, source: str = DESCRIPTION) -> AppDescription:
    """Check the text of a description; ``source`` names it in errors."""
    return build_description(parse_mapping(text, source=source), source=source)


def build_description(content: Mapping[Any, Any], *, source: str = DESCRIPTION) -> AppDescription:
    """Check a description given as nested dictionaries."""
    try:
        return AppDescription.model_validate(dict(content))
    except (ValidationError, RecursionError) as error:
        raise BractError(f"{source}: {_problems(error)}", code=code_of(error)) from None


_ONE_LINE = math.inf
"""Width of YAML that is never wrapped: what is kept of it is its first line."""


def dump_description(description: AppDescription) -> str:
    """Write a description as YAML that reads back to an equal one, its guesses marked."""
    content = description.model_dump(
        mode="json",
        exclude_none=True,
        exclude_defaults=True,
        exclude={"guessed", "witnessed"},
    )
    if description.data is not None:
        # The name identifies the data, also where it is the default one.
        content["data"] = {"name": description.data.name, **content.get("data", {})}
    lines = ["# What the server knows of this app; `bract audit` lays it over the captures.", ""]
    for key, value in content.items():
        lines += _lines(key, value, key, description.guessed)
    about = {
        "witnessed": "# Seen at clients by their witness; `bract describe` reads these anew.",
        "guessed": "# Nobody declared these; take out what you know to be right.",
    }
    for name, comment in about.items():
        if held := dict(getattr(description, name)):
            lines += ["", comment]
            lines += yaml.safe_dump(
                {name: held}, sort_keys=False, width=_ONE_LINE, allow_unicode=True
            ).splitlines()
    return "\n".join(lines) + "\n"


def _lines(
    key: str, value: Any, dotted: str, guessed: Mapping[str, str], deep: int = 0
) -> list[str]:
    indent = "  " * deep
    name = yaml.safe_dump(key, width=_ONE_LINE).splitlines()[0]
    if isinstance(value, dict) and value:
        inner = [_lines(k, v, f"{dotted}.{k}", guessed, deep + 1) for k, v in value.items()]
        return [f"{indent}{name}:", *(line for part in inner for line in part)]
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        block = yaml.safe_dump(value, sort_keys=False, width=_ONE_LINE, allow_unicode=True)
        return [f"{indent}{name}:", *(f"{indent}{line}" for line in block.splitlines())]
    text = yaml.safe_dump(value, default_flow_style=True, width=_ONE_LINE, allow_unicode=True)
    mark = "  # guessed" if dotted in guessed else ""
    return [f"{indent}{name}: {text.splitlines()[0]}{mark}"]


def _problems(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "something that is nested too deeply"
    lines = []
    for problem in error.errors(include_url=False):
        location = [str(part) for part in problem["loc"]]
        if problem["type"] == "value_error":
            said = str(problem["ctx"]["error"])
            inside = location and location[0] not in said
            lines.append(f"{'.'.join(location)}: {said}" if inside else said)
        else:
            lines.append(fault(problem, fields_at(AppDescription, problem["loc"][:-1])))
    return listed(lines)
