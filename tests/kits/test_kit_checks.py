"""What a site is told before it connects: certificates, clocks, versions, and its own kit."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import re
import shutil
import ssl
import threading
from collections.abc import Iterator
from email.utils import format_datetime
from pathlib import Path

import pytest
from refusals import refused
from sites import federation, free_ports

import bract
from bract.certificates import authority as certificates
from bract.certificates.validity import (
    check_certificate,
)
from bract.cli.doctor_kit import examine_kit
from bract.errors import BractError
from bract.installed import release
from bract.kits import gateway
from bract.kits import kit as kits
from bract.kits.administration import open_kits, renew
from bract.kits.gateway import UnreachableError, ask
from bract.kits.kit import (
    read_kit,
)
from bract.kits.provisioning import provision
from bract.runtime.serving import Certificate, start_superlink, start_supernode

DAY = datetime.timedelta(days=1)


def provisioned(folder: Path, server: str = "localhost") -> tuple[Path, int]:
    """Kits of two sites, and the port of the gateway."""
    (port,) = free_ports(1)
    config = federation("hospital-a", "hospital-b", deployment={"server": server, "port": port})
    provision(config, folder / "kits", source=folder / "federation.yaml")
    return folder / "kits", port


@contextlib.contextmanager
def answering(
    operator: Path,
    port: int,
    *,
    ahead: float = 0.0,
    version: str = release(),
    status: int = 200,
) -> Iterator[None]:
    """What answers at the gateway's address, with the certificate of an operator's kit."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)
            self.send_response_only(status)
            self.send_header("Date", format_datetime(now, usegmt=True))
            self.send_header(gateway.VERSION_HEADER, version)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.HTTPServer):
        def handle_error(self, *_: object) -> None:
            """Say nothing of handshakes that a client broke off."""

    server = Server(("127.0.0.1", port), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(operator / kits.GATEWAY, operator / kits.GATEWAY_KEY)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(folder: Path) -> gateway.Gateway:
    return ask(read_kit(folder), folder)


def test_a_gateway_that_is_in_order_is_told_from_one_that_is_not(tmp_path: Path) -> None:
    kits_folder, port = provisioned(tmp_path)
    site = kits_folder / "hospital-a"
    with answering(kits_folder / "operator", port):
        found = asked(site)
        assert abs(found.ahead) < 20 and found.version == release() and found.soon is None
    with refused("gateway-unreachable", kind=UnreachableError):
        asked(site)
    with (
        answering(kits_folder / "operator", port, status=502),
        refused("gateway-unreachable", kind=UnreachableError),
    ):
        asked(site)


@pytest.mark.parametrize(
    ("ahead", "words"),
    [
        (86_400.0, "(1 day, 0:00:0.|23:59:5.) behind"),
        (-86_400.0, "ahead of"),
        (-30.0, "0:00:.. ahead of"),
    ],
)
def test_a_clock_that_is_off_is_one_error_that_says_by_how_much(
    ahead: float, words: str, tmp_path: Path
) -> None:
    kits_folder, port = provisioned(tmp_path)
    with (
        answering(kits_folder / "operator", port, ahead=ahead),
        refused("clock-wrong") as raised,
    ):
        asked(kits_folder / "hospital-a")
    assert re.search(words, str(raised.value))
    assert "timedatectl" in str(raised.value) and "\n" not in str(raised.value)


def test_a_clock_a_day_behind_is_named_where_the_certificate_is_not_valid_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kits_folder, port = provisioned(tmp_path)
    real = certificates.now
    monkeypatch.setattr(certificates, "now", lambda: real() + 2 * DAY)
    with open_kits(kits_folder, doing="test") as opened:
        renew(opened, authority=False)
    monkeypatch.setattr(certificates, "now", real)
    with (
        answering(kits_folder / "operator", port, ahead=2 * 86_400.0),
        pytest.raises(
            BractError, match=r"the clock here is (2 days, 0:00:0.|1 day, 23:59:5.) behind"
        ),
    ):
        asked(kits_folder / "hospital-a")


def test_an_expired_certificate_is_named_with_who_renews_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = certificates.now
    monkeypatch.setattr(certificates, "now", lambda: real() - 400 * DAY)
    kits_folder, port = provisioned(tmp_path)
    monkeypatch.setattr(certificates, "now", real)
    operator = kits_folder / "operator"
    with (
        answering(operator, port),
        refused("certificate-faulty", "operator"),
    ):
        asked(kits_folder / "hospital-a")
    with refused("certificate-faulty", tmp_path):
        start_superlink(
            address="127.0.0.1:1",
            folder=tmp_path / "sockets",
            certificate=Certificate(
                operator / kits.SUPERLINK, operator / kits.SUPERLINK_KEY, operator / kits.CA
            ),
            authenticate=True,
            database=None,
        )


def test_a_kit_of_another_federation_and_another_host_are_told_apart(tmp_path: Path) -> None:
    ours, port = provisioned(tmp_path / "ours")
    config = federation("hospital-a", deployment={"port": port})
    provision(config, tmp_path / "theirs", source=tmp_path / "federation.yaml")
    with (
        answering(tmp_path / "theirs" / "operator", port),
        refused("certificate-faulty", "CA"),
    ):
        asked(ours / "hospital-a")
    elsewhere = federation("hospital-a", deployment={"server": "example.org", "port": port})
    provision(elsewhere, tmp_path / "elsewhere", source=tmp_path / "federation.yaml")
    kit = read_kit(tmp_path / "elsewhere" / "hospital-a").model_copy(update={"server": "localhost"})
    with (
        answering(tmp_path / "elsewhere" / "operator", port),
        refused("certificate-faulty", "localhost"),
    ):
        ask(kit, tmp_path / "elsewhere" / "hospital-a")
    unknown = kit.model_copy(update={"server": "nobody.invalid"})
    with refused("gateway-unreachable", "nobody.invalid", kind=UnreachableError):
        ask(unknown, tmp_path / "elsewhere" / "hospital-a")


def test_another_version_is_refused_by_name_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kits_folder, port = provisioned(tmp_path)
    with (
        answering(kits_folder / "operator", port, version="9.9.9/9"),
        pytest.raises(
            BractError, match=r"runs bract 9\.9\.9 \(protocol 9\), .*upgrade this client"
        ),
    ):
        asked(kits_folder / "hospital-a")
    monkeypatch.setattr(bract, "__version__", "9.9.9")
    operator = kits_folder / "operator"
    with refused("bract-version", "9.9.9"):
        kits.check_version(read_kit(operator), operator)


def test_a_certificate_is_warned_of_thirty_days_before_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kits_folder, _ = provisioned(tmp_path)
    path = kits_folder / "operator" / kits.GATEWAY
    ends = certificates.read_certificate(path).not_valid_after_utc
    for left, warned in ((31, False), (29, True)):
        caplog.clear()
        check_certificate(path, fix="renew it", now=ends - left * DAY)
        assert ("expires in" in caplog.text) == warned
    with refused("certificate-faulty", tmp_path):
        check_certificate(path, fix="renew it", now=ends + DAY)
    with refused("certificate-faulty", tmp_path):
        check_certificate(path, fix="renew it", now=ends - 3 * 365 * DAY)


def test_a_supernode_warns_of_its_ca(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kits_folder, _ = provisioned(tmp_path)
    ca = kits_folder / "hospital-a" / kits.CA
    ends = certificates.read_certificate(ca).not_valid_after_utc
    monkeypatch.setattr(certificates, "now", lambda: ends - 5 * DAY)

    def stop(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr("bract.runtime.serving._become", stop)
    with pytest.raises(InterruptedError):
        start_supernode(
            superlink="localhost:1",
            app="bract.client.app:app",
            node_config="",
            folder=tmp_path / "sockets",
            port=1,
            root_certificates=ca,
            key=None,
            health=False,
        )
    assert "expires in 5 days" in caplog.text


def examined(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with contextlib.suppress(BractError):
        examine_kit(folder)
    return capsys.readouterr().err


def test_the_doctor_finds_what_is_wrong_with_a_kit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kits_folder, port = provisioned(tmp_path)
    site = kits_folder / "hospital-a"
    with answering(kits_folder / "operator", port):
        examine_kit(site)
        said = capsys.readouterr().err
        assert "FAIL" not in said and said.count("ok ") >= 8
        assert f"localhost:{port} answers" in said
    other = tmp_path / "other"
    provision(federation("hospital-a"), other, source=tmp_path / "federation.yaml")
    shutil.copy(other / "hospital-a" / kits.CA, site / kits.CA)
    text = (site / kits.SITE_FILE).read_text()
    text = text.replace("data: null", "data: /nowhere").replace("policy: null", "policy: gone.yaml")
    (site / kits.SITE_FILE).write_text(text.replace("device: auto", "device: cuda:99"))
    said = examined(site, capsys)
    for words in (
        "ca.crt is not the file that was issued",
        "is the CA of another federation than study",
        "does not answer",
        "/nowhere: no folder",
        "gone.yaml",
        "cuda:99",
    ):
        assert words in said, said
    with refused("checks-failed", tmp_path):
        examine_kit(site)
    said = examined(kits_folder / "operator", capsys)
    assert "no SuperLink answers there" in said and "superlink.crt: valid until" in said
    assert "FAIL" not in examined(kits_folder / "authority", capsys)


def test_the_doctor_warns_of_a_required_defense_without_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = provisioned(tmp_path)[0] / "hospital-a"
    (site / "weak.yaml").write_text("require: [{name: guardian}]")
    text = (site / kits.SITE_FILE).read_text()
    (site / kits.SITE_FILE).write_text(text.replace("policy: null", "policy: weak.yaml"))
    (line,) = [line for line in examined(site, capsys).splitlines() if "min_cosine" in line]
    assert line.startswith("WARN") and "guardian" in line
