"""Other descriptions are looked for within a time, and what was left out is said."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from refusals import refused
from test_signal_app import checked, redescribed, run
from torch import nn

from bract.audit.description.search_time import SearchTime


def other_model() -> nn.Module:
    """Another activation than `trained`, which no other description explains."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def trained() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))


IMAGES = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("batch", [6, 2], ids=["one step", "several steps"])
def test_a_search_without_time_ends_and_names_what_it_did_not_try(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = run(tmp_path, trained, IMAGES, torch.arange(6) % 3, batch=batch)
    model = f"{__name__}:other_model"
    again = redescribed(captures, {"model": model, "training": {"batch_size": batch}})
    with refused("declaration-wrong", "give another", "for want of time not tried", "--seconds 60"):
        checked(again, tmp_path, clock=SearchTime(0.0))
    now = time.thread_time()
    monkeypatch.setattr("time.thread_time", lambda: now)
    tried: list[str] = []
    clock = SearchTime(1.0, tried.append)
    with refused("declaration-wrong") as raised:
        checked(again, tmp_path, clock=clock)
    assert "--seconds" not in str(raised.value)
    assert any("adam" in words.lower() for words in tried) and not clock.untried


def test_sizes_of_a_batch_that_were_broken_off_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all else is tried in the time that is left."""
    captures = run(tmp_path, trained, IMAGES, torch.arange(6) % 3, batch=6)
    again = redescribed(captures, {"model": f"{__name__}:other_model"})
    now = [time.thread_time()]
    monkeypatch.setattr("time.thread_time", lambda: now[-1])

    def tell(words: str) -> None:
        now.append(now[-1] + 5.0 * words.startswith("batches of"))

    clock = SearchTime(1000.0, tell)
    with refused("declaration-wrong"):
        checked(again, tmp_path, clock=clock)
    assert {"other sizes of a batch"} <= set(clock.untried)
