"""All words of the page of a whole run, in one file that a change of words changes with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bract.report import write_report

GOLDEN = Path(__file__).parent / "golden" / "report.txt"


def words(page: str) -> str:
    """Return a page's text, a sentence a line, without the moment it was written."""
    text = re.sub(r"written [\d-]+ [\d:]+ UTC", "written", page)
    return re.sub(r"(?<=[.;:]) ", "\n", text) + "\n"


def test_the_words_of_the_page_are_those_of_the_golden_file(
    make_run: Any, parse: Any, tmp_path: Path
) -> None:
    found = words(parse(write_report(make_run()).read_text()).text)
    (tmp_path / "report.txt").write_text(found)
    assert found == GOLDEN.read_text(), f"if this is meant, copy {tmp_path}/report.txt to {GOLDEN}"
