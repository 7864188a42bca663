"""`bract site status`: what a site's and the operator's status says, and when it fails."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from refusals import refused
from test_kit_checks import answering, provisioned
from typer.testing import CliRunner

from bract.certificates import authority as certificates
from bract.cli.main import app
from bract.client.answered import Answered, Last, Run
from bract.client.refusals import note_refusal, read_refusals
from bract.config import FederationConfig
from bract.errors import BractError, RunFailedError
from bract.kits import expiry, health
from bract.kits import kit as kits
from bract.kits.health import LONGEST_SILENCE, examine
from bract.kits.metrics import exposition
from bract.rundir import RunDirectory
from bract.runtime import daily_check, sockets
from bract.runtime.contact import CONTACT, note_contact
from bract.schema.metrics import FailureRow, MetricsRow


def levels(found: health.Health) -> dict[str, str]:
    return {what: level for what, level, _ in found.findings}


def values(found: health.Health) -> dict[tuple[str, ...], float]:
    """Samples by name and labels, as Prometheus reads them."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(exposition(found.samples))
        for sample in family.samples
    }


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, int]:
    """Kits of a federation whose SuperLink and SuperNodes answer on their sockets."""
    monkeypatch.setattr(sockets, "is_healthy", lambda _: True)
    folder, port = provisioned(tmp_path)
    return folder, port


def contact(site: Path, ago: float = 0.0) -> None:
    sockets = site / "state" / "sockets"
    sockets.mkdir(parents=True, exist_ok=True)
    os.environ["BRACT_SOCKETS"] = str(sockets)
    try:
        note_contact()
    finally:
        del os.environ["BRACT_SOCKETS"]
    then = datetime.datetime.now().timestamp() - ago
    os.utime(sockets / CONTACT, (then, then))


def test_a_site_that_is_well_says_what_it_answered_refused_and_spent(
    running: tuple[Path, int],
) -> None:
    folder, port = running
    site = folder / "hospital-a"
    contact(site)
    run = Run(config="c", kinds={"train": Last(round=3, count=3, digest="d")})
    record = Answered(
        totals={"train": 3}, mechanisms={"gaussian:2.0": 2}, without_guarantee=1, runs={"7/x": run}
    )
    path = site / "state" / "hospital-a-answered.json"
    path.write_text(record.model_dump_json())
    path.chmod(0o600)
    note_refusal(site / "state", "hospital-a", BractError("no such round", code="round-mismatch"))
    with answering(folder / "operator", port):
        found = examine(site)
    assert not found.failed, found.findings
    said = " ".join(detail for _, _, detail in found.findings)
    assert "train of round 3" in said and "no such round" in said and "1 updates left" in said
    read = values(found)
    assert read["bract_answers_total", "train"] == 3 and read["bract_refusals_total",] == 1
    assert read["bract_epsilon_spent",] > 0 and read["bract_contact_age_seconds",] < 30
    assert read["bract_up", "gateway"] == read["bract_up", "supernode"] == 1
    assert read["bract_certificate_seconds_left", "gateway.crt"] > 300 * 86_400


