"""Texts on the page are set as people write them, whatever marks their vocabulary has."""

from __future__ import annotations

import pytest

from bract.report.words.formatting import pieces, tight


def set_text(tokens: str | list[str]) -> str:
    values = tokens.split() if isinstance(tokens, str) else tokens
    return "".join(space + text for space, text in pieces(values)).strip()


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("dr . lee ' s follow - up", "dr. lee's follow-up"),
        ("3 . 5 mg ( twice ) , daily", "3.5 mg (twice), daily"),
        ("call 555 - 1234 : now !", "call 555-1234: now!"),
        ("ann @ clinic . org", "ann@clinic. org"),
        ("play ##ing well", "playing well"),
        ("on 12 / 03 at 10 : 45", "on 12/03 at 10:45"),
        ("a - b", "a-b"),
        ("- first", "- first"),
    ],
)
def test_without_marks_punctuation_is_tight(tokens: str, text: str) -> None:
    assert set_text(tokens) == text


def test_sentence_pieces_begin_words() -> None:
    assert set_text("▁Dr . ▁Lee ' s") == "Dr. Lee's"


def test_letters_of_bytes_become_characters() -> None:
    converting = pytest.importorskip("transformers.convert_slow_tokenizer")
    table = converting.bytes_to_unicode
    letters = table()
    tokens = [
        "".join(letters[byte] for byte in word.encode()) for word in ("Zoë", " isst", " süß", ".")
    ]
    assert tokens[1].startswith("Ġ")
    assert set_text(tokens) == "Zoë isst süß."


def test_part_of_a_character_is_marked_and_breaks_nothing() -> None:
    assert set_text(["Ġa", "Ã"]) == "a\ufffd"
    assert set_text(["Ġa", "中"]) == "a中"


@pytest.mark.parametrize("marked", ["Ġa", "▁a", "a"])
def test_a_token_cannot_control_a_terminal_or_reorder_the_page(marked: str) -> None:
    hostile = ["\x00", "\x1b[2J", "\u202eback", "\u2066in"]
    if marked == "Ġa":
        converting = pytest.importorskip("transformers.convert_slow_tokenizer")
        table = converting.bytes_to_unicode()
        hostile = ["".join(table[byte] for byte in text.encode()) for text in hostile]
    text = set_text([marked, *hostile])
    assert not set("\x00\x1b\u202e\u2066") & set(text) and text.count("\ufffd") == 4


def test_no_token_is_lost() -> None:
    values = ["(", "a", ".", "'", "##", "b", "-", "7"]
    assert len(pieces(values)) == len(values)


def test_shares_are_written_alike_and_limits_as_they_are_typed() -> None:
    text = "5% of runs, 12.5 % and 3 of 9, membership>0.05@1%"
    assert tight(text) == ("5\u00a0% of runs, 12.5\u00a0% and 3\u00a0of\u00a09, membership>0.05@1%")
