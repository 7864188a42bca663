"""A site has one record of its answers, whichever app answers and whatever its node is called."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from pydantic import BaseModel, ConfigDict
from refusals import refused

from bract.client import DefenseMod, answered
from bract.disk import LockedRecord
from bract.server.loopback import LoopbackGrid

NAMES: dict[str, dict[str, Any]] = {
    "client-0": {"partition-id": 0},
    "clinic": {"name": "clinic"},
    "site": {},
}
EARLIER = '{"totals": {"query": 2}, "without_guarantee": 1, "mechanisms": {"gaussian:1.0": 3}}'


def answers(folder: Path, node: dict[str, Any], *, index: int = 0) -> bool:
    """Return whether a site that answers twice in all answers a query, as the node of an index."""
    policy = folder / "policy.yaml"
    policy.write_text("max_rounds_total: 2")
    app = ClientApp(mods=[DefenseMod("noise", std=1.0, clip=1.0)])

    @app.query()
    def rows(message: Any, context: Any) -> Any:
        return Message(RecordDict({"metrics": MetricRecord({"rows": 8})}), reply_to=message)

    own = {**node, "policy": str(policy), "state-dir": str(folder / "state")}
    grid = LoopbackGrid(app, [own] * (index + 1))
    message = grid.create_message(RecordDict(), "query", index + 1, "")
    (reply,) = grid.send_and_receive([message])
    return bool(reply.has_content())


@pytest.mark.parametrize("name", NAMES)
def test_a_mod_counts_in_the_record_of_the_site(name: str, tmp_path: Path) -> None:
    assert answers(tmp_path, NAMES[name])
    assert (tmp_path / "state" / f"{name}-answered.json").exists()


def test_a_site_without_a_name_counts_on_when_its_node_is_another_one(tmp_path: Path) -> None:
    assert [answers(tmp_path, {}, index=index) for index in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("name", "earlier"), [("client-0", "0"), ("site", "node-81234"), ("site", "node-7")]
)
def test_what_an_earlier_release_counted_under_another_name_counts(
    name: str, earlier: str, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    old = tmp_path / "state" / f"{earlier}-answered.json"
    old.touch(mode=0o600)
    old.write_text(EARLIER)
    assert not answers(tmp_path, NAMES[name])
    old.write_text(EARLIER.replace("2", "1"))
    assert answers(tmp_path, NAMES[name])
    assert not old.exists()
    assert '"gaussian:1.0":3' in (tmp_path / "state" / f"{name}-answered.json").read_text()
    assert not answers(tmp_path, NAMES[name])


class Kept(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: float | None = None


def record(path: Path | None, memory: dict[str, str] | None = None) -> LockedRecord[Kept]:
    held: dict[str, str] = {} if memory is None else memory
    return LockedRecord(Kept, path, held, "kept", what="the record", fix="restore it")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_read_as_another_one_is_not_written(number: float, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    with record(path).changing() as held:
        held.number = 1.0
    with refused("request-refused"), record(path).changing() as held:
        held.number = number
    assert record(path).load().number == 1.0


def test_a_change_that_fails_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    for kept in (record(tmp_path / "kept.json"), record(None, {"kept": '{"number": 2}'})):
        before = kept.load()
        with pytest.raises(KeyError), kept.changing() as held:
            held.number = 5.0
            raise KeyError
        assert kept.load() == before


def test_a_record_that_is_open_damaged_or_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    with record(path).changing() as held:
        held.number = 1.0
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with refused("file-exposed", path):
        record(path).load()
    path.chmod(0o600)
    path.write_text("{")
    with refused("file-damaged", path):
        record(path).load()
    elsewhere = tmp_path / "elsewhere.json"
    os.link(path, elsewhere)
    path.unlink()
    path.symlink_to(elsewhere)
    with refused("file-exposed", path):
        record(path).load()


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_a_record_of_another_version_is_not_read_as_this_one(version: Any) -> None:
    text = json.dumps({"schema_version": version})
    with refused("schema-version", "a.json", repr(version)):
        answered.Answered.parse(text, source="a.json")
