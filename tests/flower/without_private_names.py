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

from bract import flower


def hide() -> None:
    """Let no import find a module or name of `bract.flower` any more."""
    for module, name in flower.private_names():
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
        sys.modules[module] = None  # type: ignore[assignment]
        assert name


hide()
assert len(flower.missing()) == len(flower.private_names())
assert not flower.has_runtime()
assert flwr.app and flwr.client and flwr.clientapp and flwr.server and flwr.serverapp
