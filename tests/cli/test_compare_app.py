"""``bract compare APP``: what each variant of a third-party app runs, and what it must leave."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from foreign_models import relu_mlp
from refusals import refused
from torch.nn import functional as F

from bract import Observation, ObservationStore
from bract.audit.captures import Captures
from bract.captures.stores import occupy
from bract.cli import compare_app as module
from bract.cli.compare import Steps
from bract.cli.compare_app import compare_app, inputs_of
from bract.client.defenses import ProtectContext, build_defenses
from bract.client.truth import save_truth
from bract.config import DataConfig
from bract.data.views import test_data as load_test_data
from bract.disk import write_text
from bract.inputs import is_redacted
from bract.installed import App, app_in
from bract.rundir import RunDirectory
from bract.schema import AppDescription, ClientDeclaration
from bract.schema.inputs import ImageOutline
from bract.schema.store import StoreOwner
from bract.updates.update import parameters_of

MANIFEST = """[project]
name = "theirs"
version = "1.0.0"

[tool.flwr.app.components]
serverapp = "task:server"
clientapp = "task:client"
"""

DESCRIPTION = """model: foreign_models:relu_mlp
input: {shape: [1, 8, 8], mean: [0.0], std: [1.0]}
classes: 10
training: {optimizer: sgd, lr: 0.1, momentum: 0.0, batch_size: 1, local_steps: 1}
clients: {node-1: {local_steps: 1}}
"""


def capture(root: Path, number: str, defense: str, first: int = 1) -> None:
    """Write what a run of the app leaves in its folder: two clients, of which each kept truth."""
    entries = [] if defense == "off" else json.loads(defense)
    store = root / "captures" / number
    occupy(store, StoreOwner(run_id=number, app="theirs", started=float(number)))
    images, labels = load_test_data(DataConfig(name="digits", image_size=8))
    for client in (1, 2):
        torch.manual_seed(client)
        model, one = relu_mlp(), slice(client, client + 1)
        loss = F.cross_entropy(model(images[one]), labels[one])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        update = {n: 0.1 * g for n, g in zip(names, gradients, strict=True)}
        declaration = ClientDeclaration(num_examples=1)
        if entries:
            chain = build_defenses(entries)
            update = chain.protect(update, {}, ProtectContext())
            declaration = declaration.updated({"defenses": tuple(chain.public())})
        ObservationStore(store).save(
            Observation(
                round=1,
                client=f"node-{client + first}",
                parameters=parameters_of(model),
                update=update,
                declaration=declaration,
                provenance={"run_id": number},
            )
        )
        save_truth(root / "truth" / number / f"node-{client + first}", 1, images[one], labels[one])


class Engine:
    """Stands for Flower's simulation engine: leaves what the app's run would."""

    ran: ClassVar[list[tuple[str, int, str]]] = []
    obeys: ClassVar[bool] = True

    def __init__(self, app: Path, run: RunDirectory, clients: int, defense: str) -> None:
        self.run, self.defense = run, defense
        Engine.ran.append((run.root.name, clients, defense))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        """End nothing."""

    def finish(self) -> None:
        # Flower draws other nodes for every run.
        capture(self.run.root, "5", self.defense if Engine.obeys else "off", 10 * len(Engine.ran))


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> App:
    """An app that ran once, and was described."""

    def quick(*args: Any, settings: dict[str, Any], **options: Any) -> Steps:
        assert settings == {"rounds": [1], "total_seconds": 120.0}
        return Steps.of(*args, settings={"rounds": [1], "attacks": ["analytic"]}, **options)

    monkeypatch.setattr(module, "OwnAppFederation", Engine)
    monkeypatch.setattr(module, "Steps", SimpleNamespace(of=quick))
    monkeypatch.setattr(Engine, "ran", [])
    folder = tmp_path / "theirs"
    write_text(folder / "pyproject.toml", MANIFEST)
    capture(folder, "3", "off")
    write_text(folder / "captures" / "3" / "bract.yaml", DESCRIPTION)
    found = app_in(folder)
    assert found is not None
    return found


def compare(app: App, **options: Any) -> dict[str, Any]:
    runs = app.folder.parent / "runs"
    compare_app(app, runs, **{"tiers": ["oblivious"], **options})
    found: dict[str, Any] = json.loads((runs / "theirs-compare" / "comparison.json").read_text())
    return found


def test_each_variant_is_the_app_with_that_defense_and_the_clients_it_had(app: App) -> None:
    found = compare(app, defenses=["pruning"])
    assert [name for name, *_ in Engine.ran] == ["undefended", "pruning"]
    assert {clients for _, clients, _ in Engine.ran} == {2}
    assert Engine.ran[0][2] == "off" and json.loads(Engine.ran[1][2])[0]["name"] == "pruning"
    rows = {row["variant"]: row for row in found["rows"]}
    assert set(rows) == {"undefended", "pruning"}
    assert all(row["error"] is None and row["attack"]["scored"] for row in rows.values())
    run = RunDirectory.open(app.folder.parent / "runs" / "theirs-compare" / "pruning")
    description = run.description()
    assert description is not None and description.clients == {}
    assert (run.root / "report.html").is_file()


@pytest.mark.thorough
def test_the_input_decides_whether_the_variants_pages_show_examples(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pages() -> set[bool]:
        found = compare(app, defenses=["pruning"], overwrite=True)
        root = app.folder.parent / "runs" / "theirs-compare"
        own = json.loads((root / "undefended" / "report.json").read_text())
        return {found["redacted"], own["redacted"]}

    assert pages() == {False}
    monkeypatch.setattr(ImageOutline, "withheld", True)
    assert pages() == {True}


def test_by_default_no_defense_is_compared_that_needs_a_line_of_the_app(app: App) -> None:
    planned = module._plan(2, None)
    names = [config.name for config in planned.configs]
    assert "guardian" in names and "fedkl" not in names
    assert any("Not compared: fedkl" in note for note in planned.notes)


def test_a_client_without_the_mod_is_named(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "obeys", False)
    with refused("run-failed", 1, 2, "pruning"):
        compare(app, defenses=["pruning"])
    page = app.folder.parent / "runs" / "theirs-compare" / "comparison.json"
    (row,) = [r for r in json.loads(page.read_text())["rows"] if r["variant"] == "pruning"]
    assert "ClientApp(mods=[DefenseMod" in row["error"]


def test_an_app_that_was_not_described_is_told_how(app: App) -> None:
    (app.folder / "captures" / "3" / "bract.yaml").unlink()
    with refused("captures-none", "bract"):
        compare(app)
    with refused("unknown-name", "all-knowing"):
        compare(app, tiers=["all-knowing"])


def test_variants_that_are_there_are_resumed_or_replaced_and_never_mixed(app: App) -> None:
    compare(app, defenses=["pruning"])
    with refused("file-taken"):
        compare(app, defenses=["pruning"])
    Engine.ran.clear()
    compare(app, defenses=["pruning"], resume=True)
    assert Engine.ran == []
    compare(app, defenses=["pruning"], overwrite=True)
    assert len(Engine.ran) == 2


def test_texts_that_an_app_declares_itself_are_withheld(tmp_path: Path) -> None:
    """Its ``bract.yaml`` then names no input."""
    capture(tmp_path, "1", "off")
    (one, *_) = Captures(tmp_path / "captures" / "1").index
    own = replace(one, declaration=one.declaration.updated({"input": "text"}))
    assert inputs_of(AppDescription(), [one]) == {"image"}
    assert is_redacted(None, inputs_of(AppDescription(), [one, own]))
