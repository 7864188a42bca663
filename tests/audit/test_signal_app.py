"""Third-party apps of models over time, from what `keep` wrote to a description that is checked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from refusals import refused
from torch import Tensor, nn

from bract import Observation, ObservationStore
from bract.audit.captures import Captures
from bract.audit.description.confirm import confirm
from bract.audit.description.infer import Findings, complete
from bract.audit.description.signals import guess_signals
from bract.audit.truth import load_truth
from bract.client import keep
from bract.inputs import Truth
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration
from bract.schema.description_text import build_description, dump_description

RATE = 0.05


class Beats(nn.Sequential):
    """Convolutions over time to classes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(2, 4, 5, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 14, 3)
        )


class Next(nn.Module):
    """A recurrent layer to the next two values."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 6, batch_first=True)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.gru(x)[0][:, -1])
        return found


def beats() -> nn.Module:
    torch.manual_seed(3)
    return Beats()


def following() -> nn.Module:
    torch.manual_seed(3)
    return Next()


def run(
    folder: Path,
    make: Any,
    inputs: Tensor,
    targets: Tensor,
    *,
    kept: bool = True,
    batch: int | None = None,
    client: int = 1,
    number: int = 1,
) -> Captures:
    """Capture one step of SGD of a client that keeps its batch, or undeclared ones of a part."""
    model = make()
    before = {n: v.detach().clone() for n, v in model.named_parameters()}
    if kept:
        content = RecordDict({"config": ConfigRecord({"server-round": number})})
        message: Any = SimpleNamespace(
            content=content, metadata=SimpleNamespace(run_id=7, dst_node_id=client)
        )
        context: Any = SimpleNamespace(node_id=client, node_config={}, state=RecordDict(), run_id=7)
        for _ in keep([(inputs, targets)], message, context, folder=folder / "truth"):
            pass
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    size = batch or len(inputs)
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        optimizer.zero_grad()
        outputs = model(x)
        loss = (
            nn.functional.mse_loss(outputs, y)
            if y.is_floating_point()
            else nn.functional.cross_entropy(outputs, y)
        )
        loss.backward()
        optimizer.step()
    update = {n: before[n] - v.detach() for n, v in model.named_parameters()}
    declared: Any = {} if batch else {"batch_size": len(inputs), "local_steps": 1}
    declaration = ClientDeclaration(num_examples=len(inputs), lr=RATE, **declared)
    observation = Observation(
        round=number,
        client=f"node-{client}",
        parameters=before,
        buffers={},
        update=update,
        returned_buffers={},
        declaration=declaration,
    )
    ObservationStore(folder / "captures").save(observation)
    name = f"{make.__module__}:{make.__name__}"
    return Captures(folder / "captures", frozenset({name}), build_description({"model": name}))


def described(captures: Captures, folder: Path, *, kept: bool = True) -> Findings:
    assert captures.description is not None
    truth = folder / "truth" / "7" if kept else None
    return complete(captures, captures.description, truth=truth)


def redescribed(captures: Captures, content: dict[str, Any]) -> Captures:
    """Return the captures under another description, whose model is trusted."""
    return Captures(captures.root, frozenset({content["model"]}), build_description(content))


def checked(captures: Captures, folder: Path, **options: Any) -> Findings:
    """Return the description that is held against what the client kept."""
    assert captures.description is not None
    found = described(captures, folder)
    return confirm(captures, found, captures.description, truth=folder / "truth" / "7", **options)


def written(found: Findings, folder: Path) -> None:
    """Write a description where an audit of the run reads it."""
    (folder / "bract.yaml").write_text(dump_description(found.description))


def kept(captures: Captures, found: Findings, folder: Path) -> Truth:
    """Return what the client kept, as a description reads it."""
    again = Captures(captures.root, captures.models, found.description)
    truth = load_truth(folder / "truth" / "7", again.index[0])
    assert truth is not None
    return truth


@pytest.mark.parametrize(
    ("make", "inputs", "targets", "layout", "loss"),
    [
        (
            beats,
            torch.randn(4, 2, 32),
            torch.tensor([0, 2, 1, 1]),
            "channels-first",
            "cross_entropy",
        ),
        (following, torch.randn(4, 9, 1), torch.randn(4, 2), "time-first", "mse"),
    ],
)
def test_a_model_over_time_is_described_by_what_clients_kept_and_confirmed(
    tmp_path: Path, make: Any, inputs: Tensor, targets: Tensor, layout: str, loss: str
) -> None:
    captures = run(tmp_path, make, inputs, targets)
    found = described(captures, tmp_path)
    schema = found.description.input.signal
    assert schema is not None
    assert (schema.layout, schema.objective) == (layout, loss)
    first = inputs if layout == "time-first" else inputs[:, 0]
    assert schema.low[0] == pytest.approx(float(first.min()))
    assert set(found.description.guessed) >= {"input.signal.low", "input.signal.high"}
    written(found, tmp_path)
    assert RunDirectory(tmp_path).description() == found.description
    confirmed = checked(captures, tmp_path).confirmed
    assert any("1 of 1 updates" in line and "1.000000" in line for line in confirmed)


def test_without_kept_signals_the_length_and_the_range_are_asked_for(tmp_path: Path) -> None:
    captures = run(tmp_path, beats, torch.randn(4, 2, 32), torch.arange(4) % 3, kept=False)
    with refused("declaration-lacks", "input.signal.channels=2", "channels-first"):
        described(captures, tmp_path, kept=False)


def test_kept_signals_of_several_shapes_or_not_finite_are_refused() -> None:
    labels = [torch.zeros(2).long()] * 2
    with refused("truth-unusable", "(1, 8)", "(1, 9)"):
        guess_signals([torch.rand(2, 1, 8), torch.rand(2, 1, 9)], labels, nn.Identity())
    with refused("truth-unusable"):
        guess_signals([torch.full((2, 1, 8), torch.nan)], labels[:1], nn.Identity())


def test_batches_of_a_part_are_not_taken_for_as_many_passes_over_all(tmp_path: Path) -> None:
    """Two passes at another rate explain short steps of a recurrent network nearly as well."""
    drawn = torch.Generator().manual_seed(0)
    waves = torch.sin(torch.arange(12.0) / 3 + 6 * torch.rand(16, 1, generator=drawn))
    captures = run(tmp_path, following, waves[:, :10, None], waves[:, 10:], batch=8)
    assert captures.description is not None
    truth = tmp_path / "truth" / "7"
    found = described(captures, tmp_path)
    checked = confirm(captures, found, captures.description, truth=truth)
    work = checked.description.training
    assert checked.is_confirmed and (work.batch_size, work.local_epochs) == (8, 1)
