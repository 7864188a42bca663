"""The page: self-contained, complete, harmless, and without pictures where asked."""

from __future__ import annotations

import base64
import io
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from refusals import refused

from bract.report import write_report
from bract.report.page import render
from bract.report.page.pictures import difference

SECTIONS = {
    "personal-data",
    "verdict",
    "worst",
    "tiers",
    "rounds",
    "clients",
    "attacks",
    "threat-model",
    "gaps",
    "gallery",
    "provenance",
    "glossary",
}


def test_the_page_holds_every_section_and_each_once(make_run: Any, parse: Any) -> None:
    page = parse(write_report(make_run()).read_text())
    assert set(page.ids) >= SECTIONS
    assert len(page.ids) == len(set(page.ids))


def test_the_page_needs_nothing_else(make_run: Any, parse: Any) -> None:
    source = write_report(make_run()).read_text()
    page = parse(source)
    assert "http://" not in source and "https://" not in source and "url(" not in source
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert all(r.startswith(("data:", "#")) for r in page.references)
    assert {r[1:] for r in page.references if r.startswith("#")} <= set(page.ids)


def test_a_cell_of_the_attacks_table_holds_one_figure_with_its_interval(make_run: Any) -> None:
    source = write_report(make_run()).read_text()
    for table in re.findall(r'<table class="attacks">.*?</table>', source, re.DOTALL):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", table, re.DOTALL)
        assert cells
        for cell in cells:
            text = re.sub(r"<small.*?</small>|<svg.*?</svg>|<[^>]*>", " ", cell, flags=re.DOTALL)
            counts = re.sub(r"(\d+) +of +\d+|\d+ min", r"\1", text)
            assert len(re.findall(r"\d+(?:[.,]\d+)*", counts)) <= (2 if "min" in text else 1), text


def test_every_image_is_there_with_a_text(make_run: Any, parse: Any) -> None:
    root = make_run()
    page = parse(write_report(root).read_text())
    assert len(page.images) == 3 * (27 + 3)
    for image in page.images:
        assert image["src"].startswith("data:image/png;base64,")
        assert image["class"] == "pixels"
        assert "client-" in image["alt"] and "round" in image["alt"]
    shown = {
        base64.b64decode(i["src"].partition(",")[2])
        for i in page.images
        if not i["alt"].startswith("Difference")
    }
    assert shown == {path.read_bytes() for path in root.glob("audit/ig/*.png")}


def test_what_made_the_images_of_an_upload_is_named(make_run: Any, parse: Any) -> None:
    text = parse(write_report(make_run()).read_text()).text
    assert "cosine matching, pixels, labels analytic" in text


def test_table_headers_say_what_they_head(make_run: Any, parse: Any) -> None:
    page = parse(write_report(make_run()).read_text())
    assert len(page.headers) > 30
    assert {h.get("scope") for h in page.headers} <= {"col", "row", "colgroup"}


def test_the_verdict_and_its_threshold_are_stated(make_run: Any, parse: Any) -> None:
    root = make_run()
    text = parse(write_report(root).read_text()).text
    facts = json.loads((root / "report.json").read_text())
    for part in ("sentence", "explanation", "statistics"):
        assert facts["verdict"][part] in text.replace("\u00a0", " ")
    assert all(step["text"] in text for step in facts["verdict"]["next_steps"])
    assert facts["verdict"]["rule"] in text
    assert "bract 0.1.0, flwr 1.41.0, torch 2.14.1, python 3.11.9" in text
    assert facts["config_sha256"] in text and "1234567890123" in text
    assert "LPIPS not available: lpips is not installed" in text


def test_both_files_are_for_the_owner_alone(make_run: Any) -> None:
    root = make_run(rounds=1)
    (root / "report.html").write_text("an earlier report that everybody may read")
    (root / "report.html").chmod(0o644)
    write_report(root)
    for name in ("report.html", "report.json"):
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o600
    assert not list(root.glob(".report*"))


