"""Encrypted runs of the real ClientApp: the same model as in the clear, and what goes wrong."""

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets
import torch
from encrypted_runs import (
    SIZES,
    ListeningGrid,
    final_model,
    key_secrets,
    phases,
    small,
    small_grid,
    train,
)
from flwr.app import Message, RecordDict
from refusals import refused
from safetensors.torch import load_file

import bract.client.session as client_session
from bract import ObservationStore
from bract.errors import BractError, RunFailedError
from bract.paillier.keyfile import load_private
from bract.paillier.quantize import FixedPoint
from bract.paillier.stripping import strip_messages
from bract.protocol.arrays import from_arrays
from bract.protocol.ciphertexts import BUFFER_BITS, EncryptedUpdate
from bract.rundir import RunDirectory
from bract.server.encrypted import EncryptedFederation
from bract.server.loopback import LoopbackGrid
from bract.strategies import FedBoosting, waiting
from bract.strategies.encrypted import decryption
from bract.strategies.registry import create_strategy
from bract.updates.update import Tensors

PAILLIER = {"scheme": "paillier", "clip": 0.5}
IN_BAND = {**PAILLIER, "keys": "in-band"}
READ_ONCE = functools.cache(sklearn.datasets.load_digits)
BOUND = FixedPoint(0.5, 16).bound + 1e-7
BUFFER_BOUND = FixedPoint(4096.0, BUFFER_BITS).bound + 1e-5


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    monkeypatch.setattr(sklearn.datasets, "load_digits", READ_ONCE)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plain")
    return train(folder, small(), small_grid(folder, small()))


def encrypted_run(
    folder: Any,
    keys: Any = (),
    encryption: Any = PAILLIER,
    *,
    state: Any = True,
    faults: Any = None,
    kind: Any = LoopbackGrid,
    **changes: Any,
) -> Any:
    config = small(encryption=encryption, **changes)
    options = {} if faults is None else {"faults": faults}
    grid = small_grid(folder, config, keys, state=state, kind=kind, **options)
    return train(folder, config, grid), grid


def furthest(found: Tensors, wanted: Tensors) -> float:
    assert set(found) == set(wanted)
    return max(float((found[n].double() - wanted[n].double()).abs().max()) for n in wanted)


def test_the_aggregate_is_the_plain_weighted_mean_within_the_quantisation_bound(
    tmp_path: Path, plain_run: Any, whole_key: Any
) -> None:
    run, grid = encrypted_run(tmp_path, [whole_key] * 3)
    wanted = load_file(plain_run.models / "final.safetensors")
    for client in range(3):
        assert furthest(final_model(tmp_path, client), wanted) <= BOUND
    row = run.metrics()[-1]
    assert [c.weight for c in row.clients.values()] == pytest.approx([0.6, 0.3, 0.1])
    assert phases(grid) == ["query.hello", "train", "evaluate.final"]
    assert (tmp_path / "state-0" / "small-client-0-final.safetensors").stat().st_mode & 0o077 == 0


def test_the_clients_report_the_accuracy_that_the_server_cannot_measure(
    tmp_path: Path, plain_run: Any, whole_key: Any
) -> None:
    run, _ = encrypted_run(tmp_path, [whole_key] * 3, rounds=2)
    rows = run.metrics()
    assert [row.round for row in rows] == [0, 1, 2]
    assert all(row.evaluation.split == "test" for row in rows)
    for row, plain in zip(rows, plain_run.metrics(), strict=False):
        assert row.evaluation.loss == pytest.approx(plain.evaluation.loss, abs=6e-3)
    assert not list(run.models.iterdir())


def test_batch_normalisation_statistics_and_counters_are_aggregated(
    tmp_path: Path, whole_key: Any
) -> None:
    data = {
        "image_size": 16,
        "validation": 0.0,
        "partition": {"kind": "sizes", "sizes": SIZES},
    }
    changes = {"model": {"name": "lenet-bn"}, "data": data}
    config = small(**changes)
    plain = train(tmp_path / "plain", config, small_grid(tmp_path / "plain", config))
    encrypted_run(tmp_path / "encrypted", [whole_key] * 3, **changes)
    wanted = load_file(plain.models / "final.safetensors")
    for client in range(3):
        found = final_model(tmp_path / "encrypted", client)
        for name, value in wanted.items():
            if name.endswith("num_batches_tracked"):
                # 0.6 * 8 + 0.3 * 4 + 0.1 * 2 = 6.2 batches of eight
                assert int(found[name]) == int(value) == 6
            else:
                bound = BUFFER_BOUND if "running_" in name else BOUND
                assert float((found[name] - value).abs().max()) <= bound, name
    assert any("running_var" in name for name in wanted)


