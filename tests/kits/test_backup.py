"""Copies of a kit's keys and state: who reads them, and that no record is rolled back."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from pathlib import Path, PurePath

import pytest
from refusals import refused
from sites import federation

from bract.errors import BractError
from bract.kits import backup
from bract.kits.backup import back_up, restore
from bract.kits.kit import Files, check_files
from bract.kits.provisioning import provision

PHRASE = "correct horse battery"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site's kit that has answered two rounds."""
    monkeypatch.setattr(backup, "_COST", 1 << 4)
    provision(federation("a", "b"), tmp_path / "kits", source=tmp_path / "federation.yaml")
    record(tmp_path / "kits" / "a", 2)
    return tmp_path / "kits" / "a"


def record(kit: Path, rounds: int, digest: str = "d") -> None:
    run = {"config": "c", "kinds": {"train": {"round": rounds, "count": rounds, "digest": digest}}}
    content = {"totals": {"train": rounds}, "mechanisms": {}, "runs": {"1/x": run}}
    path = kit / "state" / "a-answered.json"
    path.write_text(json.dumps(content))
    path.chmod(0o600)


def everything(kit: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(kit).as_posix(): (path.read_bytes(), path.stat().st_mode & 0o777)
        for path in kit.rglob("*")
        if path.is_file()
    }


def test_a_lost_kit_comes_back_with_its_modes_and_nothing_in_the_copy_is_readable(
    site: Path, tmp_path: Path
) -> None:
    (site / "state" / "a-train.reply").write_text("a model")
    copy = tmp_path / "a.backup"
    assert back_up(site, copy, PHRASE) == len(everything(site)) - 1
    assert copy.stat().st_mode & 0o777 == 0o600
    key = (site / "node.key").read_bytes().splitlines()[2]
    assert key not in copy.read_bytes() and b"node.key" not in copy.read_bytes()
    before = everything(site)
    del before["state/a-train.reply"]
    shutil.rmtree(site)
    assert restore(copy, site, PHRASE).kit.name == "a"
    assert everything(site) == before and check_files(site) == Files()
    assert site.stat().st_mode & 0o777 == (site / "state").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in tmp_path.glob("kits/.restored*")] == []


@pytest.mark.parametrize("what", ["passphrase", "bit", "head", "other file", "short phrase"])
def test_a_wrong_passphrase_or_a_changed_copy_restores_nothing(
    what: str, site: Path, tmp_path: Path
) -> None:
    copy, phrase = tmp_path / "a.backup", PHRASE
    back_up(site, copy, PHRASE)
    text = bytearray(copy.read_bytes())
    if what == "passphrase":
        phrase = PHRASE + "x"
    elif what == "bit":
        text[-1] ^= 1
    elif what == "head":
        text[20] ^= 1
    elif what == "other file":
        text[0] ^= 1
    else:
        with refused("usage"):
            back_up(site, tmp_path / "second", "short")
    copy.write_bytes(text)
    if what != "short phrase":
        with pytest.raises(BractError):
            restore(copy, tmp_path / "new", phrase)
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("later", "earlier", "covers"),
    [
        ({"n": 2}, {"n": 1}, True),
        ({"n": 1}, {"n": 2}, False),
        ({}, {"n": 0}, False),
        ({"n": 1, "more": 1}, {"n": 1}, True),
        ({"n": 2, "digest": "b"}, {"n": 1, "digest": "a"}, True),
        ({"n": 1, "digest": "b"}, {"n": 1, "digest": "a"}, False),
        ({"n": 2, "in": {"m": 1}}, {"n": 1, "in": {"m": 2}}, False),
        ({"closed": False}, {"closed": True}, False),
        ({"n": "2"}, {"n": 1}, False),
        ({"failed": ["a"]}, {"failed": ["a", "b"]}, False),
        ({"failed": ["a", "b"]}, {"failed": ["a"]}, True),
        ([], {}, False),
    ],
)
def test_a_record_covers_another_where_it_can_be_what_that_became(
    later: object, earlier: object, covers: bool
) -> None:
    assert backup._covers(later, earlier) is covers


