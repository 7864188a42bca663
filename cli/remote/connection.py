"""The control API of a SuperLink on another machine, through Flower's own client."""

from __future__ import annotations

import contextlib
import hashlib
import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from bract.cli.remote.where import Where
from bract.errors import BractError, RunFailedError, one_line
from bract.protocol.codes import RUN_ID_NOT_FOUND
from bract.runtime.control import control_client

QUIET = 45.0
"""Seconds without a line of log after which the stream is opened anew: a connection that broke
without a word looks like a long round."""


class UnreachableError(BractError):
    """No answer, or none that could be trusted."""

    code = "superlink-unreachable"


class UnknownRunError(BractError):
    """The SuperLink knows no such run."""

    code = "run-unknown"


class LostError(RunFailedError):
    """A SuperLink that had answered does not any more."""

    code = "connection-lost"


@dataclass(frozen=True)
class Standing:
    """A run's state as Flower reports it: ``pending``, ``starting``, ``running``, ``finished``."""

    status: str
    ending: str
    details: str

    @property
    def ended(self) -> bool:
        """Return whether the run has come to its end, whatever it was."""
        return self.status == "finished"


@contextlib.contextmanager
def connect(where: Where) -> Iterator[Control]:
    """Open the control API and see that it answers.

    Raises
    ------
    BractError
        If it cannot be reached, or must not be trusted; the message gives the reason.
    """
    connection = where.connection()
    try:
        client = control_client(connection)
    except click.ClickException as error:
        raise BractError(
            f"{where.superlink}: {one_line(error.message, 300)}", code="superlink-unreachable"
        ) from error
    except (ssl.SSLError, ValueError) as error:
        raise BractError(
            f"{connection.root_certificates}: no certificates in PEM ({one_line(error, 100)}); "
            "take the ca.crt that the server's operator gave you",
            code="certificate-faulty",
        ) from error
    with client:
        yield Control(client, connection.address or where.superlink, connection.federation or "")


