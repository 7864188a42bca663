"""The page in a real headless Chromium: it renders, every image shows, nothing is complained of."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bract.server.report import write_report
from bract.server.report.comparison import write_comparison
from bract.server.report.variants import ExampleCounts, Variant

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)

MEASURE = """
<script>
addEventListener("load", () => {
  const images = [...document.images];
  document.title = JSON.stringify({
    images: images.length,
    shown: images.filter(i => i.naturalWidth > 0 && i.getBoundingClientRect().width > 0).length,
    plots: [...document.querySelectorAll("svg.plot")].map(p => p.getBoundingClientRect().height),
    scroll: document.documentElement.scrollWidth,
    width: document.documentElement.clientWidth,
    heading: parseFloat(getComputedStyle(document.querySelector("h1")).fontSize),
  });
});
</script>
"""


@pytest.fixture
def chromium(tmp_path: Path) -> Any:
    """Return ``run(page, *options)``, which opens a file in a fresh profile."""
    if CHROMIUM is None:
        reason = "chromium is not installed (apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    browser: str = CHROMIUM

    def run(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--enable-logging=stderr",
                "--v=0",
                f"--user-data-dir={tmp_path / 'profile'}",
                *options,
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )

    return run


def console(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "CONSOLE" in line]


def measured(chromium: Any, page: Path, folder: Path, *options: str) -> dict[str, Any]:
    """Open a copy of the page that writes what it measures into its title."""
    source = page.read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', source)
    assert policy
    copy = folder / "measured.html"
    copy.write_text(source.replace(policy[0], "").replace("</body>", MEASURE + "</body>"))
    done = chromium(copy, "--dump-dom", *options)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title
    found: dict[str, Any] = json.loads(html.unescape(title[1]))
    return found


def test_the_page_renders_with_every_image_and_no_complaint(
    make_run, chromium, parse, tmp_path: Path
) -> None:
    page = write_report(make_run())
    opened = chromium(page, "--dump-dom")
    assert console(opened.stderr) == []
    rendered = parse(opened.stdout)
    assert {"verdict", "gallery", "glossary"} <= set(rendered.ids)
    found = measured(chromium, page, tmp_path, "--window-size=1280,900")
    assert found["images"] == found["shown"] == 60
    assert len(found["plots"]) == 2 and all(height > 150 for height in found["plots"])
    assert found["scroll"] <= found["width"]


def test_the_page_fits_a_phone(make_run, chromium, tmp_path: Path) -> None:
    page = write_report(make_run())
    found = measured(chromium, page, tmp_path, "--window-size=500,900")
    assert found["width"] <= 500
    assert found["scroll"] <= found["width"]
    assert found["heading"] < 24


def test_a_script_in_the_page_would_not_run(make_run, chromium, tmp_path: Path) -> None:
    page = write_report(make_run(rounds=1))
    copy = tmp_path / "scripted.html"
    copy.write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    opened = chromium(copy, "--dump-dom")
    assert "<title>Leakage report: digits-demo</title>" in opened.stdout
    assert any("Content Security Policy" in line for line in console(opened.stderr))


def test_the_redacted_page_renders_its_tiles(make_run, chromium, tmp_path: Path) -> None:
    page = write_report(make_run(), redact=True)
    assert console(chromium(page, "--dump-dom").stderr) == []
    found = measured(chromium, page, tmp_path)
    assert found["images"] == found["shown"] == 60


def test_the_comparison_renders_with_every_image_and_fits_a_phone(
    make_run, writers, chromium, tmp_path: Path
) -> None:
    root = make_run(clients=["client-0"], rounds=2).parent
    for name, noise in (("undefended", 0.1), ("guardian", 0.9)):
        writers.run(root / name, clients=["client-0"], rounds=1, name=name)
        writers.metrics(root / name, ["client-0"], 1)
        writers.audit(root / name, 1, "client-0", noise=noise)
    variants = [Variant("undefended"), Variant("guardian", ({"name": "guardian"},))]
    page = write_comparison(root, variants, name="digits", tested=ExampleCounts(360))
    assert console(chromium(page, "--dump-dom").stderr) == []
    wide = measured(chromium, page, tmp_path, "--window-size=1280,900")
    assert wide["images"] == wide["shown"] == 3 * 3
    assert len(wide["plots"]) == 3 and all(height > 150 for height in wide["plots"])
    assert wide["scroll"] <= wide["width"]
    narrow = measured(chromium, page, tmp_path, "--window-size=500,900")
    assert narrow["scroll"] <= narrow["width"] <= 500
