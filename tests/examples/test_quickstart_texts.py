"""An app of transformers' texts, from its two edits to a scored page."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import ROOT
from flwr.app import Context, RecordDict

from bract.audit.audit import Audit
from bract.cli.describe import describe_app
from bract.config.config import AuditRequest
from bract.report import write_report
from bract.rundir import RunDirectory
from bract.server.loopback import LoopbackGrid

pytest.importorskip("transformers")

EXAMPLE = ROOT / "examples" / "quickstart-huggingface"
MODEL = "notes_app.task:get_model"
SPECIAL = {"input.text": {"vocabulary": 1059, "length": 20, "special": [2, 3]}}


def test_every_line_about_bract_is_an_edit_that_the_readme_counts() -> None:
    edits = set()
    for path in (EXAMPLE / "notes_app").glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            marked = re.search(r"# edit (\d)$", line)
            ours = re.search(r"bract|HonestButCurious|\bkeep\(", line)
            assert bool(ours) == bool(marked), f"{path.name}: {line}"
            edits |= {marked[1]} if marked else set()
    assert edits == {"1", "2"}
    readme = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d) \|", readme, re.MULTILINE) == ["1", "2", "3"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the app, which is imported from there alone."""
    folder = tmp_path / "home"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("BRACT_APP_FOLDER", str(folder))
    yield folder
    for name in [n for n in sys.modules if n.partition(".")[0] == "notes_app"]:
        del sys.modules[name]


def run_app(**settings: Any) -> None:
    """Run the app's two sides in this process, for one round with three clients."""
    client = importlib.import_module("notes_app.client_app").app
    server = importlib.import_module("notes_app.server_app").app
    clients: list[Any] = [{"partition-id": i, "num-partitions": 3} for i in range(3)]
    config: Any = {"local-epochs": 1, "fraction-evaluate": 0.0, "num-server-rounds": 1}
    config |= {"learning-rate": 5e-5} | settings
    grid = LoopbackGrid(client, clients, config)
    server(grid, Context(1, 0, {}, RecordDict(), config))


def audited(home: Path, **described: Any) -> dict[str, Any]:
    """Describe, audit node 1 and report, as the commands do; return the report."""
    training = {"training.batch_size": 32, "training.local_epochs": 1, **described}
    describe_app(home, training, model=MODEL)
    run = RunDirectory.open(home)
    request = AuditRequest(
        attacks=["token-span"],
        device="cpu",
        models=frozenset({MODEL}),
        truth=run.truth,
        clients=frozenset({"node-1"}),
        seconds=10.0,
    )
    audit = Audit(run, request)
    (answer,) = audit.execute(audit.plan())
    assert answer.refused is None
    write_report(run.root, redact=False)
    found: dict[str, Any] = json.loads((run.root / "report.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.thorough
def test_flowers_own_loop_goes_to_a_scored_page_whose_redacted_form_holds_counts_alone(
    home: Path,
) -> None:
    """One step of AdamW with dropout: which tokens were there shows, their order does not."""
    run_app()
    report = audited(home)
    (observation,) = report["observations"]
    assert observation["scored"]
    assert report["verdict"]["level"] in ("leaked", "none-leaked", "undecided")
    scores = [image["scores"] for image in observation["images"]]
    assert len(scores) == 4
    assert all(score["features"] > 0.2 and not score["exact"] for score in scores)
    run = RunDirectory.open(home).root
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Guessed from the captures" in page and "input.text.vocabulary" in page
    assert '<span class="token' in page
    page = write_report(run, redact=True).read_text(encoding="utf-8")
    assert '<span class="token' not in page and "withheld: " in page and "of the tokens" in page


@pytest.mark.thorough
def test_one_step_of_sgd_without_dropout_gives_away_a_text_word_for_word(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At this rate the rounding of the weights, whose difference is the update, is small."""
    task: Any = importlib.import_module("notes_app.task")
    still = partial(task.BertConfig, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    monkeypatch.setattr(task, "BertConfig", still)
    monkeypatch.setattr(task, "AdamW", torch.optim.SGD)
    monkeypatch.setattr(task, "SMALL", 1)
    run_app(**{"learning-rate": 1.0})
    report = audited(home, **{"training.optimizer": "sgd", **SPECIAL})
    (observation,) = report["observations"]
    assert [image["scores"]["exact"] for image in observation["images"]] == [True]
    # What was described is what the client did.
    assert observation["signals"]["truth_check"]["cosine"] > 1 - 1e-5
