"""A page about signals draws them over time, with the columns and the words of signals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bract.report import write_report
from bract.report.page.signals import plot

SAVED = {"unit": "mV", "rate": 125.0, "low": -1.0, "high": 2.0}
BEAT = [0.0, 0.1, 1.2, -0.3, 0.2, 0.0]


@pytest.fixture
def signals(make_run: Any, writers: Any) -> Path:
    """Return a run of one signal, which was rebuilt nearly exactly."""
    root: Path = make_run(clients=["client-0"], rounds=1, audit=False)
    shutil.rmtree(root / "captures")
    path = writers.audit(root, 1, "client-0", images=1, noise=0.05, input="signal", families={})
    for role, lift in (("original", 0.0), ("reconstruction", 0.01)):
        content = SAVED | {"values": [[v + lift for v in BEAT]]}
        path.with_name(f"saved-{role}.signal").write_text(json.dumps(content))
    content = json.loads(path.read_text())
    (one,) = content["images"]
    one["scores"] = {"correlation": 0.9987, "nrmse": 0.0033, "mse": 1.1e-5, "psnr": 49.6}
    one |= {"reconstruction": "saved-reconstruction.signal", "original": "saved-original.signal"}
    one |= {"oracle": None, "cells": []}
    baseline = {"correlation": 0.31, "nrmse": 0.09, "psnr": 20.9}
    one["baselines"] = content["baselines"] = {"class_mean": baseline, "random_signal": baseline}
    content["budget"] = {"iterations": 1, "restarts": 1}
    content["notes"] = []
    path.write_text(json.dumps(content))
    return root


def test_a_page_about_signals_plots_both_and_has_no_word_of_images(
    signals: Path, parse: Any
) -> None:
    source = write_report(signals, redact=False).read_text()
    page = parse(source)
    strange = r"PSNR|LPIPS|SSIM|\bdB\b|\bimages?\b|\bpictures?\b"
    shown = page.text.partition("What the words mean")
    parts = [shown[0].partition("Configuration")[0], shown[2].partition("Configuration")[0]]
    rule = r"least 3 dB \(a factor of 1\.4\)"
    found = [word for part in parts for word in re.findall(strange, re.sub(rule, "", part))]
    assert not found, found
    assert "<script" not in source
    drawn = re.findall(r'<svg class="signal".*?</svg>', source)
    assert drawn and all('role="img"' in one and "<title>Original and" in one for one in drawn)
    assert all("mV" in one and one.count("<polyline") == 2 for one in drawn)
    assert "0.999" in page.text and "0.33 %" in page.text
    assert "0.048 s" in page.text and "in mV" in page.text
    assert "0.310 9.0 %" in page.text


def test_a_redacted_page_draws_no_signal(signals: Path) -> None:
    source = write_report(signals, redact=True).read_text()
    assert "withheld" in source and 'class="signal"' not in source
    assert "correlation" in source
    facts = (signals / "report.json").read_text()
    assert "saved-original" not in facts and "0.9987" in facts


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"values": [[1, "a"]]}',
        '{"values": [[1e999, 1]], "unit": "", "rate": null}',
    ],
)
def test_a_file_that_is_no_signal_is_not_drawn(content: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.signal").write_text(content)
    assert plot(tmp_path, None, "wrong.signal", title="", redact=False) is None
    assert plot(tmp_path / "in", None, "../wrong.signal", title="", redact=False) is None


def test_a_long_signal_is_thinned_and_keeps_its_extremes(tmp_path: Path) -> None:
    values = [0.0] * 30_000
    values[12_345] = 7.0
    content = SAVED | {"values": [values] * 20, "unit": '<"&>'}
    (tmp_path / "long.signal").write_text(json.dumps(content))
    found = plot(tmp_path, None, "long.signal", title='a "quoted" <title>', redact=False)
    assert found is not None
    assert (len(found.channels), found.left) == (12, 8)
    assert found.channels[0].count(",") < 2_100 and ",3.0 " in found.channels[0]
    assert "<title>a " in found.channels[0] and '"quoted" <' not in found.channels[0]