def test_fedboosting_weights_and_scores_are_the_plain_ones(tmp_path: Path, whole_key: Any) -> None:
    changes = {
        "strategy": {"name": "fedboosting"},
        "data": {"image_size": 8, "validation": 0.2},
        "training": {"local_steps": 6, "lr": 0.1},
    }
    plain = train(
        tmp_path / "plain", small(**changes), small_grid(tmp_path / "plain", small(**changes))
    )
    run, grid = encrypted_run(tmp_path / "encrypted", [whole_key] * 3, **changes)
    wanted, found = plain.metrics()[-1].boosting, run.metrics()[-1].boosting
    assert wanted is not None
    assert found is not None
    assert found.V == wanted.V
    shares = [client.weight for client in run.metrics()[-1].clients.values()]
    assert found.weights == shares
    assert shares == pytest.approx(wanted.weights, abs=0.5 / 31)
    assert phases(grid) == ["query.hello", "train", "evaluate.fused", "evaluate.final"]
    fused = next(m for m in grid.log if m.metadata.message_type == "evaluate.fused")
    assert set(fused.content.array_records["fused-0"]) == {"header", "parameters"}


def test_no_client_learns_the_weights_of_random_fusing(tmp_path: Path, whole_key: Any) -> None:
    """With them it could solve the fused models for every update; a fixed seed gives none away."""
    changes = {
        "strategy": {"name": "fedboosting", "fusing": "random"},
        "data": {"image_size": 8, "validation": 0.2},
        "training": {"local_steps": 2},
    }
    _, grid = encrypted_run(tmp_path, [whole_key] * 3, **changes)
    fused = next(m for m in grid.log if m.metadata.message_type == "evaluate.fused")
    records = [r for name, r in fused.content.array_records.items() if "header" in r]
    assert len(records) == 3
    for record in records:
        vectors = EncryptedUpdate.from_tensors(from_arrays(record)).vectors.values()
        assert all(vector.parts == () for vector in vectors)
    first, second = (create_strategy(small(**changes)) for _ in range(2))
    assert isinstance(first, FedBoosting)
    assert isinstance(second, FedBoosting)
    assert first.seed != second.seed


