"""Words of pages and verdicts in committed files: a change of words shows as a change of a file.

``tests/ROOM/golden/NAME.txt`` holds one block a case, under ``## `` and the case's name. ``make
golden`` writes the blocks anew; without it a test compares.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

TESTS = Path(__file__).parent
WRITE = "BRACT_GOLDEN"


def blocks(path: Path) -> dict[str, str]:
    """Return the blocks of a file by their names."""
    if not path.exists():
        return {}
    parts = re.split(r"^## (.*)\n", path.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], (text.strip("\n") for text in parts[1::2]), strict=True))


def check_words(name: str, case: str, text: str, *, room: str = "report") -> None:
    """Compare a text, a sentence a line, with the block of a case in ``NAME.txt`` of a room."""
    path = TESTS / room / "golden" / f"{name}.txt"
    lines = re.sub(r"(?<=[.;]) ", "\n", text).strip("\n")
    known = blocks(path)
    if os.environ.get(WRITE):
        known[case] = lines
        path.parent.mkdir(exist_ok=True)
        shown = (f"## {name}\n{block}\n" for name, block in sorted(known.items()))
        path.write_text("\n".join(shown))
    assert known.get(case) == lines, f"{path}, {case!r}: if this is meant, run `make golden`"
