"""Every command that a message or the page advises runs, on an app of each kind."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import foreign_models
import pytest
import torch
from audited import audited_run
from click.testing import Result
from command_lines import parse
from flwr.clientapp import ClientApp
from own_apps import MODEL, own_app
from typer.testing import CliRunner

from bract.cli.main import app
from bract.client import DefenseMod
from bract.client.truth import save_truth
from bract.config import DataConfig
from bract.data.views import test_data as load_test_data
from bract.disk import write_text
from bract.errors import BractError
from bract.report.facts import gather

AUTOENCODER = "foreign_models:bottleneck"
KNOWN = {
    "input.shape": "[1, 8, 8]",
    "input.mean": "[0]",
    "input.std": "[1]",
    "training.lr": "0.1",
    "training.momentum": "0",
    "training.batch_size": "1",
    "training.local_epochs": "1",
    "training.optimizer": "sgd",
    "data": "{name: digits}",
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(foreign_models.__file__).parent))


def typed(line: str, **values: str) -> Result:
    """Type a command as it was printed, with little time for attacks."""
    for name, value in values.items():
        line = re.sub(rf"\b{name}\b", value, line)
    program, *words = shlex.split(re.sub(r"--budget \S+", "--budget 4", line))
    assert program == "bract"
    done = CliRunner().invoke(app, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), (line, done.exception)
    assert done.exit_code == 0, (line, done.output)
    return done


def following(done: Result) -> str:
    """Return the command that the last message advises."""
    (found,) = re.findall(r"next: (bract .*)", " ".join(done.output.split()))
    return str(found)


def advised(run: Path) -> list[str]:
    """Return what the page of a run advises to type."""
    return [step.command for step in gather(run).verdict.next_steps if step.command]


def describe(folder: str = ".", model: str = MODEL) -> Result:
    options = " ".join(f"--set {shlex.quote(f'{k}={v}')}" for k, v in KNOWN.items())
    return typed(f"bract describe {folder} --model {model} {options}")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "defense"), [(MODEL, None), (MODEL, "pruning"), (AUTOENCODER, None)]
)
def test_an_own_app_is_led_from_its_captures_to_every_step_of_its_page(
    tmp_path: Path, model: str, defense: str | None
) -> None:
    run = own_app(tmp_path, model=model, defense=defense) / "captures" / "77"
    audit = following(describe(model=model))
    assert f"--model {model}" in audit
    audited = typed(f"{audit} --budget 1m --attack ig")
    typed(following(audited))
    steps = advised(run)
    assert steps
    for line in steps:
        if line.startswith("bract "):
            typed(line, RUN=str(run))
        else:
            scope: dict[str, Any] = {"ClientApp": ClientApp, "DefenseMod": DefenseMod}
            exec(line, scope)
            assert isinstance(scope["app"], ClientApp)
    offered = any("DefenseMod" in line for line in steps)
    assert offered or defense is not None, steps
    again = advised(run)
    tiers = {line for line in steps if "--tier" in line}
    assert not tiers & set(again), "a tier that was tried is advised again"


def test_an_autoencoder_is_recognised_and_its_image_leaks_without_a_label(tmp_path: Path) -> None:
    run = own_app(tmp_path, model=AUTOENCODER) / "captures" / "77"
    described = describe(model=AUTOENCODER)
    assert "guessed: loss reconstruction (the model classifies no image" in described.output
    typed(f"{following(described)} --budget 1m --attack analytic")
    (image,) = [i for o in gather(run).observations for i in o.images]
    assert image.scores is not None and (image.scores.psnr or 0.0) > 60.0
    assert image.label is None and image.true_label is None
    typed("bract report .")


def test_an_own_app_without_truth_is_told_how_to_be_scored(tmp_path: Path) -> None:
    run = own_app(tmp_path, truth=False) / "captures" / "77"
    typed(f"{following(describe())} --budget 1m --attack ig")
    (line,) = [line for line in advised(run) if "--truth" in line]
    images, labels = load_test_data(DataConfig(name="digits", image_size=8))
    save_truth(tmp_path / "kept" / "77" / "node-1", 1, images[:1], labels[:1])
    typed(f"{line} --attack ig --budget 1m", RUN=str(run), DIR=str(tmp_path / "kept"))
    assert gather(run).verdict.level != "unscored"


def test_a_described_app_that_was_not_audited_is_told_how(tmp_path: Path) -> None:
    run = own_app(tmp_path) / "captures" / "77"
    describe()
    (line,) = advised(run)
    typed(f"{line} --budget 1m --attack ig", RUN=str(run))


def test_describing_anew_with_another_value_is_not_refused(tmp_path: Path) -> None:
    own_app(tmp_path)
    typed(f"bract describe . --model {MODEL} --set 'input.shape=[1, 8, 8]'")
    # What the doubts of the first time ask for is given the second time.
    describe()


def test_a_federation_of_bracts_own_is_led_on(tmp_path: Path) -> None:
    run = audited_run(tmp_path / "run", 1).root
    (line,) = advised(run)
    done = typed(f"{line} --budget 1m --attack ig", RUN=str(run))
    typed(following(done))
    for line in advised(run):
        if line.startswith("bract compare"):
            parse(line.replace("RUN", str(run)))
        elif line.startswith("bract "):
            typed(line, RUN=str(run))


def test_what_an_audit_asks_for_first_can_be_typed(tmp_path: Path) -> None:
    """An audit before describe names the command that it needs, and that command runs."""
    own_app(tmp_path)
    refused = CliRunner().invoke(app, ["audit", ".", "--model", MODEL])
    assert isinstance(refused.exception, BractError)
    (line,) = re.findall(r"write one: (bract describe .*)", str(refused.exception))
    typed(f"{line} --set 'input.shape=[1, 8, 8]'")
    refused = CliRunner().invoke(app, ["audit", "."])
    assert isinstance(refused.exception, BractError)
    (line,) = re.findall(r"name it: (bract audit .*)", str(refused.exception))
    typed(f"{line} --budget 1m --attack ig")


def test_a_page_without_captures_says_what_to_add_to_the_server(tmp_path: Path) -> None:
    write_text(tmp_path / "empty" / "run.json", '{"schema": 2}')
    (line,) = advised(tmp_path / "empty")
    assert compile(line.replace("...", ""), "step", "exec")
