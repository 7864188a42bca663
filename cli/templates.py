"""The configurations that ship with the command."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from bract.cli.console import say
from bract.config import FederationConfig, parse_config
from bract.errors import BractError


def template(name: str) -> str:
    """Return the text of ``federation.yaml`` or ``demo.yaml``."""
    return (files("bract.cli") / name).read_text(encoding="utf-8")


def demo_config() -> FederationConfig:
    """Return the demo's federation."""
    return parse_config(template("demo.yaml"), source="demo.yaml")


def write_template(path: Path, *, force: bool) -> None:
    """Write the commented configuration to ``path``."""
    if path.exists() and not force:
        raise BractError(f"{path}: exists already; pass --force to replace it")
    if not path.parent.is_dir():
        raise BractError(f"{path.parent}: no such folder; make it first")
    path.write_text(template("federation.yaml"), encoding="utf-8")
    say(f"wrote {path}; start it with: bract run {path}")
