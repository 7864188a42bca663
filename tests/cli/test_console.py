"""Progress is readable at 80 columns, and off a terminal."""

from __future__ import annotations

import io
import logging
import re
import time
from typing import Any

import pytest
from rich.console import Console

from bract.cli import console
from bract.cli.console import RoundProgress, WorkProgress, duration
from bract.schema.metrics import MetricsRow

LONG = "best on round 12, client-103: 3 of 8 images identified, best SSIM 0.93, PSNR 24.1 dB, 118 s"


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr(
        console, "stderr", Console(file=out, force_terminal=True, width=width, height=20)
    )
    return out


def lines(out: io.StringIO) -> list[str]:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_keeps_its_numbers(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    out = on_terminal(monkeypatch, width)
    with WorkProgress(432, "attack, oblivious") as bar:
        bar.within(7.5, LONG)
        bar._bar.refresh()
    shown = [line for line in lines(out) if "attack" in line][-1]
    assert re.search(r"7(\.5)?/432", shown)
    assert re.search(r"2%", shown)
    assert re.search(r"\d:\d\d:\d\d left (\d|-):(\d\d|--):(\d\d|--)", shown)
    state = next(line for line in lines(out) if "best on round" in line)
    assert all(len(line) <= width for line in lines(out))
    assert state.strip().startswith("best on round 12, client-103: 3 of 8")


def test_a_round_keeps_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    out = on_terminal(monkeypatch, 80)
    with RoundProgress(50) as bar:
        bar.update(MetricsRow(round=3, clients={}, seconds=5.7))
        bar._bar.refresh()
    assert any(re.search(r"round\s+3/50 .*\d:\d\d:\d\d left", line) for line in lines(out))


def test_off_a_terminal_something_is_said_at_least_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert console.SILENCE < 60
    monkeypatch.setattr(console, "SILENCE", 0.05)
    with WorkProgress(4, "attack, oblivious") as bar:
        bar.within(1.0, "loss 0.25")
        # Nothing is reported meanwhile, as while one large step is computed.
        deadline = time.monotonic() + 20
        said: Any = ""
        while "loss 0.25" not in said and time.monotonic() < deadline:
            time.sleep(0.02)
            said += capsys.readouterr().err
    assert re.search(r"attack, oblivious: 25% after \d+ s, about \d+ s left, loss 0\.25", said)
    time.sleep(0.2)
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (59, "59 s"), (420, "7 min"), (9000, "2.5 h")]
)
def test_a_duration_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


ESCAPES = "a\x1b]0;owned\x07\x1b[2J\u202eb"


def test_no_command_to_the_terminal_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and reasons may be another party's."""
    printed = io.StringIO()
    monkeypatch.setattr(console, "stderr", Console(file=printed, width=200))
    console.say(f"{ESCAPES}\nnext")
    console.set_up_logging()
    logging.getLogger("bract").warning("%s", ESCAPES)
    assert "a?]0;owned??[2J?b\nnext" in printed.getvalue()
    assert not {"\x1b", "\x07", "\u202e"} & set(printed.getvalue())


def test_off_a_terminal_one_reason_of_many_has_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with WorkProgress(40, "attack, oblivious") as bar:
        bar.finish_item("first: found")
        for number in range(38):
            bar.finish_item(f"upload {number}: not attacked: no time", "no time")
        bar.finish_item("last: not attacked: encrypted", "encrypted")
    assert capsys.readouterr().err.splitlines() == [
        "1/40 first: found",
        "2/40 upload 0: not attacked: no time",
        "40/40 last: not attacked: encrypted",
        "38 in all were not attacked: no time",
    ]
