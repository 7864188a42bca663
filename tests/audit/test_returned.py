"""What a worker hands back is checked like any file of somebody else's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import audited_run, with_keys
from refusals import refused

from bract import ObservationStore
from bract.audit.audit import Audit
from bract.audit.worker import Worker
from bract.config import build_config
from bract.config.config import AuditRequest
from bract.errors import BractError
from bract.rundir import RunDirectory
from bract.schema import AuditResult
from experiments.harness.rows import send_rows

CHOICE = AuditRequest(attacks=["ig"], iterations=3, device="cpu")
KEYS = ["round-0001/client-0", "round-0001/client-1"]
STEM = "round-0001--client-0"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return audited_run(tmp_path_factory.mktemp("returned") / "run", uploads=2)


@pytest.fixture(scope="module")
def returned(run: RunDirectory) -> dict[str, bytes]:
    return worker(run).attack(CHOICE, "ig", 0, KEYS)


def worker(run: RunDirectory) -> Worker:
    return Worker(run.root, run.root / ".workers", torch.get_num_threads())


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k != "seconds" or isinstance(v, dict)}
        return {k: timeless(v) for k, v in kept.items() if k != "made"}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def accept(run: RunDirectory, files: Any, choice: AuditRequest = CHOICE) -> list[AuditResult]:
    audit = Audit(run, choice)
    found = audit.accept(audit.batch("ig", 0, KEYS), files)
    return [one for one in found if isinstance(one, AuditResult)]


def test_a_workers_files_are_those_that_the_audit_itself_writes(
    run: RunDirectory, returned: dict[str, bytes]
) -> None:
    assert not any((run.root / ".workers").iterdir())
    audit = Audit(run, CHOICE)
    own = [timeless(found.to_dict()) for found in audit.execute(audit.plan())]
    folder = run.audit / "ig"
    written = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert [timeless(found.to_dict()) for found in accept(run, returned)] == own
    assert written.keys() == returned.keys()
    for name, content in written.items():
        assert (folder / name).read_bytes() == returned[name]
        assert (folder / name).stat().st_mode & 0o077 == 0
        if name.endswith(".png"):
            assert returned[name] == content
    assert Audit(run, CHOICE, resume=True).plan() == []


def changed(returned: dict[str, bytes], **fields: Any) -> dict[str, bytes]:
    facts = json.loads(returned[f"{STEM}.json"]) | fields
    return returned | {f"{STEM}.json": json.dumps(facts).encode()}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"client": "client-1"}, ("worker-failed", "client-1", "client-0")),
        ({"round": 2}, ("worker-failed", "2")),
        ({"tier": "adaptive"}, ("worker-failed", "tier", "adaptive")),
        ({"num_examples": 9}, ("worker-failed", "num_examples", "9")),
        ({"seed": 9}, ("worker-failed",)),
        ({"chosen_attack": "none-such"}, ("worker-failed",)),
        ({"budget": {"iterations": 9}}, ("worker-failed",)),
        ({"schema": 99}, ("schema-version", "schema")),
        ({"basis": {}}, ("worker-failed",)),
        ({"nobody": "knows"}, ("schema-version", "nobody")),
    ],
)
def test_a_result_of_something_else_is_refused_and_nothing_is_kept(
    run: RunDirectory, returned: dict[str, bytes], fields: Any, said: tuple[str, ...]
) -> None:
    accept(run, returned)
    before = (run.audit / "ig" / f"{STEM}.json").read_bytes()
    with refused(*said):
        accept(run, changed(returned, **fields))
    assert (run.audit / "ig" / f"{STEM}.json").read_bytes() == before


def test_a_basis_that_differs_is_named_by_its_part(
    run: RunDirectory, returned: dict[str, bytes]
) -> None:
    basis = json.loads(returned[f"{STEM}.json"])["basis"]
    with refused("worker-failed", "code"):
        accept(run, changed(returned, basis=basis | {"code": "other"}))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../../escaped.png", ("worker-failed", "../../escaped.png")),
        (
            "round-0001--client-1--00-reconstruction.png",
            ("worker-failed", "round-0001--client-1--00-reconstruction.png"),
        ),
        (f"{STEM}--07-reconstruction.png", ("worker-failed",)),
    ],
)
def test_a_picture_has_its_place_and_is_there(
    run: RunDirectory, returned: dict[str, bytes], name: str, said: tuple[str, ...]
) -> None:
    images = json.loads(returned[f"{STEM}.json"])["images"]
    images[0]["reconstruction"] = name
    with refused(*said):
        accept(run, changed(returned, images=images))
    assert not list(run.root.rglob("escaped.png"))


def test_what_is_no_picture_or_no_result_is_refused(
    run: RunDirectory, returned: dict[str, bytes]
) -> None:
    picture = f"{STEM}--00-reconstruction.png"
    for content in (b"<script>", b"\x89PNG\r\n\x1a\n", returned[picture][:60]):
        with refused("file-damaged", "PNG"):
            accept(run, returned | {picture: content})
    for broken in (b"", b"{", b"[1]", b"\xff"):
        with pytest.raises(BractError):
            accept(run, returned | {f"{STEM}.json": broken})
    with refused("worker-failed"):
        accept(run, {})


def test_observations_that_are_not_there_are_named(run: RunDirectory) -> None:
    with refused("captures-none", "round-0009/client-7"):
        Audit(run, CHOICE).batch("ig", 0, ["round-0009/client-7"])


def test_batches_are_as_large_as_was_asked(run: RunDirectory) -> None:
    sizes = [len(b.captures) for b in Audit(run, with_keys(CHOICE, batch=1)).plan()]
    assert sizes == [1, 1]


def test_a_worker_hands_back_rows_of_a_table_too(tmp_path: Path) -> None:
    data = {"input": "table", "name": "diabetes"}
    training = {"algorithm": "fedsgd", "batch_size": 2}
    config = build_config({"data": data, "model": {"name": "mlp-100"}, "training": training})
    run = RunDirectory(tmp_path / "run")
    run.create(config)
    run.update_state(status="finished")
    sent = send_rows("diabetes", 2, seed=0)
    ObservationStore(run.captures).save(sent.captured)
    choice = AuditRequest(attacks=["row-span"], device="cpu")
    audit = Audit(run, choice)
    (batch,) = audit.plan()
    key = sent.captured.key
    files = worker(run).attack(choice, "row-span", 0, [key])
    assert any(name.endswith(".csv") for name in files)
    assert len(audit.accept(batch, files)) == 1
