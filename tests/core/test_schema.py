"""Records: what is written is what is read, and what does not fit is refused by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from refusals import refused

from bract.config import build_config
from bract.rundir import RunDirectory
from bract.schema.metrics import ClientRow, GlobalRow, MetricsRow
from bract.schema.record import RecordError
from bract.schema.run import RunState


def test_a_record_reads_back_what_it_wrote() -> None:
    row = MetricsRow(
        round=1,
        evaluation=GlobalRow(loss=0.5, accuracy=0.25),
        clients={"a": ClientRow.of({"train_loss": 2.0}, num_examples=3, weight=1.0)},
    )
    assert MetricsRow.parse(row.to_dict(), source="row") == row
    assert row.to_dict()["schema"] == 3 and row.to_dict()["global"]["accuracy"] == 0.25


def test_a_writer_cannot_add_a_field_that_the_schema_lacks(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create(build_config({}))
    with pytest.raises(ValidationError, match="verzions"):
        run.update_state(verzions={})
    assert not run.state_path.exists()


@pytest.mark.parametrize("found", [1, 3, "2", None])
def test_another_version_is_refused_before_its_fields_are_looked_at(found: object) -> None:
    content = {"schema": found, "a field of that version": 1}
    with refused("schema-version", "run.json", "schema", 2):
        RunState.parse_text(json.dumps(content), source="run.json")


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2, "status": "asleep"}', '{"schema": 2, '])
def test_what_is_no_such_record_is_refused_with_the_file(text: str) -> None:
    with refused("file-damaged", "run.json") as caught:
        RunState.parse_text(text, source="run.json")
    assert isinstance(caught.value, RecordError)
    assert "run.json" not in caught.value.detail


def test_a_metric_by_a_name_of_a_clients_own_is_kept_apart() -> None:
    row = ClientRow.of({"seconds": 1.5, "perplexity": 30.0}, num_examples=8, weight=0.5)
    assert row.seconds == 1.5 and row.other == {"perplexity": 30.0}


def test_a_diverged_loss_is_null_in_the_file(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_metrics(MetricsRow(round=1, evaluation=GlobalRow(loss=math.nan, accuracy=0.1)))
    assert json.loads(run.metrics_path.read_text())["global"]["loss"] is None


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_metrics(MetricsRow(round=0))
    with run.metrics_path.open("a") as file:
        file.write('{"schema": 3, "round": 1, "secon')
    assert [row.round for row in run.metrics()] == [0]


@pytest.mark.processes
def test_the_records_load_neither_torch_nor_flower() -> None:
    code = "import sys, bract.schema; print({'torch', 'flwr'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
