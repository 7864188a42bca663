from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bract.audit.captures import Capture
from bract.audit.questions.reconstruction import plan as batches
from bract.audit.questions.reconstruction.plan import in_turns, together
from bract.schema import ClientDeclaration

PLAIN = ClientDeclaration(algorithm="fedsgd", model="lenet", batch_size=2, num_examples=2)


def captures(rounds: Any, *protocols: Any, members: Any = ()) -> Any:
    return [
        Capture(number, f"client-{i}", declaration, members=members)
        for number in range(1, rounds + 1)
        for i, declaration in enumerate(protocols)
    ]


def sizes(found: Any, device: Any = "cpu", max_images: Any = 8) -> Any:
    return [len(batch) for batch in together(found, device=device, max_images=max_images)]


def test_captures_of_one_shape_run_together_across_rounds() -> None:
    assert sizes(captures(3, PLAIN, PLAIN)) == [6]
    other = replace(PLAIN, model="lenet-strided")
    assert sizes(captures(3, PLAIN, other)) == [3, 3]
    larger = replace(PLAIN, batch_size=4, num_examples=4)
    assert sizes(captures(3, PLAIN, larger)) == [3, 3]
    more = replace(PLAIN, num_examples=60)  # one batch of 2 all the same
    assert sizes(captures(3, PLAIN, more)) == [6]


def test_a_gpu_takes_more_than_a_cpu() -> None:
    assert sizes(captures(150, PLAIN, PLAIN)) == [8] * 37 + [4]
    assert sizes(captures(150, PLAIN, PLAIN), "cuda") == [256, 44]


def test_an_aggregate_runs_apart_from_clients() -> None:
    mean = captures(2, PLAIN, members=("a", "b"))
    assert sizes([*captures(2, PLAIN), *mean]) == [2, 2]


def test_captures_that_fill_the_memory_run_in_smaller_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "update.safetensors").write_bytes(b"0" * 40)
    monkeypatch.setattr(batches, "MEMORY", 100)
    found = [replace(c, folder=tmp_path) for c in captures(5, PLAIN)]
    assert sizes(found) == [2, 2, 1]
    monkeypatch.setattr(batches, "MEMORY", 10)
    assert sizes(found) == [1] * 5


@pytest.mark.parametrize("declared", [{}, {"defenses": ({"name": "noise", "std": 0.1},)}])
def test_what_declares_too_little_is_planned_all_the_same(declared: Any) -> None:
    bare = ClientDeclaration(**declared)
    assert sizes(captures(2, bare)) == [2]


def test_the_first_of_a_limited_audit_are_a_sample_of_all_rounds() -> None:
    found = captures(10, *[PLAIN] * 30)
    order = in_turns(found, seed=0)
    assert sorted(order, key=lambda c: c.key) == sorted(found, key=lambda c: c.key)
    for first in (10, 50, 200):
        assert set(Counter(c.round for c in order[:first]).values()) == {first // 10}
    clients = Counter(c.client for c in order[:60])
    assert len(clients) > 15, "another client in each round"
    assert [c.key for c in in_turns(reversed(found), seed=0)] == [c.key for c in order]
    assert in_turns(found, seed=1) != order


def test_uploads_of_the_fewest_examples_have_the_first_turns() -> None:
    more = replace(PLAIN, num_examples=60)
    order = in_turns(captures(3, more, PLAIN, ClientDeclaration()), seed=0)
    assert [c.declaration.num_examples for c in order] == [2, 2, 2, 60, 60, 60, None, None, None]
