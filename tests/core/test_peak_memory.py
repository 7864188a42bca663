from pathlib import Path

import pytest
import torch

from bract import peak_memory
from bract.peak_memory import watched_memory

SIZE = 120_000_000


def test_a_peak_counts_what_was_freed_and_not_what_was_held_before() -> None:
    before = torch.ones(2 * SIZE // 4)
    with watched_memory() as peak:
        torch.ones(SIZE // 4)
    assert before.numel() and peak.bytes is not None and 0.9 * SIZE < peak.bytes < 1.5 * SIZE
    with watched_memory() as smaller:
        pass
    assert smaller.bytes is not None and smaller.bytes < SIZE / 2


def test_a_peak_is_known_after_an_error() -> None:
    with pytest.raises(ValueError, match="ended"), watched_memory() as peak:
        raise ValueError("ended")
    assert peak.bytes is not None


def test_where_a_peak_cannot_be_reset_it_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak_memory, "_RESET", tmp_path / "missing" / "clear_refs")
    with watched_memory() as peak:
        pass
    assert peak.bytes is None
