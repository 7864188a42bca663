"""Where `bract run --superlink` goes, and what it says when it does not get there."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from refusals import check_named
from typer.testing import CliRunner

from bract.certificates.authority import Authority, certificate_pem, key_pem, new_key
from bract.cli.main import app
from bract.cli.remote.connection import UnreachableError, connect
from bract.cli.remote.where import Where
from bract.config import FederationConfig, dump_config
from bract.errors import BractError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Flower's home, with connections as `flwr` keeps them."""
    folder = tmp_path / "flower"
    folder.mkdir()
    monkeypatch.setenv("FLWR_HOME", str(folder))
    monkeypatch.setattr("bract.cli.console.set_up_logging", lambda verbose: None)
    (folder / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n'
        '[superlink.local]\naddress = ":local:"\n\n'
        '[superlink.plain]\naddress = "127.0.0.1:1"\ninsecure = true\n\n'
        f'[superlink.ours]\naddress = "fl.example.org:8000"\nroot-certificates = "{tmp_path}/ca"\n'
    )
    return folder


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority.create("study", 30)
    (tmp_path / "ca").write_bytes(certificate_pem(made.certificate))
    return made


class _Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(authority: Authority | None, tmp_path: Path, host: str = "127.0.0.1") -> Iterator[int]:
    """A server that knows no path, with a certificate for a host or without TLS."""
    server = HTTPServer(("127.0.0.1", 0), _Answer)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    if authority is not None:
        key = new_key()
        certificate = authority.issue("superlink", key, hosts=[host], days=10)
        (tmp_path / "server.pem").write_bytes(certificate_pem(certificate) + key_pem(key))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "server.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def reason(where: Where) -> str:
    with pytest.raises(BractError) as raised, connect(where) as control:
        control.nodes()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_addresses_and_profiles_are_flowers_own(tmp_path: Path, authority: Authority) -> None:
    del authority
    address = Where("fl.example.org:8000", tmp_path / "ca").connection()
    profile = Where("ours").connection()
    for found in (address, profile):
        assert found.address == "fl.example.org:8000"
        assert found.root_certificates == str(tmp_path / "ca")
        assert not found.insecure
    assert Where("plain").connection().insecure
    assert Where("[::1]:8000", insecure=True).connection().address == "[::1]:8000"


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (Where("127.0.0.1:8000"), "pass --root-certificates FILE"),
        (Where("127.0.0.1:0", insecure=True), "expected host:port"),
        (Where("127.0.0.1:99999", insecure=True), "expected host:port"),
        (Where("http://host:80", insecure=True), "expected host:port"),
        (Where("no name"), "expected host:port, a socket"),
        (Where("absent"), "not found in the Flower configuration file"),
        (Where("local"), "simulation on this machine"),
        (Where("plain", insecure=True), "leave --root-certificates and --insecure out"),
        (Where("ours"), "cannot be read"),
        (Where("h:1", Path("missing.crt")), "missing.crt: cannot be read"),
        (Where("missing/8000.sock"), "expected the socket of a `bract superlink`"),
    ],
)
def test_what_leads_nowhere_is_one_line(where: Where, said: str) -> None:
    assert said in reason(where)


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("certainly not")
    assert "ca: no certificate in PEM" in reason(Where("127.0.0.1:1", tmp_path / "ca"))


def test_nobody_there_is_said() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = reason(Where(f"127.0.0.1:{port}", insecure=True))
    assert f"127.0.0.1:{port}: cannot be reached" in said
    assert "no.such.host.invalid:1: cannot be reached" in reason(
        Where("no.such.host.invalid:1", insecure=True)
    )


def test_another_ca_another_host_and_no_tls_are_told_apart(
    tmp_path: Path, authority: Authority
) -> None:
    with serving(authority, tmp_path) as port:
        good = Where(f"127.0.0.1:{port}", tmp_path / "ca")
        assert "this port does not take runs (HTTP 404)" in reason(good)
        assert "pass --root-certificates" in reason(Where(f"127.0.0.1:{port}", insecure=True))
        other = Authority.create("other", 30)
        (tmp_path / "other").write_bytes(certificate_pem(other.certificate))
        wrong = Where(f"127.0.0.1:{port}", tmp_path / "other")
        assert "another CA signed the certificate there" in reason(wrong)
    with serving(authority, tmp_path, host="10.9.8.7") as port:
        said = reason(Where(f"127.0.0.1:{port}", tmp_path / "ca"))
        assert "certificate there is another host's" in said
    with serving(None, tmp_path) as port:
        said = reason(Where(f"127.0.0.1:{port}", tmp_path / "ca"))
        assert "it speaks no TLS" in said


def test_a_connection_that_fails_is_no_failed_run() -> None:
    with pytest.raises(UnreachableError), connect(Where("plain")) as control:
        control.nodes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu", "--resume"], "--device, --resume: only for clients and run"),
        (["--overwrite"], "--overwrite: only for"),
        (["--private-seed-file", "seed"], "--private-seed-file: only for"),
        ([], "pass --root-certificates FILE"),
        (["--insecure"], "cannot be reached"),
    ],
)
def test_bract_run_refuses_what_makes_no_sense_there(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    config = tmp_path / "federation.yaml"
    config.write_text(dump_config(FederationConfig()))
    done = CliRunner().invoke(app, ["run", str(config), "--superlink", "127.0.0.1:1", *arguments])
    assert isinstance(done.exception, BractError)
    assert said in str(done.exception)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", [["--remote"], ["--insecure"], ["--root-certificates", "ca"]])
def test_options_of_a_remote_superlink_need_one(tmp_path: Path, option: list[str]) -> None:
    config = tmp_path / "federation.yaml"
    config.write_text(dump_config(FederationConfig()))
    done = CliRunner().invoke(app, ["run", str(config), *option])
    assert isinstance(done.exception, BractError)
    check_named(str(done.exception), "--superlink")
