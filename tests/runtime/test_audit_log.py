"""Who submitted what: lines that are written before the SuperLink acts, and their outcome."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bract.installed import flower
from bract.runtime.audit_log import AuditLog

START, STOP = "/v1/control/start-run", "/v1/control/stop-run"


def bundle(manifest: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("pyproject.toml", manifest)
    return content.getvalue()


def asked(
    path: str, body: bytes, log: Path, *, answer: bytes = b"", status: int = 200
) -> tuple[int, list[dict[str, Any]], list[bytes]]:
    """Send one request in two parts; return its status, the log's lines, and what the app saw."""
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    parts = [
        {"type": "http.request", "body": body[:10], "more_body": True},
        {"type": "http.request", "body": body[10:], "more_body": False},
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return parts.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    peer = {"bract.peer": {"uid": os.getuid(), "pid": 7}}
    scope = {"type": "http", "path": path, "state": peer}
    asyncio.run(AuditLog(app, log)(scope, receive, send))
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    return sent[0]["status"], lines, seen


def start(manifest: str) -> bytes:
    request = flower.StartRunRequest()
    request.fab.content = bundle(manifest)
    request.override_config["rounds"].sint64 = 3
    return bytes(request.SerializeToString())


def test_a_submission_is_written_down_with_who_and_what_and_its_run(tmp_path: Path) -> None:
    body = start('[tool.flwr.app.config]\nname = "a"\n')
    log = tmp_path / "audit.jsonl"
    answer = flower.StartRunResponse(run_id=2**63).SerializeToString()
    status, (first, second), seen = asked(START, body, log, answer=answer)
    assert status == 200 and seen == [body]
    request = flower.StartRunRequest.FromString(body)
    assert first["bundle"] == hashlib.sha256(request.fab.content).hexdigest()
    assert (first["uid"], first["pid"], first["event"]) == (os.getuid(), 7, "asked")
    assert second["run_id"] == 2**63 and second["id"] == first["id"]
    assert log.stat().st_mode & 0o777 == 0o600
    other = asked(START, start('[tool.flwr.app.config]\nname = "b"\n'), log, answer=answer)[1]
    assert len(other) == 4 and other[2]["configuration"] != first["configuration"]


def test_a_stop_is_written_down_and_a_look_is_not(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    body = flower.StopRunRequest(run_id=5).SerializeToString()
    lines = asked(STOP, body, log, status=404)[1]
    assert [(line.get("run_id"), line.get("status")) for line in lines] == [(5, None), (None, 404)]
    assert len(asked("/v1/control/list-runs", b"", log)[1]) == 2


@pytest.mark.parametrize("body", [b"\xff" * 100, start("= no toml"), start("[tool]\n"), b""])
def test_garbage_is_written_down_and_passed_on(body: bytes, tmp_path: Path) -> None:
    status, lines, seen = asked(START, body, tmp_path / "audit.jsonl", status=400)
    assert status == 400 and seen == [body] and len(lines) == 2
    assert lines[0].get("configuration") is None


def test_what_cannot_be_written_down_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "audit.jsonl").symlink_to(tmp_path / "elsewhere")
    status, _, seen = asked(START, start(""), tmp_path / "audit.jsonl")
    assert status == 503 and seen == []
    assert (tmp_path / "elsewhere").read_text() == ""


def test_a_run_cannot_be_submitted_around_the_log(tmp_path: Path) -> None:
    for path in ("/v1/control/start-automation", "/v1/runtime/start-automation"):
        status, _, seen = asked(path, b"", tmp_path / "audit.jsonl")
        assert (status, seen) == (403, [])
