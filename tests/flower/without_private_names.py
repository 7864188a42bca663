"""Plug-in of pytest that hides every private name of Flower that bract rests on.

Flower has imported its own modules by then, so that it goes on as before.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

import flwr.app
import flwr.client
import flwr.clientapp
import flwr.server
import flwr.serverapp
import flwr.serverapp.strategy

from bract.runtime import rules


def hide() -> None:
    """Let no import find a module or name of `bract.runtime.rules` any more."""
    for module in {name.partition(":")[0] for name in rules.private_names()}:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
        sys.modules[module] = None  # type: ignore[assignment]


hide()
assert rules.lacking()
assert not rules.has_runtime()
assert flwr.app and flwr.client and flwr.clientapp and flwr.server and flwr.serverapp
