import subprocess
import sys
from pathlib import Path

import pytest

from bract.process import peak_memory, watched_memory

SIZE = 120_000_000


# Pieces too small to be mapped one by one are freed below one that stays, so that they are kept.
MEASURED = f"""
import torch
from bract.process import watched_memory
before = torch.ones({2 * SIZE // 4})
small = [torch.ones(4_000) for _ in range({2 * SIZE // 16_000})]
stays = torch.ones(4_000)
del small
with watched_memory() as peak:
    torch.ones({SIZE // 4})
with watched_memory() as smaller:
    pass
print(before.numel(), peak.bytes, smaller.bytes)
"""


@pytest.mark.processes
def test_a_peak_counts_what_was_freed_and_not_what_was_held_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True, timeout=120
    )
    _, peak, smaller = map(int, done.stdout.split())
    assert 0.9 * SIZE < peak < 1.5 * SIZE
    assert smaller < SIZE / 2


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