def test_a_silent_superlink_a_damaged_record_and_a_full_disk_fail(
    running: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = running
    site = folder / "hospital-a"
    contact(site, ago=LONGEST_SILENCE + 5)
    path = site / "state" / "hospital-a-answered.json"
    path.write_text("{")
    path.chmod(0o600)
    monkeypatch.setattr(health, "LEAST_FREE", 1 << 62)
    found = examine(site)
    level = levels(found)
    assert [level[w] for w in ("SuperLink", "answers", "disk", "gateway")] == ["FAIL"] * 4
    assert values(found)["bract_up", "gateway"] == 0


def test_the_command_exits_with_one_where_something_fails_and_writes_metrics_all_the_same(
    running: tuple[Path, int], tmp_path: Path
) -> None:
    folder, _ = running
    metrics = tmp_path / "bract.prom"
    words = ["--kit", str(folder / "hospital-a"), "--metrics", str(metrics), "--format", "json"]
    done = CliRunner().invoke(app, ["site", "status", *words])
    assert isinstance(done.exception, RunFailedError)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["healthy"] is False and found["party"] == "hospital-a"
    assert "bract_status_time_seconds" in metrics.read_text()


def test_an_operator_sees_runs_rounds_failures_and_who_is_away(
    running: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bract.kits import registration

    folder, port = running
    operator = folder / "operator"
    monkeypatch.setattr(registration, "online", lambda _: {"hospital-a": True, "b": False})
    run = RunDirectory(operator / "runs" / "study-1")
    run.create(FederationConfig())
    run.update_state(status="finished")
    failure = FailureRow(client="b", reason="away")
    run.append_metrics(MetricsRow(round=1, failures=[failure]))
    run.append_metrics(MetricsRow(round=2))
    with answering(operator, port):
        found = examine(operator)
    assert not found.failed and levels(found)["sites"] == "WARN", found.findings
    read = values(found)
    assert read["bract_run_round", "study-1"] == 2 and read["bract_site_online", "b"] == 0
    assert read["bract_run_client_failures_total", "study-1"] == 1
    assert read["bract_run_active", "study-1"] == 0
    for name in (kits.CA, kits.SUPERLINK, kits.GATEWAY):
        assert read["bract_certificate_seconds_left", name] > 0
    with refused("usage"):
        examine(folder / "authority")


def test_a_certificate_that_ends_is_reported_thirty_days_ahead_and_logged_daily(
    running: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = running
    operator = folder / "operator"
    ends = certificates.read_certificate(operator / kits.GATEWAY).not_valid_after_utc
    day = datetime.timedelta(days=1)
    monkeypatch.setattr(certificates, "now", lambda: ends - 31 * day)
    assert expiry.ending(operator, kits.read_kit(operator)) == []
    monkeypatch.setattr(certificates, "now", lambda: ends - 29 * day)
    lines = expiry.ending(operator, kits.read_kit(operator))
    assert len(lines) == 2 and all("bract site renew" in line for line in lines)
    assert levels(examine(operator))[kits.SUPERLINK] == "WARN"
    monkeypatch.setattr(certificates, "now", lambda: ends + day)
    assert levels(examine(operator))[kits.SUPERLINK] == "FAIL"
    assert any("expired" in line for line in expiry.ending(operator, kits.read_kit(operator)))


def test_a_serving_process_logs_each_day_what_a_command_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged = threading.Event()
    monkeypatch.setattr(daily_check._log, "warning", lambda *_: logged.set())
    monkeypatch.setattr(daily_check, "_DAY", 0.01)
    monkeypatch.setenv(daily_check.COMMAND, "")
    daily_check.set_daily_check(["echo", "it ends soon"])
    daily_check.start_daily_check()
    assert logged.wait(20)


@pytest.mark.processes
def test_the_daily_check_of_a_kit_prints_what_ends(tmp_path: Path) -> None:
    folder, _ = provisioned(tmp_path)
    command = expiry.daily_check(folder / "operator")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    (folder / "operator" / kits.GATEWAY).write_text("no certificate")
    done = subprocess.run(command, capture_output=True, text=True)
    assert kits.GATEWAY in done.stdout


def test_refusals_are_counted_privately_and_never_hide_the_refusal(tmp_path: Path) -> None:
    state = tmp_path / "state"
    for reason in ("first", "second\nline"):
        note_refusal(state, "a/b", BractError(reason, code="usage"))
    found = read_refusals(state, "a/b")
    assert (found.count, found.reason) == (2, "second line")
    path = state / "a_b-refused.json"
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("{")
    note_refusal(state, "a/b", BractError("third", code="usage"))
    note_refusal(None, "a/b", BractError("fourth", code="usage"))
    (tmp_path / "file").touch()
    note_refusal(tmp_path / "file" / "state", "a/b", BractError("fifth", code="usage"))


def test_a_socket_that_is_not_served_is_not_healthy(tmp_path: Path) -> None:
    folder, _ = provisioned(tmp_path)
    found = examine(folder / "operator")
    assert levels(found)["SuperLink"] == "FAIL"
