"""Rules that are put into Flower for one test."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from bract.runtime import rule


def held(place: str) -> Any:
    """What is in a place of Flower."""
    holder, name = holder_of(place)
    return getattr(holder, name)


def holder_of(place: str) -> tuple[Any, str]:
    module, _, path = place.partition("(")[0].partition(":")
    *inner, name = path.split(".")
    holder = importlib.import_module(module)
    for attribute in inner:
        holder = getattr(holder, attribute)
    return holder, name


def keep(monkeypatch: pytest.MonkeyPatch, *places: str) -> None:
    """Let what is in places of Flower be there again after a test, and where it is imported."""
    for place in places:
        holder, name = holder_of(place)
        there = getattr(holder, name)
        monkeypatch.setattr(holder, name, there)
        for module in [m for n, m in sys.modules.items() if n.startswith("flwr.")]:
            if vars(module).get(name) is there:
                monkeypatch.setattr(module, name, there)


def put(monkeypatch: pytest.MonkeyPatch, command: str, *rules: rule.Rule) -> None:
    """Put rules of a command in place, until a test ends."""
    for one in rules:
        if command in one.commands and not one.lacking():
            keep(monkeypatch, *one.put(command))
    rule.hold(command, rules)
