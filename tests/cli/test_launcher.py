import itertools

import pytest

from bract.cli import launcher
from bract.cli.launcher import Launch, LocalFederation
from bract.config import build_config
from bract.errors import RunFailedError
from bract.rundir import RunDirectory


def test_a_superlink_that_has_another_folder_is_named_with_the_folder(tmp_path, monkeypatch):
    config = build_config({"name": "apart"})
    run = RunDirectory(tmp_path / "apart")
    run.create(config)
    ticks = itertools.count(step=20)
    monkeypatch.setattr(launcher.time, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(LocalFederation, "_submit", lambda self: "7")
    monkeypatch.setattr(LocalFederation, "_flower_status", lambda self: "finished:completed")
    federation = LocalFederation(config, run, Launch(superlink="superlink:8000"))
    try:
        with pytest.raises(RunFailedError) as raised:
            federation.train(lambda row: None)
    finally:
        federation.processes.end()
    assert "log of the SuperLink at superlink:8000" in str(raised.value)
    assert f"{run.root} must be the same folder as here" in str(raised.value)
