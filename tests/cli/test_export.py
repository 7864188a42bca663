"""A run's figures in other tools, read back with those tools."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from bract.cli.export import export_run
from bract.config import build_config
from bract.parse import dump_json
from bract.rundir import RunDirectory
from bract.schema import AuditResult
from bract.schema.audit import ImageResult, Scores
from bract.schema.metrics import ClientRow, GlobalRow, MetricsRow


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two rounds, with one client of a strange name and one scored attack."""
    run = RunDirectory(tmp_path / "digits")
    run.create(build_config({"name": "digits", "rounds": 2}))
    run.update_state(name="digits", status="finished")
    for number in (1, 2):
        client = ClientRow.of({"train_loss": 2.0 / number}, num_examples=10, weight=1.0)
        judged = GlobalRow(loss=1.0 / number, accuracy=0.4 * number)
        clients = {"ward 7/ä": client}
        run.append_metrics(
            MetricsRow(round=number, seconds=3.0, time=1.0, evaluation=judged, clients=clients)
        )
    image = ImageResult(index=0, label=7, true_label=7, scores=Scores(ssim=0.75, psnr=20.0))
    result = AuditResult(
        round=1, client="ward 7/ä", attack="ig", tier="oblivious", seed=0, scored=True,
        images=[image],
    )  # fmt: skip
    path = run.audit / "ig" / "round-0001--x.json"
    path.parent.mkdir(parents=True)
    path.write_text(dump_json(result.to_dict()))
    return run


EXPECTED = {
    "global/accuracy": [(1, 0.4), (2, 0.8)],
    "global/loss": [(1, 1.0), (2, 0.5)],
    "clients/ward_7__/train_loss": [(1, 2.0), (2, 1.0)],
    "leakage/ig-oblivious/ward_7__/ssim_mean": [(1, 0.75)],
}


def test_tensorboard_reads_what_was_exported(run: RunDirectory) -> None:
    accumulators: Any = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    folder = Path(export_run(run.root, "tensorboard", None))
    events = accumulators.EventAccumulator(str(folder / "digits"))
    events.Reload()
    for name, points in EXPECTED.items():
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in points], name
        assert [value for _, value in found] == pytest.approx([value for _, value in points])
    assert not events.Tags()["images"]
    assert "strategy.name: fedavg" in str(events.Tensors("run/text_summary")[0].tensor_proto)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_reads_what_was_exported(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow: Any = pytest.importorskip("mlflow")
    uri = export_run(run.root, "mlflow", None)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("bract")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "digits" and found.info.status == "FINISHED"
    assert found.data.params["strategy.name"] == "fedavg"
    for name, points in EXPECTED.items():
        history = client.get_metric_history(found.info.run_id, name)
        assert {m.step: m.value for m in history} == pytest.approx(dict(points)), name


def test_what_cannot_be_exported_is_said(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("unknown-name", "tensorboad"):
        export_run(run.root, "tensorboad", None)
    run.metrics_path.unlink()
    (run.audit / "ig" / "round-0001--x.json").unlink()
    with refused("file-missing"):
        export_run(run.root, "tensorboard", None)


def test_a_tool_that_is_not_installed_is_named_with_what_installs_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("bract.cli.export.importlib.import_module", missing)
    with refused("package-missing", "mlflow"):
        export_run(run.root, "mlflow", None)


def hostile(run: RunDirectory, **changes: Any) -> None:
    """Make the run one of another party, whose records say what they like."""
    run.update_state(**changes)
    names = ["../../x", "..", "", "a/b", "a_b", "x" * 5000, "![](http://host/x)", "\x1b[2J\n"]
    row = ClientRow.of({"train_loss": 1e308}, num_examples=1, weight=1.0)
    clients = dict.fromkeys(names, row)
    for number in (3, -1, 2**63, 10**30):
        run.append_metrics(MetricsRow(round=number, clients=clients))


@pytest.mark.parametrize("name", ["../../outside", "/", "..", "", "x" * 400, "a\0b"])
def test_a_run_s_own_names_are_no_paths(run: RunDirectory, name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    hostile(run, name=name)
    before = {path for path in tmp_path.rglob("*") if run.root not in path.parents}
    folder = Path(export_run(run.root, "tensorboard", None))
    (made,) = folder.iterdir()
    assert made.is_dir() and any(made.iterdir())
    assert {path for path in tmp_path.rglob("*") if run.root not in path.parents} == before


@pytest.mark.thorough
def test_hostile_names_and_figures_reach_mlflow_as_series_of_their_own(run: RunDirectory) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    hostile(run, name="../../x")
    client = mlflow.MlflowClient(tracking_uri=export_run(run.root, "mlflow", None))
    experiment = client.get_experiment_by_name("bract")
    (found,) = client.search_runs([experiment.experiment_id])
    mine = [name for name in found.data.metrics if name.endswith("/train_loss")]
    assert len(mine) == 1 + 8
    assert all(len(name) < 250 and ".." not in name.split("/") for name in mine)


def test_no_link_in_a_run_is_written_through(run: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("tensorboard", "mlflow.db"):
        (run.root / name).symlink_to(outside / name)
    for to in ("tensorboard", "mlflow"):
        with refused("file-unwritable", tmp_path):
            export_run(run.root, to, None)
    (run.root / "tensorboard").unlink()
    (run.root / "tensorboard").mkdir()
    (run.root / "tensorboard" / "digits").symlink_to(outside)
    with refused("file-unwritable", tmp_path):
        export_run(run.root, "tensorboard", None)
    assert not list(outside.iterdir())


def test_what_a_redacted_report_leaves_out_is_not_exported(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("bract.cli.export._to_mlflow", lambda _run, report, *_: sent.append(report))
    monkeypatch.setattr("bract.cli.export.without_credentials", str)
    export_run(run.root, "mlflow", None)
    assert sent[0].redacted


@pytest.mark.parametrize("to", ["tensorboard", "mlflow"])
def test_what_a_tool_raises_is_one_line_without_credentials(
    to: str, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> str:
        raise RuntimeError("no answer\nfrom https://user:secret@host/x?token=secret")

    monkeypatch.setattr(f"bract.cli.export._to_{to}", fail)
    with refused("run-failed", "RuntimeError", "https://host/x") as caught:
        export_run(run.root, to, "https://user:secret@host")
    assert "secret" not in str(caught.value)
    where = "https://user:secret@host/x"
    monkeypatch.setattr(f"bract.cli.export._to_{to}", lambda *_: where)
    export_run(run.root, to, where, as_json=True)
    shown = capsys.readouterr()
    assert "secret" not in shown.out + shown.err and "https://host/x" in shown.out


def test_mlflow_reports_no_use_of_it_to_its_makers(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    monkeypatch.setattr("bract.cli.export._needed", lambda *_: 1 / 0)
    with refused("run-failed", "ZeroDivisionError"):
        export_run(run.root, "mlflow", None)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
