"""The rules that Flower's processes are started under: each holds, or nothing starts."""

import functools
import importlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from refusals import refused

from bract import timeline as spans
from bract.deploy import (
    contact,
    flower,
    fork_server,
    holding,
    pace,
    parts,
    pinned,
    resuming,
    rules,
    shim,
    sockets,
    timeline,
    transfers,
)
from bract.flower import NODE_RUNTIME, OBJECTS, PULLS, SUPERNODE


def test_sockets_are_refused_in_a_folder_that_others_may_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv(sockets.FOLDER, str(tmp_path))
    with refused("address-unusable", "0755"):
        sockets.listener(8000)


def test_another_version_of_flower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "installed", lambda: "1.43.0")
    with refused("flower-version", "1.43.0", "installed"):
        flower.run("flower-superlink")


def test_a_rule_that_has_nothing_to_replace_stops_the_process() -> None:
    with refused("flower-version"):
        rules.replace("flwr.supernode.start_client_internal", "no_such_name", None)


def test_each_process_is_paced_and_a_supernode_s_requests_are_observed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    for rule in ("follow_work", "ask_again_soon"):
        monkeypatch.setattr(pace, rule, functools.partial(done.append, rule))
    monkeypatch.setattr(parts, "ask_together", lambda: done.append("ask_together"))
    for module, rule in ((parts, "serve_together"), (holding, "hold_questions")):
        monkeypatch.setattr(module, rule, lambda name, rule=rule: done.append(f"{rule} {name}"))
    for rule in ("guard_supernode", "guard_clientapp"):
        monkeypatch.setattr(pinned, rule, functools.partial(done.append, rule))
    monkeypatch.setattr(resuming, "go_on_with_uploads", lambda: done.append("uploads"))
    monkeypatch.setattr(transfers.Connections, "use", lambda _: done.append("connections"))
    observe = lambda *interceptors: done.append([type(i).__name__ for i in interceptors])  # noqa: E731
    monkeypatch.setattr(sockets, "intercept_requests", observe)
    monkeypatch.setattr(flower, "_restrict_children", lambda name: done.append(f"children {name}"))
    monkeypatch.setattr(flower, "entry_point", lambda name: lambda: None)
    with pytest.raises(SystemExit):  # a SuperNode that returns has lost its connection
        flower.run("flower-supernode")
    flower.run("flwr-clientapp")
    assert done == [
        "ask_again_soon",
        "ask_together",
        "guard_supernode",
        "follow_work",
        "uploads",
        "connections",
        ["Retries", "Admission", "Contact", "Connections"],
        "serve_together flower-supernode",
        "hold_questions flower-supernode",
        "children flower-supernode",
        "ask_again_soon",
        "ask_together",
        "guard_clientapp",
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    "command", [["flower-superexec"], ["sh", "-c", "true"], ["flwr-serverapp"]]
)
def test_a_process_of_flower_starts_only_what_belongs_to_it(command: list[str]) -> None:
    code = """
import subprocess, sys
from bract.deploy import flower
flower.command_line = lambda name, forked: [sys.executable, "-c", "import sys; print(sys.argv)"]
flower._restrict_children("flower-supernode")
subprocess.Popen(sys.argv[1:]).wait()
"""
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, *command, "--parent-pid"],
        capture_output=True,
        text=True,
        check=False,
    )
    if command == ["flower-superexec"]:
        assert found.stdout == "['-c', '--parent-pid']\n", "under the rules"
    else:
        assert "it may start flower-superexec" in found.stderr and not found.stdout


@pytest.mark.processes
def test_an_app_is_forked_without_a_process_in_between(tmp_path: Path) -> None:
    place = tmp_path / "fork.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        server.listen()
        code = """
import os, subprocess
from bract.deploy import flower, shim
flower.command_line = lambda *_, **__: 1 / 0
flower._restrict_children("flower-superexec")
class Now:
    def __init__(self, target, args, daemon):
        self.start = lambda: target(*args)
flower.Thread = Now
subprocess.Popen(["flwr-serverapp", "--token", "t"])
"""
        asking = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, shim.SOCKET: str(place)},
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = server.accept()
        with connection:
            request, descriptors = fork_server._receive(connection)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.sendall(b"4321\n")
        _, errors = asking.communicate(timeout=60)
    assert request["argv"] == ["flwr-serverapp", "--token", "t"]
    assert asking.returncode == 0
    assert errors == "flwr-serverapp: process 4321 was killed from outside, perhaps for memory\n"


def test_interceptors_are_around_flower_s_own_the_first_outermost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = importlib.import_module("flwr.supercore.protobuf.client").ProtobufClient
    monkeypatch.setattr(client, "__init__", client.__init__)
    sockets.intercept_requests("ours")
    sockets.intercept_requests("later")
    assert client("http://localhost", interceptors=["flower's"])._interceptors == (
        "ours",
        "later",
        "flower's",
    )


def test_a_supernode_asks_often_after_work_and_as_seldom_as_flower_s_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    waits = pace.Pace()

    def idle(seconds: float) -> None:
        now[0] += seconds
        waits._woke = now[0]  # the last question was answered at once

    assert waits.seconds(3) == 0.25
    idle(10)
    assert waits.seconds(3) == pytest.approx(1.0)
    now[0] += 0.75  # the SuperLink held the question
    assert waits.seconds(3) == pytest.approx(1.075 - 0.75)
    now[0] += 5
    assert waits.seconds(3) == 0
    assert waits.seconds(0.5) == 0.1  # a ClientApp is at work
    waits.sleep(3)
    assert waits.seconds(3) == 0.25
    idle(86_400)
    assert waits.seconds(3) == 3
    assert slept == [0.0]


