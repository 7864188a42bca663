"""`bract fetch`: captures come from where they were put, and are audited here."""

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from bract import Observation
from bract.audit.captures import Captures
from bract.captures.remote import RemoteStore
from bract.cli.comparison_plan import plan
from bract.cli.main import app
from bract.cli.run import check_resumable
from bract.config import build_config
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration


def put(url: str) -> None:
    store = RemoteStore(url)
    for client in ("a", "b"):
        tensors = {"w": torch.ones(3)}
        store.save(Observation(1, client, tensors, tensors, ClientDeclaration(model="lenet")))


def test_captures_are_fetched_once_and_lie_where_an_audit_looks(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket/study"
    put(url)
    out = tmp_path / "study"
    first = CliRunner().invoke(app, ["fetch", url, str(out), "--format", "json"])
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert found["fetched"] == ["round-0001/a", "round-0001/b"]
    assert found["captures"] == str(out / "captures")
    again = CliRunner().invoke(app, ["fetch", url, str(out)])
    assert "0 captures fetched, 2 in" in " ".join(again.stderr.split())
    run = RunDirectory.open(out)
    assert [c.key for c in Captures.of_run(run).index] == found["fetched"]


def test_a_place_with_nothing_in_it_or_of_no_kind_is_one_line(tmp_path: Path) -> None:
    for url, words in (
        (f"file://{tmp_path}/nothing", "holds no captures"),
        ("bananas://x", "cannot be used as a store"),
    ):
        done = CliRunner().invoke(app, ["fetch", url, str(tmp_path / "out")])
        assert words in str(done.exception)


def test_a_comparison_keeps_its_captures_at_hand() -> None:
    config = build_config({"capture": {"store": "s3://bucket/x", "every": 2}})
    (first, *_) = plan(config, ["noise:std=0.1"]).configs
    assert first.capture.store is None and first.capture.every == 2


def test_an_interrupted_run_goes_on_with_a_larger_quota(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "x")
    run.create(build_config({"name": "x", "capture": {"quota": "1MB"}}))
    check_resumable(run, build_config({"name": "x", "capture": {"quota": "2MB"}}))
