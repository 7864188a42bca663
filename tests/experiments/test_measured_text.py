"""Documents' figures come from committed rows, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import measured_text


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, with an audit of one panel as its only result."""
    rows = [
        row("none", "plain", psnr=50.0, low=49.0, high=51.0, cosine=1.0),
        row("adadefense", "oblivious", psnr=7.0, low=6.5, high=7.5, cosine=0.46)
        | {"verdict": "apart", "short": 43.0, "short_low": 42.0, "short_high": 44.0},
        row("adadefense", "adaptive", psnr=100.0, low=None, high=None, cosine=0.46, at_cap=4)
        | {"verdict": "alike", "short": 0.0, "short_low": None, "short_high": None},
    ]
    about = {"schema": 2, "experiment": "audit", "command": "", "device": "", "versions": {}}
    (tmp_path / "audit-here-2-cores.json").write_text(json.dumps(about | {"rows": rows}))
    monkeypatch.setattr(measured_text, "RESULTS", tmp_path)
    monkeypatch.setattr(measured_text, "TEXTS", tmp_path)
    measured_text.results.cache_clear()
    yield measured_text
    measured_text.results.cache_clear()


def row(defense: str, tier: str, *, low: Any, high: Any, **columns: Any) -> dict[str, Any]:
    return {
        **{"panel": "one", "data": "digits", "defense": defense, "tier": tier, "attack": "grnn"},
        **{"ssim": 0.25, "leaked": 2, "images": 4, "psnr_low": low, "psnr_high": high},
        **{"label_accuracy": 1.0, "seconds_per_upload": 12.3, "code": "a1"},
        **columns,
    }


def template(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text("{# goes to docs/page.md #}\n" + text)
    return path


def test_a_panel_becomes_a_table_of_its_rows(texts: Any) -> None:
    assert texts.panel_table("one").splitlines() == [
        "| defense | cosine | attacker | attack | PSNR, dB | SSIM | leaked | labels | seconds "
        "| compared with the undefended update |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| none | 1.00 | undefended | `grnn` | 50.0 [49.0, 51.0] | 0.25 | 2 of 4 | 100 % | 12 s "
        "|  |",
        "| adadefense | 0.46 | ignores it | `grnn` | 7.0 [6.5, 7.5] | 0.25 | 2 of 4 | 100 % | 12 s "
        "| short of it by 3 dB or more (short by 43.0 dB [42.0, 44.0]) |",
        "| adadefense | 0.46 | knows it | `grnn` | 100.0 (4 of 4 at the cap) | 0.25 | 2 of 4 "
        "| 100 % | 12 s | alike within 3 dB (short by 0.0 dB) |",
    ]


def test_a_table_of_two_digests_of_the_code_is_refused(texts: Any, tmp_path: Path) -> None:
    path = tmp_path / "audit-here-2-cores.json"
    content = json.loads(path.read_text())
    content["rows"][2]["code"] = "b2"
    path.write_text(json.dumps(content))
    texts.results.cache_clear()
    with pytest.raises(texts.MissingRowError, match=r"code of 2 digests \(a1, b2\)"):
        texts.panel_table("one")


def test_a_claim_is_written_where_its_rows_are_there(texts: Any) -> None:
    assert texts.has("one", "adadefense")
    assert not texts.has("one", "guardian") and not texts.has("two", "adadefense")
    assert texts.strongest("one", "adadefense")["psnr"] == 100.0


def test_a_figure_that_is_typed_is_refused(texts: Any, tmp_path: Path) -> None:
    for typed in ("reaches 50 dB", "an SSIM of 0.9", "3 of 4"):
        with pytest.raises(texts.MissingRowError, match="typed figures"):
            texts.render(template(tmp_path, f"Who knows it {typed}."))
    fine = "`lr: 0.1` {{ decibels(audit('one')) }} dB, Ren et al. 2022, [a](b2.md)"
    assert texts.render(template(tmp_path, fine))[1].startswith("`lr: 0.1` 50.0 [49.0, 51.0] dB")


@pytest.mark.parametrize(
    "wanted", ["audit('other')", "audit('one', 'guardian')", "panel_table('other')", "nothing"]
)
def test_a_row_that_was_not_measured_is_refused(texts: Any, tmp_path: Path, wanted: str) -> None:
    from jinja2 import UndefinedError

    with pytest.raises((texts.MissingRowError, UndefinedError)):
        texts.render(template(tmp_path, "{{ " + wanted + " }}"))


def test_a_document_without_the_region_is_refused(texts: Any) -> None:
    before = "a\n<!-- measured: x -->\nold\n<!-- end -->\nb\n"
    after = "a\n<!-- measured: x -->\nnew\n<!-- end -->\nb\n"
    assert texts.placed(before, "x", "new") == after
    assert texts.placed(after, "x", "new") == after
    with pytest.raises(texts.MissingRowError, match="no region"):
        texts.placed(before, "y", "new")
