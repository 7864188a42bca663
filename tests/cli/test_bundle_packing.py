"""What leaves a server in a pack, and what a pack from elsewhere may not bring."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file

from bract.cli import packing
from bract.cli.packing import MOST, pack
from bract.cli.unpacking import PackError, pull
from bract.config import build_config
from bract.disk import write_tensors
from bract.errors import BractError
from bract.parse import dump_json
from bract.report.facts import gather
from bract.rundir import RunDirectory
from bract.schema import AuditResult, Report
from bract.schema.audit import ImageResult, Scores
from bract.schema.metrics import GlobalRow, MetricsRow

SECRET = b"what must stay at the server"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two rounds that was attacked, and holds everything that must stay where it is."""
    made = RunDirectory(tmp_path / "server" / "digits")
    made.create(build_config({"name": "digits", "rounds": 2}))
    made.update_state(name="digits", status="finished")
    for number in (1, 2):
        made.append_metrics(
            MetricsRow(round=number, seconds=1.0, evaluation=GlobalRow(loss=1.0, accuracy=0.5))
        )
    image = ImageResult(index=0, label=7, true_label=7, scores=Scores(ssim=0.75, psnr=20.0))
    result = AuditResult(
        round=1, client="client-0", attack="ig", tier="oblivious", seed=0, scored=True,
        images=[image],
    )  # fmt: skip
    path = made.audit / "ig" / "round-0001--client-0.json"
    path.parent.mkdir(parents=True)
    path.write_text(dump_json(result.to_dict()))
    write_tensors(made.models / "final.safetensors", {"w": torch.arange(4.0)})
    write_tensors(made.models / "last.safetensors", {"w": torch.zeros(4)})
    for secret in (
        *("captures/round-0001/client-0/update.safetensors", "truth/client-0/images.safetensors"),
        *("keys/client-0.pem", "audit/ig/image.png", "report.html", "logs/server.log"),
    ):
        file = made.root / secret
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(SECRET)
    return made


@pytest.fixture
def packed(run: RunDirectory, tmp_path: Path) -> Path:
    pack(run.root, str(tmp_path / "digits.tar"))
    return tmp_path / "digits.tar"


