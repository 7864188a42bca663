"""Masked sums that a site helps to unmask: which of them can be combined to too few clients."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import bract.client.sums as sums
from bract.client.policy import SitePolicy
from bract.updates import shares

FIVE = dict.fromkeys("abcde", 1)


def smallest_support(vectors: Sequence[Mapping[str, int]]) -> int:
    """Return the fewest clients of any combination of sums, by trying every set of them."""
    clients = sorted({c for v in vectors for c in v})
    rows = np.array([[v.get(c, 0) for c in clients] for v in vectors], dtype=float)
    rank = np.linalg.matrix_rank(rows)
    for size in range(1, len(clients) + 1):
        for kept in itertools.combinations(range(len(clients)), size):
            others = [i for i in range(len(clients)) if i not in kept]
            # Some combination vanishes on all the others, and not on these.
            if rank > (np.linalg.matrix_rank(rows[:, others]) if others else 0):
                return size
    raise AssertionError("no sum at all")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 3), min_size=1),
        min_size=1,
        max_size=4,
    )
)
def test_no_combination_holds_fewer_clients_than_the_smallest_group(
    vectors: list[dict[str, int]],
) -> None:
    groups = sums.separable(vectors)
    assert sorted(c for g in groups for c in g) == sorted({c for v in vectors for c in v})
    assert smallest_support(vectors) >= min(map(len, groups))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 3), min_size=1),
            st.integers(-4, 4),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_no_combination_counts_as_fewer_clients_than_a_group(
    terms: list[tuple[dict[str, int], int]],
) -> None:
    weights = [sum(k * v.get(c, 0) for v, k in terms) for c in "abcdef"]
    groups = sums.separable([v for v, _ in terms])
    fewest = min(shares.counted([*group.values()]) for group in groups)
    assert 1 <= fewest <= min(map(len, groups))
    assert not any(weights) or shares.counted(weights) >= fewest


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.001, 1.0), min_size=3, max_size=30))
def test_the_weights_of_a_run_are_such_that_its_clients_unmask_the_sum(
    examples: list[float],
) -> None:
    cut = shares.limited(examples)
    found = sum(s * s for s in cut) / max(cut) ** 2
    assert found >= shares.SMALLEST_SUM * (1 - 1e-9)
    assert cut == examples or found == pytest.approx(shares.SMALLEST_SUM)


@pytest.mark.parametrize("heavy", [2, 5, 27])
def test_a_sum_with_one_heavy_client_counts_as_its_cosine_says(heavy: int) -> None:
    weights = [heavy] + [1] * 9
    cosine = heavy / np.linalg.norm(weights)  # of the sum of unit vectors at right angles
    assert float(shares.counted(weights)) == pytest.approx(cosine**-2)
    most = shares.sufficient_share(10, 3.0)
    equal = np.full(9, (1 - most) / 9)
    assert (most**2 + equal @ equal) / most**2 == pytest.approx(3.0)


@pytest.mark.parametrize("weights", [(2, 2, 2, 1), (9, 1, 1, 1, 1)])
def test_a_group_is_counted_by_its_weights(weights: tuple[int, ...], tmp_path: Path) -> None:
    policy = SitePolicy(min_summed_clients=4)
    record = sums.Sums(RecordDict(), directory=tmp_path, site="a", policy=policy)
    named = dict(zip("abcde", weights, strict=False))
    with refused(
        "policy-refused", "min_summed_clients: 4", f"{float(shares.counted(weights)):.3g}"
    ):
        record.add("roster", named, model="model", config="c")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([FIVE], {**FIVE, "a": 2}),
        ([FIVE], dict.fromkeys("abcd", 1)),
        # Each pair differs by three clients or more, all four together do not.
        (
            [dict.fromkeys(set("abcdefg") - set(gone), 1) for gone in ("ab", "cd", "ef")],
            dict.fromkeys("abcdef", 1),
        ),
    ],
    ids=["another weight", "one less", "blocks"],
)
def test_sums_that_can_be_combined_to_fewer_clients_than_the_policy_allows(
    before: list[dict[str, int]], now: dict[str, int], tmp_path: Path
) -> None:
    policy = SitePolicy(min_summed_clients=3)
    record = sums.Sums(RecordDict(), directory=tmp_path, site="a", policy=policy)
    with refused("policy-refused", "min_summed_clients: 3"):
        for number, weights in enumerate([*before, now]):
            record.add(f"roster {number}", weights, model=f"model {number}", config="c")
    record.add("other", {c: 4 * w for c, w in before[0].items()}, model="x", config="c")


def test_one_model_in_another_dtype_or_with_other_statistics_is_the_same_model() -> None:
    model = {"w": torch.rand(3, 2), "norm.running_mean": torch.rand(3), "count": torch.tensor(0.0)}
    update = {"w": torch.rand(3, 2), "count": torch.tensor(1.0)}
    others = {
        "dtype": {**model, "w": model["w"].double()},
        "statistics": {**model, "norm.running_mean": torch.zeros(3)},
        "sign of zero": {**model, "count": torch.tensor(-0.0)},
    }
    digests = {sums.model_digest(m, update) for m in (model, *others.values())}
    assert len(digests) == 1
    assert sums.model_digest({**model, "w": model["w"] + 1e-6}, update) not in digests
