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
        row("adadefense", "oblivious", psnr=7.0, low=6.5, high=7.5, cosine=0.46),
        row("adadefense", "adaptive", psnr=100.0, low=None, high=None, cosine=0.46, at_cap=4),
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
        **{"panel": "one", "data": "digits", "defense": defense, "tier": tier},
        **{"ssim": 0.25, "recognisable": 0.5, "images": 4, "psnr_low": low, "psnr_high": high},
        **columns,
    }


def template(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text("{# goes to docs/page.md #}\n" + text)
    return path


def test_a_panel_becomes_a_table_of_its_rows(texts: Any) -> None:
    assert texts.panel_table("one").splitlines() == [
        "| defense | cosine | ignores it | knows it |",
        "| --- | --- | --- | --- |",
        "| none | 1.00 | 50.0 [49.0, 51.0] dB / 0.25 / 2 of 4 (undefended) | |",
        "| adadefense | 0.46 | 7.0 [6.5, 7.5] dB / 0.25 / 2 of 4 "
        "| 100.0 (4 of 4 at the cap) dB / 0.25 / 2 of 4 |",
    ]


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
