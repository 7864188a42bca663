"""The rules that Flower's processes are started under: each holds, or nothing starts."""

import functools
import importlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bract.deploy import flower, heartbeats, pace, pinned, rules, sockets
from bract.errors import BractError
from bract.flower import HEARTBEAT, NODE_TASKS, OBJECTS, PULLS, SUPERNODE


def test_sockets_are_refused_in_a_folder_that_others_may_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv(sockets.FOLDER, str(tmp_path))
    with pytest.raises(BractError, match="mode 0755; the folder of sockets must be"):
        sockets.listener(8000)


def test_another_version_of_flower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "installed", lambda: "1.42.0")
    with pytest.raises(BractError, match=r"Flower 1\.42\.0 is installed"):
        flower.run("flower-superlink")


def test_a_rule_that_has_nothing_to_replace_stops_the_process() -> None:
    with pytest.raises(BractError, match="a rule of bract would not hold"):
        rules.replace("flwr.supernode.start_client_internal", "no_such_name", None)


def test_a_killed_clientapp_is_missed_after_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token outlives two heartbeats that were lost."""
    corestate, sender = (importlib.import_module(m) for m in (NODE_TASKS, HEARTBEAT))
    paced: list[str] = []
    for rule in ("follow_work", "ask_again_soon"):
        monkeypatch.setattr(pace, rule, functools.partial(paced.append, rule))
    monkeypatch.setattr(corestate, "HEARTBEAT_PATIENCE", corestate.HEARTBEAT_PATIENCE)
    monkeypatch.setattr(sender, "HEARTBEAT_DEFAULT_INTERVAL", sender.HEARTBEAT_DEFAULT_INTERVAL)
    for rule in ("guard_supernode", "guard_clientapp"):
        monkeypatch.setattr(pinned, rule, lambda: None)
    monkeypatch.setattr(flower, "_restrict_children", lambda name: None)
    monkeypatch.setattr(flower, "load", lambda name: lambda: None)
    with pytest.raises(SystemExit):  # a SuperNode that returns has lost its connection
        flower.run("flower-supernode")
    flower.run("flwr-clientapp")
    assert paced == ["ask_again_soon", "follow_work", "ask_again_soon"]
    claimed = corestate.HEARTBEAT_DEFAULT_INTERVAL
    assert claimed == 30, "time to start in, which is Flower's"
    assert corestate.HEARTBEAT_PATIENCE * claimed == heartbeats.TOKEN_SECONDS
    interval = sender.HEARTBEAT_DEFAULT_INTERVAL - sender.HEARTBEAT_CALL_TIMEOUT
    longest = interval * (sender.HEARTBEAT_BASE_MULTIPLIER + max(sender.HEARTBEAT_RANDOM_RANGE))
    assert longest * 3 < heartbeats.TOKEN_SECONDS


def test_a_supernode_asks_often_after_work_and_as_seldom_as_flower_s_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    waits = pace.Pace()
    assert waits.seconds(3) == 0.25
    now[0] += 10
    assert waits.seconds(3) == pytest.approx(1.0)
    assert waits.seconds(0.5) == 0.1  # a ClientApp is at work
    assert waits.seconds(3) == 0.25
    now[0] += 86_400
    assert waits.seconds(3) == 3


def test_the_loop_of_a_supernode_waits_by_that_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = importlib.import_module(SUPERNODE)
    monkeypatch.setattr(loop, "time", loop.time)
    waited: list[float] = []
    pace.follow_work()
    monkeypatch.setattr(time, "sleep", waited.append)
    answers = iter([[], [], ["stop"]])

    class EnoughError(Exception):
        pass

    def messages(**_: Any) -> list[Any]:
        found = next(answers)
        if found:
            raise EnoughError
        return found

    with pytest.raises(EnoughError):
        loop._push_messages(SimpleNamespace(get_messages_legacy=messages), None, None, None)
    assert waited == [0.1, 0.1]
    assert loop.time.time is time.time, "all else is the module's"


def test_a_part_of_a_message_that_is_late_is_asked_for_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    utils = importlib.import_module(OBJECTS)
    for name in PULLS:
        function = getattr(utils, name)
        monkeypatch.setattr(function, "__kwdefaults__", dict(function.__kwdefaults__))
    pace.ask_again_soon()
    answers = iter([None, None, b"part"])

    def part(_: str) -> bytes:
        found = next(answers)
        if found is None:
            raise utils.ObjectUnavailableError("a")
        return found

    started = time.monotonic()
    assert utils.pull_objects(["a"], part) == {"a": b"part"}
    assert time.monotonic() - started < 0.8, "Flower's own waits are one and two seconds"
    assert {getattr(utils, name).__kwdefaults__["initial_backoff"] for name in PULLS} == {0.05}


def test_a_flower_without_that_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(OBJECTS), "pull_objects", lambda: None)
    with pytest.raises(BractError, match="has no initial_backoff"):
        pace.ask_again_soon()
