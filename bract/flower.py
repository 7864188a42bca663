"""Everything of Flower that is not its public API, in one place.

Public are `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and `flwr.serverapp.strategy`; any module
imports from those. The names here were read in the source of one release and may be gone in the
next one: nothing else of bract names them. docs/flower.md lists their uses.

    python -m bract.flower      # what of this the installed Flower lacks
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.cli.build import build_fab_from_files as build_fab_from_files
    from flwr.cli.flower_config import read_superlink_connection as read_superlink_connection
    from flwr.cli.typing import SuperLinkConnection as SuperLinkConnection
    from flwr.cli.utils import (
        init_http_client_from_connection as init_http_client_from_connection,
    )
    from flwr.clientapp.typing import ClientAppCallable as ClientAppCallable
    from flwr.common.constant import ErrorCode as ErrorCode
    from flwr.common.serde import fab_to_proto as fab_to_proto
    from flwr.proto.control_pb2 import ListNodesRequest as ListNodesRequest
    from flwr.proto.control_pb2 import ListRunsRequest as ListRunsRequest
    from flwr.proto.control_pb2 import RegisterNodeRequest as RegisterNodeRequest
    from flwr.proto.control_pb2 import StartRunRequest as StartRunRequest
    from flwr.proto.control_pb2 import StartRunResponse as StartRunResponse
    from flwr.proto.control_pb2 import StopRunRequest as StopRunRequest
    from flwr.proto.control_pb2 import StreamLogsRequest as StreamLogsRequest
    from flwr.proto.control_pb2 import UnregisterNodeRequest as UnregisterNodeRequest
    from flwr.proto.node_pb2 import NodeInfo as NodeInfo
    from flwr.supercore.constant import TaskType as TaskType
    from flwr.supercore.control import ControlHttpClient as ControlHttpClient
    from flwr.supercore.error import ApiErrorCode as ApiErrorCode
    from flwr.supercore.error import FlowerError as FlowerError
    from flwr.supercore.exit.exit_handler import trigger_exit_handlers as trigger_exit_handlers
    from flwr.supercore.fab import Fab as Fab
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError as ObjectPushError
    from flwr.supercore.interceptors.http.runtime_version import (
        RuntimeVersionHttpInterceptor as RuntimeVersionHttpInterceptor,
    )
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes as public_key_to_bytes
    from flwr.supercore.protobuf.client import ProtobufClient as ProtobufClient
    from flwr.supercore.run import Run as Run
    from flwr.supercore.run import RunNotRunningException as RunNotRunningException
    from flwr.supercore.task_identity import TaskIdentity as TaskIdentity

SERIES = "1.41"
"""The release whose source was read."""

REQUIREMENT = "flwr>=1.41,<1.42"

NAMES = {
    "ClientAppCallable": "flwr.clientapp.typing",
    "ErrorCode": "flwr.common.constant",
    "TaskType": "flwr.supercore.constant",
    "ProtobufClient": "flwr.supercore.protobuf.client",
    "Run": "flwr.supercore.run",
    "RunNotRunningException": "flwr.supercore.run",
    "TaskIdentity": "flwr.supercore.task_identity",
    "ListNodesRequest": "flwr.proto.control_pb2",
    "RegisterNodeRequest": "flwr.proto.control_pb2",
    "UnregisterNodeRequest": "flwr.proto.control_pb2",
    "ListRunsRequest": "flwr.proto.control_pb2",
    "StartRunRequest": "flwr.proto.control_pb2",
    "StartRunResponse": "flwr.proto.control_pb2",
    "StopRunRequest": "flwr.proto.control_pb2",
    "StreamLogsRequest": "flwr.proto.control_pb2",
    "NodeInfo": "flwr.proto.node_pb2",
    "SuperLinkConnection": "flwr.cli.typing",
    "read_superlink_connection": "flwr.cli.flower_config",
    "init_http_client_from_connection": "flwr.cli.utils",
    "build_fab_from_files": "flwr.cli.build",
    "Fab": "flwr.supercore.fab",
    "fab_to_proto": "flwr.common.serde",
    "ApiErrorCode": "flwr.supercore.error",
    "FlowerError": "flwr.supercore.error",
    "trigger_exit_handlers": "flwr.supercore.exit.exit_handler",
    "ObjectPushError": "flwr.supercore.inflatable.inflatable_utils",
    "ControlHttpClient": "flwr.supercore.control",
    "RuntimeVersionHttpInterceptor": "flwr.supercore.interceptors.http.runtime_version",
    "public_key_to_bytes": "flwr.supercore.primitives.asymmetric",
}
"""Names that can be imported from here, and where they are."""

COMMANDS = {
    "flwr": "flwr.cli.app:app",
    "flower-superlink": "flwr.superlink.cli:flower_superlink",
    "flower-supernode": "flwr.supernode.cli:flower_supernode",
    "flower-superexec": "flwr.supercore.cli:flower_superexec",
    "flwr-clientapp": "flwr.supernode.cli:flwr_clientapp",
    "flwr-serverapp": "flwr.superlink.cli:flwr_serverapp",
    "flwr-simulation": "flwr.simulation.app:flwr_simulation",
}
"""Entry points of Flower's commands."""

