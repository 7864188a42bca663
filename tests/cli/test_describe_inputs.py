"""An input that is not supported is named first, in the same words by describe and audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import check_named, refused
from safetensors.torch import save_file
from torch import Tensor, nn

from bract import Observation, ObservationStore
from bract.cli.audit import open_audit
from bract.cli.audit_requests import audit_requests
from bract.cli.describe import describe_app
from bract.config.table import Column, TableSchema, Target
from bract.errors import BractError
from bract.inputs import INPUTS
from bract.inputs.base import what_is_audited
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration
from bract.updates.update import parameters_of


class Text(nn.Module):
    """Classifies sentences by the mean of their words' embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(tokens).mean(dim=1))
        return logits


def rows() -> nn.Module:
    """Classifies rows of fourteen features."""
    return nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.Linear(8, 1))


HERE = "test_describe_inputs"


def captured(root: Path, model: nn.Module, **declared: Any) -> Path:
    held = parameters_of(model)
    ObservationStore(root / "captures").save(
        Observation(
            round=1,
            client="node-1",
            parameters=held,
            update={name: 0.1 * torch.ones_like(value) for name, value in held.items()},
            declaration=ClientDeclaration(num_examples=4, **declared),
        )
    )
    return root


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        ("Text", "it begins with an embedding, so its inputs are token ids"),
        ("rows", "it begins with a linear layer of 14 inputs, which is no usual image"),
    ],
)
def test_a_model_of_another_input_is_refused_by_what_it_takes(
    make: str, why: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    root = captured(tmp_path, globals()[make]())
    with pytest.raises(BractError) as caught:
        describe_app(root, {}, model=f"{HERE}:{make}")
    assert why in str(caught.value) and what_is_audited() in str(caught.value)
    assert not (root / "bract.yaml").exists()


def test_rows_without_a_schema_are_refused_by_what_to_declare(tmp_path: Path) -> None:
    torch.manual_seed(0)
    root = captured(tmp_path, rows(), input="table")
    with refused("declaration-wrong", "data.table", "input.table"):
        describe_app(root, {}, model=f"{HERE}:rows")


def test_rows_are_described_by_their_schema(tmp_path: Path) -> None:
    torch.manual_seed(0)
    root = captured(tmp_path, rows())
    columns = [{"name": f"c{i}", "kind": "continuous", "low": 0.0, "high": 1.0} for i in range(14)]
    target = {"name": "t", "categories": ["no", "yes"], "loss": "binary_cross_entropy_logits"}
    given = {"input": {"kind": "table", "table": {"columns": columns, "target": target}}}
    (root / "bract.yaml").write_text(json.dumps(given))
    describe_app(root, {}, model=f"{HERE}:rows", force=True)
    assert "c13" in (root / "bract.yaml").read_text()


@pytest.mark.parametrize("named", [{"input": "table"}, {}])
def test_shape_and_statistics_follow_from_the_schema_of_rows_that_an_app_declares(
    named: dict[str, str], tmp_path: Path
) -> None:
    columns = tuple(Column(name=f"c{i}", kind="continuous", low=0.0, high=2.0) for i in range(14))
    target = Target(name="t", categories=("no", "yes"), loss="binary_cross_entropy_logits")
    schema = TableSchema(columns=columns, target=target)
    root = captured(tmp_path, rows(), table=schema, **named)
    describe_app(root, {}, model=f"{HERE}:rows")
    described = RunDirectory(root).description()
    assert described is not None and described.input.table == schema
    assert not [key for key in described.guessed if key.startswith("input")]
    (seen,) = ObservationStore(root / "captures")
    declared = described.declare(seen.declaration, "node-1")
    assert declared.input == "table" and declared.image_shape == (14, 1, 1)
    assert (declared.mean, declared.std) == schema.feature_moments()


def test_rows_that_a_client_kept_are_described_without_a_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = captured(tmp_path, rows())
    kept = tmp_path / "truth" / "node-1"
    kept.mkdir(parents=True)
    inputs = torch.randn(4, 14, generator=torch.Generator().manual_seed(0))
    save_file({"inputs": inputs, "labels": torch.ones(4)}, kept / "round-0001.safetensors")
    describe_app(root, {}, model=f"{HERE}:rows", truth=tmp_path / "truth", force=True)
    check_named(capsys.readouterr().err, "input.table.columns", 14, 4)
    assert "feature 14" in (tmp_path / "bract.yaml").read_text(encoding="utf-8")


def test_an_unknown_input_is_named_with_the_known_ones(tmp_path: Path) -> None:
    root = captured(tmp_path, rows(), input="sound")
    with pytest.raises(BractError) as caught:
        describe_app(root, {}, model=f"{HERE}:rows")
    assert "'sound'" in str(caught.value) and what_is_audited() in str(caught.value)


def test_an_audit_before_describe_says_what_is_handled(tmp_path: Path) -> None:
    root = captured(tmp_path, rows())
    (request,) = audit_requests(root)
    with refused("declaration-lacks") as caught:
        open_audit(root, request)
    assert what_is_audited() in str(caught.value)
    for name, kind in ((name, INPUTS[name]) for name in INPUTS):
        assert (name in what_is_audited()) == kind.third_party
