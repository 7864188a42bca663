"""The clients of a federation in Flower's simulation engine, on this machine.

Server app, client app, capture hook and run directory are those of a federation of processes; so
are the clients' names, folders, keys and seeds. Only the processes of the clients differ: a few
processes of Ray's, each of which is one client after another, so that a thousand clients need no
more memory than a few.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from bract.cli.launch.cluster import check_ray
from bract.cli.launch.launcher import LocalFederation
from bract.cli.launch.processes import threads_of
from bract.config import FederationConfig
from bract.disk.files import write_text
from bract.errors import BractError, one_line
from bract.runtime.simulation import SIMULATED_APP, engine_environment


class SimulatedFederation(LocalFederation):
    """One SuperLink with Flower's simulation engine, which no other user of this machine reaches.

    Used as `LocalFederation` is.
    """

    _bundled_app = SIMULATED_APP

    def _start_superlink(self, *options: str, private: object = None) -> str:
        del private
        sites = self._write_sites(self._clients.keys())
        environment = engine_environment(self.processes.folder, sites, self.launch.client_app)
        return super()._start_superlink("--simulation", *options, private=environment)

    def _start_supernodes(self, address: str) -> None:
        """Start none: the engine registers its own nodes when the run begins."""

    def _write_sites(self, keys: Sequence[Path]) -> Path:
        sites = [self._node_config(client, keys) for client in range(self.config.clients)]
        file = self.processes.folder / "sites.json"
        return write_text(file, json.dumps(sites), private=True)

    def _engine(self) -> Mapping[str, int | float]:
        return {
            "num_supernodes": self.config.clients,
            "client_resources_num_cpus": 1,
            "client_resources_num_gpus": 0.0,
            "init_args_num_cpus": self.launch.at_once or clients_at_once(self.config),
            "init_args_num_gpus": 0,
        }


def clients_at_once(config: FederationConfig) -> int:
    """Return how many clients compute at a time: as many as have a core each, or as a round has.

    A client's threads are those that it has as one process of a federation of processes, which its
    numbers depend on.
    """
    round_size = max(1, int(config.clients * config.strategy.fraction))
    return min(round_size, max(1, (os.cpu_count() or 1) // threads_of(config.clients)))


def check_simulable(config: FederationConfig) -> None:
    """Refuse a simulation that cannot be started."""
    check_ray("--simulate")
    if config.deployment is not None:
        sites = one_line(", ".join(site.name for site in config.deployment.sites), 200)
        raise BractError(
            f"deployment names sites on other machines ({sites}), and --simulate runs every client "
            "on this one; remove the section deployment, or run without --simulate",
            code="config-conflict",
        )
