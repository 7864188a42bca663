"""The run directory: the files that each step of a run leaves for the next, and their places.

``runs/<name>/`` holds ``config.yaml``, ``run.json``, ``logs/``, ``models/``, ``metrics.jsonl``,
``captures/``, ``truth/<client>/``, ``audit/``, ``report.html``, ``report.json`` and
``summary.html``; encrypted runs also ``aggregates/`` (ciphertexts) and, where this machine runs
the clients, ``keys/``; runs that are audited while they train ``live.json``. ``.lock``,
``.server.lock`` and ``.live.lock`` are held by a command that works on the run, and are empty.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bract.captures.captured import CaptureRecords
from bract.captures.stores import is_run_folder, runs_in
from bract.config import FederationConfig, dump_config, load_config
from bract.disk.files import append_line, refuse_devices, write_text
from bract.disk.locks import LOCK, holder, lock
from bract.disk.permissions import make_private_folder, warn_if_open
from bract.errors import BractError, one_line, without_credentials
from bract.parse.strict_json import json_ready
from bract.schema.description import AppDescription
from bract.schema.description_text import read_description
from bract.schema.live import LiveAudit
from bract.schema.metrics import MetricsRow
from bract.schema.record import RecordError
from bract.schema.run import RunState

QUESTIONS_FOLDER = "questions"
"""Below ``audit/``: one folder a question other than reconstruction, by its name."""


class RunDirectory:
    """Paths and small files of one run."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.config_path = self.root / "config.yaml"
        self.state_path = self.root / "run.json"
        self.metrics_path = self.root / "metrics.jsonl"
        self.logs = self.root / "logs"
        self.models = self.root / "models"
        self.captures = captures_in(self.root)
        self.truth = truth_in(self.root)
        self.audit = self.root / "audit"
        self.aggregates = self.root / "aggregates"
        self.keys = self.root / "keys"
        self.lock_path = self.root / LOCK
        self.server_lock_path = self.root / ".server.lock"
        self.live_path = self.root / "live.json"
        self.live_lock_path = self.root / ".live.lock"

    @classmethod
    def open(cls, root: Path | str) -> RunDirectory:
        """Open an existing run, or the captures of a third-party app.

        A folder that holds ``captures/`` (or is that folder, whatever its name) is enough. Of a
        store with several runs it is the latest one (`bract.captures.stores`).
        """
        refuse_devices(Path(root))
        run = cls(chosen_run(Path(root))[0])
        if not run.root.is_dir():
            raise BractError(
                f"{run.root}: no such folder; expected a run made by `bract run`",
                code="file-missing",
            )
        if run.root.name == "captures" and any(run.root.glob("round-*")):
            run = cls(run.root.parent)
        if not run.config_path.is_file() and not run.captures.is_dir():
            raise BractError(
                f"{run.root}: holds neither config.yaml nor captures/; expected a run made by "
                "`bract run`, or the folder where HonestButCurious keeps its captures",
                code="file-missing",
            )
        run.state()
        return run

    def create(self, config: FederationConfig) -> None:
        """Make the folder and write the configuration."""
        try:
            for folder in (self.root, self.logs, self.models):
                make_private_folder(folder)
            write_text(self.config_path, dump_config(config))
        except OSError as error:
            raise BractError(
                f"{self.root}: cannot be written: {one_line(error, 200)}", code="file-unwritable"
            ) from error

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Be the one command that works on this run while the block runs; make its folder.

        Raises
        ------
        LockedError
            If another command works on it, naming its process.
        """
        try:
            make_private_folder(self.root)
        except OSError as error:
            raise BractError(
                f"{self.root}: cannot be written: {one_line(error, 200)}", code="file-unwritable"
            ) from error
        warn_if_open(self.root)
        with lock(self.lock_path, what=str(self.root), doing=_command()):
            yield

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Be the one server app that trains this run while the block runs.

        Raises
        ------
        LockedError
            If another server app does.
        """
        with lock(self.server_lock_path, what=str(self.root), doing="server app", patience=10.0):
            yield

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Keep captured rounds from being removed while the block runs."""
        return CaptureRecords(self.captures).reading()

    def server(self) -> str | None:
        """Return which server app trains this run, None if none does."""
        return holder(self.server_lock_path)

    def true(self, state: RunState) -> RunState:
        """Return the run state; report a stale "running" as "interrupted"."""
        if state.status not in ("starting", "running"):
            return state
        if holder(self.lock_path) or self.server():
            return state
        return state.model_copy(update={"status": "interrupted"})

    def clear(self) -> None:
        """Remove all that the run holds, but for the locks."""
        for path in self._contents():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    @property
    def is_fresh(self) -> bool:
        """Return whether nothing has been done here yet, or nothing but a start that led to no
        round.
        """
        names = {path.name for path in self._contents()}
        if not names:
            return True
        begun = names - {
            "config.yaml",
            "run.json",
            "logs",
            "models",
            "live.json",
            "live-audit.log",
        } or any(self.models.glob("*"))
        return "run.json" in names and not begun

    def _contents(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        locks = (self.lock_path, self.server_lock_path, self.live_lock_path)
        return [path for path in self.root.iterdir() if path not in locks]

    @property
    def is_configured(self) -> bool:
        """Return whether the run was made from a configuration, rather than by a third-party
        app.
        """
        return self.config_path.is_file()

    def config(self) -> FederationConfig:
        """Read the configuration that the run was made with; the default where there is none."""
        return load_config(self.config_path) if self.is_configured else FederationConfig()

    def description(self) -> AppDescription | None:
        """Read ``bract.yaml``, the server's description of an app beyond its captures."""
        return read_description(self.root)

    def state(self) -> RunState:
        """Read ``run.json``; an empty state where the run has not begun.

        Raises
        ------
        BractError
            If it cannot be read; `SchemaError` for another schema version.
        """
        try:
            text = self.state_path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return RunState()
        except (OSError, UnicodeDecodeError) as error:
            raise BractError(
                f"{self.state_path}: not readable: {one_line(error, 200)}", code="file-unreadable"
            ) from error
        return RunState.parse_text(text, source=str(self.state_path))

    def update_state(self, **changes: Any) -> None:
        """Write ``run.json`` with these fields of `RunState` changed."""
        state = RunState.model_validate(self.state().model_dump() | changes)
        write_text(self.state_path, state.to_text())

    def live(self) -> LiveAudit | None:
        """Read ``live.json``; None where no audit ran while the run trained, or it is not whole.

        Raises
        ------
        SchemaError
            If it is of another schema version.
        """
        try:
            text = self.live_path.read_bytes()
            state = LiveAudit.parse_text(text, source=str(self.live_path))
        except (OSError, RecordError):
            return None
        if state.status in ("waiting", "attacking") and not holder(self.live_lock_path):
            return state.model_copy(update={"status": "ended", "current": None})
        return state

    def metrics(self) -> list[MetricsRow]:
        """Read the rows of ``metrics.jsonl``; a line cut short by a crash is left out.

        Raises
        ------
        SchemaError
            If a row is of another schema version.
        """
        if not self.metrics_path.is_file():
            return []
        rows = []
        for line in self.metrics_path.read_bytes().splitlines():
            try:
                rows.append(MetricsRow.parse_text(line, source=str(self.metrics_path)))
            except RecordError:
                continue
        return rows

    def append_metrics(self, row: MetricsRow) -> None:
        """Append one row to ``metrics.jsonl``."""
        append_line(self.metrics_path, json.dumps(json_ready(row.to_dict()), allow_nan=False))


def captures_in(root: Path) -> Path:
    """Return the folder of a folder's captures: ``captures/``, or the folder itself."""
    folder = root / "captures"
    own = is_run_folder(root) or any(root.glob("round-*/*"))
    return root if own and not folder.is_dir() else folder


def truth_in(root: Path) -> Path:
    """Return the folder of what clients kept of a run: ``truth/``, next to a store of runs."""
    own = root / "truth"
    if own.is_dir() or not is_run_folder(root):
        return own
    return root.absolute().parents[1] / "truth"


def chosen_run(root: Path) -> tuple[Path, list[Path]]:
    """Return the run that a folder stands for, and the other runs of the same store.

    A store of several runs, and the folder that holds it as ``captures/``, stands for its latest
    run. Every other folder stands for itself.
    """
    if (root / "config.yaml").is_file() or is_run_folder(root):
        return root, []
    for store in (root / "captures", root):
        if found := runs_in(store):
            return found[0], found[1:]
    return root, []


def _command() -> str:
    return without_credentials(" ".join(["bract", *sys.argv[1:]]))