STARTERS = {
    "flower-superlink": "flwr.superlink.cli.flower_superlink",
    "flower-supernode": "flwr.supernode.start_client_internal",
    "flower-superexec": "flwr.supercore.superexec.executor.subprocess_executor",
}
"""Modules in which a command starts other processes, through their name ``subprocess``."""

SUPERNODE = "flwr.supernode.start_client_internal"
"""Module in which a SuperNode takes messages and answers them."""

CLIENTAPP = "flwr.supernode.runtime.run_clientapp"
"""Module in which the process of a ClientApp installs and loads the app."""

SIMULATION = "flwr.simulation.app"
"""Module in which the process of a simulation reads its settings."""

ENGINE = "flwr.server.superlink.fleet.vce.vce_api"
"""Module in which the simulation engine makes its nodes and has them answer."""

HEARTBEAT = "flwr.supercore.heartbeat"
"""Module in which an app sends its heartbeat."""

NODE_TASKS = "flwr.supercore.corestate.in_memory_corestate"
"""Module in which a SuperNode counts how long its apps' heartbeats are overdue."""

OBJECTS = "flwr.supercore.inflatable.inflatable_utils"
"""Module that asks for the parts of a message."""

PULLS = ("pull_objects", "pull_and_inflate_object_from_tree")
"""The functions that do."""

DATE = "flwr.supercore.date"
"""Module in which Flower asks for the time."""

FLEET = "flwr.supernode.fleet_http_connection"
"""Where a SuperNode signs its requests to the SuperLink."""

_REPLACED = {
    FLEET: ("NodeAuthHttpInterceptor",),
    SIMULATION: ("_run_simulation_settings",),
    ENGINE: ("DeprecatedRunInfoStore", "get_load_client_app_fn"),
    DATE: ("now",),
    OBJECTS: PULLS,
    HEARTBEAT: ("HEARTBEAT_DEFAULT_INTERVAL",),
    NODE_TASKS: ("HEARTBEAT_PATIENCE",),
    SUPERNODE: ("_insert_message", "_pull_and_store_message", "_push_messages", "time"),
    CLIENTAPP: (
        "install_from_fab",
        "install_app_dependencies",
        "get_load_client_app_fn",
        "pull_task_input",
        "push_message",
        "push_task_output",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(NAMES[name]), name)


def installed() -> str | None:
    """Return the version of Flower that is installed, None where there is none."""
    try:
        return version("flwr")
    except PackageNotFoundError:
        return None


def is_supported(found: str | None) -> bool:
    """Whether this is a version of the release whose source was read."""
    return found is not None and f"{found}.".startswith(f"{SERIES}.")


def private_names() -> list[tuple[str, str]]:
    """Return module and name of everything private that bract rests on."""
    return [
        *((module, name) for name, module in NAMES.items()),
        *((module, name) for module, _, name in (c.partition(":") for c in COMMANDS.values())),
        *((module, "subprocess") for module in STARTERS.values()),
        *((module, name) for module, names in _REPLACED.items() for name in names),
    ]


def missing() -> list[str]:
    """Return what of `private_names` the installed Flower lacks, as ``module.name``."""
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
