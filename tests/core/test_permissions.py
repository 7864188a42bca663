"""Other users of the machine read nothing that is written here, whatever the umask."""

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import RecordDict
from modes import open_to_others
from refusals import refused

from bract.client.private import warn_of_open_folders
from bract.disk import (
    GROUP,
    append_line,
    lock,
    make_private_folder,
    open_private,
    replacing,
    warn_if_open,
    write_bytes,
    write_text,
)
from bract.paillier.keyfile import write_file
from bract.process import log_to_file

OWN_GROUP = os.getegid()
"""The one group that every user may give a file to."""


@pytest.fixture(autouse=True)
def nothing_masked() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_whatever_is_written_is_its_owners_alone(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b" / "text", "x")
    append_line(tmp_path / "c" / "lines", "{}")
    make_private_folder(tmp_path / "d" / "e")
    with replacing(tmp_path / "f" / "whole") as made:
        make_private_folder(made)
        write_bytes(made / "bytes", b"x")
    with lock(tmp_path / "d" / ".lock", what="x", doing="x"):
        pass
    with log_to_file(tmp_path / "d" / "log"):
        pass
    write_file(tmp_path / "d" / "key", b"x")
    assert open_to_others(tmp_path) == []


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with pytest.raises(OSError, match="symbolic links"):
        os.close(open_private(tmp_path / "link", os.O_WRONLY | os.O_CREAT))


def test_a_folder_in_the_place_of_which_there_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(FileExistsError):
        make_private_folder(tmp_path / "x")


def test_the_group_that_an_operator_names_reads_all_but_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GROUP, str(OWN_GROUP))
    shared = write_text(tmp_path / "run" / "deep" / "report.html", "x")
    append_line(tmp_path / "run" / "metrics.jsonl", "{}")
    secret = write_text(tmp_path / "state" / "secret", "x", private=True)
    for path, wanted in (
        (tmp_path / "run", 0o2750),
        (tmp_path / "run" / "deep", 0o2750),
        (shared, 0o640),
        (tmp_path / "run" / "metrics.jsonl", 0o640),
    ):
        assert (mode(path), path.stat().st_gid) == (wanted, OWN_GROUP), path
    assert (mode(secret), mode(secret.parent)) == (0o600, 0o700)
    write_file(tmp_path / "run" / "key", b"x")
    assert mode(tmp_path / "run" / "key") == 0o600
    with pytest.MonkeyPatch.context() as own:
        own.delenv(GROUP)
        assert mode(write_text(tmp_path / "run" / "later", "x")) == 0o600


def test_a_group_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GROUP, "no-such-group")
    with refused("unknown-name", "BRACT_GROUP", "no-such-group"):
        write_text(tmp_path / "x" / "y", "")
    assert open_to_others(tmp_path) == []


def test_a_group_that_this_user_is_not_in_is_refused_and_nothing_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setenv(GROUP, str(OWN_GROUP))
    monkeypatch.setattr(os, "chown", denied)
    with refused("file-unwritable"):
        write_text(tmp_path / "y", "")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def reachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that others may enter, as far as a test can tell: pytest's own is closed."""
    monkeypatch.setattr("bract.disk.permissions._ENTER", 0o7777)
    folder = tmp_path / "open"
    folder.mkdir(0o755)
    return folder


def test_an_existing_folder_that_others_read_is_named_once_with_the_command(
    reachable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        warn_if_open(reachable)
    (record,) = caplog.records
    assert f"chmod -R go= {reachable}" in record.getMessage() and "0755" in record.getMessage()


@pytest.mark.parametrize("mode", [0o700, 0o1700])
def test_a_folder_of_its_owner_alone_is_not_named(
    reachable: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    reachable.chmod(mode)
    warn_if_open(reachable)
    warn_if_open(reachable / "missing")
    assert not caplog.records


def test_nothing_is_named_below_a_folder_that_others_cannot_enter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "closed").mkdir(0o700)
    (tmp_path / "closed" / "open").mkdir(0o777)
    warn_if_open(tmp_path / "closed" / "open")
    assert not caplog.records


def test_a_folder_that_the_named_group_reads_is_not_named(
    reachable: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reachable.chmod(0o750)
    monkeypatch.setenv(GROUP, str(reachable.stat().st_gid))
    warn_if_open(reachable)
    assert not caplog.records
    reachable.chmod(0o770)
    warn_if_open(reachable)
    assert len(caplog.records) == 1


def test_a_client_names_its_folders_once_a_run_over_its_processes(
    reachable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING)
    (truth := tmp_path / "truth").mkdir(0o755)
    state = RecordDict()
    for folders in ((reachable, None), (reachable, truth), (None, truth)):
        monkeypatch.setattr("bract.disk.permissions._warned", set())  # another process
        warn_of_open_folders(state, *folders)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [
        reachable, truth,
    ]  # fmt: skip
