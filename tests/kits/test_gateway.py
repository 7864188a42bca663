"""The gateway with real nginx, SuperLink and SuperNodes: what a site reaches, and what not."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sites import (
    NGINX,
    Processes,
    answers,
    bract,
    ca_of,
    connected,
    federation,
    free_ports,
    headers_of,
    signed,
    start_gateway,
    start_server,
)

from bract.certificates.authority import (
    certificate_pem,
    new_key,
    read_key,
)
from bract.config import dump_config
from bract.kits.administration import open_kits
from bract.kits.provisioning import provision
from bract.rundir import RunDirectory

pytestmark = [
    pytest.mark.processes,
    pytest.mark.deployment,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx"),
]


@dataclass
class Deployment:
    folder: Path
    port: int
    superlink_port: int
    processes: Processes

    def kit(self, name: str) -> Path:
        return self.folder / "kits" / name

    @property
    def ca(self) -> Path:
        return ca_of(self.kit("hospital-c"))

    def status(self, request: bytes) -> list[int]:
        return answers(self.port, self.ca, request)

    def control_calls(self) -> int:
        return self.processes.log("superlink").read_text().count("ControlServicer.")


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    """Four sites of which two train; the folder may be entered by every user of the machine."""
    folder = Path(tempfile.mkdtemp(prefix="bract-gateway-"))
    folder.chmod(0o755)
    port, superlink_port = free_ports(2)
    config = federation(
        "hospital-a",
        "hospital-b",
        "hospital-c",
        "hospital-d",
        deployment={"port": port, "superlink_port": superlink_port},
    )
    processes = Processes(folder)
    try:
        provision(config, folder / "kits", source=folder / "federation.yaml")
        (folder / "kits").chmod(0o755)
        (folder / "kits" / "operator").chmod(0o755)
        start_server(processes, folder / "kits" / "operator", superlink_port, port)
        done = bract("site", "register", "--kit", folder / "kits" / "operator")
        assert done.returncode == 0, done.stderr
        assert "hospital-a, hospital-b, hospital-c, hospital-d" in done.stderr
        yield Deployment(folder, port, superlink_port, processes)
    finally:
        processes.end()
        shutil.rmtree(folder)


def test_a_round_runs_through_the_gateway_under_the_names_of_the_sites(
    deployment: Deployment,
) -> None:
    for name in ("hospital-a", "hospital-b"):
        deployment.processes.bract(name, "supernode", "--kit", deployment.kit(name))
    config = federation("x", "y").model_copy(update={"deployment": None})
    (deployment.folder / "run.yaml").write_text(dump_config(config))
    operator = deployment.kit("operator")
    done = bract(
        *("run", deployment.folder / "run.yaml", "--runs", deployment.folder / "runs"),
        *("--superlink", operator / "sockets" / f"{deployment.superlink_port}.sock"),
    )
    logs = {name: deployment.processes.log(name).read_text()[-3000:] for name in ("hospital-a",)}
    assert done.returncode == 0, (done.stderr, logs)
    run = RunDirectory.open(deployment.folder / "runs" / "study")
    assert set(run.metrics()[-1].clients) == {"hospital-a", "hospital-b"}
    log = operator / "state" / "audit.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    asked, answered = (line for line in lines if line["action"] == "start-run")
    assert (asked["uid"], asked["event"], answered["event"]) == (os.getuid(), "asked", "answered")
    assert str(answered["run_id"]) == run.state().flower_run_id
    assert len(asked["bundle"]) == len(asked["configuration"]) == 64
    assert log.stat().st_mode & 0o777 == 0o600
    # Messages were answered by processes that had torch imported already.
    assert (deployment.kit("hospital-a") / "state" / "sockets" / "fork.sock").is_socket()
    checked = bract("doctor", "--kit", deployment.kit("hospital-a"))
    assert checked.returncode == 0, checked.stderr
    assert "answers, certificate valid until" in checked.stderr
    accessed = (deployment.folder / "nginx" / "access.log").read_text()
    assert ' 127.0.0.1 "POST /v1/fleet/pull-messages HTTP/1.1" 200 ' in accessed
    for party in ("hospital-a", "operator"):
        status = bract("site", "status", "--kit", deployment.kit(party), "--format", "json")
        assert status.returncode == 0, status.stderr
        assert json.loads(status.stdout)["healthy"]
    online = {
        one["labels"]["site"]: one["value"]
        for one in json.loads(status.stdout)["metrics"]
        if one["name"] == "bract_site_online"
    }
    assert online["hospital-a"] == online["hospital-b"] == 1 and online["hospital-d"] == 0

    # Submitted from a machine that shares no folder: the run lies in the operator's kit.
    done = bract(
        *("run", deployment.folder / "run.yaml", "--remote", "--format", "json"),
        *("--superlink", operator / "sockets" / f"{deployment.superlink_port}.sock"),
    )
    assert done.returncode == 0, (done.stderr, logs)
    lies = RunDirectory.open(json.loads(done.stdout)["run"])
    assert lies.root.parent == operator / "runs"
    assert set(lies.metrics()[-1].clients) == {"hospital-a", "hospital-b"}
    assert len(list(lies.captures.glob("round-0001/*/observation.json"))) == 2


HEAD = b"Host: localhost\r\nContent-Type: application/protobuf\r\n"


def post(path: bytes, *headers: bytes, body: bytes = b"", line: bytes | None = None) -> bytes:
    """A request, whose connection the gateway closes after its answer."""
    lines = b"".join(header + b"\r\n" for header in headers)
    first = line if line is not None else b"POST " + path + b" HTTP/1.1"
    length = b"Content-Length: %d\r\n" % len(body)
    return first + b"\r\n" + HEAD + b"Connection: close\r\n" + lines + length + b"\r\n" + body


FLEET = b"/v1/fleet/pull-messages"
START = b"/v1/control/start-run"
SMUGGLED = b"POST /v1/control/start-run HTTP/1.1\r\nHost: superlink\r\nContent-Length: 0\r\n\r\n"

PATHS = {
    "control start-run": START,
    "control stop-run": b"/v1/control/stop-run",
    "control list-runs": b"/v1/control/list-runs",
    "control stream-logs": b"/v1/control/stream-logs",
    "control register-node": b"/v1/control/register-node",
    "control unregister-node": b"/v1/control/unregister-node",
    "control list-nodes": b"/v1/control/list-nodes",
    "control create-federation": b"/v1/control/create-federation",
    "runtime acquire-task": b"/v1/runtime/acquire-task",
    "runtime pull-app-inputs": b"/v1/runtime/pull-app-inputs",
    "runtime push-messages": b"/v1/runtime/push-messages",
    "fleet register-node": b"/v1/fleet/register-node",
    "fleet unregister-node": b"/v1/fleet/unregister-node",
    "fleet of another name": b"/v1/fleet/start-run",
    "fleet alone": b"/v1/fleet",
    "fleet folder": b"/v1/fleet/",
    "root": b"/",
    "docs": b"/docs",
    "openapi": b"/openapi.json",
    "dots": b"/v1/fleet/../control/start-run",
    "dots to itself": b"/v1/fleet/../fleet/pull-messages",
    "encoded dots": b"/v1/fleet/%2e%2e/control/start-run",
    "encoded dots in capitals": b"/v1/fleet/%2E%2E/control/start-run",
    "encoded dots and slash": b"/v1/fleet/%2e%2e%2fcontrol%2fstart-run",
    "twice encoded dots": b"/v1/fleet/%252e%252e/control/start-run",
    "overlong dots": b"/v1/fleet/%c0%ae%c0%ae/control/start-run",
    "dots with a parameter": b"/v1/fleet/..;/control/start-run",
    "encoded letter": b"/v1/fleet/pull-message%73",
    "encoded slash": b"/v1%2ffleet/pull-messages",
    "two slashes": b"/v1/fleet//pull-messages",
    "two slashes first": b"//v1/control/start-run",
    "backslash": b"/v1/fleet/..\\control\\start-run",
    "trailing slash": b"/v1/fleet/pull-messages/",
    "trailing dot": b"/v1/fleet/pull-messages.",
    "query": b"/v1/fleet/pull-messages?x=/v1/control/start-run",
    "fragment": b"/v1/fleet/pull-messages#/../control/start-run",
    "parameter": b"/v1/fleet/pull-messages;x=1",
    "null": b"/v1/fleet/pull-messages%00",
    "capitals": b"/V1/FLEET/PULL-MESSAGES",
    "health by post": b"/health",
}

LINES = {
    "absolute form of the control API": b"POST http://superlink:8000/v1/control/start-run HTTP/1.1",
    "absolute form of the gateway": b"POST https://localhost/v1/fleet/pull-messages HTTP/1.1",
    "get": b"GET /v1/fleet/pull-messages HTTP/1.1",
    "head": b"HEAD /v1/fleet/pull-messages HTTP/1.1",
    "put": b"PUT /v1/fleet/push-object HTTP/1.1",
    "delete": b"DELETE /v1/fleet/push-object HTTP/1.1",
    "patch": b"PATCH /v1/fleet/push-object HTTP/1.1",
    "options": b"OPTIONS * HTTP/1.1",
    "trace": b"TRACE /v1/fleet/pull-messages HTTP/1.1",
    "connect": b"CONNECT 127.0.0.1:8000 HTTP/1.1",
    "small letters": b"post /v1/fleet/pull-messages HTTP/1.1",
    "unknown method": b"START /v1/control/start-run HTTP/1.1",
    "HTTP/1.0": b"POST /v1/fleet/pull-messages HTTP/1.0",
    "HTTP/0.9": b"GET /v1/control/list-runs",
    "HTTP/2 by name": b"POST /v1/fleet/pull-messages HTTP/2.0",
    "two blanks": b"POST  /v1/fleet/pull-messages  HTTP/1.1",
    "a tab": b"POST\t/v1/fleet/pull-messages HTTP/1.1",
}

SMUGGLING = {
    "length and chunks": post(FLEET, b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
    "two lengths": post(FLEET, b"Content-Length: 4", body=SMUGGLED),
    "length with a sign": b"POST " + FLEET + b" HTTP/1.1\r\n" + HEAD
    + b"Content-Length: +%d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
    "chunks by another name": b"POST " + FLEET + b" HTTP/1.1\r\n" + HEAD
    + b"Transfer-Encoding: xchunked\r\n\r\n" + SMUGGLED,
    "chunks after a blank": b"POST " + FLEET + b" HTTP/1.1\r\n" + HEAD
    + b"Connection: close\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "chunks in a folded line": b"POST " + FLEET + b" HTTP/1.1\r\n" + HEAD
    + b"X: y\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk without its end": b"POST " + FLEET + b" HTTP/1.1\r\n" + HEAD
    + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + SMUGGLED,
    "pipelined": b"POST " + FLEET + b" HTTP/1.1\r\n" + HEAD + b"Content-Length: 0\r\n\r\n"
    + SMUGGLED,
    "a header with a line end": post(FLEET, b"X-Y: z\nTransfer-Encoding: chunked", body=SMUGGLED),
    "upgrade to HTTP/2": post(FLEET, b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAoAAA"),
    "upgrade to a web socket": post(FLEET, b"Upgrade: websocket", b"Sec-WebSocket-Key: eA=="),
    "a path in another header": post(b"/v1/control/list-runs", b"X-Original-URL: " + FLEET),
    "no host": b"POST " + START + b" HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "two hosts": post(FLEET, b"Host: superlink"),
    "the SuperLink as host": post(FLEET).replace(b"localhost", b"superlink"),
}  # fmt: skip

OVERSIZED = {
    "a body of 40 MB": b"POST " + FLEET + b" HTTP/1.1\r\n" + HEAD
    + b"Content-Length: 40000000\r\n\r\n",
    "a path of 64 kB": post(b"/v1/fleet/" + b"a" * 65536),
    "a header of 64 kB": post(FLEET, b"X: " + b"a" * 65536),
}  # fmt: skip

REQUESTS = {
    **{f"path: {name}": post(path) for name, path in PATHS.items()},
    **{f"line: {name}": post(b"", line=line) for name, line in LINES.items()},
    **{f"smuggling: {name}": request for name, request in SMUGGLING.items()},
    **{f"oversized: {name}": request for name, request in OVERSIZED.items()},
}


def with_signature(request: bytes, kit: Path) -> bytes:
    """The request with the headers of a site that is registered, after the first line."""
    first, found, rest = request.partition(b"\r\n")
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers_of(kit).items())
    return first + found + lines.encode() + rest


@pytest.mark.parametrize("name", list(REQUESTS))
def test_a_registered_site_is_refused_all_but_its_ten_requests(
    name: str, deployment: Deployment
) -> None:
    before = deployment.control_calls()
    found = deployment.status(with_signature(REQUESTS[name], deployment.kit("hospital-c")))
    # Nothing is answered where the gateway closes the connection at once.
    assert all(400 <= status < 600 for status in found), found
    assert deployment.control_calls() == before


def test_there_are_forty_such_requests() -> None:
    assert len(set(REQUESTS.values())) >= 40


def activation(key_pem: bytes) -> bytes:
    from flwr.proto.fleet_pb2 import ActivateNodeRequest

    request = ActivateNodeRequest(public_key=key_pem, heartbeat_interval=30)
    return bytes(request.SerializeToString())


def activate(deployment: Deployment, headers: dict[str, str], claimed: bytes) -> list[int]:
    lines = [f"{name}: {value}".encode() for name, value in headers.items()]
    return deployment.status(post(b"/v1/fleet/activate-node", *lines, body=activation(claimed)))


def public_pem(headers: dict[str, str]) -> bytes:
    import base64

    return base64.b64decode(headers["flwr-public-key"])


def test_a_registered_key_is_let_in_and_no_other(deployment: Deployment) -> None:
    own = headers_of(deployment.kit("hospital-c"))
    assert activate(deployment, own, public_pem(own)) == [200]
    stranger = signed(new_key())
    refused = {
        "no signature": activate(deployment, {}, public_pem(own)),
        "another's key": activate(deployment, stranger, public_pem(own)),
        "an unregistered key": activate(deployment, stranger, public_pem(stranger)),
        "a signature of another": activate(
            deployment, own | {"flwr-signature": stranger["flwr-signature"]}, public_pem(own)
        ),
    }
    assert all(len(s) == 1 and 400 <= s[0] < 500 for s in refused.values()), refused


def test_a_clock_that_is_off_is_refused_by_the_superlink_too(deployment: Deployment) -> None:
    from bract.certificates.authority import (
        read_node_key,
    )
    from bract.kits.gateway import MOST_AHEAD, MOST_BEHIND

    key = read_node_key(deployment.kit("hospital-c") / "node.key")
    for age in (-MOST_AHEAD - 30, MOST_BEHIND + 30):
        headers = signed(key, age)
        assert activate(deployment, headers, public_pem(headers)) == [401], age


def test_a_supernode_with_an_unregistered_key_ends(deployment: Deployment) -> None:
    kit = deployment.folder / "stranger"
    shutil.copytree(deployment.kit("hospital-c"), kit)
    from bract.certificates.authority import (
        node_key_text,
    )
    from bract.kits import kit as kits

    (kit / "node.key").write_bytes(node_key_text(new_key()))
    broken = bract("supernode", "--kit", kit)
    assert broken.returncode == 2 and "node.key is not the file that was issued" in broken.stderr
    kits.reissue(kit, ["node.key"])
    deployment.processes.bract("stranger", "supernode", "--kit", kit)
    # A process that it started holds its output for a moment longer.
    code = deployment.processes.started.pop("stranger").wait(240)
    said = deployment.processes.log("stranger").read_text()
    assert code == 2 and "its key is not registered there, or was revoked" in said, said


def test_a_revoked_site_is_shut_out(deployment: Deployment) -> None:
    own = headers_of(deployment.kit("hospital-d"))
    assert activate(deployment, own, public_pem(own)) == [200]
    revoked = bract("site", "revoke", "hospital-d", "--kits", deployment.folder / "kits")
    assert revoked.returncode == 0, revoked.stderr
    # The gateway refuses the key by itself, while the SuperLink still knows it.
    deployment.processes.started["nginx"].send_signal(signal.SIGHUP)
    deployment.processes.wait(lambda: activate(deployment, own, public_pem(own)) == [410])
    others = headers_of(deployment.kit("hospital-c"))
    assert activate(deployment, others, public_pem(others)) in ([200], [412])
    registered = bract("site", "register", "--kit", deployment.kit("operator"))
    assert registered.returncode == 0 and "shut out: hospital-d" in registered.stderr, (
        registered.stderr
    )
    own = headers_of(deployment.kit("hospital-d"))
    found = activate(deployment, own, public_pem(own))
    assert len(found) == 1 and 400 <= found[0] < 500


def test_the_superlinks_own_port_takes_the_gateway_alone(deployment: Deployment) -> None:
    with (
        pytest.raises((OSError, ssl.SSLError)),
        connected(deployment.superlink_port, deployment.ca) as secure,
    ):
        # TLS 1.3 tells of a missing certificate with the first answer.
        secure.sendall(post(FLEET))
        assert secure.recv(1) == b"", "answered somebody without a certificate"
        raise ConnectionResetError
    with socket.socket() as plain:
        plain.settimeout(10)
        plain.connect(("127.0.0.1", deployment.superlink_port))
        plain.sendall(post(START))
        with contextlib.suppress(OSError):
            assert not plain.recv(100).startswith(b"HTTP/1.1 2")


def test_the_superlink_listens_on_the_loopback_interface_alone(deployment: Deployment) -> None:
    import psutil

    listening = {
        connection.laddr.ip
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == deployment.superlink_port
    }
    assert listening == {"127.0.0.1"}


@pytest.mark.parametrize("name", [None, "superlink", "example.org"])
def test_another_name_gets_no_handshake(name: str | None, deployment: Deployment) -> None:
    with pytest.raises(ssl.SSLError), connected(deployment.port, deployment.ca, name):
        pass


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_versions_of_tls_are_refused(version: ssl.TLSVersion, deployment: Deployment) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(deployment.ca)
    context.minimum_version = context.maximum_version = version
    with (
        socket.create_connection(("127.0.0.1", deployment.port)) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain, server_hostname="localhost")


def test_http_2_is_not_offered(deployment: Deployment) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(deployment.ca)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", deployment.port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        assert secure.selected_alpn_protocol() != "h2"


def test_plain_http_gets_nothing(deployment: Deployment) -> None:
    with socket.create_connection(("127.0.0.1", deployment.port), timeout=10) as plain:
        plain.sendall(post(START))
        assert plain.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
def test_another_user_of_the_operators_machine_does_not_reach_the_socket(
    deployment: Deployment,
) -> None:
    place = deployment.kit("operator") / "sockets" / f"{deployment.superlink_port}.sock"
    attempt = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "knock = socket.socket(socket.AF_UNIX)\n"
        "for action in (lambda: knock.connect(sys.argv[1]), lambda: open(sys.argv[2]).read(),\n"
        "               lambda: os.listdir(os.path.dirname(sys.argv[1]))):\n"
        "    try:\n"
        "        action()\n"
        "    except PermissionError:\n"
        "        continue\n"
        "    sys.exit('reached')\n"
    )
    key = deployment.kit("operator") / "superlink.key"
    done = subprocess.run(
        [sys.executable, "-c", attempt, str(place), str(key)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_site_outlives_restarts_and_names_a_gateway_whose_certificate_has_expired(
    deployment: Deployment,
) -> None:
    """Killed and started again; then the gateway started again; then an expired certificate."""
    own = headers_of(deployment.kit("hospital-c"))
    activate(deployment, own, public_pem(own))  # as a process that was killed after it
    deployment.processes.bract("hospital-c", "supernode", "--kit", deployment.kit("hospital-c"))
    site = deployment.processes.started.pop("hospital-c")
    log = deployment.processes.log("hospital-c")

    def logged(text: str) -> None:
        deadline = time.monotonic() + 240
        while text not in log.read_text():
            assert site.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def start_gateway_again(noticed: str) -> None:
        prefix, operator = deployment.folder / "nginx", deployment.kit("operator")
        old = deployment.processes.started["nginx"]
        old.terminate()
        old.wait()
        logged(noticed)
        assert NGINX is not None
        command = (NGINX, "-e", "stderr", "-p", prefix, "-c", operator / "nginx.conf")
        deployment.processes.start("nginx", *command)

    logged("counts as connected")
    logged("SuperNode ID")
    start_gateway_again("Connection attempt failed")
    logged("Connection successful after")
    with open_kits(deployment.folder / "kits", doing="test") as provisioned:
        key = read_key(deployment.kit("operator") / "gateway.key")
        expired = provisioned.authority.issue("gateway", key, hosts=["localhost"], days=0)
    (deployment.kit("operator") / "gateway.crt").write_bytes(certificate_pem(expired))
    start_gateway_again("Connection attempt failed")
    try:
        assert site.wait(120) == 2, log.read_text()
    finally:
        site.kill()
    assert log.read_text().count("certificate of the gateway has expired") == 1


def test_sites_behind_one_address_have_connections_of_their_own(tmp_path: Path) -> None:
    names = [f"site-{number}" for number in range(8)]
    port, superlink_port = free_ports(2)
    config = federation(*names, deployment={"port": port, "superlink_port": superlink_port})
    kits = tmp_path / "kits"
    provision(config, kits, source=tmp_path / "federation.yaml")
    processes = Processes(tmp_path)
    try:
        start_gateway(processes, kits / "operator", port)
        with contextlib.ExitStack() as stack:

            def begin(name: str, count: int) -> list[ssl.SSLSocket]:
                """Begin requests whose bodies do not come; those beyond a limit are answered."""
                began = []
                for _ in range(count):
                    secure = stack.enter_context(connected(port, ca_of(kits / name)))
                    secure.sendall(with_signature(post(FLEET, body=b"x"), kits / name)[:-1])
                    secure.settimeout(0.5)
                    began.append(secure)
                return began

            # Eight parts of a message, a heartbeat and a question of each site.
            sites = [secure for name in names for secure in begin(name, 10)]
            assert not select.select(sites, [], [], 1.0)[0]
            more = begin(names[0], 30)
            refused = select.select(more, [], [], 1.0)[0]
            assert 5 <= len(refused) < 30
            assert b" 503 " in refused[0].recv(100)
            assert not select.select(sites, [], [], 0.2)[0]
    finally:
        processes.end()
