"""Flower's simulation engine, with clients that are those of a federation of processes.

The engine gives a simulated node its number and the total number, and nothing else. Under the
rules of this module

- node i has the node configuration of client i: its folders, keys and device (`SITES`);
- the process of a client imports the installed ClientApp, answers with the error that a client of
  the deployment would send where the app raises, and is started again where it was killed;
- the processes of Ray serve this machine alone, and who knows a secret (`engine_environment`).
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message

from bract.deploy import clock
from bract.deploy.pinned import load_app
from bract.deploy.private_ray import private_ray
from bract.deploy.rules import replace
from bract.flower import ENGINE, SIMULATION, ErrorCode

SITES = "BRACT_SIMULATED_SITES"
"""Environment variable with a JSON file: a list of node configurations, one a client."""


class SimulatedApp:
    """The app that a process of the engine calls for a message: the installed one, under its name.

    Pickled with every message, so it is the name rather than the app.
    """

    def __init__(self, reference: str) -> None:
        self.reference = reference

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; what the app raises is an error of its client, as in a deployment."""
        clock.keep_even()
        try:
            answer: Message = load_app(self.reference)(message, context)
        except Exception as error:  # noqa: BLE001 - the process serves other clients afterwards
            traceback.print_exc()
            reason = f"{type(error)}:<'{error}'>"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        return answer


def engine_environment(folder: Path, sites: Path) -> dict[str, str]:
    """Return the environment of the engine's processes.

    Parameters
    ----------
    folder
        Where Ray keeps its sockets and logs, this user's alone.
    sites
        The file that `SITES` names.
    """
    return {
        SITES: str(sites),
        **private_ray(folder),
    }


def simulate_sites() -> None:
    """Make the engine run the clients that the launcher described."""
    sites: list[dict[str, Any]] = json.loads(Path(os.environ[SITES]).read_text(encoding="utf-8"))

    def node(node_id: int, node_config: Mapping[str, Any]) -> Any:
        return known(node_id=node_id, node_config=sites[int(node_config["partition-id"])])

    def loader(default_app_ref: str, **_: Any) -> Callable[..., SimulatedApp]:
        load_app(default_app_ref)
        return lambda *_: SimulatedApp(default_app_ref)

    def settings(config: Any) -> tuple[Any, ...]:
        clients, name, backend, *others = read(config)
        # Options of Ray's for the processes; Flower would go on asking one that was killed.
        backend["client_resources"]["max_restarts"] = -1
        return (clients, name, backend, *others)

    known = replace(ENGINE, "DeprecatedRunInfoStore", node)
    replace(ENGINE, "get_load_client_app_fn", loader)
    read = replace(SIMULATION, "_run_simulation_settings", settings)
