"""A run on another machine as its log tells of it: progress, endings, broken connections."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from refusals import check_named, refused

from bract.cli.remote import run_log, running
from bract.cli.remote.connection import Standing, UnknownRunError, UnreachableError
from bract.cli.remote.run_log import follow
from bract.cli.remote.running import check_remote, follow_on, wait_for_nodes
from bract.cli.remote.where import Where
from bract.cli.signals import Stopped
from bract.config import build_config
from bract.errors import BractError, RunFailedError
from bract.protocol.progress import Progress, ProgressWriter
from bract.schema.metrics import FailureRow, MetricsRow

COMPLETED = Standing("finished", "completed", "")
RUNNING = Standing("running", "", "")


class Scripted:
    """A SuperLink that says what a test wants: pieces of log, or an error in their place."""

    address = "fl.example.org:8000"

    def __init__(self, *streams: list[str | BaseException], ending: Standing = COMPLETED) -> None:
        self.streams = list(streams)
        self.ending = ending
        self.asked: list[float] = []
        self._time = 0.0

    def log(self, run_id: int, after: float) -> Iterator[tuple[str, float]]:
        assert run_id == 17
        self.asked.append(after)
        for piece in self.streams.pop(0) if self.streams else []:
            if isinstance(piece, BaseException):
                raise piece
            self._time += 1.0
            yield piece, self._time

    def standing(self, run_id: int) -> Standing:
        assert run_id == 17
        return RUNNING if self.streams else self.ending


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "AGAIN", 0.0)
    monkeypatch.setattr(running, "NODES_PATIENCE", 0.0)


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """What a server app prints, one piece an event."""

    def pieces(*events: Progress) -> list[str]:
        writer = ProgressWriter("1.0")
        found = [capsys.readouterr().out]
        for one in events:
            writer.write(one)
            found.append(capsys.readouterr().out)
        return found

    return pieces


TRAINING = Progress(event="training", name="n", rounds=2, clients=2, run="/srv/runs/n-17")


def row(number: int, **changes: Any) -> Progress:
    return Progress(event="round", row=MetricsRow(round=number, seconds=1.0, **changes))


def test_rounds_and_failures_are_shown_and_brought(
    tell: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    bad = FailureRow(client="client-1", reason="no\x1b[31m data\nat all")
    pieces = tell(TRAINING, row(1), row(2, failures=[bad]), Progress(event="finished"))
    found = follow(Scripted(["INFO: words\n", *pieces]), 17)  # type: ignore[arg-type]
    assert [r.round for r in found.rows] == [1, 2]
    assert found.folder == "/srv/runs/n-17"
    assert found.to_dict()["status"] == "finished"
    shown = capsys.readouterr().err
    assert "round 1/2" in shown and "round 2/2" in shown
    assert "client-1 failed: no?[31m data at all" in shown


def test_a_stream_that_breaks_is_taken_up_where_it_was(tell: Callable[..., list[str]]) -> None:
    begun, training, first, second, end = tell(TRAINING, row(1), row(2), Progress(event="finished"))
    broken = UnreachableError("h: cannot be reached")
    control = Scripted([begun, training, first[:9], broken], [broken], [first[9:], second], [end])
    found = follow(control, 17)  # type: ignore[arg-type]
    assert [r.round for r in found.rows] == [1, 2]
    assert control.asked == [0.0, 3.0, 3.0, 5.0, 6.0]


def test_a_superlink_that_stays_away_is_given_up_with_the_way_back(
    tell: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "PATIENCE", -1.0)
    broken = UnreachableError("h: cannot be reached")
    control = Scripted([*tell(TRAINING), broken], [broken], [broken])
    with refused("connection-lost", 17, "--superlink", "h:1", "--insecure") as raised:
        follow_on(control, 17, Where("h:1", insecure=True))  # type: ignore[arg-type]
    assert isinstance(raised.value, RunFailedError)


@pytest.mark.parametrize(
    ("ending", "standing", "said"),
    [
        (
            Progress(event="failed", error="data: no images"),
            "failed",
            "run 17 failed: data: no images",
        ),
        (None, "failed", "run 17 failed: ModuleNotFoundError: no bract"),
        (None, "stopped", "run 17 was stopped after round 1"),
    ],
)
def test_every_other_end_is_a_failure_with_its_reason(
    tell: Callable[..., list[str]], ending: Progress | None, standing: str, said: str
) -> None:
    pieces = tell(TRAINING, row(1), *([ending] if ending else []))
    log = [*pieces, "Traceback\nModuleNotFoundError: no bract\n"]
    with pytest.raises(RunFailedError) as raised:
        follow(Scripted(log, ending=Standing("finished", standing, "")), 17)  # type: ignore[arg-type]
    assert said in str(raised.value)


def test_the_run_of_another_app_is_followed_to_its_end() -> None:
    found = follow(Scripted(["INFO: round 1\n"]), 17)  # type: ignore[arg-type]
    assert (found.folder, found.rows, list(found.tail)) == ("", [], ["INFO: round 1"])


def test_ctrl_c_says_that_the_run_goes_on_and_how_to_follow_and_stop_it(
    tell: Callable[..., list[str]],
) -> None:
    control = Scripted([*tell(TRAINING), Stopped(signal.SIGINT)])
    with pytest.raises(Stopped) as raised:
        follow_on(control, 17, Where("ours"))  # type: ignore[arg-type]
    assert raised.value.code == 130
    said = str(raised.value)
    assert "run 17 goes on at ours" in said
    check_named(said, 17, "--superlink")
    check_named(said, 17, "--superlink")


def test_a_superlink_that_forgot_the_run_ends_it(tell: Callable[..., list[str]]) -> None:
    control = Scripted([*tell(TRAINING), UnknownRunError("h: run not found")])
    with refused("run-failed", "--database"):
        follow_on(control, 17, Where("ours"))  # type: ignore[arg-type]


class Nodes:
    address = "fl.example.org:8000"

    def __init__(self, *there: str, away: tuple[str, ...] = ()) -> None:
        self._found = (list(there), list(away))

    def nodes(self) -> tuple[list[str], list[str]]:
        return self._found


def test_too_few_supernodes_are_said_before_a_run_waits_for_ever() -> None:
    wait_for_nodes(Nodes("a", "b"), 2)  # type: ignore[arg-type]
    with pytest.raises(BractError) as raised:
        wait_for_nodes(Nodes("hospital-a", away=("hospital-b",)), 3)  # type: ignore[arg-type]
    said = str(raised.value)
    assert "clients is 3, and 1 SuperNodes are connected" in said
    assert "(hospital-a), away: hospital-b" in said
    assert "starts none" in said


def test_keys_that_nobody_would_make_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with refused("config-conflict", "in-band"):
        check_remote(build_config({"encryption": "paillier"}))
    known = {"scheme": "paillier", "key_id": "0" * 32}
    check_remote(build_config({"encryption": known, "truth": True}))
    check_remote(build_config({"encryption": {"scheme": "paillier", "keys": "in-band"}}))
    assert "truth: true does nothing at a remote SuperLink" in capsys.readouterr().err


def test_rounds_that_begin_and_clients_that_are_waited_for_are_shown_at_once(
    tell: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    log = [
        "WARNING: waiting for clients: 1 of 2 are connected (a\x1b[31m), missing: b\n",
        "\x1b[92mINFO \x1b[0m:      [ROUND 1/2]\n",
    ]
    training, *rest = tell(TRAINING, Progress(event="finished"))
    follow(Scripted([training, *log, *rest]), 17)  # type: ignore[arg-type]
    shown = capsys.readouterr().err
    assert "round 1/2 begins" in shown
    assert "waiting for clients: 1 of 2 are connected (a?[31m), missing: b" in shown
