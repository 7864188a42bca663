"""What rules do in Flower's processes."""

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
from ruling import held, put

from bract.installed import flower
from bract.process import timeline as spans
from bract.runtime import children, contact, fork_server, polling, rule, shim, sockets, timeline


def test_sockets_are_refused_in_a_folder_that_others_may_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv(sockets.FOLDER, str(tmp_path))
    with refused("address-unusable", "0755"):
        sockets.listener(8000)


@pytest.mark.processes
@pytest.mark.parametrize(
    "command", [["flower-superexec"], ["sh", "-c", "true"], ["flwr-serverapp"]]
)
def test_a_process_of_flower_starts_only_what_belongs_to_it(command: list[str]) -> None:
    code = """
import subprocess, sys
from bract.runtime import children, rule
children.command_line = lambda name, forked: [sys.executable, "-c", "import sys; print(sys.argv)"]
rule.hold("flower-supernode", [children.RULE])
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
from bract.runtime import children, rule, shim
children.command_line = lambda *_, **__: 1 / 0
rule.hold("flower-superexec", [children.RULE])
class Now:
    def __init__(self, target, args, daemon):
        self.start = lambda: target(*args)
children.Thread = Now
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
    rules = [
        rule.Rule("first", "speed", rule.ALL, (), "", "", put=intercepting("ours")),
        rule.Rule(
            "second", "speed", rule.ALL, (), "", "", after=("first",), put=intercepting("later")
        ),
    ]
    put(monkeypatch, rule.ALL[0], *reversed(rules))
    client = held(flower.CLIENT)("http://localhost", interceptors=["flower's"])
    assert client._interceptors == ("ours", "later", "flower's")


def intercepting(name: str) -> Any:
    return lambda _: {sockets.CONSTRUCTED: sockets.intercepted(name)}


def test_a_supernode_asks_often_after_work_and_as_seldom_as_flower_s_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    waits = polling.IdleWait()

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


@pytest.mark.usefixtures("paced")
def test_an_answer_that_is_handed_in_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "_ANSWER", 60.0)
    waiting = threading.Thread(
        target=held(f"{flower.SUPERNODE}:time").sleep, args=(0.5,), daemon=True
    )
    waiting.start()
    assert held(f"{flower.NODE_RUNTIME}.push_task_output")("request", "state", "task") == "stored"
    waiting.join(30.0)
    assert not waiting.is_alive()


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = held(flower.NODE_RUNTIME)
    monkeypatch.setattr(handlers, "push_task_output", lambda *_: "stored")
    put(monkeypatch, "flower-supernode", polling.POLL_SOONER)


@pytest.mark.usefixtures("paced")
def test_the_loop_of_a_supernode_waits_by_that_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = importlib.import_module(flower.SUPERNODE)
    waited: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda _, seconds: waited.append(seconds))
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
    utils = importlib.import_module(flower.OBJECTS)
    put(monkeypatch, rule.ALL[0], polling.LATE_PARTS)
    answers = iter([None, None, b"part"])

    def part(_: str) -> bytes:
        found = next(answers)
        if found is None:
            raise utils.ObjectUnavailableError("a")
        return found

    started = time.monotonic()
    assert utils.pull_objects(["a"], part) == {"a": b"part"}
    assert time.monotonic() - started < 2.0, "Flower waits one second, then two"
    node = importlib.import_module(flower.SUPERNODE)
    assert node.pull_objects is utils.pull_objects, "which imports it by its name"


def test_a_flower_without_that_wait_waits_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(flower.OBJECTS), "pull_objects", lambda: None)
    (off,) = rule.hold(rule.ALL[0], [polling.LATE_PARTS])
    assert off.rule is polling.LATE_PARTS and "initial_backoff" in off.lacking[0]


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
    put(monkeypatch, "flower-supernode", timeline.RULE)
    (observer,) = held(flower.CLIENT)("http://localhost")._interceptors
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
        "from bract.runtime import flower\n"
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
from bract.runtime import children, rule
children.command_line = lambda name, forked: [sys.executable, "-P", {str(app)!r}, name]
rule.hold("flower-superexec", [children.RULE])
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
    assert children.without_secrets(left) == (left, {})
    for given in (["--token", "t"], ["--token=t"]):
        found = children.without_secrets(["--a", *given, "--b"])
        assert found == (["--a", "--b"], {children.TOKEN: "t"})
