from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from bract.config.encryption import EncryptionConfig
from bract.errors import BractError
from bract.protocol.ciphertexts import (
    EncryptedUpdate,
    apply_mean,
    combine_updates,
    decrypt_mean,
    encrypt_update,
    plan_layout,
    split_floating,
)
from bract.updates.update import difference

CONFIG = EncryptionConfig(scheme="paillier", clip=0.5, buffer_clip=64.0)
BOUNDS = {
    part: plan_layout(CONFIG, part, 1).fixed_point.bound for part in ("parameters", "buffers")
}
EXTREMES = [0.0, 0.5, -0.5, 1e-9, 0.7, -3.0]

clients = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from(["random", "extreme"])),
    min_size=1,
    max_size=6,
)
shapes = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=3)


def tensors(seed: Any, kind: Any, names: Any, sizes: Any, scale: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, size in zip(names, sizes, strict=False):
        value = torch.randn(size, generator=generator, dtype=torch.float64) * scale
        if kind == "extreme":
            pick = torch.randint(len(EXTREMES), value.shape, generator=generator)
            value = torch.tensor(EXTREMES, dtype=torch.float64)[pick]
        made[name] = value
    return made


@settings(max_examples=25, deadline=None)
@given(clients=clients, sizes=shapes, buffers=st.booleans())
def test_the_encrypted_aggregate_is_the_plain_weighted_mean(
    whole_key: Any, clients: Any, sizes: Any, buffers: Any
) -> None:
    weights = [weight for _, weight, _ in clients]
    updates = [tensors(s, k, ["w", "v", "u"], sizes, 0.1) for s, _, k in clients]
    moved = [
        tensors(s + 1, k, ["running_mean"], [[3]], 9.0) if buffers else {} for s, _, k in clients
    ]
    encrypted = [
        encrypt_update(whole_key, u, b, CONFIG) for u, b in zip(updates, moved, strict=True)
    ]
    total = combine_updates(whole_key.public, [e for e, _ in encrypted], weights)
    mean = decrypt_mean(whole_key, EncryptedUpdate.from_tensors(total.to_tensors()))
    assert set(mean) == ({"parameters", "buffers"} if buffers else {"parameters"})
    for part, plain, clip in (("parameters", updates, 0.5), ("buffers", moved, 64.0)):
        for name, value in mean.get(part, {}).items():
            kept = [w * p[name].clamp(-clip, clip) for w, p in zip(weights, plain, strict=True)]
            wanted = sum(kept) / sum(weights)
            assert value.shape == wanted.shape
            assert float((value - wanted).abs().max()) <= BOUNDS[part]
    outside = sum(int((v.abs() > 0.5).sum()) for u in updates for v in u.values())
    outside += sum(int((v.abs() > 64.0).sum()) for b in moved for v in b.values())
    assert sum(clipped for _, clipped in encrypted) == outside


def test_a_model_moves_by_the_learning_rate_and_its_buffers_by_their_change() -> None:
    model = {
        "w": torch.tensor([1.0, 2.0]),
        "running_mean": torch.tensor([5.0]),
        "num_batches_tracked": torch.tensor(7),
    }
    mean = {
        "parameters": {"w": torch.tensor([0.5, -1.0], dtype=torch.float64)},
        "buffers": {"running_mean": torch.tensor([2.0], dtype=torch.float64)},
    }
    moved = apply_mean(model, mean, 0.1)
    torch.testing.assert_close(moved["w"], torch.tensor([0.95, 2.1]))
    torch.testing.assert_close(moved["running_mean"], torch.tensor([3.0]))
    assert moved["num_batches_tracked"] == 7
    assert list(moved) == list(model)


def test_integer_buffers_are_averaged_exactly_and_rounded(whole_key: Any) -> None:
    counts, flags = [7, 2**31 + 4, 10], [True, True, False]
    model = {"w": torch.zeros(1), "count": torch.tensor(2**31), "flag": torch.tensor(True)}
    updates = []
    for count, flag in zip(counts, flags, strict=True):
        local = {"count": torch.tensor(count), "flag": torch.tensor(flag)}
        change = difference({name: model[name] for name in local}, local)
        updates.append(encrypt_update(whole_key, {"w": torch.zeros(1)}, change, CONFIG))
    assert [clipped for _, clipped in updates] == [0, 0, 0]
    total = combine_updates(whole_key.public, [u for u, _ in updates], [1, 2, 1])
    moved = apply_mean(model, decrypt_mean(whole_key, total), 1.0)
    assert moved["count"].item() == round((7 + 2 * (2**31 + 4) + 10) / 4)
    assert moved["count"].dtype == torch.int64
    assert moved["flag"].item() is True


def test_an_aggregate_of_another_model_is_refused() -> None:
    mean = {"parameters": {"other": torch.zeros(2)}}
    with refused("model-mismatch"):
        apply_mean({"w": torch.zeros(2)}, mean, 1.0)


def test_integer_buffers_are_told_from_floating_ones() -> None:
    floating, rest = split_floating({"a": torch.zeros(1), "b": torch.tensor(3)})
    assert (list(floating), list(rest)) == (["a"], ["b"])


def replaced(record: Any, **arrays: Any) -> Any:
    return {**record, **{n: torch.from_numpy(np.array(v)) for n, v in arrays.items()}}


def test_a_damaged_record_is_refused(whole_key: Any) -> None:
    record = encrypt_update(whole_key, {"w": torch.zeros(200)}, {}, CONFIG)[0].to_tensors()
    whole = record["parameters"].numpy()
    with refused("message-malformed"):
        EncryptedUpdate.from_tensors(replaced(record, parameters=whole[:-1]))
    with refused("message-malformed"):
        EncryptedUpdate.from_tensors(replaced(record, parameters=whole[:, :-1]))
    with refused("message-malformed", "header"):
        EncryptedUpdate.from_tensors(replaced(record, header=np.zeros(9, np.uint8)))
    with refused("message-malformed", "header"):
        EncryptedUpdate.from_tensors({"parameters": record["parameters"]})
    header = record["header"].numpy().tobytes().replace(b"[200]", b"[100]")
    with refused("message-malformed", 200, 100):
        EncryptedUpdate.from_tensors(replaced(record, header=np.frombuffer(header, dtype=np.uint8)))


def test_a_key_of_another_run_opens_nothing(whole_key: Any, another_key: Any) -> None:
    update, _ = encrypt_update(whole_key, {"w": torch.zeros(3)}, {}, CONFIG)
    with pytest.raises(BractError, match=whole_key.public.key_id):
        decrypt_mean(another_key, update)


def test_nan_is_refused(whole_key: Any) -> None:
    with refused("message-malformed", "NaN"):
        encrypt_update(whole_key, {"w": torch.tensor([1.0, float("nan")])}, {}, CONFIG)


def test_weights_above_the_planned_sum_are_refused_with_the_numbers(whole_key: Any) -> None:
    update, _ = encrypt_update(whole_key, {"w": torch.zeros(3)}, {}, CONFIG)
    with refused("message-malformed", 32, 31):
        combine_updates(whole_key.public, [update, update], [16, 16])
