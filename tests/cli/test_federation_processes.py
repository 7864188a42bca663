import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from bract.cli.launch.processes import Processes
from bract.cli.launch.warming import warmed_up
from bract.errors import RunFailedError
from bract.rundir import RunDirectory


@pytest.fixture
def processes(tmp_path: Path) -> Any:
    started = Processes(tmp_path, threads=1, fork_server=False)
    started.begin()
    yield started
    started.end()


def end_at_once(processes: Any, name: Any) -> None:
    processes.start(name, [sys.executable, "-c", "print('its last words'); raise SystemExit(3)"])


def stay(processes: Any, name: Any) -> None:
    processes.start(name, [sys.executable, "-c", "import time; time.sleep(60)"])


def noticed(processes: Any, expendable: Any) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        processes.check_alive(expendable)
        time.sleep(0.05)


@pytest.mark.processes
def test_a_process_that_ends_by_itself_is_named_with_its_last_words(processes: Any) -> None:
    end_at_once(processes, "client-0")
    said = "client-0 ended by itself with code 3: its last words; see .*client-0.log"
    with pytest.raises(RunFailedError, match=said):
        noticed(processes, ())


@pytest.mark.processes
def test_one_of_several_that_may_be_lost_is_said_once_and_the_last_one_is_not_let_go(
    processes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("client-0", "client-1")
    stay(processes, "superlink")
    end_at_once(processes, "client-1")
    with caplog.at_level(logging.WARNING):
        while "client-1" not in caplog.text:
            processes.check_alive(names)
        processes.check_alive(names)
    assert caplog.text.count("goes on without it") == 1
    end_at_once(processes, "client-0")
    with refused("run-failed", "client-0"):
        noticed(processes, names)


@pytest.mark.processes
def test_what_a_client_of_this_machine_does_not_send_is_read_in_its_own_log(
    processes: Any,
) -> None:
    line = "ERROR: client-1: the server is sent no reason: x.csv: row 3 has no label"
    processes.start("superlink", [sys.executable, "-c", "print('another line')"])
    processes.start("client-1", [sys.executable, "-c", f"print({line!r}); print('more')"])
    deadline = time.monotonic() + 20
    while not processes.own_reasons() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes.own_reasons() == {"client-1": "x.csv: row 3 has no label"}


@pytest.mark.processes
def test_every_process_ends_with_the_others(tmp_path: Path) -> None:
    processes = Processes(tmp_path, threads=1, fork_server=False)
    processes.begin()
    stay(processes, "superlink")
    (running,) = processes._running
    processes.end()
    assert running.handle.poll() is not None
    assert not processes.folder.exists()


def warm_up(processes: Processes) -> None:
    """Stand for the fork server's seconds of imports."""
    code = "print('early words', flush=True); import time; time.sleep(60)"
    processes.start("fork-server", [sys.executable, "-c", code])


@pytest.mark.processes
def test_a_fork_server_that_starts_early_logs_where_the_run_does_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "warm_up", warm_up)
    log = tmp_path / "logs" / "fork-server.log"
    log.parent.mkdir()
    with warmed_up(3) as processes:
        (running,) = processes._running
        while not (processes.folder / "fork-server.log").read_text():
            time.sleep(0.05)
        processes.attach(log.parent, tmp_path)
        assert log.read_text() == "early words\n"
        assert running.log == log
        processes.end()
    assert running.handle.poll() is not None
    assert not processes.folder.exists()


@pytest.mark.processes
def test_a_fork_server_that_started_early_ends_where_the_command_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Processes, "warm_up", warm_up)
    with pytest.raises(RunFailedError), warmed_up(3) as processes:
        (running,) = processes._running
        raise RunFailedError("the data are not there")
    assert running.handle.poll() is not None
    assert not processes.folder.exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "early"), [([], True), (["--cold"], False), (["--superlink", "a/1.sock"], False)]
)
def test_bract_run_starts_the_fork_server_before_it_imports(
    options: list[str], early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bract.cli import main, run

    launches = []

    def launched(config: Any, runs: Path, launch: Any, **_: Any) -> RunDirectory:
        launches.append((launch, [p.name for p in launch.processes._running] if early else []))
        found = RunDirectory(tmp_path / "run")
        found.create(config)
        return found

    monkeypatch.setattr(Processes, "warm_up", warm_up)
    monkeypatch.setattr(run, "run_federation", launched)
    (tmp_path / "f.yaml").write_text("name: early")
    main.app(["run", str(tmp_path / "f.yaml"), *options], standalone_mode=False)
    ((launch, names),) = launches
    assert names == (["fork-server"] if early else [])
    assert (launch.processes is not None) is early


def test_a_profile_of_processes_that_are_started_elsewhere_is_refused(tmp_path: Path) -> None:
    from bract.cli import main

    (tmp_path / "f.yaml").write_text("name: elsewhere")
    words = ["run", str(tmp_path / "f.yaml"), "--profile", "--superlink", "a/1.sock"]
    with refused("usage", "--profile"):
        main.app(words, standalone_mode=False)


IMPORTS = """
import importlib, sys
from bract.runtime.fork_server import _ALL
for name in _ALL:
    importlib.import_module(name)
import torch
from bract.client.steps import Steps
from bract.config.config import TrainingConfig
before = set(sys.modules)
layer = torch.nn.Linear(2, 1)
optimizer = Steps(list(layer.parameters()), TrainingConfig(lr=0.1))
optimizer.zero_grad()
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
print(len(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_a_step_of_training_imports_nothing_that_the_fork_server_has_not() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTS], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 10