def test_an_answer_that_is_handed_in_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_ANSWER", 60.0)
    handlers = importlib.import_module(NODE_RUNTIME)
    monkeypatch.setattr(handlers, "push_task_output", lambda *_: "stored")
    waits = pace.Pace()
    holding.note_task_outputs(waits.answered.set)
    assert handlers.push_task_output("request", "state", "task") == "stored"
    waiting = threading.Thread(target=waits.sleep, args=(0.5,), daemon=True)
    waiting.start()
    waiting.join(30.0)
    assert not waiting.is_alive()


def test_the_loop_of_a_supernode_waits_by_that_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = importlib.import_module(SUPERNODE)
    monkeypatch.setattr(loop, "time", loop.time)
    waited: list[float] = []
    handlers = importlib.import_module(NODE_RUNTIME)
    monkeypatch.setattr(handlers, "push_task_output", handlers.push_task_output)
    monkeypatch.setattr(threading.Event, "wait", lambda _, seconds: waited.append(seconds))
    pace.follow_work()
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
    assert time.monotonic() - started < 2.0, "Flower waits one second, then two"
    assert {getattr(utils, name).__kwdefaults__["initial_backoff"] for name in PULLS} == {0.05}


def test_a_flower_without_that_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(OBJECTS), "pull_objects", lambda: None)
    with refused("flower-version", "initial_backoff"):
        pace.ask_again_soon()


def ask(interceptor: Any, method: str, status: int = 200, content: bytes = b"a message") -> None:
    context = SimpleNamespace(rpc_method=f"/flwr.proto.Fleet/{method}")
    interceptor.intercept(context, lambda _: httpx.Response(status, content=content))


def test_an_answered_question_for_messages_is_the_contact_that_health_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sockets.FOLDER, str(tmp_path))
    for method, status in (("PushMessages", 200), ("PullMessages", 502)):
        ask(contact.Contact(), method, status)
        assert contact.contact_age(tmp_path) is None
    ask(contact.Contact(), "PullMessages", content=b"")
    age = contact.contact_age(tmp_path)
    assert age is not None and age < 60


def test_a_profile_has_the_requests_that_brought_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(spans.FOLDER, str(tmp_path))
    client = importlib.import_module("flwr.supercore.protobuf.client").ProtobufClient
    monkeypatch.setattr(client, "__init__", client.__init__)
    timeline.note_spans("flower-supernode")
    (observer,) = client("http://localhost")._interceptors
    ask(observer, "PullMessages", content=b"")
    ask(observer, "SendNodeHeartbeat")
    ask(observer, "PullMessages")
    ask(observer, "PushMessages")
    (file,) = tmp_path.iterdir()
    names = [json.loads(line)["name"] for line in file.read_text().splitlines()]
    assert names == ["take message from SuperLink", "send answer to SuperLink"]


@pytest.mark.parametrize(("soft", "hard", "expected"), [(64, 512, 512), (64, 1 << 17, 1 << 16)])
def test_a_superlink_may_hold_the_connections_of_many_sites(
    soft: int, hard: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    sockets.allow_many_connections()
    soft = expected
    sockets.allow_many_connections()
    assert given == [(expected, hard)]


@pytest.mark.processes
@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("given", [["--token", "5ecre7"], ["--token=5ecre7"]])
def test_no_process_shows_the_token_of_its_app(
    given: list[str], forked: bool, tmp_path: Path
) -> None:
    """Every user of a machine sees the arguments of every process, as `ps` shows them."""
    app = tmp_path / "app.py"
    app.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from bract.deploy import flower\n"
        "def entry():\n"
        "    shown = Path('/proc/self/cmdline').read_bytes()\n"
        "    print(b'5ecre7' in shown, sys.argv[1:], '5ecre7' in os.environ.values())\n"
        "flower.entry_point = lambda name: entry\n"
        "sys.argv = sys.argv[1:]\n"
        "flower.run(sys.argv[0])\n"
    )
    # A shim that no fork server answers starts the command afresh.
    code = f"""
import subprocess, sys
from bract.deploy import flower, shim
flower.command_line = lambda name, forked: [sys.executable, "-P", {str(app)!r}, name]
flower._restrict_children("flower-superexec")
subprocess.Popen(["flwr-serverapp", *sys.argv[1:], "--insecure"], stdin=subprocess.DEVNULL).wait()
"""
    environment = {**os.environ, shim.SOCKET: str(tmp_path / "none.sock")} if forked else None
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, *given],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )
    assert found.stdout == "False ['--insecure', '--token', '5ecre7'] False\n", found.stderr


def test_a_secret_is_taken_off_the_arguments_of_whatever_is_started() -> None:
    left = ["flwr", "--token-file", "f", "--insecure"]
    assert flower.without_secrets(left) == (left, {})
    for given in (["--token", "t"], ["--token=t"]):
        found = flower.without_secrets(["--a", *given, "--b"])
        assert found == (["--a", "--b"], {flower.TOKEN: "t"})