class Control:
    """Requests of `bract` to a SuperLink.

    Every method raises `UnreachableError` without an answer, and `RunFailedError` where the
    SuperLink refuses; `UnknownRunError` where it knows no run of that number.

    Parameters
    ----------
    federation
        What Flower's configuration calls a federation of the SuperLink; empty takes its only one.
    """

    def __init__(self, client: Any, address: str, federation: str = "") -> None:
        self._client = client
        self._federation = federation
        self.address = address
        client._interceptors = (*client._interceptors, _Impatient())

    def nodes(self) -> tuple[list[str], list[str]]:
        """Return the names of the SuperNodes that are connected, and of those that are not."""
        from bract.installed.flower import ListNodesRequest

        with self._explained():
            found = self._client.ListNodes(ListNodesRequest()).nodes_info
        names: tuple[list[str], list[str]] = ([], [])
        for node in found:
            if node.status != "unregistered":
                names[node.status != "online"].append(
                    one_line(node.name, 80) or f"node {node.node_id}"
                )
        return names

    def start(
        self, files: Mapping[str, bytes | Path], engine: Mapping[str, int | float] | None = None
    ) -> int:
        """Submit an app; return the run's number.

        Parameters
        ----------
        files
            The app's files by their path in it, ``pyproject.toml`` among them.
        engine
            Settings of a simulation engine at the SuperLink.
        """
        from bract.installed.flower import StartRunRequest, build_fab_from_files

        content, _ = build_fab_from_files(files)
        with self._explained():
            request = StartRunRequest(federation=self._federation)
            for name, value in (engine or {}).items():
                setattr(request.override_federation_config, name, value)
            request.fab.content = content
            request.fab.hash_str = hashlib.sha256(content).hexdigest()
            answer = self._client.StartRun(request)
        if not answer.HasField("run_id"):
            note = one_line(answer.note, 300) or "no reason given"
            raise RunFailedError(f"{self.address}: the SuperLink did not take the run: {note}")
        return int(answer.run_id)

    def stop(self, run_id: int) -> bool:
        """Stop a run; return whether that ended it."""
        from bract.installed.flower import StopRunRequest

        with self._explained():
            return bool(self._client.StopRun(StopRunRequest(run_id=run_id)).success)

    def standing(self, run_id: int) -> Standing:
        """Return a run's state."""
        from bract.installed.flower import ListRunsRequest

        with self._explained():
            runs = self._client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict
        if run_id not in runs:
            raise UnknownRunError(
                f"{self.address}: knows no run {run_id}; `flwr ls` lists the runs"
            )
        found = runs[run_id].status
        return Standing(found.status, found.sub_status, one_line(found.details, 500))

    def log(self, run_id: int, after: float) -> Iterator[tuple[str, float]]:
        """Return pieces of a run's log with their times, those after ``after`` first.

        Ends with the run, and after `QUIET` seconds without a piece.
        """
        from bract.installed.flower import StreamLogsRequest

        with self._explained(), contextlib.suppress(httpx.ReadTimeout):
            request = StreamLogsRequest(run_id=run_id, after_timestamp=after)
            try:
                for piece in self._client.StreamLogs(request):
                    yield piece.log_output, piece.latest_timestamp
            except ValueError as error:  # a piece that was cut short
                raise UnreachableError(f"{self.address}: {one_line(error, 200)}") from error

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPStatusError as error:
            raise self._refused(error.response) from error
        except httpx.HTTPError as error:
            raise UnreachableError(f"{self.address}: {_reason(error)}") from error

    def _refused(self, response: httpx.Response) -> BractError:
        refusal = _refusal_of(response.text)
        if refusal is not None:
            code, reason = refusal
            if code == RUN_ID_NOT_FOUND:
                return UnknownRunError(f"{self.address}: {reason}; `flwr ls` lists the runs")
            return RunFailedError(f"{self.address}: the SuperLink refused: {reason}")
        if response.status_code in (401, 403, 404):
            return BractError(
                f"{self.address}: this port does not take runs (HTTP {response.status_code}): it "
                "is a gateway, or a `bract superlink`, which takes them on its operator's socket; "
                "see docs/guide/deployment.md, A run from another machine",
                code="superlink-unreachable",
            )
        return RunFailedError(
            f"{self.address}: HTTP {response.status_code}: {one_line(response.text, 300)}"
        )


class _Impatient:
    """Let a silent stream end after `QUIET` seconds; Flower's waits for ever."""

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        """Pass the call on."""
        response: httpx.Response = call_next(context)
        context.request.extensions["timeout"]["read"] = QUIET
        return response


def _refusal_of(text: str) -> tuple[int, str] | None:
    """Return code and message of an error of Flower's APIs, None where the text is another."""
    try:
        found = json.loads(text)
        code, message, details = found["code"], found["detail"], found.get("extra")
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(code, int) or not isinstance(message, str):
        return None
    return code, one_line(f"{message} {details or ''}".strip(), 300)


def _reason(error: httpx.HTTPError) -> str:
    """Return why a connection failed, and the fix."""
    text = one_line(error, 200)
    low = text.lower()
    if "hostname mismatch" in low or "ip address mismatch" in low:
        return (
            f"the certificate there is another host's ({text}); ask for the name that the "
            "certificate was made for"
        )
    if "certificate has expired" in low:
        return "the certificate there has expired; its operator renews it"
    if "certificate_verify_failed" in low:
        return (
            f"another CA signed the certificate there ({text}); --root-certificates must be the CA "
            "of this SuperLink"
        )
    if "wrong_version_number" in low or "record layer" in low or "packet length" in low:
        return "it speaks no TLS; is it the right port? Without TLS it takes --insecure"
    if "certificate required" in low or "handshake" in low:
        return f"it takes the connections of its gateway alone ({text})"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return f"closed the connection ({text}); where it speaks TLS, pass --root-certificates"
    if isinstance(error, httpx.TimeoutException):
        return "does not answer in time; check the address, and firewalls on the way"
    return f"cannot be reached ({text}); check the address, and that the SuperLink runs"