def test_a_failed_write_keeps_the_earlier_report(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run(rounds=1)
    write_report(root)
    before = (root / "report.html").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bract.disk.files.os.fsync", full)
    with refused("write-failed", "report.json"):
        write_report(root)
    assert (root / "report.html").read_bytes() == before
    assert not list(root.glob(".report*"))


def test_redaction_leaves_no_pixel_and_no_single_label(make_run: Any, parse: Any) -> None:
    root = make_run()
    write_report(root)
    page_path = write_report(root, redact=True)
    page, facts = page_path.read_text(), (root / "report.json").read_text()
    pictures = list(root.glob("audit/ig/*.png"))
    assert pictures
    for path in pictures:
        content = path.read_bytes()
        assert base64.b64encode(content).decode() not in page
        assert path.name not in page and path.name not in facts
    assert "image/png" not in page
    parsed = parse(page)
    assert len(parsed.images) == 60
    assert all("(withheld)" in i["alt"] for i in parsed.images)
    assert len({i["src"] for i in parsed.images}) == 1
    assert "label 1" not in parsed.text and "Redacted" in parsed.text
    content = json.loads(facts)
    assert content["redacted"] is True
    for observation in content["observations"]:
        for image in observation["images"]:
            assert image["label"] is image["true_label"] is image["label_confidence"] is None
            assert image["scores"]["ssim"] is not None


def test_redaction_reads_no_picture(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_run(rounds=1)
    read = Path.read_bytes

    def guarded(path: Path) -> bytes:
        assert path.suffix != ".png", path
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", guarded)
    write_report(root, redact=True)
    with pytest.raises(AssertionError):
        write_report(root)


HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"


def test_hostile_names_and_reasons_stay_text(make_run: Any, writers: Any, parse: Any) -> None:
    root = make_run(clients=["client-0"], rounds=1, audit=False)
    writers.run(root, clients=["client-0"], rounds=1, name=HOSTILE, command=HOSTILE)
    path = writers.audit(root, 1, "client-0", notes=[HOSTILE], settings={"surrogate": HOSTILE})
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "client": HOSTILE, "attack": HOSTILE}))
    writers.audit(root, 2, "client-0", images=0, scored=False, refused=HOSTILE)
    row = {
        "schema": 3,
        "round": 1,
        "clients": {HOSTILE: {}},
        "failures": [{"client": HOSTILE, "reason": HOSTILE}],
    }
    (root / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    page = parse(write_report(root).read_text())
    assert "script" not in page.tags
    assert all(i["src"].startswith("data:") and "onerror" not in i for i in page.images)
    assert page.text.count("<script>alert('x')</script>") > 5


def drop(root: Path, name: str) -> None:
    path = root / name
    for child in sorted(path.rglob("*"), reverse=True) if path.is_dir() else []:
        child.unlink() if child.is_file() else child.rmdir()
    path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("part", ["run.json", "config.yaml", "metrics.jsonl", "captures", "audit"])
def test_a_run_that_lacks_one_part_still_has_a_page(make_run: Any, parse: Any, part: str) -> None:
    root = make_run(rounds=2)
    drop(root, part)
    page = parse(write_report(root).read_text())
    assert {"verdict", "clients", "provenance", "glossary"} <= set(page.ids)


@pytest.mark.parametrize("part", ["run.json", "config.yaml", "metrics.jsonl", "captures", "audit"])
def test_a_run_that_holds_one_part_alone_still_has_a_page(
    make_run: Any, parse: Any, part: str
) -> None:
    root = make_run(rounds=2)
    for name in {"run.json", "config.yaml", "metrics.jsonl", "captures", "audit"} - {part}:
        drop(root, name)
    assert "verdict" in parse(write_report(root).read_text()).ids


@pytest.mark.parametrize(
    ("status", "said"),
    [("interrupted", "was interrupted"), ("stopped", "was stopped"), ("failed", "failed")],
)
def test_a_run_that_did_not_finish_says_so(
    make_run: Any, writers: Any, parse: Any, status: str, said: str
) -> None:
    root = make_run(rounds=2)
    writers.run(root, clients=["a", "b", "c"], rounds=9, status=status, finished=None)
    page = parse(write_report(root).read_text())
    assert "incomplete" in page.ids
    assert f"This run {said} after round 2 of 9." in page.text


def test_an_unscored_audit_shows_its_reconstructions(make_run: Any, parse: Any) -> None:
    page = parse(write_report(make_run(truth=False, rounds=1)).read_text())
    assert len(page.images) == 3 * 3 + 3
    assert all(i["alt"].startswith("Reconstruction") for i in page.images)
    assert all(i["src"].startswith("data:image/png") for i in page.images)
    assert "counts as leaked" not in page.text
    assert "has not been measured" in page.text


def test_a_scored_image_whose_original_is_gone_shows_a_tile(make_run: Any, parse: Any) -> None:
    root = make_run(clients=["a"], rounds=1, images=1)
    (root / "audit" / "ig" / "round-0001--a--00-original.png").unlink()
    page = parse(write_report(root).read_text())
    gone = [i for i in page.images if i["alt"].startswith("Original")]
    assert len(gone) == 2 and all("(not kept)" in i["alt"] for i in gone)


def test_a_broken_picture_becomes_a_tile(make_run: Any, parse: Any) -> None:
    root = make_run(clients=["a"], rounds=1, images=1)
    path = root / "audit" / "ig" / "round-0001--a--00-reconstruction.png"
    path.write_bytes(path.read_bytes()[:60])
    page = parse(write_report(root).read_text())
    broken = [i for i in page.images if "(file unreadable)" in i["alt"]]
    assert len(broken) == 2
    assert all(i["src"].startswith("data:image/svg+xml") for i in broken)


def test_a_large_audit_shows_the_worst_uploads_and_says_so(
    make_run: Any, parse: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(render, "GALLERY_IMAGES", 7)
    page = parse(write_report(make_run()).read_text())
    assert "The 2 of 9 attacked uploads that leaked most" in page.text
    assert len(page.images) == 3 * (2 * 3 + 3)


def test_a_long_strip_shows_the_best_reconstructions_first(make_run: Any, parse: Any) -> None:
    root = make_run(clients=["a"], rounds=1, images=11)
    page = parse(write_report(root).read_text())
    facts = json.loads((root / "report.json").read_text())
    scores = sorted((i["scores"]["ssim"] for i in facts["observations"][0]["images"]), reverse=True)
    assert "the 8 of 11 images that were reconstructed best" in page.text
    assert len(page.images) == 3 * (8 + 11)
    first = facts["observations"][0]["images"][
        int(page.images[0]["alt"].split("image ")[1].split(" ")[0])
    ]
    assert first["scores"]["ssim"] == scores[0]


def test_the_oracle_stands_beside_the_blind_score(make_run: Any, parse: Any) -> None:
    root = make_run(clients=["a"], rounds=1, images=1)
    path = root / "audit" / "ig" / "round-0001--a.json"
    content = json.loads(path.read_text())
    content["images"][0]["oracle"] = {**content["images"][0]["scores"], "ssim": 0.987}
    path.write_text(json.dumps(content))
    text = parse(write_report(root).read_text()).text
    assert "oracle 0.99" in text
    assert f"{content['images'][0]['scores']['ssim']:.2f} SSIM" in text


def test_the_difference_is_black_where_pictures_agree(tmp_path: Path) -> None:
    one = Image.new("RGB", (4, 2), (10, 200, 30))
    other = one.copy()
    other.putpixel((3, 1), (255, 200, 30))
    one.save(tmp_path / "one.png")
    other.save(tmp_path / "other.png")
    between = difference(tmp_path, "one.png", "other.png", redact=False)
    assert between is not None and between.state == "shown"
    pixels = Image.open(io.BytesIO(base64.b64decode(between.uri.partition(",")[2])))
    values = [pixels.getpixel((x, y)) for y in range(2) for x in range(4)]
    assert values == [0] * 7 + [round(0.299 * 245)]
    assert difference(tmp_path, "one.png", "other.png", redact=True) is None


def test_no_difference_is_made_of_what_is_no_pair(tmp_path: Path) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "one.png")
    Image.new("L", (5, 4)).save(tmp_path / "wider.png")
    content = (tmp_path / "one.png").read_bytes()
    huge = content[:16] + (1 << 20).to_bytes(4, "big") + content[20:]
    (tmp_path / "huge.png").write_bytes(huge)
    (tmp_path / "torn.png").write_bytes(content[:40] + content[-20:])
    for name in ("wider.png", "huge.png", "torn.png", "absent.png", "../one.png", None):
        assert difference(tmp_path, "one.png", name, redact=False) is None


def test_uploads_come_worst_first_and_the_worst_round_is_open(make_run: Any, parse: Any) -> None:
    root = make_run()
    source = write_report(root).read_text()
    uploads = re.findall(r'<article class="upload" data-round="(\d)">\s*<header>\s*<h3>.*?</i>'
                         r"(client-\d), round", source)  # fmt: skip
    assert len(uploads) == 9
    assert uploads[0] == ("1", "client-2")
    assert 'id="round-1" autocomplete="off" checked' in source


def test_a_result_of_an_attack_that_is_not_installed_keeps_its_title(
    make_run: Any, parse: Any, writers: Any
) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    titles, families = {"gone": "Theirs"}, {"gradient matching over pixels": ["gone"]}
    writers.audit(root, 1, "a", attack="gone", titles=titles, families=families)
    page = parse(write_report(root).read_text())
    assert "Theirs" in page.text and "IG" not in page.text
    facts = json.loads((root / "report.json").read_text())
    assert [row["attack"] for row in facts["observations"]] == ["gone"]
    assert len(page.images) == 3 * (3 + 3)


def test_uploads_set_aside_for_one_reason_are_one_row(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1)
    for number in (2, 3, 4, 7):
        for client in range(40):
            writers.audit(
                root, number, f"client-{client}", images=0, scored=False, refused="no time was left"
            )
    source = write_report(root).read_text()
    assert source.count("no time was left") == 1
    row = re.search(r"<tr>(?:(?!<tr>).)*no time was left", source, re.DOTALL)
    assert row is not None
    cells = re.sub(r"<[^>]+>", "|", row[0])
    assert "2-4, 7" in cells and "160 uploads" in cells
    # Among so many clients those of which nothing was attacked are folded away.
    assert source.count("37 clients of which no upload was attacked") == 1
