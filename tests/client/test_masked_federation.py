"""Masked runs of the real ClientApp: the plain quantised sum, dropouts, and what goes wrong."""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encrypted_runs import SIZES, TamperingGrid, phases, small, small_grid, train
from refusals import check_named, refused
from safetensors.torch import load_file

from bract import ObservationStore
from bract.captures.aggregates import Aggregates
from bract.config import build_config
from bract.errors import BractError, RunFailedError
from bract.masks.layout import MaskLayout
from bract.protocol.arrays import from_arrays, to_arrays
from bract.protocol.masking import MaskedUpdate
from bract.updates.update import flatten

MASKS = {"scheme": "masks", "clip": 0.5}
EQUAL = {"weighting": "uniform", "tolerate_failures": True}
"""A sum of two that is left counts as two clients."""
BAD = 3
"""Node of the bad client, which calls itself client-2."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)


def masked(folder: Path, *, faults: Any = None, tamper: Any = None, **changes: Any) -> Any:
    encryption = {**MASKS, **changes.pop("encryption", {})}
    state = changes.pop("state", True)
    config = small(encryption=encryption, **changes)
    options: dict[str, Any] = {} if faults is None else {"faults": faults}
    kind: Any = TamperingGrid if tamper else type(small_grid(folder / "unused", config))
    if tamper:
        options["tamper"] = tamper
    grid = small_grid(folder, config, state=state, kind=kind, **options)
    return train(folder, config, grid), grid


def of(message: Any, kind: str, number: int = 1, node: int = BAD) -> bool:
    return bool(
        message.metadata.message_type == kind
        and message.metadata.dst_node_id == node
        and message.content["config"]["server-round"] == number
    )


def furthest(run: Any, other: Any) -> float:
    found, wanted = (load_file(r.models / "final.safetensors") for r in (run, other))
    return max(float((found[n] - wanted[n]).abs().max()) for n in wanted)


@pytest.mark.usefixtures("public_order")
def test_the_mean_is_that_of_the_plain_quantised_updates_to_the_bit(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", small(), small_grid(tmp_path / "plain", small()))
    run, grid = masked(tmp_path / "masked")
    uploads = [o for o in ObservationStore(plain.captures) if o.round == 1]
    values = {o.client: flatten({n: v.double() for n, v in o.update.items()}) for o in uploads}
    layout = MaskLayout(next(iter(values.values())).numel(), 0.5, 16, 31)
    weights = dict(zip(sorted(values), (6, 3, 1), strict=True))
    assert sum(SIZES) == 100
    codes = [layout.fixed_point.encode(values[c].numpy())[0] * weights[c] for c in weights]
    wanted = layout.fixed_point.decode(np.sum(codes, axis=0, dtype=np.uint64), 10)
    found = flatten(
        {n: Aggregates(run.aggregates).aggregate(1)[n] for n in uploads[0].update}
    ).numpy()
    assert np.array_equal(found, wanted)
    assert furthest(run, plain) <= layout.fixed_point.bound + 1e-6
    assert phases(grid)[:6] == [
        "query.advertise",
        "query.share",
        "query.open",
        "train",
        "query.agree",
        "query.unmask",
    ]
    weight = {c: row.weight for c, row in run.metrics()[1].clients.items()}
    assert weight == {"client-0": 0.6, "client-1": 0.3, "client-2": 0.1}


def test_the_server_holds_no_update_and_an_upload_looks_like_noise(tmp_path: Path) -> None:
    run, _ = masked(tmp_path)
    for observation in ObservationStore(run.captures):
        assert not observation.update
        assert observation.declaration.encryption == "masks"
        sent = MaskedUpdate.from_tensors(observation.ciphertexts)
        values = sent.parts["parameters"].reshape(-1, 3)[:, 0]
        assert len(np.unique(values)) > 200
        assert "train_loss" not in observation.provenance["metrics"]


def test_two_phases_less_without_consistency(tmp_path: Path) -> None:
    run, grid = masked(tmp_path, encryption={"consistency": False})
    assert "query.agree" not in phases(grid)
    assert len(run.metrics()[1].clients) == 3


@pytest.mark.usefixtures("public_order")
@pytest.mark.parametrize("phase", ["query.open", "train"])
def test_a_client_that_drops_out_leaves_the_others_sum(tmp_path: Path, phase: str) -> None:
    run, _ = masked(
        tmp_path / "masked",
        faults=lambda m: "gone" if of(m, phase) else None,
        strategy={"tolerate_failures": True},
    )
    config = small(strategy={"tolerate_failures": True})
    plain = train(
        tmp_path / "plain",
        config,
        small_grid(tmp_path / "plain", config, faults=lambda m: "gone" if of(m, "train") else None),
    )
    assert set(run.metrics()[1].clients) == {"client-0", "client-1"}
    assert furthest(run, plain) <= MaskLayout(1, 0.5).fixed_point.bound + 1e-6


@pytest.mark.parametrize("phase", ["query.agree", "query.unmask"])
def test_a_client_that_leaves_after_its_upload_stays_in_the_sum(tmp_path: Path, phase: str) -> None:
    run, _ = masked(
        tmp_path,
        faults=lambda m: "gone" if of(m, phase) else None,
        strategy={"tolerate_failures": True},
        rounds=2,
    )
    assert [len(row.clients) for row in run.metrics()[1:]] == [3, 3]


def test_dropouts_are_the_end_of_a_run_that_tolerates_none(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"client-2|node-3"):
        masked(tmp_path, faults=lambda m: "gone" if of(m, "train") else None)
    with refused("clients-missing", "client-2", kind=RunFailedError):
        masked(tmp_path / "two", faults=lambda m: "gone" if of(m, "query.share") else None)


def test_a_restart_without_state_costs_one_round(tmp_path: Path) -> None:
    forgot: list[int] = []

    def forget(message: Any, reply: Any) -> None:
        if of(message, "query.open", 1):
            grid_of[0].contexts[BAD].state.clear()
            forgot.append(1)

    grid_of: list[Any] = []
    config = small(encryption=MASKS, rounds=2, strategy={"tolerate_failures": True})
    grid = small_grid(tmp_path, config, state=False, kind=TamperingGrid, tamper=forget)
    grid_of.append(grid)
    run = train(tmp_path, config, grid)
    rows = run.metrics()
    assert forgot
    assert [len(row.clients) for row in rows[1:]] == [2, 3]
    assert "has no masks of round 1 (none)" in rows[1].failures[0].reason


def change(message: Any, reply: Any, kind: str, alter: Any, number: int = 1) -> None:
    if of(message, kind, number):
        alter(reply)


def later(part: str) -> Any:
    def alter(reply: Any) -> None:
        tensors = {n: a.numpy() for n, a in reply.content.array_records["ciphertexts"].items()}
        update = MaskedUpdate.from_tensors({n: torch.from_numpy(t) for n, t in tensors.items()})
        fields: dict[str, dict[str, Any]] = {
            "round": {"number": 7},
            "roster": {"digest": "00" * 32},
            "bytes": {"parts": {"parameters": update.parts["parameters"][:-3]}},
            "twice": {"shapes": {"parameters": update.shapes["parameters"] * 2}},
        }
        from bract.protocol.arrays import to_arrays

        wrong = MaskedUpdate(**{**update.__dict__, **fields[part]})
        reply.content["ciphertexts"] = to_arrays(wrong.to_tensors())

    return alter


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ("round", "sent masks of round 7"),
        ("roster", "this is round 1 and roster"),
        ("bytes", "sent parameters as (3627,)"),
        ("twice", "masked other tensors than the model has: 1.bias"),
    ],
)
def test_a_wrong_masked_update_costs_its_sender(tmp_path: Path, part: str, found: str) -> None:
    run, _ = masked(
        tmp_path,
        tamper=lambda m, r: change(m, r, "train", later(part)),
        strategy={"tolerate_failures": True},
    )
    row = run.metrics()[1]
    assert set(row.clients) == {"client-0", "client-1"}
    assert row.failures[0].client == "client-2"
    assert found in row.failures[0].reason


def test_a_client_that_answers_first_decides_no_order_for_the_others(tmp_path: Path) -> None:
    def turned(message: Any, reply: Any) -> None:
        if not of(message, "train", node=1):
            return
        from bract.protocol.arrays import to_arrays

        tensors = {n: a.numpy() for n, a in reply.content.array_records["ciphertexts"].items()}
        update = MaskedUpdate.from_tensors({n: torch.from_numpy(t) for n, t in tensors.items()})
        shapes = {part: listed[::-1] for part, listed in update.shapes.items()}
        wrong = MaskedUpdate(update.number, update.digest, update.parts, shapes)
        reply.content["ciphertexts"] = to_arrays(wrong.to_tensors())

    run, _ = masked(tmp_path, tamper=turned, strategy=EQUAL)
    row = run.metrics()[1]
    assert set(row.clients) == {"client-1", "client-2"}
    assert [f.client for f in row.failures] == ["client-0"]
    assert "in another order than the others" in row.failures[0].reason


@pytest.mark.usefixtures("public_order")
def test_a_wrong_share_names_its_helper_and_the_sum_is_right(tmp_path: Path) -> None:
    def alter(reply: Any) -> None:
        record = reply.content.config_records["masks"]
        record["values"] = [v[:-1] + bytes([v[-1] ^ 1]) for v in record["values"]]

    run, _ = masked(tmp_path / "bad", tamper=lambda m, r: change(m, r, "query.unmask", alter))
    good, _ = masked(tmp_path / "good")
    assert "gave a wrong share" in run.metrics()[1].failures[0].reason
    assert run.metrics()[1].failures[0].client == "client-2"
    assert furthest(run, good) == 0.0


def test_boxes_that_do_not_open_leave_their_sender_out_before_anyone_trains(
    tmp_path: Path,
) -> None:
    def alter(reply: Any) -> None:
        record = reply.content.config_records["masks"]
        record["boxes"] = [b[:-1] + bytes([b[-1] ^ 1]) if b else b for b in record["boxes"]]

    sizes = [30, 30, 30, 10]
    config = build_config(
        {
            **small(encryption=MASKS, strategy={"tolerate_failures": True}).model_dump(mode="json"),
            "clients": 4,
            "data": {
                "image_size": 8,
                "validation": 0.0,
                "partition": {"kind": "sizes", "sizes": sizes},
            },
        }
    ).as_own_word()
    tamper: Any = lambda m, r: change(m, r, "query.share", alter)  # noqa: E731
    grid = small_grid(tmp_path, config, kind=TamperingGrid, tamper=tamper)
    run = train(tmp_path, config, grid)
    row = run.metrics()[1]
    assert set(row.clients) == {"client-0", "client-1", "client-3"}
    check_named(str(row.failures), "client-0", "client-1", "client-3")


def test_another_seed_costs_the_round_and_its_owner_all_later_ones(tmp_path: Path) -> None:
    def alter(reply: Any) -> None:
        reply.content.config_records["masks"]["seed"] = bytes(32)

    sizes = [30, 30, 30, 10]
    config = build_config(
        {
            **small(encryption=MASKS, strategy={"tolerate_failures": True}).model_dump(mode="json"),
            "clients": 4,
            "rounds": 2,
            "data": {
                "image_size": 8,
                "validation": 0.0,
                "partition": {"kind": "sizes", "sizes": sizes},
            },
        }
    ).as_own_word()
    tamper: Any = lambda m, r: change(m, r, "query.share", alter)  # noqa: E731
    grid = small_grid(tmp_path, config, kind=TamperingGrid, tamper=tamper)
    run = train(tmp_path, config, grid)
    rows = run.metrics()
    assert rows[0].evaluation == rows[1].evaluation
    assert set(rows[2].clients) == {"client-0", "client-1", "client-3"}
    assert "shared another seed" in str(rows[2].failures)


def test_fedboosting_is_refused_by_name(tmp_path: Path) -> None:
    with refused("config-value", "fedboosting"):
        small(encryption=MASKS, strategy={"name": "fedboosting"}, data={"validation": 0.2})


@pytest.mark.parametrize(
    ("encryption", "found"),
    [
        ({"threshold": 4}, ("config-value", "encryption.threshold", "4", "3")),
        ({"key_bits": 3072}, ("config-value", "encryption.key_bits")),
        ({"max_weight_sum": 2}, ("config-value", "encryption.max_weight_sum", "2")),
    ],
)
def test_settings_that_masks_cannot_have(encryption: Any, found: tuple[str, ...]) -> None:
    with refused(*found):
        small(encryption={**MASKS, **encryption})


def test_two_clients_are_too_few() -> None:
    with refused("config-value", 3, 2):
        build_config({"clients": 2, "encryption": "masks"})


def test_a_threshold_of_half_needs_a_server_that_follows_the_protocol() -> None:
    with refused("config-value", 3):
        build_config({"clients": 4, "encryption": {"scheme": "masks", "threshold": 2}})


def test_a_site_refuses_small_sums_and_sums_in_the_clear(tmp_path: Path) -> None:
    for text, found in (
        ("min_summed_clients: 4", "joins those of 4 or more"),
        ("plain_sums: false", "plain_sums is false"),
    ):
        folder = tmp_path / text[:8]
        folder.mkdir()
        (folder / "policy.yaml").write_text(text)
        config = small(encryption=MASKS)
        grid = small_grid(folder, config)
        grid.contexts[1].node_config["policy"] = str(folder / "policy.yaml")
        with pytest.raises(RunFailedError, match=found):
            train(folder, config, grid)


def again(folder: Path, name: str, *, without: int | None = None, **changes: Any) -> Any:
    """Run three clients of four, or all, whose state lies in one folder for every call."""
    config = small(
        encryption=MASKS,
        **{"clients": 4, "strategy": {"tolerate_failures": True}, **changes},
        data={
            "image_size": 8,
            "validation": 0.0,
            "partition": {"kind": "sizes", "sizes": [30, 30, 30, 10]},
        },
    )
    gone: Any = lambda m: "gone" if m.metadata.dst_node_id == without else None  # noqa: E731
    grid = small_grid(folder, config, faults=gone)
    (folder / name).mkdir(parents=True)
    for context in grid.contexts.values():
        if (folder / "policy.yaml").exists():
            context.node_config["policy"] = str(folder / "policy.yaml")
    return train(folder / name, config, grid)


def test_two_sums_of_one_model_with_and_without_a_client_are_not_both_unmasked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = again(tmp_path, "all")
    assert len(first.metrics()[1].clients) == 4
    with refused("run-failed", "second sum", kind=RunFailedError):
        again(tmp_path, "three", without=BAD)
    # The same sum once more, as after --resume, gives away nothing else.
    assert len(again(tmp_path, "resumed").metrics()[1].clients) == 4
    # Other settings of the same model are another update of each client.
    with refused("run-failed", "second sum", kind=RunFailedError):
        again(tmp_path, "slower", training={"lr": 0.05})
    assert len(again(tmp_path, "other", without=BAD, seed=4).metrics()[1].clients) == 3


def test_where_the_policy_says_so_two_sums_differ_by_as_many_clients_as_a_sum_has(
    tmp_path: Path,
) -> None:
    (tmp_path / "policy.yaml").write_text("min_summed_clients: 3")
    again(tmp_path, "all", strategy=EQUAL)
    # Refused as the clients are named, before anything is masked.
    with refused("clients-missing", "min_summed_clients: 3", kind=RunFailedError):
        again(tmp_path, "three", without=BAD, seed=4, strategy=EQUAL)


def test_a_sum_that_dropouts_leave_mostly_to_one_client_costs_its_round(tmp_path: Path) -> None:
    # Of weights 6, 3 and 1 the second leaves.
    run, grid = masked(
        tmp_path,
        faults=lambda m: "gone" if of(m, "train", node=2) else None,
        strategy={"tolerate_failures": True},
        rounds=2,
    )
    rows = run.metrics()
    check_named(rows[1].failures[-1].reason, 6, 1, 1.03)
    assert rows[1].failures[-1].client == "aggregate"
    assert rows[0].evaluation == rows[1].evaluation != rows[2].evaluation
    assert len(rows[2].clients) == 3 and not rows[2].failures
    asked = [m for m in grid.log if m.metadata.message_type == "query.agree"]
    assert len(asked) == 3  # of the second round alone


def test_a_sum_that_dropouts_leave_mostly_to_one_client_is_not_unmasked(tmp_path: Path) -> None:
    """Whatever share the configuration allows: of weights 2, 2 and 1 one client of 2 leaves."""
    sizes = {"kind": "sizes", "sizes": [40, 40, 20]}
    config = small(
        encryption=MASKS,
        strategy={"tolerate_failures": True, "max_share": 1.0},
        data={"image_size": 8, "validation": 0.0, "partition": sizes},
    )
    faults: Any = lambda m: "gone" if of(m, "train", node=2) else None  # noqa: E731
    grid = small_grid(tmp_path, config, faults=faults)
    (tmp_path / "policy.yaml").write_text("min_summed_clients: 2")
    for context in grid.contexts.values():
        context.node_config["policy"] = str(tmp_path / "policy.yaml")
    with refused("run-failed", "2 of 3", "min_summed_clients", kind=RunFailedError):
        train(tmp_path, config, grid)


def test_a_server_cuts_the_largest_weight_so_that_the_clients_unmask_the_sum(
    tmp_path: Path,
) -> None:
    sizes = {"kind": "sizes", "sizes": [80, 10, 10]}
    run, _ = masked(tmp_path, data={"image_size": 8, "validation": 0.0, "partition": sizes})
    weights = [row.weight for row in run.metrics()[1].clients.values()]
    assert sum(w * w for w in weights) / max(weights) ** 2 >= 1.25
    assert max(weights) > 0.55 and weights[1] == weights[2]


def test_a_masked_update_is_not_the_same_twice(tmp_path: Path) -> None:
    means = [
        flatten(Aggregates(masked(tmp_path / name)[0].aggregates).aggregate(1)) for name in "ab"
    ]
    assert not torch.equal(*means)


def altered(reply: Any, change: Any) -> None:
    from bract.protocol.arrays import to_arrays

    tensors = {n: a.numpy() for n, a in reply.content.array_records["ciphertexts"].items()}
    update = MaskedUpdate.from_tensors({n: torch.from_numpy(t) for n, t in tensors.items()})
    parts = {"parameters": change(update.parts["parameters"])}
    wrong = MaskedUpdate(**{**update.__dict__, "parts": parts})
    reply.content["ciphertexts"] = to_arrays(wrong.to_tensors())


def test_garbage_of_the_right_form_costs_the_round_and_names_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def garbage(sent: Any) -> Any:
        return np.random.default_rng(1).integers(0, 256, sent.shape).astype(np.uint8)

    def spoil(message: Any, reply: Any) -> None:
        for number in (1, 2):
            change(message, reply, "train", lambda r: altered(r, garbage), number)

    run, _ = masked(
        tmp_path,
        tamper=spoil,
        faults=lambda m: "gone" if of(m, "train", 2, node=1) else None,
        strategy=EQUAL,
        rounds=3,
    )
    rows = run.metrics()
    assert rows[0].evaluation == rows[1].evaluation == rows[2].evaluation != rows[3].evaluation
    assert "larger than clients of total weight 3 can give" in caplog.text
    first, second = rows[1].failures[0], rows[2].failures[-1]
    assert (first.client, second.client) == ("aggregate", "aggregate")
    assert "which of its clients: client-0, client-1, client-2" in first.reason
    check_named(second.reason, 2, "client-1", "client-2")
    assert not rows[3].failures


def test_garbage_that_is_a_possible_sum_moves_the_mean_within_the_clip_range(
    tmp_path: Path,
) -> None:
    """A client of weight 1 of 10 adds to the sum what nine tenths of the range leave room for."""
    layout = MaskLayout(1210, 0.5, 16, 31)

    def push(sent: Any) -> Any:
        words = layout.from_bytes(sent) + np.uint32(9 * 32767 // 2)
        return layout.to_bytes(layout.reduce(words))

    run, _ = masked(
        tmp_path,
        tamper=lambda m, r: change(m, r, "train", lambda reply: altered(reply, push)),
    )
    mean = flatten(Aggregates(run.aggregates).aggregate(1))
    assert float(mean.abs().max()) <= 0.5
    assert float(mean.mean()) > 0.1


def one_client(folder: Path, node: int, run: int, config: Any, **policy: Any) -> Any:
    """A client of round 1 in the process of one message of a run."""
    from flwr.app import ConfigRecord, Context, RecordDict, UserConfig

    from bract.client.masked import MaskedClient
    from bract.client.policy import SitePolicy
    from bract.client.site import Site
    from bract.protocol.keyexchange import SESSION_KEY

    node_config: UserConfig = {"partition-id": node, "state-dir": str(folder / str(node))}
    context = Context(run, node, node_config, RecordDict(), {})
    content = RecordDict({"config": ConfigRecord({SESSION_KEY: "s", "server-round": 1})})
    site = Site.from_node_config(node_config)
    return MaskedClient(config, site, SitePolicy.model_validate(policy), context, content)


def sharing(folder: Path, config: Any) -> None:
    """Three clients that wait for the model of round 1."""
    from bract.masks.roster import Roster, Seat
    from bract.protocol.masking import (
        Advert,
        read_dealt,
        read_refused,
        write_parcels,
        write_roster,
    )

    def client(node: int) -> Any:
        return one_client(folder, node, 1, config)

    adverts = {n: Advert.read(client(n).advertise()) for n in range(3)}
    seats = tuple(Seat(n, a.identity, a.box_key, a.mask_key, 1) for n, a in adverts.items())
    roster = write_roster(Roster(client(0).session, 1, 2, 2, seats))
    dealt = {n: read_dealt(client(n).share(roster)) for n in range(3)}
    for n in range(3):
        sent = {m: dealt[m].parcels[n] for m in range(3) if m != n}
        assert not read_refused(client(n).open(write_parcels(sent)))


def test_two_messages_at_once_get_one_update_and_one_list(tmp_path: Path) -> None:
    """The difference of two updates under the same masks would be that of their values."""
    from bract.protocol.masking import write_survivors

    config = small(encryption=MASKS)
    sharing(tmp_path, config)
    first, second = (one_client(tmp_path, 1, 1, config) for _ in range(2))
    first.check_ready()
    second.check_ready()
    received = {"w": torch.zeros(4)}
    first.mask({"w": torch.rand(4)}, received, {})
    with refused("round-mismatch"):
        second.mask({"w": torch.zeros(4)}, received, {})
    first, second = (one_client(tmp_path, 1, 1, config) for _ in range(2))
    first.agree(write_survivors((0, 1, 2)))
    with refused("message-malformed"):
        second.agree(write_survivors((1, 2)))


def test_a_message_waits_while_another_one_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read the state before either had masked; the lock alone holds them apart."""
    from concurrent.futures import ThreadPoolExecutor

    from bract.masks.party import Party

    config = small(encryption=MASKS)
    sharing(tmp_path, config)
    masking = Party.mask

    def slow(self: Party, *args: Any) -> None:
        time.sleep(0.5)
        masking(self, *args)

    monkeypatch.setattr(Party, "mask", slow)

    def answer(value: float) -> str:
        client = one_client(tmp_path, 1, 1, config)
        try:
            client.mask({"w": torch.full((4,), value)}, {"w": torch.zeros(4)}, {})
        except BractError as error:
            return str(error)
        return "masked"

    with ThreadPoolExecutor(2) as pool:
        first, second = sorted(pool.map(answer, (1.0, 2.0)))
    assert first == "masked" and "asked to train twice" in second