def every_byte_the_server_had(grid: Any, run: Any) -> Any:
    """Everything in either direction through the server, and everything that it stored."""
    for message in grid.log + grid.answers:
        for record in message.content.array_records.values():
            yield from (array.numpy().tobytes() for array in record.values())
        yield from (str(dict(r)).encode() for r in message.content.config_records.values())
        for record in message.content.config_records.values():
            for value in record.values():
                many = value if isinstance(value, list) else [value]
                yield from (v for v in many if isinstance(v, bytes))
    for folder in (run.captures, run.aggregates):
        yield from (file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_neither_a_plain_update_nor_a_key_passes_through_the_server(
    tmp_path: Path, plain_run: Any
) -> None:
    config = small(encryption=IN_BAND)
    grid = small_grid(tmp_path, config, kind=ListeningGrid)
    run = train(tmp_path, config, grid)
    assert phases(grid) == ["query.hello", "query.deal", "train", "evaluate.final"]
    state = load_file(next((tmp_path / "state-0").glob("*-encryption.safetensors")))
    key = load_private(state["key"].numpy().tobytes())
    secrets = [*key_secrets(key), state["identity"].numpy().tobytes()[:32]]
    updates = [
        value.numpy().tobytes()[:64]
        for observation in ObservationStore(plain_run.captures)
        for value in observation.update.values()
        if value.numel() >= 16 and bool(value.any())
    ]
    model = final_model(tmp_path, 0)
    models = [value.numpy().tobytes()[:64] for value in model.values() if value.numel() >= 16]
    assert len(updates) == 9
    assert len(models) == 3
    seen = list(every_byte_the_server_had(grid, run))
    assert any(b"BRACT PAILLIER PUBLIC KEY" in data for data in seen)
    for secret in secrets + updates + models:
        assert not any(secret in data for data in seen)
    # The search finds what is there: the initial model did pass.
    initial = load_file(run.aggregates / "initial.safetensors")["1.weight"]
    assert any(initial.numpy().tobytes()[:64] in data for data in seen)


def test_in_band_keys_end_in_the_same_model_at_every_client(tmp_path: Path, plain_run: Any) -> None:
    encrypted_run(tmp_path, (), IN_BAND)
    wanted = load_file(plain_run.models / "final.safetensors")
    models = [final_model(tmp_path, client) for client in range(3)]
    assert furthest(models[0], wanted) <= BOUND
    assert furthest(models[1], models[0]) == 0.0 == furthest(models[2], models[0])


def test_the_client_of_the_lowest_partition_generates_the_key(tmp_path: Path) -> None:
    _, grid = encrypted_run(tmp_path, (), IN_BAND)
    dealt = [m for m in grid.log if m.metadata.message_type == "query.deal"]
    assert [m.metadata.dst_node_id for m in dealt] == [1]


def counting(function: Any, calls: list[Any]) -> Any:
    def called(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return function(*arguments, **options)

    return called


@pytest.mark.thorough
@pytest.mark.parametrize("powers", ["clients", "server"])
@pytest.mark.parametrize("strategy", ["fedavg", "fedboosting"])
def test_two_of_three_shares_decrypt_to_the_plain_model(
    tmp_path: Path,
    plain_run: Any,
    two_of_three: Any,
    strategy: Any,
    powers: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the powers of the clients the server raises nothing to n itself."""
    raised: list[Any] = []
    monkeypatch.setattr(decryption, "strip_messages", counting(strip_messages, raised))
    changes = {"strategy": {"name": strategy}}
    if strategy == "fedboosting":
        changes["data"] = {"image_size": 8, "validation": 0.2}
        changes["training"] = {"local_steps": 2}
    section = {**PAILLIER, "threshold": 2, "powers": powers}
    _, grid = encrypted_run(tmp_path, two_of_three, section, **changes)
    assert bool(raised) == (powers == "server")
    if strategy == "fedavg":
        assert phases(grid) == ["query.hello", "train", "query.partial", "evaluate.final"]
        wanted = load_file(plain_run.models / "final.safetensors")
        assert furthest(final_model(tmp_path, 2), wanted) <= BOUND
    else:
        expected = ["query.hello", "train", "query.partial", "evaluate.fused", "query.partial"]
        assert phases(grid) == [*expected, "evaluate.final"]


def test_one_answer_is_too_few_for_a_threshold_of_two_and_both_are_named(
    tmp_path: Path, two_of_three: Any
) -> None:
    def only_the_first(message: Any) -> Any:
        partial = message.metadata.message_type == "query.partial"
        return "unplugged" if partial and message.metadata.dst_node_id != 1 else None

    with refused("clients-missing", 1, 3, 2, "client-1", kind=RunFailedError):
        encrypted_run(tmp_path, two_of_three, {**PAILLIER, "threshold": 2}, faults=only_the_first)


def test_the_help_of_two_is_enough_where_the_third_is_lost(
    tmp_path: Path, plain_run: Any, two_of_three: Any
) -> None:
    def without_the_first(message: Any) -> Any:
        partial = message.metadata.message_type == "query.partial"
        return "drop" if partial and message.metadata.dst_node_id == 1 else None

    encrypted_run(tmp_path, two_of_three, {**PAILLIER, "threshold": 2}, faults=without_the_first)
    wanted = load_file(plain_run.models / "final.safetensors")
    assert furthest(final_model(tmp_path, 0), wanted) <= BOUND


def test_shares_can_be_dealt_in_band_and_nobody_keeps_the_whole_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encrypted_run(tmp_path, (), {**IN_BAND, "threshold": 2})
    assert "sees the whole key" in caplog.text
    for client in range(3):
        state = load_file(next((tmp_path / f"state-{client}").glob("*-encryption.safetensors")))
        assert b"KEY SHARE" in state["key"].numpy().tobytes()


def test_a_client_without_a_key_is_named_before_training(tmp_path: Path, whole_key: Any) -> None:
    config = small(encryption=PAILLIER)
    grid = small_grid(tmp_path, config, [whole_key] * 3)
    del grid.contexts[2].node_config["paillier-key"]
    with refused("run-failed", "client-1"):
        train(tmp_path, config, grid)
    assert "train" not in phases(grid)


def test_a_client_with_the_key_of_another_run_is_named_before_training(
    tmp_path: Path, whole_key: Any, another_key: Any
) -> None:
    config = small(encryption=PAILLIER)
    grid = small_grid(tmp_path, config, [whole_key, whole_key, another_key])
    wrong = f"client-2: holds Paillier key {another_key.public.key_id}"
    with refused("run-failed", wrong, whole_key.public.key_id):
        train(tmp_path, config, grid)
    assert "train" not in phases(grid)


def test_a_failed_key_check_is_left_out_where_failures_are_tolerated(
    tmp_path: Path, whole_key: Any, another_key: Any
) -> None:
    keys = [whole_key, whole_key, another_key]
    run, _ = encrypted_run(tmp_path, keys, strategy={"tolerate_failures": True})
    row = run.metrics()[-1]
    assert set(row.clients) == {"client-0", "client-1"}
    assert row.failures[0].client == "client-2"


@pytest.mark.parametrize(
    ("encryption", "message"),
    [
        ({**PAILLIER, "key_bits": 3072}, "2048 bits, encryption.key_bits is 3072"),
        ({**PAILLIER, "threshold": 2}, "holds a whole private key, but encryption.threshold is 2"),
    ],
)
def test_a_key_that_does_not_fit_the_run_is_refused(
    tmp_path: Path, whole_key: Any, encryption: Any, message: Any
) -> None:
    with refused("run-failed", "client-0", message):
        encrypted_run(tmp_path, [whole_key] * 3, encryption)


def test_a_share_is_refused_where_the_run_has_no_threshold(
    tmp_path: Path, two_of_three: Any
) -> None:
    with refused("run-failed", "threshold"):
        encrypted_run(tmp_path, two_of_three)


def test_a_client_that_was_given_a_key_sends_nothing_unencrypted(
    tmp_path: Path, whole_key: Any
) -> None:
    config = small()
    grid = small_grid(tmp_path, config, [whole_key] * 3)
    with refused("run-failed", "unencrypted"):
        train(tmp_path, config, grid)


def test_a_client_that_missed_rounds_ends_with_the_model_of_the_others(
    tmp_path: Path, whole_key: Any
) -> None:
    def away(message: Any) -> Any:
        missed = message.metadata.message_type == "train" and message.metadata.dst_node_id == 3
        return "away" if missed and message.content["config"]["server-round"] in (2, 3) else None

    run, grid = encrypted_run(
        tmp_path,
        [whole_key] * 3,
        faults=away,
        rounds=4,
        strategy={"tolerate_failures": True},
    )
    assert [len(row.clients) for row in run.metrics()] == [0, 3, 2, 2, 3]
    assert furthest(final_model(tmp_path, 2), final_model(tmp_path, 0)) == 0.0
    back = [m for m in grid.log if m.metadata.dst_node_id == 3][-2]
    assert {"aggregate-1", "aggregate-2", "aggregate-3"} <= set(back.content)


# A share that was dealt in-band and lost cannot be dealt again; see the next test.
@pytest.mark.parametrize(("threshold", "in_band"), [(None, False), (None, True), (2, False)])
def test_a_client_that_lost_its_state_is_sent_everything_again(
    tmp_path: Path,
    whole_key: Any,
    two_of_three: Any,
    threshold: Any,
    in_band: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = () if in_band else two_of_three if threshold else [whole_key] * 3
    encryption = {**(IN_BAND if in_band else PAILLIER), "threshold": threshold}
    config = small(encryption=encryption, rounds=2)

    def forget(message: Any) -> None:
        again = message.metadata.message_type == "train" and "aggregate-1" in message.content
        if again and message.metadata.dst_node_id == 2 and not forgotten:
            grid.contexts[2].state = RecordDict()
            forgotten.append(True)

    forgotten: list[Any] = []
    grid = small_grid(tmp_path, config, keys, state=False, faults=forget)
    run = train(tmp_path, config, grid)
    assert forgotten
    assert "client-1 could not follow" in caplog.text
    assert [len(row.clients) for row in run.metrics()] == [0, 3, 3]
    ends = [
        {
            name: value
            for name, value in context.state.array_records["bract.encryption"]
            .to_torch_state_dict()
            .items()
            if name.startswith("model.")
        }
        for context in grid.contexts.values()
    ]
    assert furthest(ends[1], ends[0]) == 0.0 == furthest(ends[2], ends[0])


def test_a_share_that_was_dealt_in_band_and_lost_is_said_to_be_gone(tmp_path: Path) -> None:
    config = small(encryption={**IN_BAND, "threshold": 2}, rounds=2)

    def forget(message: Any) -> None:
        if "aggregate-1" in message.content and message.metadata.dst_node_id == 2:
            grid.contexts[2].state = RecordDict()

    grid = small_grid(tmp_path, config, state=False, faults=forget)
    with refused("run-failed", "client-0"):
        train(tmp_path, config, grid)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, whole_key: Any) -> None:
    whole = tmp_path / "whole"
    encrypted_run(whole, [whole_key] * 3, rounds=2)
    parts = tmp_path / "parts"

    def second_round(message: Any) -> Any:
        later = message.metadata.message_type == "train" and "aggregate-1" in message.content
        return "unplugged" if later else None

    with refused("run-failed", "unplugged"):
        encrypted_run(parts, [whole_key] * 3, rounds=2, faults=second_round)
    config = small(encryption=PAILLIER, rounds=2)
    (parts / "keys").rename(parts / "earlier-keys")
    run = train(parts, config, small_grid(parts, config, [whole_key] * 3))
    assert [row.round for row in run.metrics()] == [0, 1, 2]
    assert all(row.evaluation for row in run.metrics())
    assert set(run.metrics()[1].clients) == {"client-0", "client-1", "client-2"}
    assert furthest(final_model(parts, 1), final_model(whole, 1)) == 0.0


class Returning(LoopbackGrid):
    """After a power loss: one client is connected, one has left and is listed, one comes later.

    Each look at who is connected is a second. Who has left is unavailable until it connects again.
    """

    back = 6

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, faults=self._left, **options)
        self._looks, self._asked = 0, False

    def get_node_ids(self) -> list[int]:
        self._looks += 1
        returned = self._looks >= self.back
        return [1, *([2] if returned or not self._asked else []), *([3] if returned else [])]

    def _left(self, message: Message) -> str | None:
        if message.metadata.dst_node_id != 2 or self._looks >= self.back:
            return None
        self._asked = True
        return "Node Unavailable"


@pytest.mark.parametrize("delivered_only", [False, True])
def test_a_resumed_run_waits_for_all_of_its_clients(
    delivered_only: bool, tmp_path: Path, two_of_three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "POLL", 0.0)
    section = {**PAILLIER, "threshold": 2}
    lost = "evaluate.final" if delivered_only else "query.partial"

    def power_loss(message: Any) -> Any:
        return "lost" if message.metadata.message_type == lost else None

    tolerant = {"strategy": {"name": "fedavg", "tolerate_failures": True}}
    with pytest.raises(RunFailedError):
        encrypted_run(tmp_path, two_of_three, section, faults=power_loss, **tolerant)
    (tmp_path / "keys").rename(tmp_path / "earlier-keys")
    config = small(encryption=section, **tolerant)
    states: list[str] = []
    monkeypatch.setattr(
        RunDirectory, "update_state", noting(RunDirectory.update_state, "waiting", states)
    )
    grid = small_grid(tmp_path, config, two_of_three, kind=Returning)
    train(tmp_path, config, grid)
    assert final_model(tmp_path, 0).keys() == final_model(tmp_path, 2).keys()
    assert any(line and "of 3 are connected" in line for line in states) and states[-1] is None


def test_a_client_that_does_not_return_ends_a_resumed_run_in_one_line(
    tmp_path: Path, two_of_three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "POLL", 0.0)
    monkeypatch.setattr(Returning, "back", 10**9)
    section = {**PAILLIER, "threshold": 2}
    options = {"strategy": {"name": "fedavg", "tolerate_failures": True, "timeout": 1}}
    with refused("clients-missing", "strategy.timeout", 1, kind=RunFailedError):
        encrypted_run(tmp_path, two_of_three, section, kind=Returning, **options)


def noting(update: Any, key: str, seen: list[Any]) -> Any:
    """`RunDirectory.update_state`, which keeps what is noted under a key."""

    def noted(run: RunDirectory, **changes: Any) -> None:
        seen.extend([changes[key]] if key in changes else [])
        update(run, **changes)

    return noted


def test_a_finished_run_is_not_run_again(tmp_path: Path, whole_key: Any) -> None:
    run, _ = encrypted_run(tmp_path, [whole_key] * 3)
    config = small(encryption=PAILLIER)
    grid = small_grid(tmp_path / "again", config, [whole_key] * 3)
    EncryptedFederation(config, RunDirectory(run.root)).train(grid)
    assert grid.log == []


def test_clipped_values_are_counted_and_said(
    tmp_path: Path, whole_key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = encrypted_run(tmp_path, [whole_key] * 3, {**PAILLIER, "clip": 1e-4})
    assert run.metrics()[-1].clients["client-0"].clipped > 50
    assert "raise encryption.clip" in caplog.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda v: v.data.__setitem__((0, slice(None)), 255), "out of range"),
        (lambda v: v.data.__setitem__((0, slice(None)), 0), "out of range"),
        (lambda v: object.__setattr__(v, "key_id", "0" * 32), "under key 0000"),
        (lambda v: object.__setattr__(v, "weight", 5), "weights that sum to 5"),
    ],
)
def test_an_altered_ciphertext_is_refused_and_its_client_named(
    tmp_path: Path, whole_key: Any, monkeypatch: pytest.MonkeyPatch, damage: Any, message: Any
) -> None:
    from bract.client.encrypted.client import EncryptedClient

    original = EncryptedClient.encrypt

    def altered(self: Any, update: Any, buffers: Any) -> Any:
        encrypted, figures = original(self, update, buffers)
        if self.site.partition == 1:
            damage(encrypted.vectors["parameters"])
        return encrypted, figures

    monkeypatch.setattr(EncryptedClient, "encrypt", altered)
    with refused("run-failed", "client-1", message):
        encrypted_run(tmp_path, [whole_key] * 3)


def test_an_aggregate_under_another_key_is_refused_by_the_clients(
    tmp_path: Path, whole_key: Any, another_key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bract.client.encrypted import client

    monkeypatch.setattr(client, "read_key", lambda *_: whole_key)
    config = small(encryption=PAILLIER, rounds=2)
    grid = small_grid(tmp_path, config, [whole_key] * 3)

    def swap(message: Any) -> None:
        if "aggregate-1" in message.content:
            monkeypatch.setattr(client, "read_key", lambda *_: another_key)

    grid._faults = swap
    with refused("run-failed", "client-0", whole_key.public.key_id):
        train(tmp_path, config, grid)


def test_what_a_defense_protected_is_what_is_encrypted(
    tmp_path: Path, whole_key: Any, plain_run: Any
) -> None:
    run, _ = encrypted_run(tmp_path, [whole_key] * 3, defenses=["pruning"])
    declaration = next(iter(ObservationStore(run.captures))).declaration
    assert [d["name"] for d in declaration.defenses] == ["pruning"]
    moved = load_file(plain_run.models / "final.safetensors")
    initial = load_file(run.aggregates / "initial.safetensors")
    pruned = final_model(tmp_path, 0)

    def unchanged(model: Any) -> Any:
        return sum(int((model[name] == initial[name]).sum()) for name in initial)

    assert unchanged(pruned) > unchanged(moved) + 500


def test_two_clients_are_warned_about(
    tmp_path: Path, whole_key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = {
        "image_size": 8,
        "validation": 0.0,
        "partition": {"kind": "sizes", "sizes": [20, 10]},
    }
    encrypted_run(tmp_path, [whole_key] * 2, clients=2, data=data)
    assert "take three or more" in caplog.text


def test_nan_never_leaves_a_client(
    tmp_path: Path,
    whole_key: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original = vars(client_session)["train_locally"]

    def diverged(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        result.update["1.bias"][0] = torch.nan
        return result

    monkeypatch.setattr(client_session, "train_locally", diverged)
    with refused("run-failed", "client-0"):
        encrypted_run(tmp_path, [whole_key] * 3)
    assert "NaN" in caplog.text


def test_a_missing_key_file_is_named_at_its_client_alone(
    tmp_path: Path, whole_key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = small(encryption=PAILLIER)
    grid = small_grid(tmp_path, config, [whole_key] * 3)
    grid.contexts[1].node_config["paillier-key"] = str(tmp_path / "nowhere.pem")
    with pytest.raises((RunFailedError, BractError), match=r"client-0") as caught:
        train(tmp_path, config, grid)
    assert "nowhere.pem" not in str(caught.value)
    assert "nowhere.pem" in caplog.text


def test_the_private_key_is_in_no_file_of_the_server(tmp_path: Path, whole_key: Any) -> None:
    run, _ = encrypted_run(tmp_path, [whole_key] * 3)
    files = [file.read_bytes() for file in run.root.rglob("*") if file.is_file()]
    for secret in key_secrets(whole_key):
        assert not any(secret in data for data in files)
