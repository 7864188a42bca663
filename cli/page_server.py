"""One page on 127.0.0.1, for holders of its address: no other user of the machine, no other site.

The port is free and random, the path holds 192 random bits, and a request must name this address
as its host: a page of another site that makes its own name point here (DNS rebinding) is refused.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from bract.errors import BractError, one_line

ADDRESS = "127.0.0.1"

POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; frame-ancestors 'none'; "
    "form-action 'none'; base-uri 'none'"
)


class PageServer:
    """Serves what ``page`` returns while the block runs.

    Parameters
    ----------
    page
        Returns the page, and whether it may grow: then it asks to be loaded anew.
    refresh
        Seconds until then.

    Attributes
    ----------
    address
        The URL, with the token in its path.
    """

    def __init__(self, page: Callable[[], tuple[str, bool]], *, refresh: int) -> None:
        token = secrets.token_urlsafe(24)
        try:
            self._server = _Server(page, token, refresh)
        except OSError as error:
            raise BractError(
                f"{ADDRESS}: no port to serve the page on: {one_line(error, 200)}",
                code="address-unusable",
            ) from error
        self.port: int = self._server.server_address[1]
        self.address = f"http://{ADDRESS}:{self.port}/{token}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, page: Callable[[], tuple[str, bool]], token: str, refresh: int) -> None:
        super().__init__((ADDRESS, 0), _Handler)
        self.page = page
        self.token = token
        self.refresh = refresh
        port = self.server_address[1]
        self.hosts = {f"{ADDRESS}:{port}", f"localhost:{port}"}

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep quiet about a browser that hung up."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0
    server_version = "bract"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST)
            return
        path, _, query = self.path.partition("?")
        expected = f"/{self.server.token}/"
        if not hmac.compare_digest(path.encode(errors="replace"), expected.encode()):
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        try:
            text, grows = self.server.page()
        except BractError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n", "text/plain", body, grows=True)
            return
        self._send(HTTPStatus.OK, text, "text/html", body, grows=grows and query != "hold")

    def _refuse(self, status: HTTPStatus) -> None:
        self._send(status, f"{status.phrase}\n", "text/plain", body=True, grows=False)

    def _send(self, status: HTTPStatus, text: str, kind: str, body: bool, *, grows: bool) -> None:
        content = text.encode()
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": POLICY,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }
        if grows:
            headers["Refresh"] = str(self.server.refresh)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the token out of the terminal's history and the log."""
