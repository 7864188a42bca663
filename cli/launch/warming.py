"""A fork server that starts while the command that needs it still imports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bract.cli.launch.processes import Processes, threads_of


@contextlib.contextmanager
def warmed_up(clients: int, *, simulate: bool = False) -> Iterator[Processes]:
    """Start the fork server of a federation on this machine while its launcher still imports.

    Whatever is left of it ends with the block.
    """
    processes = Processes(None, threads=threads_of(clients), fork_server=True, simulate=simulate)
    try:
        processes.warm_up()
        yield processes
    finally:
        processes.end()
