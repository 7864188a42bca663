"""What the server app notes of a run that ends before its last round."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException

from bract.config import build_config, dump_config
from bract.errors import ProcessEndError, RunFailedError
from bract.rundir import RunDirectory
from bract.server import app as server_app


@pytest.mark.parametrize(
    ("ending", "status", "error"),
    [
        (RunNotRunningException(), "stopped", None),
        (RunFailedError("round 1: no client answered"), "failed", "round 1: no client answered"),
        (SystemExit("of a strategy"), "failed", "of a strategy"),
    ],
)
def test_a_stopped_run_is_noted_as_stopped_and_a_failed_one_with_its_reason(
    ending: BaseException, status: str, error: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    def train(_: Grid) -> None:
        raise ending

    monkeypatch.setattr(server_app, "_federation", lambda *_: SimpleNamespace(train=train))
    settings: dict[str, bool | float | int | str] = {
        "federation": dump_config(build_config({"name": "n"})),
        "run-dir": str(tmp_path),
    }
    context = Context(7, 0, {}, RecordDict(), settings)
    raised = ProcessEndError if isinstance(ending, SystemExit) else type(ending)
    with pytest.raises(raised):
        server_app._train(cast(Grid, SimpleNamespace()), context, lambda _: None)
    state = RunDirectory(tmp_path).state()
    assert state.status == status
    assert state.error is None if error is None else error in str(state.error)
    assert state.finished is not None
