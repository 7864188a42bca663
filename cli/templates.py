"""The configurations that ship with the command."""

from __future__ import annotations

from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from bract.errors import BractError

if TYPE_CHECKING:
    from bract.config import FederationConfig

SCHEMA = ".bract/federation.json"
"""Path of the configuration's schema, relative to a configuration that `bract init` wrote."""


class Template(StrEnum):
    """The templates of `bract init`."""

    DIGITS = "digits"
    CIFAR10_GPU = "cifar10-gpu"
    ENCRYPTED = "encrypted"
    DEFENDED = "defended"
    OWN_APP = "own-app"
    TABLE = "table"
    TEXT = "text"
    SIGNAL = "signal"

    @property
    def file(self) -> str:
        """Name of the file; that of ``digits`` shows every key."""
        return "federation.yaml" if self is Template.DIGITS else f"{self}.yaml"


def template(name: str) -> str:
    """Return the text of a file that ships with the command, such as ``demo.yaml``."""
    return (files("bract.cli") / name).read_text(encoding="utf-8")


class DemoData(StrEnum):
    """What the federation of `bract demo` learns from."""

    DIGITS = "digits"
    TABLE = "table"
    TEXT = "text"
    SIGNAL = "signal"

    @property
    def file(self) -> str:
        """Name of the configuration."""
        return "demo.yaml" if self is DemoData.DIGITS else f"demo-{self}.yaml"


def demo_config(*, quick: bool = False, data: DemoData = DemoData.DIGITS) -> FederationConfig:
    """Return the demo's federation; ``quick`` for one round and one short attack."""
    from bract.config import build_config
    from bract.config.config import parse_config

    config = parse_config(template(data.file), source=data.file)
    if not quick:
        return config
    first = config.audit.attacks[0]
    short = {"attacks": [first], "rounds": [1], "clients": ["client-2"], "iterations": 60}
    content = config.model_dump(mode="json")
    return build_config(content | {"rounds": 1, "audit": content["audit"] | short})


def write_template(path: Path, which: Template = Template.DIGITS, *, force: bool) -> None:
    """Write a commented configuration to ``path``, and next to it the schema that editors read.

    The schema is that of the installed version, in ``.bract/federation.json``: completion works
    without a network.
    """
    from bract.cli.console import say
    from bract.cli.schemas import json_schema
    from bract.disk.files import write_text

    if path.exists() and not force:
        raise BractError(f"{path}: exists already; pass --force to replace it", code="file-taken")
    if not path.parent.is_dir():
        raise BractError(f"{path.parent}: no such folder; make it first", code="file-missing")
    write_text(path.parent / SCHEMA, json_schema("federation"))
    write_text(path, f"# yaml-language-server: $schema={SCHEMA}\n{template(which.file)}")
    say(f"done: {path}; next: bract run {path}")
