"""Files of a kit that are made from templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import jinja2

from bract.disk.files import write_text

Facts = Mapping[str, object]
"""A template's variables for a kit, by name."""


def render(path: Path, template: str, facts: Facts) -> None:
    """Write a file from a template of this room; a script may be run."""
    text = (files("bract.kits") / "templates" / template).read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    write_text(path, environment.from_string(text).render(facts))
    if path.suffix == ".sh":
        path.chmod(0o700)


def project(name: str) -> str:
    """Return a name as Docker Compose has that of a project."""
    return re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_")
