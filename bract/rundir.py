"""The run directory: what each step of a run leaves for the next, and where.

``runs/<name>/`` holds ``config.yaml``, ``run.json``, ``logs/``, ``models/``, ``metrics.jsonl``,
``captures/``, ``truth/<client>/``, ``audit/``, ``report.html`` and ``report.json``; encrypted
runs also ``aggregates/`` (ciphertexts) and, where this machine runs the clients, ``keys/``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bract.config import FederationConfig, dump_config, load_config
from bract.errors import BractError, SchemaError

RUN_SCHEMA = 1


class RunDirectory:
    """Paths and small files of one run."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.config_path = self.root / "config.yaml"
        self.state_path = self.root / "run.json"
        self.metrics_path = self.root / "metrics.jsonl"
        self.logs = self.root / "logs"
        self.models = self.root / "models"
        self.captures = self.root / "captures"
        self.truth = self.root / "truth"
        self.audit = self.root / "audit"
        self.aggregates = self.root / "aggregates"
        self.keys = self.root / "keys"

    @classmethod
    def open(cls, root: Path | str) -> RunDirectory:
        """Open an existing run, or the captures of somebody's own app.

        A folder that holds ``captures/`` (or is that folder) is enough: without ``config.yaml``
        the captures are audited unscored.

        Raises
        ------
        BractError
            If the folder is neither, or a run of another schema version.
        """
        run = cls(root)
        if not run.root.is_dir():
            raise BractError(f"{run.root}: no such folder; expected a run made by `bract run`")
        if run.root.name == "captures" and any(run.root.glob("round-*")):
            run = cls(run.root.parent)
        if not run.config_path.is_file() and not run.captures.is_dir():
            raise BractError(
                f"{run.root}: holds neither config.yaml nor captures/; expected a run made by "
                "`bract run`, or the folder where HonestButCurious keeps its captures"
            )
        run.state()
        return run

    def create(self, config: FederationConfig) -> None:
        """Make the folder and write the configuration."""
        try:
            for folder in (self.root, self.logs, self.models):
                folder.mkdir(parents=True, exist_ok=True)
            write_text(self.config_path, dump_config(config))
        except OSError as error:
            raise BractError(f"{self.root}: cannot be written: {error}") from error

    @property
    def is_configured(self) -> bool:
        """Whether the run was made from a configuration, rather than by somebody's own app."""
        return self.config_path.is_file()

    def config(self) -> FederationConfig:
        """Read the configuration that the run was made with; the default where there is none."""
        return load_config(self.config_path) if self.is_configured else FederationConfig()

    def state(self) -> dict[str, Any]:
        """Read ``run.json``; an empty dictionary where the run has not begun."""
        try:
            content: dict[str, Any] = json.loads(self.state_path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise BractError(f"{self.state_path}: not readable as JSON: {error}") from error
        if content.get("schema") != RUN_SCHEMA:
            raise SchemaError(
                f"{self.root}: run schema {content.get('schema')!r}, this version reads "
                f"{RUN_SCHEMA}; use the bract version that made it, or run it again"
            )
        return content

    def update_state(self, **changes: Any) -> None:
        """Merge ``changes`` into ``run.json``."""
        write_text(
            self.state_path, json.dumps({"schema": RUN_SCHEMA, **self.state(), **changes}, indent=1)
        )

    def metrics(self) -> list[dict[str, Any]]:
        """Read the rows of ``metrics.jsonl``; a last line cut short by a crash is left out."""
        if not self.metrics_path.is_file():
            return []
        rows = []
        for line in self.metrics_path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one row to ``metrics.jsonl``."""
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole: under a temporary name first, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
