"""Spans of what Flower does in a process, for `bract run --profile`."""

from __future__ import annotations

import functools
import importlib
import os
import time
from typing import Any

from bract.deploy.rules import replace
from bract.flower import CLIENTAPP, SUPERNODE
from bract.timeline import FOLDER, note, traced

_SPANS = {
    "flower-supernode": {
        SUPERNODE: {"_push_messages": "wait for the ClientApp, send its answer"},
    },
    "flwr-clientapp": {
        CLIENTAPP: {
            "pull_task_input": "take message from SuperNode",
            "install_from_fab": "install bundle",
            "push_message": "hand answer to SuperNode",
            "push_task_output": "hand state to SuperNode",
        }
    },
}


def note_spans(name: str) -> None:
    """Note what the command ``name`` does, where a profile is wanted."""
    if FOLDER not in os.environ:
        return
    for module, functions in _SPANS.get(name, {}).items():
        for function, said in functions.items():
            found = getattr(importlib.import_module(module), function, None)
            replace(module, function, traced(said, found) if found else None)
    if name == "flower-supernode":
        _note_pulls()


def _note_pulls() -> None:
    """Note only the questions to the SuperLink that brought a message."""
    pull = getattr(importlib.import_module(SUPERNODE), "_pull_and_store_message")  # noqa: B009

    @functools.wraps(pull)
    def pulled(**arguments: Any) -> Any:
        began = time.monotonic_ns()
        run_id = pull(**arguments)
        if run_id is not None:
            note("take message from SuperLink", began)
        return run_id

    replace(SUPERNODE, "_pull_and_store_message", pulled)
