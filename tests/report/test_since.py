"""What a page rests on, an earlier page beside it, and the sheet of a release."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from reporting import gather

from bract.cli import main as command_line
from bract.report import facts, write_report
from bract.report.since import read_earlier


def depends(root: Path) -> dict[str, str]:
    return {row["name"]: row["audited"] for row in gather(root)["depends"]}


def stamp(root: Path, **basis: str) -> None:
    """Give the audits of a run what they depend on."""
    for path in (root / "audit").glob("*/*.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"basis": basis}))


def run_command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["bract", *map(str, words)])
    try:
        command_line.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_page_of_other_code_is_stale(make_run: Any) -> None:
    root = make_run()
    stamp(root, code="0123456789abcdef", libraries="torch 1.0")
    rows = {row.name: row for row in facts.gather(root).depends}
    assert rows["code"].audited == "0123456789abcdef" and rows["code"].stale
    assert rows["libraries"].audited == "torch 1.0" and not rows["libraries"].stale
    assert {"model", "training", "protection", "data"} <= rows.keys()
    assert 'class="chip hot">stale' in write_report(root).read_text()
    stamp(root, code=rows["code"].now or "")
    assert not any(row.stale for row in facts.gather(root).depends)
    assert 'class="chip hot">stale' not in write_report(root).read_text()


def test_an_earlier_page_shows_what_changed_and_what_it_did(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = make_run()
    old = Path(shutil.copytree(new, tmp_path / "old"))
    for path in (new / "captures").glob("*/*/observation.json"):
        content = json.loads(path.read_text())
        content["declaration"]["num_examples"] = 7
        path.write_text(json.dumps(content))
    for path in (new / "audit").glob("*/*.json"):
        path.unlink()
    assert depends(old)["data"] != depends(new)["data"] and "7" in depends(new)["data"]
    assert run_command(monkeypatch, "report", old) == 0
    kept = tmp_path / "kept.json"
    kept.write_bytes((old / "report.json").read_bytes())
    for earlier in (old, kept):
        assert run_command(monkeypatch, "report", new, "--since", earlier) == 0
        found = json.loads((new / "report.json").read_text())["since"]
        changed = {r["title"]: r for r in found["depends"] if r["before"] != r["after"]}
        assert list(changed) == ["examples of each client"]
        results = {r["title"]: (r["before"], r["after"]) for r in found["results"]}
        before, after = results["Reconstruction, oblivious tier"]
        assert "leaked" in before and after == "not asked"
        assert 'id="since"' in (new / "report.html").read_text()
    assert run_command(monkeypatch, "report", new, "--since", tmp_path / "none.json") == 2
    kept.write_text("{}")
    assert run_command(monkeypatch, "report", new, "--since", kept) == 2


def test_a_release_names_limits_files_and_what_is_in_the_way(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run()
    out = tmp_path / "model.bin"
    out.write_bytes(b"weights")
    assert run_command(monkeypatch, "release", root, "--file", out) == 3
    text = (root / "release.json").read_text()
    sheet = json.loads(text)
    assert not sheet["passed"] and sheet["open_points"]
    assert [(row["limit"], row["tier"], row["passed"]) for row in sheet["limits"]] == [
        ("leaked>0@oblivious", "oblivious", False)
    ]
    digest = hashlib.sha256(b"weights").hexdigest()
    assert sheet["files"] == [{"name": "model.bin", "size": 7, "sha256": digest}]
    page = (root / "release.html").read_text()
    assert not sheet["final_examined"] and "--question membership" in page
    assert digest in page and page.count("<dd></dd>") == 5 and str(tmp_path) not in page + text
    assert "http://" not in page and "https://" not in page and "<script" not in page


def test_a_release_passes_where_every_limit_held_and_nothing_is_stale(
    make_run: Any, writers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run()
    out = tmp_path / "model.bin"
    out.write_bytes(b"weights")
    words = ["release", root, "--file", out, "--fail-on", "leaked>999"]
    assert run_command(monkeypatch, *words) == 3, "nobody asked the model that goes out"
    writers.membership(root)
    assert run_command(monkeypatch, *words) == 0
    read: Any = lambda: json.loads((root / "release.json").read_text())  # noqa: E731
    assert read()["passed"] and read()["open_points"] == []
    assert {t["tier"]: t["passed"] for t in read()["tiers"]}["oblivious"]
    assert run_command(monkeypatch, "release", root, "--fail-on", "leaked>999") == 3
    assert not read()["passed"] and not read()["files"], "nothing is named that goes out"
    stamp(root, code="0123456789abcdef")
    assert run_command(monkeypatch, *words) == 3
    assert not read()["passed"] and "0123456789abcdef" in read()["open_points"][0]
    with_none = ["release", root, "--file", tmp_path / "none", "--fail-on", "leaked>999"]
    assert run_command(monkeypatch, *with_none) == 2
    os.mkfifo(tmp_path / "pipe")
    pipe = ["--file", tmp_path / "pipe", "--fail-on", "leaked>999"]
    assert run_command(monkeypatch, "release", root, *pipe) == 2
    assert run_command(monkeypatch, "report", root, "--since", tmp_path / "pipe") == 2
    assert run_command(monkeypatch, "release", root, "--fail-on", "nonsense") == 2


def test_the_facts_that_0_6_0_wrote_are_read(make_run: Any) -> None:
    root = make_run(rounds=1)
    write_report(root)
    content = json.loads((root / "report.json").read_text())
    guess = {"scope": "without", "attack_name": "class_mean", "tier": None, "score": 0.2}
    rows = content["reach"]
    content["reach"] = [*rows, guess | {"client": None, "round": None, "input": "image"}]
    (root / "report.json").write_text(json.dumps(content))
    read = read_earlier(root / "report.json")
    assert [row.scope for row in read.reach] == [row["scope"] for row in rows] != []
