"""The demo of signals, trained in this process: from made-up beats to a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bract.audit.audit import Audit
from bract.cli.templates import DemoData, demo_config
from bract.config.config import AuditRequest
from bract.report import write_report
from bract.rundir import RunDirectory
from bract.runtime.in_process import train_here
from bract.schema import AuditResult


@pytest.mark.thorough
def test_a_single_beat_comes_back_from_its_upload_and_is_drawn(tmp_path: Path) -> None:
    config = demo_config(quick=True, data=DemoData.SIGNAL)
    assert config.data.input == "signal" and config.audit.attacks == ["ig"]
    run = RunDirectory(tmp_path / "demo")
    run.create(config)
    train_here(config, run)
    request = AuditRequest(attacks=["gauss-newton"], rounds=[1], clients=["client-2"], device="cpu")
    audit = Audit(run, request)
    (answer,) = audit.execute(audit.plan())
    assert isinstance(answer, AuditResult)
    (beat,) = answer.images
    assert beat.scores is not None and beat.scores.correlation is not None
    assert beat.scores.correlation >= 0.99 and (beat.scores.nrmse or 1.0) < 0.01
    assert set(answer.baselines) >= {"class_mean", "random_signal"}
    page = write_report(run.root).read_text(encoding="utf-8")
    assert page.count('<polyline class="rebuilt"') >= 1
    facts = json.loads((run.root / "report.json").read_text(encoding="utf-8"))
    assert facts["observations"][0]["images"][0]["leaked_by"] == "correlation"
