"""Everything of Flower that is not its public API, in one place.

Public are `flwr.app`, `flwr.clientapp`, `flwr.serverapp`, `flwr.serverapp.strategy` and Flower's
commands; any module imports from those. The names here were read in the source of one release and
may be gone in the next one: nothing else of bract names them. docs/flower.md lists their uses.

    python -m bract.flower      # names and commands that the installed Flower lacks
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import TYPE_CHECKING, Any

from bract.errors import BractError

if TYPE_CHECKING:
    from flwr.cli.build import build_fab_from_files as build_fab_from_files
    from flwr.cli.flower_config import read_superlink_connection as read_superlink_connection
    from flwr.cli.typing import SuperLinkConnection as SuperLinkConnection
    from flwr.cli.utils import (
        init_http_client_from_connection as init_http_client_from_connection,
    )
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares as combine_shares
    from flwr.common.secure_aggregation.crypto.shamir import create_shares as create_shares
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
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError as ObjectPushError
    from flwr.supercore.protobuf.client import ProtobufClient as ProtobufClient
    from flwr.supercore.run import RunNotRunningException as RunNotRunningException
    from flwr.supercore.task_identity import TaskIdentity as TaskIdentity

SERIES = ("1.41", "1.42")
"""The releases whose source was read, and on which the runtime's tests pass."""

REQUIREMENT = "flwr>=1.41,<1.43"

_CONTROL = "flwr.proto.control_pb2"
_SHAMIR = "flwr.common.secure_aggregation.crypto.shamir"

