"""Experiments go on where they were, say what they cost, and refuse what they cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from typer.testing import CliRunner

from bract.errors import BractError
from experiments.papers import estimate, running
from experiments.papers.__main__ import paper as app
from experiments.papers.catalog import experiments, find
from experiments.papers.results import Sample, path_of, read_result
from experiments.papers.runners.base import Context, Measured
from experiments.papers.runners.guardian_steps import StepsRunner
from experiments.papers.running import plan, run
from experiments.papers.summary import stand

NAME = "guardian/figure-2"
ROWS = 8


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every unit that is measured, which costs nothing here."""
    done: list[dict[str, Any]] = []

    def fake(self: Any, settings: Any, unit: int, context: Any) -> Measured:
        done.append(settings.model_dump())
        loss = 1.0 if settings.start == "gradient" else 2.0
        samples = [Sample(group=i, values={"loss": loss + 0.01 * i}) for i in range(4)]
        return Measured(samples)

    monkeypatch.setattr(StepsRunner, "run", fake)
    monkeypatch.setattr(StepsRunner, "missing", lambda *_: None)
    return done


def made(out: Path, scale: Any = "laptop", **more: Any) -> Any:
    (experiment,) = find([NAME])
    return plan(experiment, scale, out, Context(), **more)


def go(out: Path, scale: Any = "laptop", **more: Any) -> None:
    run(made(out, scale), out, Context(), command=["bract"], **more)


def test_an_experiment_that_is_interrupted_anywhere_resumes(
    measured: list[Any], tmp_path: Path
) -> None:
    def stop(name: str) -> None:
        if len(measured) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, tell=stop)
    (experiment,) = find([NAME])
    result = read_result(tmp_path, experiment, "laptop")
    assert result is not None and len(result.rows) == 3
    assert stand(experiment, tmp_path).state == "not run", "part of an experiment decides nothing"
    assert made(tmp_path).left == ROWS - 3
    go(tmp_path)
    assert len(measured) == ROWS
    assert stand(experiment, tmp_path).state == "reproduced"
    go(tmp_path)
    assert len(measured) == ROWS, "what is done is not done again"


def test_what_other_code_or_settings_made_is_measured_anew(
    measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path)
    assert made(tmp_path, "smoke").left == 2, "another scale has other settings"
    monkeypatch.setattr(running, "code_digest", lambda *_: "other")
    assert made(tmp_path).left == ROWS


def test_a_result_of_other_settings_than_the_declared_ones_decides_nothing(
    measured: list[Any], tmp_path: Path
) -> None:
    go(tmp_path)
    (experiment,) = find([NAME])
    assert stand(experiment, tmp_path).state == "reproduced"
    more = experiment.scales["laptop"].model_copy(update={"over": {"uploads": 64}})
    changed = experiment.model_copy(update={"scales": experiment.scales | {"laptop": more}})
    assert stand(changed, tmp_path).state == "not run"


def test_rows_that_two_experiments_share_are_measured_once(tmp_path: Path) -> None:
    one, other = find(["adadefense/table-2", "adadefense/table-4"])
    keys = [
        {
            key
            for row in plan(e, "smoke", tmp_path, Context(), estimate=False).keys.values()
            for key in row
        }
        for e in (one, other)
    ]
    assert keys[0] == keys[1]


def test_too_many_hours_are_refused_before_anything_starts(
    measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "cost", lambda *_: estimate.Cost(7200.0, 1e6))
    with refused("budget-spent", "16.0", "--max-hours", "24.0"):
        made(tmp_path)
    assert made(tmp_path, max_hours=20.0).cost.seconds == 7200.0 * ROWS
    assert not measured


def test_too_much_memory_is_refused_before_anything_starts(
    measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "cost", lambda *_: estimate.Cost(1.0, 1e15))
    with refused("out-of-memory", "1000.0", "TB"):
        made(tmp_path)


def test_missing_data_say_where_they_belong_and_what_runs_without_them(tmp_path: Path) -> None:
    (experiment,) = find(["guardian/table-3"])
    with pytest.raises(BractError) as caught:
        plan(experiment, "gpu", tmp_path, Context(folder=tmp_path / "data"))
    said = str(caught.value)
    assert str(tmp_path / "data" / "cifar-10-batches-py") in said
    assert "python -m experiments.papers run guardian/table-3 --scale laptop" in said


def test_what_cannot_be_run_says_what_it_would_take(tmp_path: Path) -> None:
    bert, drawn = find(["guardian/table-5", "guardian/figure-1"])
    unrun = bert.model_copy(update={"scales": {}, "needs": "weights of BERT"})
    with refused("unknown-name", "BERT"):
        plan(unrun, "laptop", tmp_path, Context())
    with refused("usage", "guardian/figure-1"):
        plan(drawn, "laptop", tmp_path, Context())


def test_a_damaged_result_is_named(measured: list[Any], tmp_path: Path) -> None:
    go(tmp_path)
    (experiment,) = find([NAME])
    path = path_of(tmp_path, experiment, "laptop")
    path.write_text(path.read_text()[:200])
    with refused("file-damaged", "figure-2-laptop.json", "JSON"):
        stand(experiment, tmp_path)
    made(tmp_path)


def test_the_list_has_the_fields_that_scripts_read(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["list", "--format", "json", "--results", str(tmp_path)])
    rows = json.loads(done.stdout)
    assert {row["experiment"] for row in rows} == set(experiments())
    for row in rows:
        assert {"paper", "experiment", "state", "scale", "result"} <= set(row)
        assert row["state"] in ("not run", "needs", "nothing to run")


def test_the_command_runs_resumes_and_reports(measured: list[Any], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "results")]
    done = CliRunner().invoke(app, ["run", NAME, "--scale", "laptop", *out])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(app, ["run", NAME, "--scale", "laptop", "--format", "json", *out])
    assert json.loads(again.stdout)[0]["state"] == "reproduced"
    assert len(measured) == ROWS
    page = tmp_path / "papers.html"
    CliRunner().invoke(app, ["report", "--results", str(tmp_path / "results"), "--out", str(page)])
    text = page.read_text()
    assert "reproduced at laptop" in text
    assert "PSNR as printed 50.11" in text


def test_a_plan_without_running_costs_nothing(measured: list[Any], tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        ["run", NAME, "--scale", "laptop", "--dry-run", "--format", "json",
         "--out", str(tmp_path)],
    )  # fmt: skip
    assert json.loads(done.stdout)[0]["left"] == ROWS
    assert not measured


def test_results_that_are_not_there_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["list", "--results", str(tmp_path / "none")])
    assert isinstance(done.exception, BractError)
    assert "no such folder" in str(done.exception)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", NAME, "--device", "nonsense"])
    assert isinstance(done.exception, BractError)
    assert "--device 'nonsense'" in str(done.exception)


def test_a_folder_of_data_that_is_not_there_is_refused(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    done = CliRunner().invoke(app, ["run", NAME, "--dry-run", "--data", str(gone)])
    assert isinstance(done.exception, BractError)
    assert f"--data: {gone} is no folder" in str(done.exception)


def test_names_are_listed_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = CliRunner().invoke(app, ["list"]).stdout
    assert all(name in listed for name in experiments())
