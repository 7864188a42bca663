"""A page about texts has the columns and the words of texts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bract.report import write_report


@pytest.fixture
def texts(make_run: Any, writers: Any) -> Path:
    """Return a run of one text, of which a set of tokens was found."""
    root: Path = make_run(clients=["client-0"], rounds=1, audit=False)
    shutil.rmtree(root / "captures")
    path = writers.audit(root, 1, "client-0", images=1, noise=0.05, input="text", families={})
    content = json.loads(path.read_text())
    (text,) = content["images"]
    text["scores"] = {"features": 1.0, "precision": 0.4, "order_chance": 0.6, "exact": False}
    text |= {"reconstruction": None, "original": None, "oracle": None, "label": None}
    text["cells"] = [
        {"column": "1", "value": "play", "original": "play", "right": True},
        {"column": "2", "value": "##ing", "original": "##ing", "right": True},
        {"column": "3", "value": "chess", "original": None, "right": False},
    ]
    content["baselines"] = {"nearest_public_row": {"features": 0.3, "precision": 0.5}}
    content["budget"] = {"iterations": 1, "restarts": 1}
    content["notes"] = []
    path.write_text(json.dumps(content))
    return root


def test_a_page_about_texts_has_no_word_of_images(texts: Path, parse: Any) -> None:
    source = write_report(texts, redact=False).read_text()
    page = parse(source)
    strange = r"PSNR|LPIPS|SSIM|\bdB\b|##|1 iterations|\bimages?\b|\bpictures?\b|1 images"
    # The configuration is of the demonstration, which trains on digits.
    shown = page.text.partition("What the words mean")
    found = [*re.findall(strange, _without_config(shown[0])), *re.findall(strange, shown[2])]
    assert not found, found
    assert "hare of tokens recovered" in page.text and "1 iteration" in page.text
    assert "playing" in re.sub(r"<[^>]*>", "", source)


def test_a_set_of_tokens_is_named_as_one(texts: Path, parse: Any) -> None:
    page = parse(write_report(texts, redact=False).read_text())
    facts = json.loads((texts / "report.json").read_text())
    assert facts["verdict"]["level"] == "none-leaked"
    assert "Which words occur can itself be sensitive" in facts["verdict"]["explanation"]
    assert "0 of 1 text leaked" in page.text


def _without_config(text: str) -> str:
    return text.partition("Configuration")[0]
