"""Code of others, run by bract: what it raises, what it says, and what it changes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from bract.cli.signals import Stopped
from bract.errors import (
    ProcessEndError,
    apart,
    contained,
    in_words,
    not_installed,
    one_line,
    out_of_memory,
    shown,
)
from bract.installed.references import TrustedReference, import_reference

ENDS = [
    SystemExit("bye"),
    GeneratorExit("bye"),
    BaseExceptionGroup("bye", [SystemExit(1)]),
    asyncio.CancelledError("bye"),
]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("held", [contained, apart])
def test_what_would_end_the_process_is_an_error_that_names_it(
    held: Callable[[], Any], error: BaseException
) -> None:
    with pytest.raises(ProcessEndError, match=type(error).__name__), held():
        raise error


def test_an_interrupt_passes_where_python_itself_raises_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a handler makes another error of Ctrl-C, code of others has raised this one."""
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), contained():
        raise KeyboardInterrupt
    monkeypatch.setattr(signal, "getsignal", lambda _: print)
    with pytest.raises(ProcessEndError), contained():
        raise KeyboardInterrupt


def test_an_end_after_a_broken_pipe_of_that_code_is_contained() -> None:
    """An app that ends itself where its own connection broke may leave nobody waiting."""
    with pytest.raises(ProcessEndError), contained():
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904 - as such code does


def test_a_generator_that_is_closed_ends() -> None:
    def walk() -> Generator[int, None, None]:
        with contained():
            yield 1
            yield 2

    walked = walk()
    assert next(walked) == 1
    walked.close()
    assert list(walked) == []


def test_an_error_of_bracts_own_that_ends_the_process_passes() -> None:
    with pytest.raises(Stopped), contained():
        raise Stopped(signal.SIGTERM)


class _TextError(RuntimeError):
    def __str__(self) -> str:
        raise SystemExit("in __str__")


class _NumberError(OSError):
    errno = ()  # type: ignore[assignment]

    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class _NameError(ModuleNotFoundError):
    name = 7  # type: ignore[assignment]


class _NoRepr:
    def __repr__(self) -> str:
        raise SystemExit("in __repr__")


@pytest.mark.parametrize("kind", [_TextError, _NumberError, _NameError])
def test_an_error_whose_own_text_fails_is_told_all_the_same(kind: type[Exception]) -> None:
    error = kind()
    assert isinstance(in_words(error), str)
    assert isinstance(one_line(error), str)
    assert not out_of_memory(error)
    assert not isinstance(error, ImportError) or not_installed(error) is None


def test_a_value_that_cannot_be_written_is_shown_by_its_type() -> None:
    claims_to_be_a_number = type("int", (), {})()
    for value in (_NoRepr(), [_NoRepr()], {1: _NoRepr()}):
        assert "_NoRepr" in shown(value)
    assert "int" in shown(claims_to_be_a_number)


def _errors_of_warnings() -> None:
    warnings.simplefilter("error")


def _ignores_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "folder": (lambda: os.chdir("/"), Path.cwd),
    "umask": (lambda: os.umask(0), lambda: os.umask(0o077)),
    "signals": (_ignores_signals, lambda: signal.getsignal(signal.SIGTERM)),
    "stdout": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout),
    "warnings": (_errors_of_warnings, lambda: [f for f in warnings.filters if f[0] == "error"]),
    "logging": (lambda: logging.disable(logging.CRITICAL), lambda: logging.root.manager.disable),
    "depth": (lambda: sys.setrecursionlimit(400), sys.getrecursionlimit),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "gradients": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("ends", [False, True])
def test_what_code_of_others_changes_of_the_process_is_put_back(what: str, ends: bool) -> None:
    change, read = CHANGES[what]
    os.umask(0o077)
    before = read()
    try:
        with apart():
            change()
            if ends:
                sys.exit(1)
    except ProcessEndError:
        assert ends
    assert read() == before


def test_filters_of_warnings_that_a_library_adds_stay() -> None:
    with warnings.catch_warnings(), apart():
        warnings.filterwarnings("ignore", "of a library that was just imported")
        added = warnings.filters[0]
        with apart():
            pass
        assert warnings.filters[0] == added


def test_an_app_keeps_what_its_module_sets_for_its_own_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch\ntorch.set_default_dtype(torch.float64)\nvalue = 1\n"
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for name, keeps in (("own_app", True), ("model", False)):
            (tmp_path / f"foreign_{name}.py").write_text(text)
            torch.set_default_dtype(torch.float32)
            reference = TrustedReference(f"foreign_{name}:value")
            import_reference(reference, what=name, keeps=keeps)
            assert (torch.get_default_dtype() == torch.float64) == keeps
    finally:
        torch.set_default_dtype(torch.float32)