def test_a_damaged_key_is_restored_beside_a_record_that_has_not_grown(
    site: Path, tmp_path: Path
) -> None:
    back_up(site, tmp_path / "copy", PHRASE)
    (site / "node.key").write_text("damaged")
    restore(tmp_path / "copy", site, PHRASE)
    assert check_files(site) == Files()
    # The record of a site whose state went back to an earlier one is brought forward.
    record(site, 1)
    restore(tmp_path / "copy", site, PHRASE)
    assert '"round": 2' in (site / "state" / "a-answered.json").read_text()


def test_no_record_is_rolled_back(site: Path, tmp_path: Path) -> None:
    back_up(site, tmp_path / "copy", PHRASE)
    record(site, 3)
    with refused("file-taken", "copy"):
        restore(tmp_path / "copy", site, PHRASE)
    assert '"round": 3' in (site / "state" / "a-answered.json").read_text()
    record(site, 2)
    for name, content in (("key.json", '{"failed": 1}'), ("fedkl.safetensors", "secret")):
        (site / "state" / name).write_text(content)
        with refused("file-taken", name):
            restore(tmp_path / "copy", site, PHRASE)
        (site / "state" / name).unlink()
    (site / "failed-1.json").write_text('{"failed": ["a"]}')
    with refused("file-taken", "failed-1"):
        restore(tmp_path / "copy", site, PHRASE)
    (site / "failed-1.json").unlink()
    # As many answers, but other ones.
    record(site, 2, digest="e")
    with refused("file-taken", tmp_path):
        restore(tmp_path / "copy", site, PHRASE)
    (site / "state" / "a-refused.json").write_text("{}")
    record(site, 2)
    restore(tmp_path / "copy", site, PHRASE)
    # A damaged record cannot be compared.
    (site / "state" / "a-answered.json").write_text("{")
    with refused("file-taken", tmp_path):
        restore(tmp_path / "copy", site, PHRASE)


def test_a_copy_is_not_restored_over_another_party_or_under_a_running_process(
    site: Path, tmp_path: Path
) -> None:
    back_up(site, tmp_path / "copy", PHRASE)
    with refused("identity-refused", tmp_path):
        restore(tmp_path / "copy", site.parent / "b", PHRASE)
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as served:
        served.bind(f"{short}/9094.sock")
        served.listen()
        (site / "state" / "sockets").symlink_to(short)
        with refused("file-locked", tmp_path):
            restore(tmp_path / "copy", site, PHRASE)


def test_an_operators_copy_holds_no_database(site: Path, tmp_path: Path) -> None:
    operator = site.parent / "operator"
    (operator / "state" / "superlink.db").write_text("runs")
    (operator / "state" / "audit.jsonl").write_text("{}\n")
    back_up(operator, tmp_path / "copy", PHRASE)
    restore(tmp_path / "copy", tmp_path / "new", PHRASE)
    assert [path.name for path in (tmp_path / "new" / "state").iterdir()] == ["audit.jsonl"]


def test_no_record_is_rolled_back_by_a_copy_that_names_another_folder(
    site: Path, tmp_path: Path
) -> None:
    back_up(site, tmp_path / "copy", PHRASE)
    record(site, 3)
    settings = (site / "site.yaml").read_text()
    (site / "site.yaml").write_text(settings.replace("state: state", "state: state2"))
    with refused("file-taken", "copy"):
        restore(tmp_path / "copy", site, PHRASE)
    assert '"round": 3' in (site / "state" / "a-answered.json").read_text()


@pytest.mark.parametrize("name", ["sockets-a", "superlink.dbx", "a.lock", "b-refused.json"])
def test_a_copy_holds_a_sites_record_whatever_the_site_is_called(name: str) -> None:
    """A federation's name, which the server chooses, is in names of files too."""
    records = [f"{name}-answered.json", f"{name}-sums.json", f"{name}/{name}-pins.json"]
    assert not any(backup._is_left_out(PurePath(record)) for record in records)
    assert backup._is_left_out(PurePath("sockets/8000.sock"))
    assert backup._is_left_out(PurePath("superlink.db-wal"))
    assert backup._is_left_out(PurePath(f"{name}-train.reply"))
