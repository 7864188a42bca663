"""A store holds each run of an app in a folder of its own, whichever SuperLink it runs in."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from refusals import refused
from typer.testing import CliRunner

from bract import ObservationStore
from bract.audit.captures import Captures
from bract.audit.truth import check_truth, load_truth, truth_path
from bract.captures.stores import LATEST, OWNER, owner_of, runs_in
from bract.cli.main import app
from bract.installed import app_folder, flower
from bract.rundir import RunDirectory, chosen_run
from bract.server import HonestButCurious
from bract.server.loopback import LoopbackGrid

CLIENT = ClientApp()


@CLIENT.train()
def _train(message: Message, context: Context) -> Message:
    del context
    content = RecordDict()
    content["arrays"] = message.content.array_records["arrays"]
    content["metrics"] = MetricRecord({"num-examples": 4})
    return Message(content, reply_to=message)


@CLIENT.evaluate()
def _evaluate(message: Message, context: Context) -> Message:
    del context
    return Message(RecordDict({"m": MetricRecord({"num-examples": 1})}), reply_to=message)


def train(hook: HonestButCurious, run_id: int | None = None) -> None:
    """Run one round of three clients."""
    grid = LoopbackGrid(CLIENT, [{}, {}, {}], run_id=run_id)
    hook.start(grid, ArrayRecord({"w": Array(torch.zeros(4).numpy())}), num_rounds=1)


MANIFEST = """[project]
name = "{name}"
version = "1.0.0"

[tool.flwr.app.components]
serverapp = "task:server"
clientapp = "task:client"

[tool.flwr.federations]
default = "local"
"""


@pytest.fixture
def apps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders ``first`` and ``second`` of two apps; the SuperLink was started in ``first``."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(MANIFEST.format(name=name))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "first")
    return tmp_path


def run(apps: Path, name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> ObservationStore:
    """Run an app from a copy, as Flower unpacks it; return the store of its hook."""
    unpacked = apps / "home" / "apps" / name
    unpacked.mkdir(parents=True, exist_ok=True)
    # Flower leaves the federations out, and writes the rest anew.
    manifest = MANIFEST.format(name=name).partition("[tool.flwr.federations]")[0]
    (unpacked / "pyproject.toml").write_text(manifest)
    monkeypatch.setattr(sys, "path", [str(unpacked), *sys.path])
    monkeypatch.setattr(flower.TaskIdentity, "_run_id", number)
    hook = HonestButCurious(FedAvg(), "captures")
    train(hook, number)
    store = hook.recorder.store
    assert isinstance(store, ObservationStore)
    return store


def test_two_apps_in_one_superlink_do_not_share_a_store(
    apps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(apps, "first", 11, monkeypatch)
    second = run(apps, "second", 12, monkeypatch)
    assert first.root == apps / "first" / "captures" / "11"
    assert second.root == apps / "second" / "captures" / "12"
    assert len(first.folders()) == len(second.folders()) == 3
    owner = owner_of(second.root)
    assert owner is not None and (owner.run_id, owner.app) == ("12", "second")


def test_a_second_run_of_an_app_has_its_own_folder_and_is_the_latest(
    apps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = run(apps, "first", 11, monkeypatch)
    later = run(apps, "first", 12, monkeypatch)
    store = apps / "first" / "captures"
    assert runs_in(store) == [later.root, earlier.root]
    assert (store / LATEST).resolve() == later.root
    opened = RunDirectory.open(apps / "first")
    assert opened.root == opened.captures == later.root
    assert RunDirectory.open(earlier.root).captures == earlier.root
    assert chosen_run(store) == (later.root, [earlier.root])
    # Without links, the time at which each began decides.
    (store / LATEST).unlink()
    assert chosen_run(store)[0] == later.root
    assert [c.run_id is not None for c in Captures(opened.captures).index] == [True] * 3


def test_a_link_that_leads_elsewhere_is_no_run(apps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(apps, "first", 11, monkeypatch)
    link = apps / "first" / "captures" / LATEST
    link.unlink()
    shutil.copytree(found.root, apps / "99")
    link.symlink_to("../../99")
    assert chosen_run(apps / "first") == (found.root, [])


def test_a_folder_of_another_run_or_app_is_refused_by_name(
    apps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run(apps, "first", 11, monkeypatch)
    (apps / "second" / "captures").mkdir()
    shutil.copytree(store.root, apps / "second" / "captures" / "12")
    with refused("file-taken", "captures", 11):
        run(apps, "second", 12, monkeypatch)
    (apps / "second" / "captures" / "12" / OWNER).unlink()
    with refused("file-taken", "captures"):
        run(apps, "second", 12, monkeypatch)


def test_a_hook_made_outside_of_a_run_learns_the_run_from_its_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (21, 22):
        monkeypatch.setattr(flower.TaskIdentity, "_run_id", None)
        train(HonestButCurious(FedAvg(), tmp_path), number)
    assert [len(ObservationStore(tmp_path / run).folders()) for run in ("21", "22")] == [3, 3]
    assert not ObservationStore(tmp_path).folders()


def test_an_app_that_is_not_found_is_refused_and_both_apps_are_named(
    apps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(apps / "second")
    with refused("usage", "second", "/first"):
        run(apps, "second", 12, monkeypatch)
    # A SuperLink's folder that is no app's is taken, as on a server.
    (apps / "server").mkdir()
    monkeypatch.chdir(apps / "server")
    assert app_folder.app_folder() == apps / "server"


def test_captures_of_the_layout_before_are_read_and_several_runs_in_one_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        train(HonestButCurious(FedAvg(), ObservationStore(tmp_path / "captures")))
    run = RunDirectory.open(tmp_path)
    assert run.root == tmp_path and run.captures == tmp_path / "captures"
    assert RunDirectory.open(tmp_path / "captures").root == tmp_path
    assert len(Captures.of_run(run).index) == 3 and "captures of" not in caplog.text
    (kept,) = (tmp_path / "captures" / "round-0001").glob("node-1")
    other = kept / "observation.json"
    number = Captures.of_run(run).index[0].run_id
    other.write_text(other.read_text().replace(f'"{number}"', '"5"'))
    Captures.of_run(run)
    assert "holds the captures of 2 runs" in caplog.text


def test_what_was_kept_is_found_by_the_run_and_in_the_layout_before(
    apps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run(apps, "first", 11, monkeypatch)
    opened = RunDirectory.open(apps / "first")
    capture, *_ = Captures(store.root).index
    assert opened.truth == apps / "first" / "truth"
    flat = opened.truth / capture.client / "round-0001.safetensors"
    assert truth_path(opened.truth, capture.client, capture) == flat
    with refused("truth-lacking"):
        check_truth(opened.truth, [capture])
    (opened.truth / str(capture.run_id) / capture.client).mkdir(parents=True)
    assert truth_path(opened.truth, capture.client, capture).parents[1].name == capture.run_id
    check_truth(opened.truth, [capture])
    assert load_truth(opened.truth, capture) is None


def test_a_command_names_the_run_that_it_takes_and_the_others(
    apps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bract.cli.report.report_run", lambda root, **_: print(f"took {root}"))
    for number in (11, 12):
        run(apps, "first", number, monkeypatch)
    said: Any = CliRunner().invoke(app, ["report", "."])
    assert "took captures/12" in said.output
    assert "run 12, the latest of 2; name another by its folder: captures/11" in said.output
