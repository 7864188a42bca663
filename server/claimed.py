"""Protection that the server's strategy and the app's code claim, as text: nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bract.errors import BractError
from bract.installed.app_folder import App, app_folder, app_in, running_app
from bract.schema.claims import ProtectionClaim

_MOST_FILES = 200
_MOST_BYTES = 1 << 20

_LOCAL = "LocalDpMod"
_PARAMETERS = ("clipping_norm", "sensitivity", "epsilon", "delta")
"""Arguments of Flower's ``LocalDpMod``, in order."""


def claims_of(strategy: object) -> list[ProtectionClaim]:
    """Return what a strategy of central differential privacy claims, and the mods of the app."""
    return [*_central(strategy), *_of_app()]


def _central(strategy: object) -> Iterator[ProtectionClaim]:
    """Yield claims of a strategy and of those that it wraps."""
    seen: list[object] = []
    while strategy is not None and not any(strategy is one for one in seen) and len(seen) < 10:
        seen.append(strategy)
        kind = type(strategy).__name__
        multiplier = getattr(strategy, "noise_multiplier", None)
        if kind.startswith("DifferentialPrivacy") and isinstance(multiplier, int | float):
            clip = getattr(strategy, "clipping_norm", None)
            clients = getattr(strategy, "num_sampled_clients", None)
            yield ProtectionClaim(
                by=kind,
                where="server",
                place="server",
                noise_multiplier=float(multiplier),
                clip=float(clip) if isinstance(clip, int | float) else None,
                clients=clients if isinstance(clients, int) else None,
            )
        strategy = getattr(strategy, "strategy", None)


def _of_app() -> list[ProtectionClaim]:
    app = _app()
    if app is None:
        return []
    components = app.identity[2]
    package = str(components.get("clientapp", "")).partition(":")[0].partition(".")[0]
    if not package.isidentifier():
        return []
    place = app.folder / package
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return [claim for path in files[:_MOST_FILES] for claim in claims_in(path, app.folder)]


def _app() -> App | None:
    app = running_app()
    if app is not None:
        return app
    try:
        return app_in(app_folder())
    except BractError:
        return None


def claims_in(path: Path, root: Path) -> list[ProtectionClaim]:
    """Return the claims of ``LocalDpMod(...)`` in a file of Python; arguments that are numbers."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return []
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    names = {_LOCAL} | {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == _LOCAL and alias.asname
    }
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in names
    ]
    return [_local(call, f"{path.relative_to(root)}, line {call.lineno}") for call in calls]


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _local(call: ast.Call, where: str) -> ProtectionClaim:
    given = {name: _number(value) for name, value in zip(_PARAMETERS, call.args, strict=False)}
    given |= {word.arg: _number(word.value) for word in call.keywords if word.arg in _PARAMETERS}
    return ProtectionClaim(
        by=_LOCAL,
        where=where,
        place="client",
        epsilon=given.get("epsilon"),
        delta=given.get("delta"),
        clip=given.get("clipping_norm"),
        sensitivity=given.get("sensitivity"),
    )


def _number(node: ast.expr) -> float | None:
    """Return the number that an argument is; None where it is computed or named."""
    try:
        value: Any = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
