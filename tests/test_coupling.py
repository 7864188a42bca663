"""Tests lean less and less on sentences and on the inside of rooms."""

import ast
import json
from pathlib import Path

import pytest
from coupling import KINDS, NUMBERS, counts, is_sentence


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_only_falls(kind: str) -> None:
    allowed = json.loads(NUMBERS.read_text(encoding="utf-8"))[kind]
    found = counts()[kind]
    assert found <= allowed, (
        f"{kind}: {found}, at most {allowed}: {KINDS[kind]}. Import from the room, and assert the "
        "code and the values of an error (tests/refusals.py); `python tests/coupling.py` lists them"
    )


def test_each_kind_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "from bract.attacks.solve.engine import Engine, Place\n"
        "from bract.attacks import IG\n"
        "import bract.audit.truth\n"
        "with pytest.raises(ValueError, match='the file is missing'): pass\n"
        "with pytest.raises(ValueError, match='a.csv'): pass\n"
        "assert 'no such folder here' in str(error)\n"
        "assert 'a.csv' in str(error)\n"
        "monkeypatch.setattr(engine, '_size', 3)\n"
        "monkeypatch.setattr('bract.audit.truth.read', None)\n"
        "monkeypatch.setattr('sys.argv', [])\n"
    )
    assert counts(tmp_path) == {"inner imports": 3, "sentences": 2, "private patches": 2}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("'cannot be read'", True),
        ("r'lr: found .* less than'", True),
        ("'training.lr'", False),
        ("f'{path}: damaged'", False),
        ("words", False),
    ],
)
def test_three_words_are_a_sentence(text: str, sentence: bool) -> None:
    assert is_sentence(ast.parse(text, mode="eval").body) is sentence
