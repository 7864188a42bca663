"""The page of a third-party app, of which captures alone are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reporting import gather

from bract import Observation, ObservationStore
from bract.report import write_report
from bract.schema import ClientDeclaration


@pytest.fixture
def own_app(tmp_path: Path, writers: Any) -> Path:
    """A folder that the hook and an audit left: no run record, configuration or metrics."""
    root = tmp_path / "my-app"
    store = ObservationStore(root / "captures")
    for number in (1, 2):
        for position, (client, examples) in enumerate((("node-7", 4), ("node-8", 717))):
            received = 1_772_000_000.0 + 100 * number + position
            store.save(
                Observation(
                    round=number,
                    client=client,
                    parameters={},
                    update={},
                    declaration=ClientDeclaration(model="my_app.task:Net", num_examples=examples),
                    provenance={"run_id": "2636878478201779231", "received": received},
                )
            )
    writers.audit(root, 1, "node-7", noise=1.2)
    return root


def test_rounds_examples_and_origin_are_those_of_the_captures(own_app: Path) -> None:
    facts = gather(own_app)
    run = facts["run"]
    assert (run["status"], run["rounds_done"]) == ("captured", 2)
    assert (run["model"], run["inputs"]) == ("my_app.task:Net", ["image"])
    assert run["flower_run_id"] == "2636878478201779231"
    assert run["first_upload"] == "2026-02-25T06:15:00+00:00"
    assert run["last_upload"] == "2026-02-25T06:16:41+00:00"
    assert [(c["rounds"], c["examples"]) for c in facts["clients"]] == [(2, 4), (2, 717)]


def test_the_page_of_captures_alone_has_no_empty_fact(own_app: Path, parse: Any) -> None:
    text = parse(write_report(own_app).read_text()).text
    assert "my-app · my_app.task:Net · 2 clients · 2 rounds · captured 2026-02-25 06:16:41" in text
    for name in ("Started", "Versions", "Time in rounds", "No round recorded an accuracy"):
        assert name not in text
    clients = text.partition("Uploads attacked")[2].partition("Attacks, against")[0]
    assert "1 of 2 717" in clients or "0 of 2 717 2" in clients
    assert "Accuracy" not in clients and "Time a round" not in clients


def test_a_moment_that_has_no_date_is_left_out(own_app: Path) -> None:
    for path in own_app.glob("captures/*/*/observation.json"):
        content = json.loads(path.read_text())
        content["provenance"]["received"] = 1e300
        path.write_text(json.dumps(content))
    assert gather(own_app)["run"]["last_upload"] is None
