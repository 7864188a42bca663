"""The page in a real headless Chromium, as somebody reads it: at each width, in light and dark, by
keyboard, on paper, and as axe-core reads it for a screen reader."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, Browser
from reporting import variant

from bract.cli import release
from bract.errors import LeakageError
from bract.report import write_report
from bract.report.comparison.comparison import write_comparison
from bract.report.comparison.variants import ExampleCounts

WIDTHS = (360, 768, 1200, 2560)

MEASURE = """
(() => {
  const box = e => e.getBoundingClientRect();
  const seen = e => e.checkVisibility({checkOpacity: true, checkVisibilityCSS: true});
  const texts = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, parent = node.parentElement;
    if (!node.data.trim() || parent.closest(".hidden, style, details:not([open])")) continue;
    if (!seen(parent)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    texts.push([node.data.trim(), parent, [...range.getClientRects()]]);
  }
  const clipped = texts.filter(([, parent, boxes]) => {
    const frame = parent.closest(".scroll, .chart, .case");
    if (frame && frame.matches(".scroll")) return false;
    const edge = frame ? box(frame) : {left: 0, right: innerWidth};
    return boxes.some(b => b.left < edge.left - 1 || b.right > edge.right + 1);
  }).map(([text]) => text);
  for (const e of document.querySelectorAll("body *")) {
    const style = getComputedStyle(e);
    const hides = ["hidden", "clip"].includes(style.overflowX) && !e.closest("svg, .hidden");
    if (hides && seen(e) && e.scrollWidth > e.clientWidth + 1) clipped.push(e.outerHTML);
  }
  const images = [...document.images];
  return {
    images: images.length,
    broken: images.filter(i => !i.naturalWidth).length,
    shown: images.filter(i => box(i).width > 0).length,
    plots: [...document.querySelectorAll("svg.plot")].map(p => box(p).height),
    scroll: document.documentElement.scrollWidth,
    clipped,
    unsaid: [...document.querySelectorAll(".scroll")].filter(e => seen(e) &&
      (e.scrollWidth > e.clientWidth) !== seen(e.querySelector(".hint")))
      .map(e => [e.getAttribute("aria-label"), e.scrollWidth, e.clientWidth]),
    heading: parseFloat(getComputedStyle(document.querySelector("h1")).fontSize),
    paper: getComputedStyle(document.body).backgroundColor,
  };
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        reason = "chromium is not installed (apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def comparison(make_run: Any, writers: Any) -> Path:
    root = make_run(clients=["client-0"], rounds=2).parent
    for name, noise in (("undefended", 0.1), ("guardian", 0.9)):
        writers.run(root / name, clients=["client-0"], rounds=1, name=name)
        writers.metrics(root / name, ["client-0"], 1)
        writers.audit(root / name, 1, "client-0", noise=noise)
    variants = [variant("undefended"), variant("guardian", {"name": "guardian"})]
    return write_comparison(root, variants, name="digits", tested=ExampleCounts(360))


def read_everywhere(browser: Browser, page: Path, images: int) -> None:
    """Look at a page at every width, in light and dark, and on paper."""
    browser.open(page.as_uri())
    papers = set()
    for scheme in ("light", "dark"):
        for width in WIDTHS:
            browser.look(width=width, scheme=scheme)
            found = browser.evaluate(MEASURE)
            where = f"{width} px, {scheme}"
            assert found["scroll"] <= width, where
            assert found["clipped"] == [], where
            assert found["unsaid"] == [], where
            assert (found["images"], found["broken"]) == (images, 0), where
            assert all(height > 150 for height in found["plots"]), where
            assert (found["heading"] < 24) == (width < 760), where
            papers.add((scheme, found["paper"]))
        browser.look(width=WIDTHS[0] if scheme == "light" else WIDTHS[2], scheme=scheme)
        assert browser.violations() == [], scheme
    assert len(papers) == 2, "light and dark look alike"
    # What is printable of A4 between the page's margins.
    browser.look(width=695, medium="print")
    printed = browser.evaluate(MEASURE)
    assert (printed["scroll"], printed["clipped"]) == (695, [])
    assert browser.complaints == []


@pytest.mark.thorough
def test_the_page_reads_at_every_width_in_light_dark_and_print(
    make_run: Any, writers: Any, browser: Browser
) -> None:
    root = make_run()
    writers.audit(root, 1, "client-0", attack="grnn", noise=0.9, first=3)
    read_everywhere(browser, write_report(root), images=3 * (27 + 3 + 3))


@pytest.mark.thorough
def test_long_names_many_clients_and_hostile_text_stay_on_the_page(
    make_run: Any, writers: Any, browser: Browser
) -> None:
    names = [f"university-hospital-of-somewhere-{i}" for i in range(7)]
    root = make_run(clients=names, rounds=2, images=1)
    writers.audit(root, 2, names[0], attack="grnn", images=0, scored=False, refused="x" * 300)
    read_everywhere(browser, write_report(root), images=3 * (14 + 1))


@pytest.mark.thorough
def test_the_redacted_page_reads_alike(make_run: Any, browser: Browser) -> None:
    page = write_report(make_run(), redact=True)
    read_everywhere(browser, page, images=2 * (27 + 3))


def test_the_comparison_reads_at_every_width_in_light_dark_and_print(
    comparison: Path, browser: Browser
) -> None:
    read_everywhere(browser, comparison, images=3 * 3)


def test_the_release_sheet_reads_at_every_width_and_prints_whole(
    make_run: Any, browser: Browser, tmp_path: Path
) -> None:
    root = make_run(clients=[f"client-{number}" for number in range(4)], rounds=2)
    out = tmp_path / "final.safetensors"
    out.write_bytes(b"weights")
    with pytest.raises(LeakageError):
        release.release_run(root, files=[out], limits=[])
    page = root / "release.html"
    browser.open(page.as_uri())
    headings = "[...document.querySelectorAll('h2')].map(e => e.firstChild.data.trim())"
    shown = """
    [...document.querySelectorAll('section, footer')].map(e => e.getBoundingClientRect().height)
    """
    for width in (390, 1280):
        browser.look(width=width)
        found = browser.evaluate(MEASURE)
        assert found["scroll"] <= width and found["clipped"] == [] == found["unsaid"]
        assert browser.violations() == [] == browser.complaints
    browser.look(width=695, medium="print")
    assert {"What is in the way", "Limits", "Files that go out", "Decision"} <= set(
        browser.evaluate(headings)
    )
    assert min(browser.evaluate(shown)) > 10.0
    printed = browser.pdf(tmp_path / "release.pdf").read_bytes()
    assert len(re.findall(rb"/Type\s*/Page[^s]", printed)) <= 2
    # No defense was on, so knowing it applies to nothing.
    cells = "[...document.querySelectorAll('#tiers td:nth-of-type(1)')].map(e => e.innerText)"
    assert set(browser.evaluate(cells)) == {"no", "does not apply", "not tried"}


def test_a_script_in_the_page_would_not_run(
    make_run: Any, browser: Browser, tmp_path: Path
) -> None:
    page = write_report(make_run(rounds=1))
    copy = tmp_path / "scripted.html"
    script = "<script>document.title = 'run'</script><img src=x onerror=\"document.title='run'\">"
    copy.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    browser.open(copy.as_uri())
    assert browser.evaluate("document.title") == "Leakage report: digits-demo"
    assert any("Content Security Policy" in line for line in browser.complaints)


OPEN = "document.querySelectorAll(':popover-open').length"
WIDTH = "document.querySelector('#worst-0 img').getBoundingClientRect().width"


def test_a_picture_is_enlarged_and_put_back_by_keyboard(make_run: Any, browser: Browser) -> None:
    browser.open(write_report(make_run()).as_uri(), width=1200)
    small = browser.evaluate(WIDTH)
    for _ in range(40):
        browser.press("Tab")
        if browser.evaluate("document.activeElement.closest('#worst-0') !== null"):
            break
    assert browser.evaluate(OPEN) == 0
    browser.press("Enter")
    assert browser.evaluate(OPEN) == 1
    assert browser.evaluate(WIDTH) > 2.5 * small
    assert browser.evaluate("document.activeElement.innerText").strip().startswith("Close")
    assert browser.violations() == []
    browser.press("Escape")
    assert browser.evaluate(OPEN) == 0 and browser.evaluate(WIDTH) == small
    assert browser.evaluate("document.activeElement.closest('#worst-0') !== null")


def test_a_picture_of_the_comparison_is_enlarged(comparison: Path, browser: Browser) -> None:
    browser.open(comparison.as_uri(), width=1200)
    width = WIDTH.replace("#worst-0", "#m1-1")
    small = browser.evaluate(width)
    browser.evaluate("document.querySelector('#m1-1 button').click()")
    assert browser.evaluate(OPEN) == 1
    assert browser.evaluate(width) > 2.5 * small
    assert browser.violations() == []
    browser.press("Escape")
    assert browser.evaluate(OPEN) == 0 and browser.evaluate(width) == small


SHOWN = """
[...document.querySelectorAll("article.upload")].filter(e => e.checkVisibility())
  .map(e => Number(e.dataset.round))
"""


def test_the_slider_moves_over_the_rounds_by_keyboard(make_run: Any, browser: Browser) -> None:
    browser.open(write_report(make_run()).as_uri())
    assert browser.evaluate(SHOWN) == [1, 1, 1]
    browser.evaluate("document.querySelector('#round-1').focus()")
    browser.press("ArrowRight")
    assert browser.evaluate(SHOWN) == [2, 2, 2]
    text = browser.evaluate("document.querySelector('.of-round:not([data-round=\"1\"])').innerText")
    assert text.startswith("Round 2")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert sorted(browser.evaluate(SHOWN)) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    browser.evaluate("document.querySelector('#round-3').click()")
    browser.look(width=695, medium="print")
    assert sorted(browser.evaluate(SHOWN)) == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_the_tables_of_the_page_need_no_scroll_at_1280_pixels(
    make_run: Any, writers: Any, browser: Browser
) -> None:
    root = make_run(clients=["node-3951436575135978626", "client-1", "client-2"])
    for name in ("client-1", "client-2"):
        writers.audit(root, 1, name, attack="grnn", noise=0.9, first=3)
    browser.open(write_report(root).as_uri(), width=1280)
    wide = browser.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(e => e.checkVisibility())"
        ".filter(e => e.scrollWidth > e.clientWidth).map(e => e.getAttribute('aria-label'))"
    )
    assert wide == []
    cells = browser.evaluate("document.querySelectorAll('table.attacks td').length")
    assert cells > 40, "the table is there"