NAMES = {
    # Messages in one process: Flower refuses to create one without an identity.
    "TaskIdentity": "flwr.supercore.task_identity",
    # A stopped run is recorded as stopped, and a restarted SuperLink does not end one.
    "RunNotRunningException": "flwr.supercore.run",
    "ObjectPushError": "flwr.supercore.inflatable.inflatable_utils",
    # Security: Flower's clients connect to Unix sockets. The same hook observes their requests:
    # a refused SuperNode asks again and names the cause, health knows the last answer.
    "ProtobufClient": "flwr.supercore.protobuf.client",
    # Runs at a SuperLink on another machine, through the client that `flwr` itself makes.
    "SuperLinkConnection": "flwr.cli.typing",
    "read_superlink_connection": "flwr.cli.flower_config",
    "init_http_client_from_connection": "flwr.cli.utils",
    "build_fab_from_files": "flwr.cli.build",
    "ListRunsRequest": _CONTROL,
    "StreamLogsRequest": _CONTROL,
    "ListNodesRequest": _CONTROL,
    # The same, and security: the SuperLink's audit log reads these requests.
    "StartRunRequest": _CONTROL,
    "StartRunResponse": _CONTROL,
    "StopRunRequest": _CONTROL,
    "RegisterNodeRequest": _CONTROL,
    "UnregisterNodeRequest": _CONTROL,
    # Security: each message has a list of its own parts.
    "ObjectTree": "flwr.proto.message_pb2",
    # Speed: the parts of a message travel together.
    "PullObjectRequest": "flwr.proto.message_pb2",
    # Masked sums: Shamir shares of the masks' seeds (over GF(2^128), by PyCryptodome).
    "create_shares": _SHAMIR,
    "combine_shares": _SHAMIR,
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

SUPERNODE = "flwr.supernode.start_client_internal"
"""Module in which a SuperNode takes messages and answers them."""

CLIENTAPP = "flwr.supernode.runtime.run_clientapp"
"""Module in which the process of a ClientApp installs and loads the app."""

SIMULATION = "flwr.simulation.app"
"""Module in which the process of a simulation reads its settings."""

OBJECTS = "flwr.supercore.inflatable.inflatable_utils"
"""Module that asks for the parts of a message."""

PULLS = ("pull_objects", "pull_and_inflate_object_from_tree")
"""The functions that do."""

STATES = (
    ("flwr.server.superlink.linkstate.in_memory_linkstate", "InMemoryLinkState"),
    ("flwr.server.superlink.linkstate.sql_linkstate", "SqlLinkState"),
)
"""Modules and classes in which a SuperLink keeps messages."""

STORES = (
    ("flwr.supercore.object_store.in_memory_object_store", "InMemoryObjectStore"),
    ("flwr.supercore.object_store.sql_object_store", "SqlObjectStore"),
)
"""Modules and classes in which a SuperLink keeps the parts of messages; a SuperNode has the first,
in memory, and so has a SuperLink without a database."""

FLEET = "flwr.superlink.servicer.fleet.fleet_handlers"
"""Module with what a SuperLink does for SuperNodes."""

LINK_RUNTIME = "flwr.superlink.servicer.runtime.runtime_handlers"
"""Module with what a SuperLink does for its server apps."""

NODE_RUNTIME = "flwr.supernode.servicer.runtime.runtime_handlers"
"""Module with what a SuperNode does for its ClientApps."""

GRID = "flwr.superlink.grid.http_grid"
"""Module in which a server app takes answers from the SuperLink."""

DATE = "flwr.supercore.date"
"""Module in which Flower asks for the time."""

_RUNTIME = ("acquire_task", "pull_messages", "pull_object", "push_messages", "push_object")

_REPLACED = {
    # Security: a site runs the one app that its operator installed, whatever bundle arrives.
    SUPERNODE: ("_pull_and_store_message", "_insert_message", "_push_messages", "time"),
    CLIENTAPP: ("install_from_fab", "get_load_client_app_fn"),
    # Reliability: an answer that cannot be decoded is its site's error, and ends no run.
    GRID: ("inflate_object_from_contents",),
    # Reliability: a clock that is set, or a laptop that slept, does not end a run.
    DATE: ("now",),
    # Reliability: a simulated client's process that was killed is started again.
    SIMULATION: ("_run_simulation_settings",),
    # Speed: parts of a message that are late, how many move at once, and (`time` above) a
    # SuperNode's pauses.
    OBJECTS: (*PULLS, "get_num_workers"),
    # Reliability: an answer whose upload takes long holds up no other.
    **{module: (name,) for module, name in STATES},
    # Security: a site's list of parts is bounded, and touches no message of another.
    **{module: (name,) for module, name in STORES},
    # Speed: parts of a message travel together, and a question is held until there is an answer.
    # Security: and a node touches its own messages alone.
    FLEET: (
        "confirm_message_received",
        "pull_messages",
        "pull_object",
        "push_messages",
        "push_object",
    ),
    LINK_RUNTIME: _RUNTIME,
    NODE_RUNTIME: (*_RUNTIME, "push_task_output"),
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(NAMES[name]), name)


def error_class(name: str) -> tuple[type[Exception], ...]:
    """Return one of Flower's own errors, for ``except``; none where Flower has no such name."""
    try:
        return (__getattr__(name),)
    except (ImportError, AttributeError):
        return ()


def installed() -> str | None:
    """Return the version of Flower that is installed, None where there is none."""
    try:
        return version("flwr")
    except PackageNotFoundError:
        return None


def is_supported(found: str | None) -> bool:
    """Whether this is a version of a release whose source was read."""
    return found is not None and f"{found}.".startswith(tuple(f"{one}." for one in SERIES))


def has_runtime() -> bool:
    """Return whether bract can start the installed Flower's processes under its rules."""
    return is_supported(installed()) and not missing()


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
    entry: Callable[[], Any] = scripts[command].load()
    return entry


def private_names() -> list[tuple[str, str]]:
    """Return module and name of everything private that bract rests on."""
    return [
        *((module, name) for name, module in NAMES.items()),
        *((module, name) for module, names in _REPLACED.items() for name in names),
    ]


def missing() -> list[str]:
    """Return the `private_names` that the installed Flower lacks, as ``module.name``."""
    return [f"{module}.{name}" for module, name in private_names() if not _is_there(module, name)]


def _is_there(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def main() -> None:
    """Print the names that the installed Flower lacks; exit with 1 if there are any."""
    lacking = missing()
    names = private_names()
    sys.stdout.write(f"flwr {installed()}: {len(names) - len(lacking)} of {len(names)} names\n")
    sys.stdout.writelines(f"missing: {name}\n" for name in lacking)
    sys.exit(1 if lacking else 0)


if __name__ == "__main__":
    main()
