"""Updates of 16 bits: what the server sums, what a capture states, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from encrypted_runs import small, small_grid, train
from refusals import refused
from safetensors.torch import load_file

import bract.client.app as client_app
from bract import ObservationStore
from bract.attacks.adaptive.adadefense.inversion import sending_error
from bract.config import build_config
from bract.errors import BractError
from bract.protocol.arrays import BFLOAT16, from_arrays
from bract.protocol.records import Contribution, to_arrays
from bract.rundir import RunDirectory
from bract.server.capturing import CapturePlan
from bract.server.loopback import LoopbackGrid
from bract.strategies.aggregation import aggregate, check_contribution
from bract.updates.rounding import rounded, sent_rounded, unagreed_widened

LOW = ("float16", "bfloat16")


class SizingGrid(LoopbackGrid):
    """Counts the bytes of all updates."""

    def pull_messages(self, message_ids: Any) -> Any:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            record = reply.content.array_records["update"]
            self.bytes = getattr(self, "bytes", 0) + sum(len(a.data) for a in record.values())
        return replies


def run(folder: Path, dtype: str, **changes: Any) -> Any:
    config = small(training={"lr": 0.1, "update_dtype": dtype}, **changes)
    grid = small_grid(folder, config, kind=SizingGrid)
    return train(folder, config, grid), grid


def final(found: Any) -> Any:
    return load_file(found.models / "final.safetensors")


@pytest.mark.parametrize("dtype", LOW)
def test_the_server_sums_the_rounded_updates_in_float64(tmp_path: Path, dtype: Any) -> None:
    plain, wide = run(tmp_path / "wide", "float32")
    low, narrow = run(tmp_path / "low", dtype)
    # 1,210 values, and a header for each of the four arrays.
    assert narrow.bytes < 0.6 * wide.bytes
    sent = {o.client: rounded(o.update, dtype)[0] for o in ObservationStore(plain.captures)}
    weights = {"client-0": 0.6, "client-1": 0.3, "client-2": 0.1}
    first = next(iter(ObservationStore(plain.captures))).parameters
    for name, value in final(low).items():
        step = torch.stack([weights[c] * sent[c][name].double() for c in weights]).sum(0)
        torch.testing.assert_close(value, first[name] - step.float(), rtol=0, atol=1e-7)
    assert any(not torch.equal(final(low)[n], final(plain)[n]) for n in final(plain))


@pytest.mark.parametrize("dtype", LOW)
def test_a_capture_states_that_its_client_rounded(tmp_path: Path, dtype: Any) -> None:
    exact = {o.client: o for o in ObservationStore(run(tmp_path / "wide", "float32")[0].captures)}
    found, _ = run(tmp_path / "low", dtype, capture={"dtype": "float16"})
    for observation in ObservationStore(found.captures):
        loss = observation.rounded
        assert loss is not None and (loss.by, loss.dtype, loss.error) == ("client", dtype, None)
        wanted, _ = rounded(exact[observation.client].update, dtype)
        for name, value in observation.update.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, wanted[name].float())
        # The store does not round again what came in half the bytes.
        assert CapturePlan().stored(observation) is observation


def test_an_attacker_knows_the_rounding(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "bfloat16")
    observation = next(iter(ObservationStore(found.captures)))
    update = torch.cat([v.flatten() for v in observation.update.values()]).double()
    torch.testing.assert_close(sending_error(observation), update.abs() * 2.0**-8)
    assert not sending_error(replace(observation, rounded=None, parameters={})).any()


def test_a_client_that_sends_float32_is_taken_where_16_bits_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_app, "rounded", lambda update, dtype: (update, None))
    older, _ = run(tmp_path / "older", "bfloat16")
    monkeypatch.undo()
    plain, _ = run(tmp_path / "plain", "float32")
    assert all(torch.equal(final(older)[n], final(plain)[n]) for n in final(plain))
    assert {o.rounded for o in ObservationStore(older.captures)} == {None}


def test_a_client_that_rounds_unasked_or_otherwise_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_app, "rounded", lambda update, dtype: rounded(update, "float16"))
    for dtype in ("float32", "bfloat16"):
        with refused("run-failed", "client-0", "torch.float16"):
            run(tmp_path / dtype, dtype)


@pytest.mark.parametrize(("agreed", "sent"), [("float32", "float16"), ("float16", "bfloat16")])
def test_a_client_does_not_choose_what_the_capture_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agreed: Any, sent: Any
) -> None:
    plain, _ = run(tmp_path / "plain", "float32")

    def mixed(update: Any, dtype: Any) -> Any:
        first = next(iter(update))
        low = rounded({first: update[first]}, sent)[0]
        return rounded(update, agreed)[0] | low, None

    monkeypatch.setattr(client_app, "rounded", mixed)
    with refused("run-failed", f"torch.{sent}"):
        run(tmp_path / "mixed", agreed, capture={"dtype": "float16"})
    folder = RunDirectory(tmp_path / "mixed" / "run").captures
    exact, seen = (next(iter(ObservationStore(place))) for place in (plain.captures, folder))
    assert exact.client == seen.client
    first, *others = exact.update
    (flag,) = seen.provenance["flags"]
    assert flag == f"sent {first} as {sent}, training.update_dtype is {agreed}; taken as float32"
    # The store rounds where the run does not; else what came as agreed stays, the rest is whole.
    by = ("store", ()) if agreed == "float32" else ("client", (first,))
    loss = seen.rounded
    assert loss is not None and (loss.dtype, loss.by, loss.kept) == ("float16", *by)
    assert {value.dtype for value in seen.update.values()} == {torch.float32}
    wanted = rounded(exact.update, "float16")[0] | rounded({first: exact.update[first]}, sent)[0]
    assert others and all(torch.equal(seen.update[n], v.float()) for n, v in wanted.items())
    held = load_file(folder / "round-0001" / seen.client / "update.safetensors")
    assert {n for n, v in held.items() if v.dtype != torch.float16} == set(loss.kept)


def test_16_bits_of_a_16_bit_parameter_are_no_rounding() -> None:
    half = {"w": torch.ones(2, dtype=torch.float16), "v": torch.ones(2, dtype=torch.float16)}
    parameters = {"w": torch.ones(2, dtype=torch.float16), "v": torch.ones(2)}
    loss = sent_rounded(half, parameters, "float16")
    assert loss is not None and loss.kept == ("w",)
    assert sent_rounded(half, parameters, "float32") is None
    update, unasked = unagreed_widened(half, parameters, "bfloat16")
    assert unasked == ["v"] and {n: v.dtype for n, v in update.items()} == {
        "w": torch.float16,
        "v": torch.float32,
    }


def test_a_sum_of_16_bit_updates_overflows_no_16_bits() -> None:
    arrays = {"w": torch.zeros(2)}
    parts = [
        Contribution(i, f"client-{i}", {"w": torch.tensor([6e4, 1e-4], dtype=torch.float16)}, 1)
        for i in range(2)
    ]
    for part in parts:
        check_contribution(arrays, part, 4.0, "float16")
    found = aggregate(arrays, parts, [1.0, 1.0], 4.0)["w"]
    assert found.dtype == torch.float32
    expected = -8.0 * parts[0].update["w"].double()
    assert torch.allclose(found.double(), expected, rtol=1e-6)
    infinite = replace(parts[0], update={"w": torch.full((2,), torch.inf, dtype=torch.float16)})
    with refused("update-refused", "NaN"):
        check_contribution(arrays, infinite, 1.0, "float16")


def test_what_cannot_be_rounded_is_refused_in_one_line() -> None:
    for encryption, words in (("paillier", "sends codes of 16 bits"), ("masks", "16 bits")):
        with pytest.raises(BractError, match=words):
            build_config({"encryption": encryption, "training": {"update_dtype": "float16"}})
    with refused("config-value", "training.update_dtype", "half"):
        build_config({"training": {"update_dtype": "half"}})


def test_bfloat16_travels_as_its_bytes() -> None:
    value = torch.tensor([1.0, -2.5, torch.inf], dtype=torch.bfloat16)
    array = to_arrays({"w": value})["w"]
    assert (array.dtype, array.stype) == (BFLOAT16, BFLOAT16)
    assert array.data == b"\x80\x3f\x20\xc0\x80\x7f"
    assert torch.equal(from_arrays(to_arrays({"w": value}))["w"], value)
