"""What a run's encryption cost and cut, in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reporting import gather

from bract.report import write_report


def report_of_clients(root: Path, reports: dict[str, dict[str, Any]]) -> None:
    """Add figures to each client's row in the last line of ``metrics.jsonl``."""
    path = root / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for client, figures in reports.items():
        rows[-1]["clients"][client] |= figures
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_clipped_values_are_counted_and_said(make_run: Any, parse: Any) -> None:
    root = make_run(rounds=2)
    report_of_clients(root, {"client-0": {"clipped": 0}, "client-1": {"clipped": 1234.0}})
    facts = gather(root)
    assert [c["clipped"] for c in facts["clients"]] == [0, 1234, None]
    assert any("1234 values" in n and "in round 2 at client-1" in n for n in facts["notes"])
    text = parse(write_report(root).read_text()).text
    assert "1,234 values clipped" in text
    assert "raise encryption.clip" in text


def test_a_run_that_clipped_nothing_says_nothing_of_it(make_run: Any) -> None:
    root = make_run(rounds=1)
    assert not any("clip" in note for note in gather(root)["notes"])
    assert "clipped" not in write_report(root).read_text()


def test_the_time_of_encryption_stands_beside_the_time_of_the_round(
    make_run: Any, parse: Any
) -> None:
    root = make_run(rounds=1)
    report_of_clients(root, {"client-0": {"encrypt_seconds": 0.25, "decrypt_seconds": 0.5}})
    assert gather(root)["clients"][0]["encryption_seconds_per_round"] == 0.75
    assert "0.8 s of it encryption" in parse(write_report(root).read_text()).text
