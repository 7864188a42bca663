"""No message shows Python's own words for an error of the operating system."""

import ast
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rooms import sources

from bract import rundir
from bract.audit import global_models
from bract.certificates import authority
from bract.cli import main
from bract.client import policy, site
from bract.config import config
from bract.data import tables
from bract.disk import files
from bract.errors import CodedError, one_line, system
from bract.kits import sites
from bract.protocol import keyfiles
from bract.schema import work
from bract_harden import space_file
from bract_priors import trained_prior

SYSTEM = {
    "OSError",
    "IOError",
    "FileNotFoundError",
    "PermissionError",
    "Exception",
    "BaseException",
}
LOGS = {"debug", "info", "warning", "error", "critical", "exception"}


def bare(text: str) -> Iterator[int]:
    """Yield lines that put an error of the operating system into words as it reads."""
    for handler in ast.walk(ast.parse(text)):
        if isinstance(handler, ast.ExceptHandler) and handler.name and handler.type is not None:
            names = {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)}
            if names & SYSTEM:
                inside = (n for part in handler.body for n in ast.walk(part))
                for node in (n for n in inside if isinstance(n, ast.expr)):
                    if any(_is_bare(value, handler.name) for value in _put_in_words(node)):
                        yield node.lineno


def _put_in_words(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.FormattedValue):
        return [node.value]
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Name) and function.id in ("str", "repr"):
            return node.args
        if isinstance(function, ast.Attribute) and function.attr in LOGS:
            return node.args[1:]
    return []


def _is_bare(value: ast.expr, error: str) -> bool:
    if isinstance(value, ast.BoolOp):
        return any(_is_bare(one, error) for one in value.values)
    if isinstance(value, ast.Attribute):
        return value.attr == "strerror" and _is_bare(value.value, error)
    return isinstance(value, ast.Name) and value.id == error


@pytest.mark.parametrize(
    "line",
    [
        'raise E(f"{path}: {error}")',
        'raise E(f"{error.strerror or error}")',
        'log.warning("no: %s", error)',
        "note(str(error))",
        "note(repr(error)[:300])",
    ],
)
def test_the_lint_sees_an_error_that_is_said_as_it_reads(line: str) -> None:
    assert list(bare(f"try:\n    f()\nexcept (OSError, ValueError) as error:\n    {line}\n"))
    assert not list(bare(f"try:\n    f()\nexcept BractError as error:\n    {line}\n"))
    whole = line.replace("str(error)", "one_line(error)").replace("repr(error)", "one_line(error)")
    whole = whole.replace("{error.strerror or error}", "{error}").replace(
        "{error}", "{one_line(error)}"
    )
    whole = whole.replace(", error)", ", one_line(error))")
    assert not list(bare(f"try:\n    f()\nexcept OSError as error:\n    {whole}\n"))


def test_no_message_says_an_error_of_the_operating_system_as_it_reads() -> None:
    found = [f"{path}:{line}" for path in sources() for line in bare(path.read_text("utf-8"))]
    assert found == []


READERS: dict[str, Callable[[Path], object]] = {
    "config": config.load_config,
    "policy": policy.load_policy,
    "sites": sites.read_sites,
    "seed": site.read_private_seed,
    "table": tables.read_table,
    "key": keyfiles.read_key_file,
    "certificate": authority.read_certificate,
    "work": work.read_work,
    "state": lambda path: rundir.RunDirectory(path.parent).state(),
    "model": global_models.read_model,
    "round": global_models.round_of,
    "space": space_file.read_space,
    "prior": trained_prior.TrainedPrior.load,
}
"""Readers of what a person names or may damage, of several rooms."""

FOREIGN = re.compile(
    r"Errno|os error|codec|No such file or dir|Is a directory|Permission denied|No space left"
)


def said(act: Callable[[], object]) -> str:
    with pytest.raises(CodedError) as error:
        act()
    return str(error.value)


def place(name: str, folder: Path) -> Path:
    return folder / {"state": "run.json", "table": "named.csv"}.get(name, "named.file")


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("found", ["nothing", "folder", "bytes", "folder above is a file"])
def test_what_cannot_be_read_is_said_in_words(name: str, found: str, tmp_path: Path) -> None:
    path = place(name, tmp_path)
    if found == "folder":
        path.mkdir()
    elif found == "bytes":
        path.write_bytes(b"\xff\xfe\x00" * 40)
        path.chmod(0o600)
    elif found != "nothing":
        path = place(name, tmp_path / "file")
        path.parent.write_text("text")
    if (name, found) == ("state", "nothing"):
        return  # a run that has not begun
    message = said(lambda: READERS[name](path))
    assert path.name in message and FOREIGN.search(message) is None, message


@pytest.mark.parametrize("name", [n for n in READERS if n not in ("model", "round", "prior")])
def test_a_file_of_another_user_is_said_in_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place(name, tmp_path)
    path.write_text("text: 1\n")
    path.chmod(0o600)

    def denied(*arguments: object, **settings: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("io.open", denied)
    monkeypatch.setattr("builtins.open", denied)
    monkeypatch.setattr("pyarrow.csv.read_csv", denied)
    message = said(lambda: READERS[name](path))
    monkeypatch.undo()
    assert path.name in message and FOREIGN.search(message) is None, message
    assert system.in_words(PermissionError(errno.EACCES, "x")) in message


def test_a_full_disk_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="") as real:
        Path("/dev/full").write_bytes(b"x")
    words = one_line(real.value)
    assert words == system.in_words(OSError(errno.ENOSPC, "x"))
    failed = str(files.write_failed(tmp_path / "file", real.value, 1000))
    assert words in failed and FOREIGN.search(failed) is None
    status, code, line = main._operating_system(real.value)
    assert status == 1 and code == "system-error" and words in line


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_error_of_the_system_has_words_without_a_number(number: int) -> None:
    words = one_line(OSError(number, os.strerror(number), "/a/file"))
    assert words and "Errno" not in words
    assert number not in system._WORDS or FOREIGN.search(words) is None


def test_what_a_library_says_itself_is_kept() -> None:
    assert one_line(OSError("cannot identify image")) == "cannot identify image"
    assert one_line(ValueError("no")) == "no"
    words = system.in_words(FileNotFoundError(errno.ENOENT, "x"))
    assert one_line(FileNotFoundError("No such file or directory: /x")) == words
    assert one_line(RuntimeError("I/O error: gone (os error 2)")) == words
