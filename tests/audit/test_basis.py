"""What an earlier result holds for: whatever it depends on changes its basis."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import with_keys

from bract import Observation, ObservationStore
from bract.audit.basis import Basis, changes
from bract.audit.observations import Observations
from bract.config import build_config
from bract.config.config import AuditRequest
from bract.installed import RESULT_CODE, code_digest, versions
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration

ROOT = Path(__file__).parents[2]
CHOICE = AuditRequest(attacks=["ig"], tier="adaptive")

HARMLESS = {
    "bract.disk",
    "bract.errors",
    "bract.installed",
    "bract.lazy",
    "bract.pool",
    "bract.process",
    "bract.rundir",
}
"""Of what attacks and scores import: what words, files, names and refused keys depend on."""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with a folder of images, three rounds of one client, and aggregates."""
    images = tmp_path / "images"
    (images / "test" / "one").mkdir(parents=True)
    (images / "test" / "one" / "1.png").write_bytes(b"first")
    config = build_config(
        {"clients": 1, "data": {"name": "folder", "path": str(images), "image_size": 16}}
    )
    directory = RunDirectory(tmp_path / "run")
    directory.create(config)
    store = ObservationStore(directory.captures)
    for number in (1, 2, 3):
        store.save(
            Observation(
                round=number,
                client="client-0",
                parameters={"w": torch.zeros(2), "v": torch.zeros(2)},
                update={"w": torch.ones(2), "v": torch.ones(2)},
                declaration=ClientDeclaration(model="lenet"),
            )
        )
    directory.aggregates.mkdir()
    for number in (1, 2, 3):
        (directory.aggregates / f"round-{number:04d}.safetensors").write_bytes(b"sum")
    (tmp_path / "key.pem").write_text("key")
    return directory


def basis(run: RunDirectory, choice: AuditRequest = CHOICE, number: int = 2) -> dict[str, str]:
    """The parts of one round, as a new process finds them."""
    code_digest.cache_clear()
    seen = Observations(run, with_keys(choice, tier="oblivious", key=None, models=[]))
    seen.request = choice
    return Basis(seen).of(next(c for c in seen.captures.index if c.round == number))


def changed(run: RunDirectory, before: dict[str, str], **options: Any) -> list[str]:
    return changes(before, basis(run, **options))


def test_nothing_changes_where_nothing_did(run: RunDirectory) -> None:
    assert changed(run, basis(run)) == []


def test_what_was_sent_is_a_part_of_the_capture_though_others_share_it(run: RunDirectory) -> None:
    before = basis(run)
    (sent,) = (run.captures / "round-0002" / ".sent").iterdir()
    sent.write_bytes(sent.read_bytes()[:-1] + b"\x01")
    assert changed(run, before) == ["the captured tensors changed"]


def test_every_module_that_attacks_and_scores_import_is_a_part_of_the_code() -> None:
    covered = {name for name in RESULT_CODE if name.startswith("bract.")}
    files = [
        path
        for name in covered
        for top in (ROOT / name.partition(".")[2], ROOT / name.replace(".", "/"))
        for path in (top.rglob("*.py") if top.is_dir() else [top.with_suffix(".py")])
        if path.is_file()
    ]
    assert len(files) > 150
    imported = {
        ".".join(name.split(".")[:2])
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        if name.startswith("bract.")
    }
    assert imported - covered <= HARMLESS


@pytest.mark.parametrize(
    "group", [f"bract.{kind}" for kind in ("attacks", "data", "defenses", "models", "priors")]
)
def test_a_plug_ins_own_helpers_are_a_part_of_it(
    run: RunDirectory, tmp_path: Path, monkeypatch: Any, group: str
) -> None:
    package = tmp_path / "site" / "theirs_of_basis"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "entry.py").write_text("from theirs_of_basis.helper import VALUE\n")
    (package / "helper.py").write_text("VALUE = 1\n")
    info = tmp_path / "site" / "theirs_of_basis-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs_of_basis\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nit = theirs_of_basis.entry:VALUE\n")
    without = basis(run)
    monkeypatch.syspath_prepend(tmp_path / "site")
    installed = basis(run)
    named = ["the code of other packages' attacks, defenses, models or data changed"]
    assert changes(without, installed) == named
    (package / "helper.py").write_text("VALUE = 2\n")
    assert changed(run, installed) == named


