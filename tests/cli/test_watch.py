"""Watching a run: who may see the page, that it grows, and what the terminal says."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from refusals import refused

from bract.cli.page_server import PageServer
from bract.cli.watch import Watched, watch_run
from bract.config import build_config
from bract.errors import BractError
from bract.parse import dump_json
from bract.rundir import RunDirectory
from bract.schema.live import LiveAudit
from bract.schema.metrics import GlobalRow, MetricsRow


def trained(run: RunDirectory, number: int) -> None:
    judged = GlobalRow(loss=1.0, accuracy=0.5 + number / 100)
    run.append_metrics(MetricsRow(round=number, seconds=2.0, time=float(number), evaluation=judged))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "watched")
    run.create(build_config({"name": "watched", "rounds": 4}))
    run.update_state(name="watched", status="finished")
    trained(run, 1)
    return run


class Growing:
    """A page that grows until it is told not to."""

    grows = True

    def __call__(self) -> tuple[str, bool]:
        return "<p>the page</p>", self.grows


@pytest.fixture
def page() -> Growing:
    return Growing()


@pytest.fixture
def server(page: Growing) -> Iterator[PageServer]:
    with PageServer(page, refresh=7) as running:
        yield running


def ask(
    server: PageServer, path: str | None = None, host: str | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest(method, path or urlsplit(server.address).path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def test_who_has_the_address_sees_the_page_and_nothing_may_be_loaded_into_it(
    server: PageServer,
) -> None:
    status, headers, text = ask(server)
    assert (status, text) == (200, "<p>the page</p>")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Frame-Options"] == "DENY"
    assert ask(server, host=f"localhost:{server.port}")[0] == 200
    assert ask(server, method="HEAD")[2] == ""
    assert ask(server, method="POST")[0] == 501


def test_the_page_is_on_this_machine_alone_under_a_path_that_nobody_guesses(page: Growing) -> None:
    with PageServer(page, refresh=7) as one, PageServer(page, refresh=7) as other:
        first, second = (urlsplit(server.address) for server in (one, other))
        assert first.hostname == second.hostname == "127.0.0.1"
        assert first.port != second.port and first.path != second.path
        assert len(first.path.strip("/")) >= 32
        for path in ("/", "/report.html", second.path, first.path[:-2] + "/", first.path + "x"):
            status, _, text = ask(one, path)
            assert status == 404 and "the page" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", ""])
def test_a_name_that_was_made_to_point_here_is_refused(server: PageServer, host: str) -> None:
    status, _, text = ask(server, host=host.format(port=server.port) or " ")
    assert status == 421 and "the page" not in text


def test_the_page_loads_itself_anew_while_it_grows_and_is_not_held(
    server: PageServer, page: Growing
) -> None:
    path = urlsplit(server.address).path
    assert ask(server)[1]["Refresh"] == "7"
    assert "Refresh" not in ask(server, f"{path}?hold")[1]
    page.grows = False
    assert "Refresh" not in ask(server)[1]


def test_a_run_that_cannot_be_read_at_the_moment_is_said_and_asked_for_again() -> None:
    def failing() -> tuple[str, bool]:
        raise BractError("run.json: half-written", code="usage")

    with PageServer(failing, refresh=7) as server:
        status, headers, text = ask(server)
    assert (status, headers["Refresh"]) == (503, "7")
    assert text == "run.json: half-written\n"


def live(run: RunDirectory, **changes: Any) -> None:
    state = LiveAudit(pid=1, attacks=["auto"], every=1, updated=0.0, **changes)
    run.live_path.write_text(dump_json(state.to_dict()))


def test_the_standing_names_rounds_accuracy_leak_and_queue(run: RunDirectory) -> None:
    watched = Watched(run, redact=False)
    assert watched.standing().text() == (
        "finished, round 1 of 4, accuracy 51.0%, nothing scored yet, no live audit"
    )
    trained(run, 2)
    live(run, status="ended", done=3, queue=5, skipped=2)
    standing = watched.standing()
    assert standing.progress == "round 2 of 4" and standing.accuracy == pytest.approx(0.52)
    assert standing.work == "3 uploads attacked, 5 waiting, 2 skipped; ended"
    page, grows = watched.page()
    assert not grows and "3 uploads attacked, 5 waiting" in page and "http://" not in page


def test_once_says_how_it_stands_and_serves_nothing(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    watch_run(run.root, redact=False, once=True, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["round"], found["rounds"], found["status"]) == (1, 4, "finished")
    with refused("file-missing"):
        watch_run(run.root / "nowhere", redact=False, once=True, as_json=False)


@pytest.mark.processes
def test_the_command_serves_the_growing_page_until_it_is_interrupted(run: RunDirectory) -> None:
    command = [sys.executable, "-m", "bract.cli.main", "watch", str(run.root), "--format", "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        address = process.stderr.readline().removeprefix("page: ").strip()
        assert json.loads(process.stdout.readline())["round"] == 1
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert "round 1 of 4" in answer.read().decode()
        time.sleep(0.01)
        trained(run, 2)
        assert json.loads(process.stdout.readline())["round"] == 2
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert "round 2 of 4" in answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
