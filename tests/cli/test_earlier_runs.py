"""A run that an earlier version wrote is read, audited further, described and released.

`tests/earlier/run-VERSION.tar.xz` is what `bract demo --quick` of it left of client-2, without
logs, pages and pictures.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from environments import ROOT
from typer.testing import CliRunner

from bract.cli.main import app

EARLIER = sorted((ROOT / "tests" / "earlier").glob("run-*.tar.xz"))


@pytest.fixture(params=EARLIER, ids=lambda path: path.name.removesuffix(".tar.xz"))
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def bract(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    return done.exit_code, f"{done.output}{done.exception or ''}"


def test_its_audit_is_reported_as_it_stands(run: Path) -> None:
    code, said = bract("report", run)
    assert code == 0, said
    report = json.loads((run / "report.json").read_text())
    assert {attack["attack"] for attack in report["attacks"]} == {"grnn"}
    code, said = bract("release", run)
    assert code and "grnn (oblivious), round 1, client-2, image 2: leaked by ssim" in said, said


def test_it_is_audited_again_with_the_same_result_and_then_not_once_more(run: Path) -> None:
    (result,) = run.glob("audit/grnn/*.json")
    before = json.loads(result.read_text())
    code, said = bract("audit", run, "--resume")
    assert code == 0 and "1 earlier results are attacked again" in " ".join(said.split()), said
    after = json.loads(result.read_text())
    for one, other in zip(after["images"], before["images"], strict=True):
        assert one["scores"]["psnr"] == pytest.approx(other["scores"]["psnr"], abs=0.1)
    assert "nothing left to attack" in bract("audit", run, "--resume")[1]


def test_it_is_described(run: Path) -> None:
    code, said = bract("describe", run)
    assert code == 0 and (run / "bract.yaml").is_file(), said
    assert "1 of 1 updates are what clients so described send" in " ".join(said.split())