def test_a_site_that_bounds_sums_takes_no_part_without_consistency(tmp_path: Path) -> None:
    """A server could name it as gone to some, and as here to others."""
    config = small(encryption={**MASKS, "consistency": False})
    with refused("policy-refused", "min_summed_clients", "consistency"):
        one_client(tmp_path, 1, 1, config, min_summed_clients=3)


@pytest.mark.parametrize(("size", "clipped"), [(0.4, 0.0), (2.0, 3.0)])
def test_a_client_says_about_how_many_values_its_clip_cuts(
    tmp_path: Path, size: float, clipped: float
) -> None:
    config = small(encryption=MASKS)
    sharing(tmp_path, config)
    update = {"w": torch.tensor([size, -size, 0.1, size])}
    _, figures = one_client(tmp_path, 1, 1, config).mask(update, {"w": torch.zeros(4)}, {})
    assert figures["clipped"] == clipped


def test_an_update_takes_no_masks_that_came_while_it_was_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is weighed by one list of clients, so the masks of another one hide another sum."""
    from bract.client import masked as module
    from bract.protocol.masking import encode_update

    config = small(encryption=MASKS)
    sharing(tmp_path, config)

    def slow(*args: Any) -> Any:
        sharing(tmp_path, config)
        return encode_update(*args)

    monkeypatch.setattr(module, "encode_update", slow)
    with refused("message-malformed"):
        one_client(tmp_path, 1, 1, config).mask({"w": torch.rand(4)}, {"w": torch.zeros(4)}, {})


def test_a_roster_of_more_clients_than_declared_needs_a_majority_too(tmp_path: Path) -> None:
    """A threshold of two is a majority of the three declared clients, not of the ten named."""
    from bract.masks.party import Party
    from bract.masks.roster import Roster
    from bract.paillier.exchange import make_identity
    from bract.protocol.masking import write_roster

    config = small(encryption={**MASKS, "threshold": 2})
    client = one_client(tmp_path, 1, 1, config)
    run = client.session
    seats = tuple(Party.begin(n, run, 1).seat(make_identity(), 1) for n in range(10))
    roster = write_roster(Roster(run, 1, 2, 9, seats))
    with refused("request-refused", "threshold", 2):
        client.share(roster)


def test_a_client_that_pins_its_peers_needs_a_folder_for_its_state(tmp_path: Path) -> None:
    (tmp_path / "peers").write_text("")
    config = small(encryption=MASKS)
    grid = small_grid(tmp_path, config, state=False)
    grid.contexts[1].node_config["peers"] = str(tmp_path / "peers")
    with refused("clients-missing", kind=RunFailedError):
        train(tmp_path, config, grid)


def test_a_server_that_sends_one_client_another_model_learns_no_sum(tmp_path: Path) -> None:
    """Also where that client states the others' model, and only the masks tell."""

    def other(message: Any) -> None:
        if of(message, "train"):
            message.content.array_records["arrays"] = dead(message.content.array_records["arrays"])

    def dead(arrays: Any) -> Any:
        return to_arrays({n: torch.zeros_like(v) for n, v in from_arrays(arrays).items()})

    stated: list[str] = []

    def same(message: Any, reply: Any) -> None:
        if message.metadata.message_type == "train":
            update = MaskedUpdate.from_tensors(from_arrays(reply.content["ciphertexts"]))
            stated.append(update.task)
            update = replace(update, task=stated[0])
            reply.content["ciphertexts"] = to_arrays(update.to_tensors())

    with refused("run-failed", "another"):
        masked(tmp_path / "stated", faults=other)
    with refused("run-failed", "larger"):
        masked(tmp_path / "same", faults=other, tamper=same)
    assert len(set(stated)) == 2


def test_two_clients_of_one_round_key_cost_themselves_the_round_and_no_others(
    tmp_path: Path,
) -> None:
    first: list[Any] = []

    def copied(message: Any, reply: Any) -> None:
        if of(message, "query.advertise", node=2) or of(message, "query.advertise"):
            record = reply.content["masks"]
            first.append(record["box-key"])
            record["box-key"] = first[0]

    strategy = {"tolerate_failures": True}
    with refused("clients-missing", "another", kind=RunFailedError):
        masked(tmp_path, tamper=copied, strategy=strategy)
