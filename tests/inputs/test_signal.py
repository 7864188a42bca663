"""Signals: the schema, what clients kept of them, batches of loaders, files, references."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from refusals import refused

from bract.config import DataConfig, SignalSchema
from bract.data import DATASETS
from bract.inputs import INPUTS, input_of, kept_examples
from bract.schema import ClientDeclaration

SCHEMA = SignalSchema(
    channels=2, length=6, low=(-1.0, 0.0), high=(3.0, 10.0), mean=(1.0, 5.0), std=(2.0, 4.0)
)
BEATS = DataConfig(name="made-up-beats", input="signal")
LOADS = DataConfig(name="made-up-loads", input="signal")


Signal: Any = INPUTS["signal"]


def spec_of(config: DataConfig) -> Any:
    return DATASETS[config.name].spec(config)


def in_unit(examples: torch.Tensor, schema: SignalSchema) -> torch.Tensor:
    """Return values ``(..., channels, length)``: those of [0, 1], between low and high."""
    low, high = (torch.tensor(v, dtype=torch.float64)[:, None] for v in (schema.lows, schema.highs))
    return examples.squeeze(-2).double() * (high - low) + low


def declared(schema: SignalSchema) -> ClientDeclaration:
    mean, std = schema.feature_moments()
    return ClientDeclaration(
        input="signal",
        image_shape=schema.shape,
        signal=schema,
        mean=mean,
        std=std,
        classes=schema.outputs or 3,
        loss=schema.objective,
    )


@pytest.mark.parametrize(
    ("signals", "targets", "kept"),
    [
        (torch.rand(4, 2, 9), torch.arange(4), (4,)),
        (torch.rand(4, 9, 2), torch.rand(4, 1), (4,)),
        (torch.rand(4, 9, 2), torch.rand(4, 3), (4, 3)),
        (torch.rand(4, 9, 2), torch.rand(4, 3, 1), (4, 3)),
        (torch.rand(4, 9), torch.rand(4, 3), (4, 3)),
        (torch.rand(4, 1, 9), torch.eye(4, 5), (4,)),
    ],
)
def test_batches_of_signals_are_kept_as_the_model_takes_them(
    signals: torch.Tensor, targets: torch.Tensor, kept: tuple[int, ...]
) -> None:
    for batch in ((signals, targets), {"x": signals, "y": targets}):
        found = kept_examples(batch)
        assert found is not None
        assert torch.equal(found[0], signals) and tuple(found[1].shape) == kept


def test_rows_and_images_are_left_to_their_input() -> None:
    for batch in (
        (torch.rand(4, 9), torch.rand(4)),
        (torch.rand(4, 1, 9, 9), torch.arange(4)),
        (torch.rand(4, 2, 9),),
    ):
        assert Signal().examples(batch) is None


@pytest.mark.parametrize("layout", ["channels-first", "time-first"])
def test_what_a_client_kept_becomes_values_in_the_declared_range(layout: str) -> None:
    schema = replace(SCHEMA, layout=cast(Any, layout))
    values = (
        torch.rand(3, 2, 6) * torch.tensor([4.0, 10.0])[:, None] - torch.tensor([1.0, 0])[:, None]
    )
    inputs = (values - torch.tensor([1.0, 5.0])[:, None]) / torch.tensor([2.0, 4.0])[:, None]
    inputs = inputs.transpose(1, 2).contiguous() if layout == "time-first" else inputs
    kept = {"inputs": inputs, "labels": torch.arange(3)}
    truth = input_of(declared(schema)).read(kept, declared(schema))
    assert truth.images.shape == (3, 2, 1, 6)
    assert torch.allclose(in_unit(truth.images, schema).float(), values, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"labels": torch.rand(2)}, ("data-shape", "2", "int64")),
        ({"images": torch.rand(2, 2, 1, 5)}, ("data-shape", "5", "6")),
        ({"images": torch.rand(2, 2, 1, 6) + 1.0}, ("data-value", "0", "1")),
    ],
)
def test_truth_that_is_not_of_the_schema_is_refused(
    change: dict[str, torch.Tensor], named: tuple[str, ...]
) -> None:
    kept = {"images": torch.rand(2, 2, 1, 6), "labels": torch.arange(2)}
    with refused(*named):
        input_of(declared(SCHEMA)).read(kept | change, declared(SCHEMA))


def test_inputs_outside_a_channels_range_name_the_channel() -> None:
    inputs = torch.zeros(2, 2, 6)
    inputs[:, 1, 3] = 50.0
    with refused("data-value", "channel 2"):
        input_of(declared(SCHEMA)).read(
            {"inputs": inputs, "labels": torch.arange(2)}, declared(SCHEMA)
        )


def test_targets_of_a_forecast_are_as_many_values_as_declared() -> None:
    schema = replace(SCHEMA, task="forecast", horizon=3)
    images = torch.rand(2, 2, 1, 6)
    truth = input_of(declared(schema)).read(
        {"images": images, "labels": torch.rand(2, 3)}, declared(schema)
    )
    assert truth.labels.shape == (2, 3)
    with refused("data-shape", "3"):
        input_of(declared(schema)).read(
            {"images": images, "labels": torch.rand(2)}, declared(schema)
        )


@pytest.mark.parametrize(
    "wrong",
    [{"low": (3.0,), "high": (1.0,)}, {"layout": "flat"}, {"horizon": 4}, {"low": (0.0,) * 3}],
)
def test_a_schema_that_contradicts_itself_is_refused(wrong: dict[str, object]) -> None:
    content = {"channels": 2, "length": 6} | wrong
    with pytest.raises(ValueError, match=r"."):
        SignalSchema(**content)  # type: ignore[arg-type]


def test_signals_without_a_schema_or_of_another_shape_are_unreadable() -> None:
    bare = replace(declared(SCHEMA), signal=None)
    assert "input.signal" in (input_of(bare).unreadable(bare) or "")
    other = replace(declared(SCHEMA), image_shape=(1, 1, 6))
    assert input_of(other).unreadable(other) is not None
    assert input_of(declared(SCHEMA)).unreadable(declared(SCHEMA)) is None


def test_a_saved_signal_holds_its_unit_and_is_checked_before_it_is_taken(tmp_path: Path) -> None:
    schema = replace(SCHEMA, unit="mV", rate=50.0)
    kind = Signal(schema)
    example = torch.rand(2, 1, 6)
    name = kind.save(example, tmp_path / "upload.json", 0, "original")
    content = (tmp_path / name).read_bytes()
    found = json.loads(content)
    assert torch.allclose(torch.tensor(found["values"]).double(), in_unit(example, schema))
    assert (found["unit"], found["rate"], found["low"], found["high"]) == ("mV", 50.0, -1.0, 10.0)
    Signal.check_saved(name, content)
    for bad in (b"\xff", b"[]", b'{"values": [[1], [1, 2]]}', b'{"values": [[NaN]]}'):
        with refused("file-damaged", name):
            Signal.check_saved(name, bad)


def test_made_up_beats_are_the_same_for_every_party_and_lie_in_their_range() -> None:
    twice = [DATASETS[BEATS.name].open(BEATS, "train").read(7) for _ in range(2)]
    assert torch.equal(*twice) and twice[0].shape == (1, 1, 187)
    for config in (BEATS, LOADS):
        spec = spec_of(config)
        assert spec.signal is not None
        source = DATASETS[config.name].open(config, "test")
        values = source.images(range(20), channels=1, size=1)
        assert tuple(values.shape[1:]) == spec.signal.shape
        assert 0.0 < float(values.min()) < float(values.max()) < 1.0
    assert set(DATASETS[BEATS.name].open(BEATS, "test").labels.tolist()) == set(range(5))


def test_made_up_signals_of_another_input_or_shape_are_refused() -> None:
    with refused("input-mismatch", "signal"):
        spec_of(DataConfig(name="made-up-beats"))
    with refused("config-conflict", "187"):
        spec_of(BEATS.model_copy(update={"signal": SCHEMA}))


def test_baselines_are_the_mean_of_the_class_and_a_public_signal() -> None:
    references = (
        INPUTS["signal"].declared(declared(spec_of(BEATS).signal or SCHEMA)).references(BEATS, 0)
    )
    made = references.baselines(torch.tensor([0, 1]), 2, seed=0)
    assert set(made) == {"class_mean", "random_signal"}
    mean = references.of_class(1).mean(dim=0)
    assert torch.allclose(made["class_mean"][1], mean)
    # A forecast has no classes: every signal counts for its mean.
    loads = Signal(spec_of(LOADS).signal).references(LOADS, 0)
    assert torch.equal(loads.class_mean(torch.tensor([0.3])), loads.class_mean(torch.tensor([2.0])))
