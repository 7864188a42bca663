"""Files that a person names: none is waited for, and none is read without an end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bract.audit import global_models
from bract.certificates import authority
from bract.cli import unpacking
from bract.client import policy, site
from bract.config import config
from bract.disk import check_file, named, read_named, read_private
from bract.errors import BractError
from bract.kits import backup, sites
from bract.protocol import keyfiles
from bract.schema import work

READERS: dict[str, Callable[[Path], Any]] = {
    "configuration": config.load_config,
    "policy": policy.load_policy,
    "certificate": authority.read_file,
    "private record": read_private,
    "private seed": site.read_private_seed,
    "key": keyfiles.read_key_file,
    "sites": sites.read_sites,
    "model": global_models.read_model,
    "work": work.read_work,
    "pack": lambda path: unpacking.pull(str(path), path.with_name("out")),
    "copy": lambda path: backup.restore(path, path.with_name("kit"), "words"),
}


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """Fail a test that waits."""

    def late(*_: Any) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("what", READERS)
def test_a_named_pipe_is_refused_and_not_waited_for(what: str, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    with pytest.raises(BractError) as refusal:
        READERS[what](path)
    assert str(path) in str(refusal.value) and "name a file" in str(refusal.value)


@pytest.mark.parametrize("what", ["configuration", "policy", "certificate", "private seed", "key"])
@pytest.mark.parametrize("endless", [True, False])
def test_no_more_is_read_than_such_a_file_has(what: str, endless: bool, tmp_path: Path) -> None:
    path = Path("/dev/zero")
    if not endless:
        path = tmp_path / "large"
        path.touch(0o600)
        os.truncate(path, 1 << 40)
    with pytest.raises(BractError) as refusal:
        READERS[what](path)
    assert str(path) in str(refusal.value)


def test_a_shells_own_pipe_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"{}")
    os.close(writing)
    assert read_named(Path(f"/proc/self/fd/{reading}")) == b"{}"
    os.close(reading)


def test_a_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * named.MOST_BYTES)
    assert len(read_named(path)) == named.MOST_BYTES
    assert check_file(tmp_path) == tmp_path
    path.write_bytes(b"a" * (named.MOST_BYTES + 1))
    with pytest.raises(OSError):
        read_named(path)
