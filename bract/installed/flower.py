"""Where Flower keeps what is not its public API.

Public are `flwr.app`, `flwr.clientapp`, `flwr.serverapp`, `flwr.serverapp.strategy` and Flower's
commands; any module imports from those. The modules and names here were read in the source of some
releases and may be gone in the next one: nothing else of bract names them. What they are for is
said by the rules that need them (`bract.runtime.rules`).
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution, version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bract.errors import BractError

if TYPE_CHECKING:
    from flwr.cli.build import build_fab_from_files as build_fab_from_files
    from flwr.cli.flower_config import read_superlink_connection as read_superlink_connection
    from flwr.cli.typing import SuperLinkConnection as SuperLinkConnection
    from flwr.cli.utils import (
        init_http_client_from_connection as init_http_client_from_connection,
    )
    from flwr.proto.control_pb2 import ListNodesRequest as ListNodesRequest
    from flwr.proto.control_pb2 import ListRunsRequest as ListRunsRequest
    from flwr.proto.control_pb2 import RegisterNodeRequest as RegisterNodeRequest
    from flwr.proto.control_pb2 import StartRunRequest as StartRunRequest
    from flwr.proto.control_pb2 import StartRunResponse as StartRunResponse
    from flwr.proto.control_pb2 import StopRunRequest as StopRunRequest
    from flwr.proto.control_pb2 import StreamLogsRequest as StreamLogsRequest
    from flwr.proto.control_pb2 import UnregisterNodeRequest as UnregisterNodeRequest
    from flwr.proto.message_pb2 import ObjectTree as ObjectTree
    from flwr.proto.message_pb2 import PullObjectRequest as PullObjectRequest
    from flwr.supercore.task_identity import TaskIdentity as TaskIdentity
    from flwr.supernode.start_client_internal import _insert_message as _insert_message

SERIES = ("1.41", "1.42")
"""The releases whose source was read, and on which the runtime's tests pass."""

REQUIREMENT = "flwr>=1.41,<1.43"

_CONTROL = "flwr.proto.control_pb2"
_MESSAGES = "flwr.proto.message_pb2"

SUPERNODE = "flwr.supernode.start_client_internal"
"""Module in which a SuperNode takes messages and answers them."""

CLIENTAPP = "flwr.supernode.runtime.run_clientapp"
"""Module in which the process of a ClientApp installs and loads the app."""

SIMULATION = "flwr.simulation.app"
"""Module in which the process of a simulation reads its settings."""

OBJECTS = "flwr.supercore.inflatable.inflatable_utils"
"""Module that moves the parts of a message."""

CLIENT = "flwr.supercore.protobuf.client:ProtobufClient"
"""Class of Flower's clients, which all requests go through."""

STATES = (
    "flwr.server.superlink.linkstate.in_memory_linkstate:InMemoryLinkState",
    "flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState",
)
"""Classes in which a SuperLink keeps messages: in memory, and in a database."""

STORES = (
    "flwr.supercore.object_store.in_memory_object_store:InMemoryObjectStore",
    "flwr.supercore.object_store.sql_object_store:SqlObjectStore",
)
"""Classes in which a SuperLink keeps the parts of messages; a SuperNode has the first, in memory,
and so has a SuperLink without a database."""

STATE, STORE = STATES[0], STORES[0]
"""Those in memory."""

FLEET = "flwr.superlink.routers.fleet.router:fleet_handlers"
"""What a SuperLink's routes call for SuperNodes: a method for each request."""

LINK_RUNTIME = "flwr.superlink.main:_RUNTIME_HANDLERS"
"""What they call for its server apps."""

NODE_RUNTIME = "flwr.supernode.main:_RUNTIME_HANDLERS"
"""What a SuperNode's routes call for its ClientApps."""

GRID = "flwr.superlink.grid.http_grid"
"""Module in which a server app takes answers from the SuperLink."""

DATE = "flwr.supercore.date"
"""Module in which Flower asks for the time."""

NAMES = {
    "TaskIdentity": "flwr.supercore.task_identity",
    "_insert_message": SUPERNODE,
    "SuperLinkConnection": "flwr.cli.typing",
    "read_superlink_connection": "flwr.cli.flower_config",
    "init_http_client_from_connection": "flwr.cli.utils",
    "build_fab_from_files": "flwr.cli.build",
    "ListRunsRequest": _CONTROL,
    "StreamLogsRequest": _CONTROL,
    "ListNodesRequest": _CONTROL,
    "StartRunRequest": _CONTROL,
    "StartRunResponse": _CONTROL,
    "StopRunRequest": _CONTROL,
    "RegisterNodeRequest": _CONTROL,
    "UnregisterNodeRequest": _CONTROL,
    "ObjectTree": _MESSAGES,
    "PullObjectRequest": _MESSAGES,
}
"""Names that can be imported from here, and where they are."""

COMMANDS = (
    "flwr",
    "flower-superlink",
    "flower-supernode",
    "flower-superexec",
    "flwr-clientapp",
    "flwr-serverapp",
    "flwr-simulation",
)
"""Flower's commands that run under bract's rules, as its distribution declares them."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module(NAMES[name]), name)


def module(name: str) -> ModuleType:
    """Import a module of Flower's, and keep this process's filters of warnings.

    Some show every deprecated call of every package from then on (``flwr.simulation``), to somebody
    who can change none of them.
    """
    with _filters_kept():
        return importlib.import_module(name)


@contextmanager
def _filters_kept() -> Iterator[None]:
    importlib.import_module("flwr.app")  # numpy's filters among others, which stay
    with warnings.catch_warnings():
        yield


def place(name: str) -> str:
    """Return where a name is that can be imported from here, as ``module:name``."""
    return f"{NAMES[name]}:{name}"


def is_of_flower(error: BaseException) -> bool:
    """Return whether an exception is of a class of Flower's own, whichever that is."""
    return type(error).__module__.partition(".")[0] == "flwr"


def installed() -> str | None:
    """Return the version of Flower that is installed, None where there is none."""
    try:
        return version("flwr")
    except PackageNotFoundError:
        return None


def is_supported(found: str | None) -> bool:
    """Return whether this is a version of a release whose source was read."""
    return found is not None and f"{found}.".startswith(tuple(f"{one}." for one in SERIES))


def entry_point(command: str) -> Callable[[], Any]:
    """Import the function that one of Flower's commands runs.

    Raises
    ------
    BractError
        If the installed Flower has no such command, or bract has no rules for it.
    """
    scripts = distribution("flwr").entry_points.select(group="console_scripts", name=command)
    if not scripts or command not in COMMANDS:
        raise BractError(
            f"Flower {installed()} has no command {command} that bract runs; "
            f"pip install '{REQUIREMENT}'",
            code="flower-version",
        )
    with _filters_kept():
        entry: Callable[[], Any] = scripts[command].load()
    return entry
