"""The site of documents: it builds strictly, loads nothing from elsewhere, and its snippets run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, Browser
from command_lines import parse

pytest.importorskip("mkdocs", reason="the site's tools are in the extra bract[docs]")

pytestmark = pytest.mark.slow  # builds the site

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


class Links(HTMLParser):
    """What a page loads, what it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update({given["id"]} if "id" in given else ())
        if tag in ("script", "img", "iframe", "source") and "src" in given:
            self.loaded.append(given["src"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(given["href"])
        elif tag == "a" and "href" in given:
            self.linked.append(given["href"])


def test_nothing_is_loaded_from_elsewhere_and_every_link_leads_somewhere(site: Path) -> None:
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 25
    for path, page in pages.items():
        for source in page.loaded:
            assert not re.match(r"(https?:)?//", source), f"{path.name} loads {source}"
            if path.name != "404.html":
                assert (path.parent / source.partition("?")[0]).exists(), f"{path.name}: {source}"
        for link in page.linked if path.name != "404.html" else ():
            if re.match(r"(https?|mailto):", link):
                continue
            target, _, anchor = link.partition("#")
            there = path if not target else (path.parent / target).resolve()
            there = there / "index.html" if there.is_dir() else there
            assert there.exists(), f"{path.name}: {link}"
            if anchor and there.suffix == ".html":
                found = pages.get(there) or Links(there.read_text())
                assert anchor in found.anchors, f"{path.name}: {link}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text()), style.name


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("Paillier", "encryption.html"),
        ("tabular", "first-day.html"),
        ("LoRA", "first-day.html"),
        ("DPIA", "reading-the-page.html"),
        ("GDPR", "reading-the-page.html"),
    ],
)
def test_the_search_works_without_a_server(site: Path, word: str, page: str) -> None:
    """The index is a script, which a page that was opened from a folder may load."""
    index = site / "search" / "search_index.js"
    assert word in index.read_text()
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no browser")
    shown = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--allow-file-access-from-files", f"--user-data-dir={site.parent / 'browser'}",
         "--virtual-time-budget=15000", "--dump-dom", f"file://{site}/index.html?q={word}"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert page in shown.stdout.partition("md-search-result__list")[2]


def test_no_code_is_cut_at_1280_pixels(site: Path, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no browser")
    with Browser(tmp_path / "profile") as browser:
        for name in ("first-day", "your-own-app", "command-line", "deployment", "extending"):
            browser.open((site / "guide" / f"{name}.html").as_uri(), width=1280)
            cut = browser.evaluate(
                "[...document.querySelectorAll('pre > code')].filter(e => "
                "e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 80))"
            )
            assert cut == [], name


def test_the_reference_is_made_from_the_code(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text()
    assert "--max-images" not in commands
    for text in ("bract policy check", "--fail-on", "Skip what an earlier audit has done"):
        assert text in commands
    configuration = (site / "reference" / "configuration.html").read_text()
    assert "audit.leak.psnr_margin" in configuration
    api = (site / "reference" / "api.html").read_text()
    assert "HonestButCurious" in api
    assert "chosen_restarts" in api


@pytest.mark.parametrize("path", sorted((DOCS / "tutorials").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_tutorial_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are not committed"
    client.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


def command_lines(text: str) -> Iterator[str]:
    """Yield the `bract` command lines of the shell snippets of a page."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip().startswith("bract "):
                yield re.sub(r"\s>\s\S+$", "", line)  # the shell writes the file


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_of_a_page_parses(page: Path) -> None:
    for line in command_lines(page.read_text()):
        words = shlex.split(line, comments=True)
        if words[1].startswith("--"):
            assert words[1] in ("--help", "--install-completion", "--show-completion", "--version")
            continue
        if "--help" not in words:
            parse(shlex.join(words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_snippet_of_a_page_is_what_it_says(page: Path) -> None:
    """Python compiles and what it imports is there, YAML and JSON and TOML parse."""
    import importlib
    import json
    import tomllib

    import yaml

    checks: dict[str, Any] = {
        "yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads,
        "python": lambda text: compile(text, page.name, "exec"),
    }  # fmt: skip
    for kind, text in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL):
        assert kind in {*checks, "sh", "text"}, f"{page.name}: ```{kind}"
        if kind in checks:
            checks[kind](text)
        if kind == "python":
            for module, names in re.findall(r"^from (bract[\w.]*) import ([\w, ]+)$", text, re.M):
                found = importlib.import_module(module)
                for name in names.split(","):
                    assert hasattr(found, name.strip()), f"{page.name}: {module}.{name.strip()}"
