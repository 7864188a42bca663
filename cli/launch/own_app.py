"""A third-party app in Flower's simulation engine, in a SuperLink that is started and ended here.

`flwr run .` would take the SuperLink that an earlier app left behind, whose processes know nothing
of this run's environment.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from bract.cli import signals
from bract.cli.console import duration
from bract.cli.launch.cluster import check_ray
from bract.cli.launch.launcher import Launch, LocalFederation
from bract.client.mod import SWITCH_VARIABLE
from bract.config import build_config
from bract.disk.files import write_text
from bract.disk.permissions import make_private_folder
from bract.errors import RunFailedError
from bract.installed.app_folder import APP_FOLDER
from bract.rundir import RunDirectory
from bract.runtime.private_ray import private_ray
from bract.runtime.simulation import SITES

NOT_BUNDLED = shutil.ignore_patterns(
    "__pycache__", "captures", "truth", "runs", "build", "dist", ".*", "*.egg-info"
)
"""What is no part of an app's bundle."""

LONGEST = 3600.0
"""Seconds after which the run of one variant is given up."""

_INTERVAL = 2.0


class OwnAppFederation(LocalFederation):
    """One SuperLink with the simulation engine, which runs the app of a folder as it is.

    Parameters
    ----------
    app
        The app's folder, with its manifest.
    run
        Where captures, truth and logs of this run go, in place of the app's folder.
    clients
        Simulated nodes.
    defense
        What `bract.client.mod.SWITCH_VARIABLE` says to every client: ``off``, or JSON.
    """

    def __init__(self, app: Path, run: RunDirectory, clients: int, defense: str) -> None:
        check_ray("bract compare of an app")
        self.app = app
        self._variables = {APP_FOLDER: str(run.root.absolute()), SWITCH_VARIABLE: defense}
        make_private_folder(run.logs)
        config = build_config({"clients": clients, "name": run.root.name})
        super().__init__(config, run, Launch(fork_server=False, simulate=True))

    def finish(self, seconds: float = LONGEST) -> None:
        """Run the app to its end.

        Parameters
        ----------
        seconds
            After which the run is given up.

        Raises
        ------
        RunFailedError
            If Flower's run does not end as completed, or not in time.
        """
        self.run_id = self._submit()
        deadline = time.monotonic() + seconds
        while not (status := self._flower_status()).startswith("finished"):
            signals.check()
            self.processes.check_alive()
            if time.monotonic() > deadline:
                raise RunFailedError(
                    f"the app's run is {status} after {duration(seconds)} and was given up; lower "
                    "its rounds or its local epochs in pyproject.toml, or see why it waits: "
                    f"{self.run.logs / 'superlink.log'}"
                )
            time.sleep(_INTERVAL)
        if status != "finished:completed":
            raise RunFailedError(f"the app's run ended as {status}; {self._where_to_look()}")

    def _start_superlink(self, *options: str, private: Mapping[str, str] | None = None) -> str:
        del private
        # That it is set has the SuperLink start the engine; the app itself asks for no sites.
        sites = write_text(self.processes.folder / "sites.json", "[]", private=True)
        engine = {SITES: str(sites), **private_ray(self.processes.folder)}
        environment = {**engine, **self._variables}
        return super()._start_superlink("--simulation", *options, private=environment)

    def _start_supernodes(self, address: str) -> None:
        """Start none: the engine registers its own nodes when the run begins."""

    def _write_app(self) -> None:
        shutil.copytree(self.app, self.processes.folder / "app", ignore=NOT_BUNDLED)

    def _engine(self) -> Mapping[str, int | float]:
        return {"num_supernodes": self.config.clients, "client_resources_num_cpus": 1}
