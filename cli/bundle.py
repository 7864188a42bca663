"""Input for Flower: an app bundle that carries configuration only."""

from __future__ import annotations

import json
from pathlib import Path

from bract.config import FederationConfig, dump_config
from bract.disk.files import utf8
from bract.runtime.pinned import DEFAULT_APP


def app_manifest(
    config: FederationConfig, run_dir: Path | None, client_app: str = DEFAULT_APP
) -> str:
    """Return the ``pyproject.toml`` of a Flower App Bundle that carries configuration only.

    The sites' names and data paths stay with the provisioner.

    Parameters
    ----------
    run_dir
        The server's run directory; None lets it take a folder of its own.
    client_app
        The ClientApp that the bundle names, ``package.module:name``.
    """
    config = config.model_copy(update={"deployment": None})
    return "\n".join(
        [
            "[project]",
            'name = "bract-federation"',
            'version = "1.0.0"',
            'description = "Configuration of one federation; the code is what each side installed"',
            'license = "Apache-2.0"',
            "dependencies = []",
            "",
            "[tool.flwr.app]",
            'publisher = "bract"',
            "",
            "[tool.flwr.app.components]",
            'serverapp = "bract.server.app:app"',
            f"clientapp = {json.dumps(client_app)}",
            "",
            "[tool.flwr.app.config]",
            f"federation = {json.dumps(dump_config(config))}",
            *([f"run-dir = {json.dumps(utf8(run_dir))}"] if run_dir else []),
            "",
        ]
    )