def test_the_code_of_a_named_model_is_a_part(
    run: RunDirectory, tmp_path: Path, monkeypatch: Any
) -> None:
    module = tmp_path / "a_model_of_theirs.py"
    module.write_text("def make(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    choice = with_keys(CHOICE, models=["a_model_of_theirs:make"])
    before = basis(run, choice)
    module.write_text("def make(): return 1\n")
    (said,) = changed(run, before, choice=choice)
    assert "models" in said


def test_other_libraries_are_named(run: RunDirectory, monkeypatch: Any) -> None:
    before = basis(run)
    real = versions._installed
    monkeypatch.setattr(
        versions, "_installed", lambda name: "0.1" if name == "scikit-image" else real(name)
    )
    (said,) = changed(run, before)
    assert "scikit-image 0.1" in said


def test_what_the_client_declared_earlier_is_a_part_of_what_an_adaptive_attacker_knows(
    run: RunDirectory,
) -> None:
    before = {number: basis(run, number=number) for number in (1, 2)}
    store = ObservationStore(run.captures)
    seen = store.load(store.folder(1, "client-0"))
    entry = {"name": "pruning", "ratio": 0.5}
    store.save(replace(seen, declaration=seen.declaration.updated({"defenses": [entry]})))
    assert changed(run, before[2]) == ["the client's earlier captures changed"]
    assert "what the capture declares changed" in changed(run, before[1], number=1)


def test_which_tensors_a_capture_holds_and_in_which_order_is_a_part_of_it(
    run: RunDirectory,
) -> None:
    before = basis(run)
    store = ObservationStore(run.captures)
    seen = store.load(store.folder(2, "client-0"))
    store.save(replace(seen, update=dict(reversed(seen.update.items()))))
    assert changed(run, before) == ["the captured tensors changed"]


def test_another_file_among_the_images_is_seen(run: RunDirectory, tmp_path: Path) -> None:
    before = basis(run)
    (tmp_path / "images" / "test" / "one" / "1.png").write_bytes(b"second")
    assert changed(run, before) == ["the data set's files changed"]


def test_a_colluding_clients_key_and_the_aggregates_so_far_are_a_part(
    run: RunDirectory, tmp_path: Path
) -> None:
    choice = with_keys(CHOICE, tier="colluding", key=tmp_path / "key.pem")
    before = basis(run, choice)
    (run.aggregates / "round-0003.safetensors").write_bytes(b"later")
    assert changed(run, before, choice=choice) == []
    said = ["the run's aggregates or the colluding client's key changed"]
    (run.aggregates / "round-0001.safetensors").write_bytes(b"other")
    assert changed(run, before, choice=choice) == said
    (run.aggregates / "round-0001.safetensors").write_bytes(b"sum")
    assert changed(run, before, choice=choice) == []
    (tmp_path / "key.pem").write_text("another key")
    assert changed(run, before, choice=choice) == said


def test_a_capture_that_changes_while_an_audit_runs_is_read_again(run: RunDirectory) -> None:
    chosen = Observations(run, CHOICE)
    capture = next(c for c in chosen.captures.index if c.round == 2)
    found = Basis(chosen)
    before = found.of(capture)
    store = ObservationStore(run.captures)
    seen = store.load(store.folder(2, "client-0"))
    store.save(replace(seen, update={n: torch.zeros(2) for n in seen.update}))
    assert changes(before, found.of(capture)) == ["the captured tensors changed"]


def test_code_that_moves_to_another_file_is_other_code(tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / "moving_package"
    for part in ("a", "b"):
        (package / part).mkdir(parents=True)
    (package / "a" / "same.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = code_digest("moving_package")
    (package / "a" / "same.py").rename(package / "b" / "same.py")
    code_digest.cache_clear()
    assert code_digest("moving_package") != before
    assert code_digest("no_such_package") != code_digest("nor_such_a_package")
    assert code_digest("__main__", "builtins")
