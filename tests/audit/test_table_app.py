"""A third-party app in the shape of Flower's ``fl-tabular``: rows, one output, binary loss."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor, nn
from torch.nn import functional as F

from bract import Observation, ObservationStore
from bract.audit.audit import Audit
from bract.audit.captures import Captures
from bract.audit.description.infer import complete
from bract.client import keep
from bract.config.config import AuditRequest
from bract.config.table import Column, TableSchema, Target
from bract.data.rows import encode
from bract.errors import BractError
from bract.installed import TrustedReference
from bract.models import create_model
from bract.report import write_report
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration
from bract.schema.description_text import build_description, dump_description

SCHEMA = TableSchema(
    (
        Column("age", "integer", low=17.0, high=90.0, mean=40.0, std=13.0),
        Column("hours", "continuous", low=1.0, high=99.0, mean=40.0, std=12.0, public_name=True),
        Column("class", "ordinal", categories=("gov", "own", "private"), mean=1.0, std=0.5),
    ),
    Target("income", ("below", "above"), loss="binary_cross_entropy"),
)
ROWS: dict[str, list[Any]] = {"age": [25, 61], "hours": [38.5, 20.0], "class": ["gov", "private"]}


class IncomeClassifier(nn.Module):
    """As the app has it: rows of floats to a probability ``(B, 1)``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(3, 24)
        self.layer2 = nn.Linear(24, 12)
        self.output = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.output(F.relu(self.layer2(F.relu(self.layer1(x))))).sigmoid()
        return found


def income() -> nn.Module:
    torch.manual_seed(5)
    return IncomeClassifier()


def captured(folder: Path) -> RunDirectory:
    """One client that takes a step on two rows of its loader, which `keep` writes down."""
    mean, std = (torch.tensor(values) for values in SCHEMA.feature_moments())
    rows = (encode(SCHEMA, ROWS, source="app") - mean) / std
    loader: Any = [(rows, torch.tensor([[0.0], [1.0]]))]
    content = RecordDict({"config": ConfigRecord({"server-round": 1})})
    context: Any = SimpleNamespace(node_id=7, run_id=1, node_config={}, state=RecordDict())
    message: Any = SimpleNamespace(content=content)
    model = income()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in keep(loader, message, context, folder=folder / "truth"):
        F.binary_cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    update = {n: before[n] - p.detach() for n, p in model.named_parameters()}
    declared = ClientDeclaration(
        num_examples=2, batch_size=2, local_steps=1, lr=0.1, optimizer="sgd"
    )
    ObservationStore(folder / "captures").save(
        Observation(
            round=1,
            client="node-7",
            parameters=before,
            buffers={},
            update=update,
            returned_buffers={},
            declaration=declared,
        )
    )
    return RunDirectory(folder)


MODEL = "test_table_app:income"


def described(run: RunDirectory) -> None:
    given = build_description(
        {
            "model": MODEL,
            "input": {"table": asdict(SCHEMA)},
            "training": {"optimizer": "sgd", "lr": 0.1, "batch_size": 2, "local_steps": 1},
        }
    )
    found = complete(Captures(run.captures, {MODEL}, given), given, truth=run.root / "truth" / "1")
    assert any("rows that clients kept fit" in line for line in found.confirmed)
    text = dump_description(found.description)
    (run.root / "bract.yaml").write_text(text, encoding="utf-8")


def test_an_app_of_rows_goes_from_two_edits_to_a_scored_page(tmp_path: Path) -> None:
    run = captured(tmp_path)
    described(run)
    request = AuditRequest(
        attacks=["spear"], device="cpu", models=frozenset({MODEL}), truth=tmp_path / "truth" / "1"
    )
    audit = Audit(run, request)
    (answer,) = audit.execute(audit.plan())
    assert answer.refused is None
    page = write_report(tmp_path).read_text(encoding="utf-8")
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    images = report["observations"][0]["images"]
    assert [image["scores"]["features"] for image in images] == [1.0, 1.0]
    assert {image["cells"][-1]["value"] for image in images} == {"below", "above"}
    assert "private" in page and "38.5" in page and "Original" in page


def test_the_schema_of_kept_rows_is_guessed_and_the_page_is_scored(tmp_path: Path) -> None:
    run = captured(tmp_path)
    training = {"optimizer": "sgd", "lr": 0.1, "batch_size": 2, "local_steps": 1}
    given = build_description({"model": MODEL, "training": training})
    truth = tmp_path / "truth" / "1"
    found = complete(Captures(run.captures, {MODEL}, given), given, truth=truth).description
    assert found.input.table is not None
    assert found.input.table.statistics == "private"
    assert found.input.table.target.objective == "binary_cross_entropy"
    assert "2 rows that clients kept" in found.guessed["input.table.columns"]
    (run.root / "bract.yaml").write_text(dump_description(found), encoding="utf-8")
    request = AuditRequest(attacks=["spear"], device="cpu", models=frozenset({MODEL}), truth=truth)
    audit = Audit(run, request)
    (answer,) = audit.execute(audit.plan())
    assert answer.refused is None
    write_report(tmp_path)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    images = report["observations"][0]["images"]
    assert [image["scores"]["features"] for image in images] == [1.0, 1.0]


def test_a_redacted_page_holds_no_cell_and_only_allowed_names(tmp_path: Path) -> None:
    run = captured(tmp_path)
    described(run)
    request = AuditRequest(
        attacks=["spear"], device="cpu", models=frozenset({MODEL}), truth=tmp_path / "truth" / "1"
    )
    audit = Audit(run, request)
    assert list(audit.execute(audit.plan()))
    page = write_report(tmp_path, redact=True).read_text(encoding="utf-8")
    content = (tmp_path / "report.json").read_text(encoding="utf-8")
    for secret in ("38.5", '"age"', ">age<", "gov"):
        assert secret not in content and secret not in page, secret
    assert "hours" in page and "hours" in content


def test_a_model_of_scikit_learn_is_refused_in_the_first_line() -> None:
    with pytest.raises(BractError) as error:
        create_model(
            TrustedReference("sklearn.linear_model:LogisticRegression"),
            classes=2,
            channels=3,
            image_size=1,
        )
    first = str(error.value).splitlines()[0]
    assert "scikit-learn's LogisticRegression: its captures are not attacked" in first


def test_images_declared_as_a_table_are_refused_by_name_and_the_audit_goes_on(
    tmp_path: Path,
) -> None:
    run = captured(tmp_path)
    text = f"model: {MODEL}\ninput: {{kind: table, shape: [3, 1, 1]}}\nclasses: 1\nloss: mse\n"
    (run.root / "bract.yaml").write_text(text, encoding="utf-8")
    request = AuditRequest(attacks=["spear", "tableak"], device="cpu", models=frozenset({MODEL}))
    audit = Audit(run, request)
    answers = [answer for batch in audit.plan() for answer in audit.execute([batch])]
    assert len(answers) == 2
    assert all("declares the input table and no schema" in (a.refused or "") for a in answers)
