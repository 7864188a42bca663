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


class Graph(nn.Module):
    """Takes nodes and edges, as models of graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(14, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        found: Tensor = self.head(nodes.index_add(0, edges[1], nodes[edges[0]]))
        return found


class Pairs(nn.Module):
    """Rates what a user thinks of an item, as recommenders do."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(9, 4), nn.Embedding(30, 4)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        found: Tensor = (self.user(user) * self.item(item)).sum(dim=1)
        return found


class Two(nn.Module):
    """Has two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(64, 8), nn.Linear(8, 10), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = torch.relu(self.body(x.flatten(1)))
        return {"one": self.one(found), "other": self.other(found)}


def volumes() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 2, 3), nn.Flatten(), nn.Linear(16, 2))


class Lazy(nn.Module):
    """Has no weights before its first pass."""

    def __init__(self, made: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(64, 8) if made else nn.LazyLinear(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(self.body(x.flatten(1))))
        return found


def double() -> nn.Module:
    return Lazy(made=True).double()


class Spectrum(nn.Module):
    """Has complex weights, as layers over frequencies do."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.ones(8, 5, dtype=torch.complex64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.irfft2(torch.fft.rfft2(x) * self.filters, s=(8, 8))
        made: Tensor = self.head(found.flatten(1))
        return made


HERE = "test_describe_inputs"


def captured(root: Path, model: nn.Module, **declared: Any) -> Path:
    held = parameters_of(model)
    ObservationStore(root / "captures").save(
        Observation(
            round=1,
            client="node-1",
            parameters=held,
            update={name: 0.1 * torch.ones_like(value) for name, value in held.items()},
            declaration=ClientDeclaration(**({"num_examples": 4} | declared)),
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


@pytest.mark.parametrize(
    ("make", "named"),
    [
        ("Graph", ("forward needs edges besides",)),
        ("Pairs", ("forward needs item besides",)),
        ("Two", ("returns a dict", "logits")),
        ("volumes", ("convolution over volumes",)),
        ("Lazy", ("body.weight", "lazy")),
        ("Spectrum", ("complex", "filters")),
    ],
)
def test_a_model_that_is_not_audited_is_refused_by_its_own_reason_first(
    make: str, named: tuple[str, ...], tmp_path: Path
) -> None:
    """The error names what the model takes, and does not advise to declare another input."""
    sent = Lazy(made=True) if make == "Lazy" else globals()[make]()
    root = captured(tmp_path, sent)
    with pytest.raises(BractError) as caught:
        describe_app(root, {}, model=f"{HERE}:{make}")
    check_named(str(caught.value), *named)
    for cure in ("bract schema", "nn.Flatten", "input.text", "input.shape=["):
        assert cure not in str(caught.value)


def test_a_model_of_64_bits_is_described(tmp_path: Path) -> None:
    torch.manual_seed(0)
    root = captured(tmp_path, double())
    settings: dict[str, Any] = {"input.shape": [1, 8, 8], "training.batch_size": 4}
    describe_app(root, settings, model=f"{HERE}:double", force=True)
    described = RunDirectory(root).description()
    assert described is not None and described.classes == 10


def test_what_was_kept_is_counted_where_no_reply_says_how_many_examples_it_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many as a usual batch are looked for else, and none of them is there."""
    torch.manual_seed(0)
    root = captured(tmp_path, Lazy(made=True), num_examples=None)
    settings: dict[str, Any] = {"input.shape": [1, 8, 8]}
    describe_app(root, settings, model=f"{HERE}:filled", force=True)
    check_named(capsys.readouterr().err, "training.num_examples", "round-0001/node-1")
    kept = tmp_path / "truth" / "node-1"
    kept.mkdir(parents=True)
    images = torch.rand(3, 1, 8, 8)
    save_file({"inputs": images, "labels": torch.arange(3)}, kept / "round-0001.safetensors")
    describe_app(root, settings, model=f"{HERE}:filled", truth=tmp_path / "truth", force=True)
    described = RunDirectory(root).description()
    assert described is not None and described.training.num_examples == 3
    (seen,) = ObservationStore(root / "captures")
    assert described.declare(seen.declaration, "node-1").local_steps == 1


def filled() -> nn.Module:
    return Lazy(made=True)


def test_rows_that_a_model_does_not_take_are_no_fault_of_its_code(tmp_path: Path) -> None:
    """A witness may keep what enters a part of a model alone."""
    torch.manual_seed(0)
    root = captured(tmp_path, nn.Sequential(nn.Linear(14, 8), nn.Linear(9, 1)))
    kept = tmp_path / "truth" / "node-1"
    kept.mkdir(parents=True)
    save_file(
        {"inputs": torch.rand(4, 14), "labels": torch.ones(4)}, kept / "round-0001.safetensors"
    )
    with refused("truth-unusable", "does not take the rows of 14 numbers"):
        describe_app(root, {}, model=f"{HERE}:broken", truth=tmp_path / "truth")


def broken() -> nn.Module:
    return nn.Sequential(nn.Linear(14, 8), nn.Linear(9, 1))


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
