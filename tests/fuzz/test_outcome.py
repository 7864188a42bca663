"""The suite's own net: what counts as a fault is found."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz.outcome import FaultError, Parser, outcome
from hypothesis import strategies as st

from bract.errors import BractError


def spin(value: object, folder: Path) -> None:
    while True:
        pass


def swallow(value: object, folder: Path) -> None:
    try:
        spin(value, folder)
    except Exception:  # noqa: BLE001 - as a careless parser would
        return


def refuse(text: str) -> Callable[[Any, Path], object]:
    def read(value: object, folder: Path) -> None:
        raise BractError(text, code="usage")

    return read


FAULTS: dict[str, tuple[Callable[[Any, Path], object], str]] = {
    "an undocumented error": (lambda value, folder: dict[str, int]()["x"], "KeyError"),
    "endless brackets": (lambda value, folder: eval("[" * 5000), "SyntaxError|Recursion|Memory"),
    "a loop": (spin, "more than 2.0 s"),
    "a loop that catches everything": (swallow, "more than 2.0 s"),
    "a long message": (refuse("x" * 700), "a message of 700"),
    "a message of two lines": (refuse("a\nb"), "a message of 3"),
    "a file outside": (lambda value, folder: Path("../elsewhere").write_text("x"), "touched open"),
    "a folder outside": (lambda value, folder: Path("elsewhere").mkdir(), "touched os.mkdir"),
    "a process": (lambda value, folder: subprocess.run(["true"], check=True), "touched subprocess"),
    "a command": (lambda value, folder: os.system("true"), "touched os.system"),
    "foreign code": (lambda value, folder: __import__("bract_fuzz_canary"), "ModuleNotFound"),
    "memory": (lambda value, folder: len(bytes(3 << 30).replace(b"\0", b"1")), "took|MemoryError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bounded_memory: None
) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    monkeypatch.chdir(folder)
    read, words = FAULTS[fault]
    with pytest.raises(FaultError, match=words):
        outcome(Parser("toy", st.none(), read, "here"), None)


def test_what_is_accepted_and_refused_is_told_apart() -> None:
    def write(value: object, folder: Path) -> object:
        return (folder / "inside").write_text("x")

    assert outcome(Parser("toy", st.none(), write, "here"), None) == "accepted"
    assert outcome(Parser("toy", st.none(), refuse("no"), "here"), None) == "refused"