def test_report_metrics_and_model_arrive_and_nothing_else(
    run: RunDirectory, packed: Path, tmp_path: Path
) -> None:
    assert packed.stat().st_mode & 0o777 == 0o600
    assert SECRET not in packed.read_bytes()
    out = tmp_path / "here" / "digits"
    contents = pull(str(packed), out)
    assert contents.run == "digits"
    assert {path.name for path in out.rglob("*")} == {
        *("report.json", "report.html", "metrics.jsonl", "final.safetensors")
    }
    assert load_file(out / "final.safetensors")["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows == [row.to_dict() for row in run.metrics()]
    brought = Report.parse_text((out / "report.json").read_text(), source="brought")
    expected = gather(run.root).redact()
    assert brought.model_copy(update={"written": expected.written}) == expected
    assert brought.redacted
    assert "<html" in (out / "report.html").read_text()
    assert not list(out.parent.glob(".*"))


def test_a_link_in_a_run_packs_nothing_but_a_model(run: RunDirectory, tmp_path: Path) -> None:
    secret = tmp_path / "id_ed25519"
    secret.write_bytes(SECRET)
    (run.models / "final.safetensors").unlink()
    (run.models / "final.safetensors").symlink_to(secret)
    with refused("file-damaged", "final.safetensors"):
        pack(run.root, str(tmp_path / "out.tar"))
    assert not (tmp_path / "out.tar").exists()


def test_what_the_run_holds_is_left_as_it_is(run: RunDirectory, packed: Path) -> None:
    del packed
    assert (run.root / "report.html").read_bytes() == SECRET
    assert not (run.root / "report.json").exists()


@pytest.mark.slow
def test_a_pack_goes_through_a_pipe(run: RunDirectory, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "bract.cli.main"]
    with subprocess.Popen(
        [*command, "pack", str(run.root), "--out", "-"], stdout=subprocess.PIPE
    ) as sender:
        done = subprocess.run(
            [*command, "pull", "-", "--out", str(tmp_path / "here"), "--format", "json"],
            stdin=sender.stdout,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (sender.returncode, done.returncode) == (0, 0), done.stderr
    assert json.loads(done.stdout)["run"] == "digits"
    assert (tmp_path / "here" / "report.html").is_file()


def test_a_run_that_did_not_end_brings_its_last_model(run: RunDirectory, tmp_path: Path) -> None:
    (run.models / "final.safetensors").unlink()
    pack(run.root, str(tmp_path / "pack"))
    pull(str(tmp_path / "pack"), tmp_path / "here")
    assert load_file(tmp_path / "here" / "last.safetensors")["w"].tolist() == [0.0] * 4


def test_where_no_report_can_be_made_the_rest_is_packed(
    run: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "bract.report.facts", None)
    pack(run.root, str(tmp_path / "pack"))
    assert "warning: without the report" in capsys.readouterr().err
    assert set(pull(str(tmp_path / "pack"), tmp_path / "here").files) == {
        *("metrics.jsonl", "final.safetensors")
    }


def test_a_pack_of_a_run_that_was_not_attacked_is_said_to_lack_an_audit(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(run.root, str(tmp_path / "audited"))
    assert "not audited" not in capsys.readouterr().err
    shutil.rmtree(run.audit)
    pack(run.root, str(tmp_path / "pack"))
    assert f"not audited, so this pack has no figures of leaks; first: bract audit {run.root}" in (
        capsys.readouterr().err.replace("\n", " ")
    )


def test_a_folder_that_is_there_is_not_touched(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out in (tmp_path / "here", tmp_path / "link"):
        with refused("file-taken", tmp_path):
            pull(str(packed), out)
    with refused("file-unreadable", tmp_path):
        pull(str(tmp_path / "absent"), tmp_path / "new")
    with refused("file-unreadable", tmp_path):
        pull(str(tmp_path), tmp_path / "new")


def test_a_run_with_nothing_to_bring_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(packing, "_redacted", lambda run: None)
    (tmp_path / "captures").mkdir()
    with refused("file-missing", tmp_path):
        pack(tmp_path, str(tmp_path / "pack"))
    assert not (tmp_path / "pack").exists()


def test_a_model_that_no_pack_can_hold_is_said(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MOST, "final.safetensors", 10)
    with refused("file-unreadable", "pack", 10):
        pack(run.root, str(tmp_path / "pack"))
    assert not (tmp_path / "pack").exists()


Entry = tuple[str, bytes]


def archive(
    *entries: Entry, change: Callable[[tarfile.TarInfo], None] = lambda entry: None
) -> bytes:
    """A tar of files; ``change`` sees each of them but the first."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, (name, content) in enumerate(entries):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            if number:
                change(entry)
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def contents(*entries: Entry, **changes: Any) -> Entry:
    files = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in entries
    }
    whole = {"schema": 1, "bract": "1", "run": "digits", "files": files} | changes
    return ("pack.json", json.dumps(whole).encode())


def whole(*entries: Entry) -> bytes:
    return archive(contents(*entries), *entries)


METRICS = ("metrics.jsonl", MetricsRow(round=1).model_dump_json(by_alias=True).encode() + b"\n")
EVIL = b"evil"


def as_link(entry: tarfile.TarInfo) -> None:
    entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"


def too_large() -> bytes:
    size = MOST["metrics.jsonl"] + 1
    return archive(contents(files={"metrics.jsonl": {"size": size, "sha256": "0" * 64}}))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "ends before the pack does"),
    "no tar": (b"x" * 2000, "is no pack"),
    "a page": (b"<html>" + b" " * 2000, "is no pack"),
    "zeros": (b"\0" * 2000, "begins with no pack.json"),
    "no contents": (archive(METRICS), "begins with no pack.json"),
    "large contents": (archive(("pack.json", b" " * 20000)), "begins with no pack.json"),
    "contents that are no JSON": (archive(("pack.json", b"{")), "half-written or corrupted"),
    "another schema": (archive(contents(schema=2)), "same version of bract"),
    "more fields": (archive(contents(more=1)), "same version of bract"),
    "a path out": (whole(("../evil", EVIL)), "offers '../evil'"),
    "an absolute path": (whole(("/tmp/evil", EVIL)), "offers '/tmp/evil'"),
    "a capture": (whole(("captures/round-0001/update.safetensors", EVIL)), "offers 'captures/"),
    "a page of theirs": (whole(("report.html", EVIL)), "offers 'report.html'"),
    "a negative size": (
        archive(contents(files={"metrics.jsonl": {"size": -1, "sha256": "0" * 64}})),
        "half-written or corrupted",
    ),
    "a size beyond the limit": (too_large(), "at most"),
    "another name than was said": (
        archive(contents(METRICS), ("../evil", METRICS[1])),
        "is not in the place that pack.json gives",
    ),
    "another size than was said": (
        archive(contents(METRICS), (METRICS[0], METRICS[1] + b"x")),
        "is not in the place that pack.json gives",
    ),
    "another content than was said": (
        archive(contents(METRICS), (METRICS[0], METRICS[1].replace(b"1", b"2"))),
        "SHA-256 differs",
    ),
    "a link": (archive(contents(METRICS), METRICS, change=as_link), "no regular file"),
    "one file more": (archive(contents(METRICS), METRICS, ("evil", EVIL)), "holds more"),
    "a file twice": (archive(contents(METRICS), METRICS, METRICS), "holds more"),
    "metrics that are none": (whole(("metrics.jsonl", b'{"schema": 3, "evil": 1}\n')), "metrics"),
    "a pickle": (whole(("final.safetensors", pickle.dumps({}))), "final.safetensors: "),
    "a report that is none": (whole(("report.json", b'{"schema": 4}')), "report.json"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_pack_may_not_hold_is_refused_whole(what: str, tmp_path: Path) -> None:
    content, said = HOSTILE[what]
    (tmp_path / "pack").write_bytes(content)
    place = tmp_path / "a" / "place"
    place.mkdir(parents=True)
    with pytest.raises(BractError) as raised:
        pull(str(tmp_path / "pack"), place / "here")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list(place.iterdir())
    assert {path.name for path in tmp_path.rglob("*")} == {"pack", "a", "place"}


def test_a_pack_that_was_cut_anywhere_is_refused(packed: Path, tmp_path: Path) -> None:
    text = packed.read_bytes()
    end = len(text.rstrip(b"\0"))
    for cut in (*range(0, end, 4096), end - 1):
        (tmp_path / "cut").write_bytes(text[:cut])
        with refused("file-damaged", tmp_path, kind=PackError):
            pull(str(tmp_path / "cut"), tmp_path / "here")
        assert not (tmp_path / "here").exists()


def test_a_report_that_shows_pictures_is_refused(run: RunDirectory, tmp_path: Path) -> None:
    text = dump_json(gather(run.root).to_dict()).encode()
    (tmp_path / "pack").write_bytes(whole(("report.json", text)))
    with refused("file-damaged", tmp_path, kind=PackError):
        pull(str(tmp_path / "pack"), tmp_path / "here")


def test_a_report_that_only_says_that_it_is_redacted_is_redacted_here(
    run: RunDirectory, tmp_path: Path
) -> None:
    facts = gather(run.root).model_copy(update={"redacted": True})
    text = dump_json(facts.to_dict()).encode()
    (tmp_path / "pack").write_bytes(whole(("report.json", text)))
    pull(str(tmp_path / "pack"), tmp_path / "here")
    kept = Report.parse_text((tmp_path / "here" / "report.json").read_text(), source="kept")
    assert kept == facts.redact() != facts


def test_words_of_a_report_do_nothing_in_the_page(run: RunDirectory, tmp_path: Path) -> None:
    facts = gather(run.root).redact().model_copy(update={"notes": ["<script>x</script>"]})
    text = dump_json(facts.to_dict()).encode()
    (tmp_path / "pack").write_bytes(whole(("report.json", text)))
    pull(str(tmp_path / "pack"), tmp_path / "here")
    page = (tmp_path / "here" / "report.html").read_text()
    assert "<script" not in page
    assert "default-src 'none'" in page
