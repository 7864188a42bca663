"""The documents are two books: a guide of what one does, and a page for each measurement."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = sorted((ROOT / "docs" / "guide").rglob("*.md"))
ABOUT = {"method", "experiments", "comparison", "papers"}
"""Pages of the book of measurements that say how it was made."""
MEASURED = [
    path
    for path in sorted((ROOT / "docs" / "measured").glob("*.md"))
    if path.stem not in ABOUT and not path.stem.startswith("earlier")
]
EARLIER = sorted((ROOT / "docs" / "measured").glob("earlier*.md"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
MOST_WORDS = 30_000
MOST_ROWS = 6
"""Rows of a table of measurements in the guide."""
MOST_LINES = 120
"""Lines of README.md."""


def prose(text: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_the_guide_can_be_read_in_a_day() -> None:
    words = {path.name: len(prose(path.read_text()).split()) for path in GUIDE}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda pair: -pair[1])


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_a_page_of_the_guide_has_no_long_table_of_measurements(page: Path) -> None:
    for region in re.findall(r"<!-- measured: .*?<!-- end -->", page.read_text(), re.DOTALL):
        for table in re.findall(r"(?:^\|.*\n?)+", region, re.MULTILINE):
            assert len(table.splitlines()) - 2 <= MOST_ROWS, table[:200]


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.stem)
def test_a_measured_page_asks_answers_shows_and_says_how(page: Path) -> None:
    text = page.read_text()
    made, title, *_ = text.splitlines()
    assert made == f"<!-- made from experiments/texts/{page.stem}.md -->"
    assert title.startswith("# ") and title.endswith("?")
    answer = text.split("\n\n")[1]
    assert not answer.startswith(("|", "#", "-"))
    assert len(re.findall(r"[.:?](?=\s|$)", answer)) <= 3 and len(answer.split()) <= 90, answer
    assert re.search(r"^\|", text, re.MULTILINE), "no table"
    assert re.search(r"^## Run it again\n\n.*`python -m experiments", text, re.MULTILINE)
    assert "\n## Limits\n" in text


@pytest.mark.parametrize("page", EARLIER, ids=lambda page: page.stem)
def test_figures_without_rows_are_marked_as_such(page: Path) -> None:
    assert "rows were not kept" in page.read_text().split("\n\n")[1]


def test_each_page_of_the_books_is_linked_from_the_guide_or_another() -> None:
    pages = [*GUIDE, *MEASURED, *DECISIONS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    linked = {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r"\]\(([^)#]+\.md)", page.read_text())
    }
    lacking = [str(page.relative_to(ROOT)) for page in MEASURED if page.resolve() not in linked]
    assert lacking == []
