"""Flower's simulation engine, with clients that are those of a federation of processes.

The engine gives a simulated node its number and the total number, and nothing else. The bundle of
a simulated run names `app`, so that

- node i has the node configuration of client i: its folders, keys and device (`SITES`);
- the process of a client imports the installed ClientApp and answers with the error that a client
  of the deployment would send where the app raises.

Two settings of the engine are not in its configuration: its processes serve this machine alone and
require a secret (`engine_environment`), and one that was killed is started again
(`RULE`).
"""

from __future__ import annotations

import functools
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from bract.errors import contained, in_words
from bract.installed.flower import SIMULATION
from bract.protocol.codes import ErrorCode
from bract.runtime import clock
from bract.runtime.pinned import APP, load_app, pinned_app
from bract.runtime.private_ray import private_ray
from bract.runtime.rule import Rule

SITES = "BRACT_SIMULATED_SITES"
"""Environment variable with a JSON file: a list of node configurations, one a client."""

SIMULATED_APP = "bract.runtime.simulation:app"
"""The ClientApp that the bundle of a simulated run names."""


class SimulatedApp(ClientApp):
    """The installed ClientApp, as one of the clients that `SITES` describes."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; what the app raises is an error of its client, as in a deployment."""
        clock.use_monotonic_clock()
        context.node_config = _sites()[int(context.node_config["partition-id"])]
        try:
            with contained():
                answer: Message = load_app(pinned_app())(message, context)
        except Exception as error:  # noqa: BLE001 - the process serves other clients afterwards
            traceback.print_exc()
            reason = f"{type(error)}:<'{in_words(error)}'>"
            return Message(Error(ErrorCode.APP_RAISED, reason), reply_to=message)
        return answer


app = SimulatedApp()


@functools.cache
def _sites() -> list[dict[str, Any]]:
    sites: list[dict[str, Any]] = json.loads(Path(os.environ[SITES]).read_text(encoding="utf-8"))
    return sites


def engine_environment(folder: Path, sites: Path, client_app: str) -> dict[str, str]:
    """Return the environment of the engine's processes.

    Parameters
    ----------
    folder
        Where Ray keeps its sockets and logs, this user's alone.
    sites
        The file that `SITES` names.
    client_app
        The installed ClientApp, ``package.module:name``.
    """
    return {SITES: str(sites), APP: client_app, **private_ray(folder)}


def _restarting(read: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
    def settings(config: Any) -> tuple[Any, ...]:
        clients, name, backend, *others = read(config)
        backend["client_resources"]["max_restarts"] = -1  # an option of Ray's for processes
        return (clients, name, backend, *others)

    return settings


_SETTINGS = f"{SIMULATION}:_run_simulation_settings"

RULE = Rule(
    name="restarted clients of a simulation",
    kind="reliability",
    commands=("flwr-simulation",),
    needs=(_SETTINGS,),
    does="A simulated client's process is started again where it was killed.",
    without="Flower goes on asking a process that was killed.",
    put=lambda _: {_SETTINGS: _restarting},
)
