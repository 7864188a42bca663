"""Where captures land: where the operator of the server says."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.serverapp.strategy import FedAvg
from refusals import refused

from bract import ObservationStore
from bract.installed import flower
from bract.runtime.serving import start_superexec, start_superlink
from bract.server import HonestButCurious
from bract.server.capture_folders import CAPTURES, run_folder, store_folder


@pytest.fixture
def operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the operator named, in run 17 in a SuperLink started elsewhere."""
    monkeypatch.setenv(CAPTURES, str(tmp_path / "captured"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(flower.TaskIdentity, "_run_id", 17)
    return tmp_path / "captured"


def root(store: ObservationStore | Path | str) -> Path:
    placed = HonestButCurious(FedAvg(), store).recorder.store
    assert isinstance(placed, ObservationStore)
    return placed.root


def test_captures_of_any_app_lie_below_the_operators_folder_each_run_apart(
    operators: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert root("captures") == operators / "run-17" / "captures"
    assert root(Path("a/captures")) == operators / "run-17" / "a" / "captures"
    store = ObservationStore("captures", models=["m:M"])
    placed = HonestButCurious(FedAvg(), store).recorder.store
    assert isinstance(placed, ObservationStore)
    assert placed.root == operators / "run-17" / "captures"
    assert placed.models == {"m:M"}
    monkeypatch.setattr(flower.TaskIdentity, "_run_id", 18)
    assert root("captures") == operators / "run-18" / "captures"
    assert run_folder("study", 18) == operators / "study-18"


def test_an_absolute_store_stays_where_it_is(operators: Path, tmp_path: Path) -> None:
    assert root(tmp_path / "own") == tmp_path / "own" / "17"
    assert operators not in root(tmp_path / "own").parents


def test_without_a_folder_of_the_operators_each_run_has_one_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CAPTURES, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flower.TaskIdentity, "_run_id", 17)
    assert root("captures") == tmp_path / "captures" / "17"
    assert root(ObservationStore("captures")) == Path("captures")
    assert run_folder("study", 3) == Path("runs/study-3")


def test_outside_of_a_run_the_folder_has_no_number(
    operators: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower.TaskIdentity, "_run_id", None)
    assert store_folder(Path("captures"), None) == operators / "run" / "captures"


@pytest.mark.usefixtures("operators")
def test_a_store_that_leads_out_of_the_folder_is_refused() -> None:
    with refused("config-value", "../captures", "captures"):
        root("../captures")


def test_the_log_says_in_one_line_where_captures_go(
    operators: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = HonestButCurious(FedAvg(), "captures")
    with caplog.at_level(logging.INFO, logger="flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        grid: Any = SimpleNamespace(get_node_ids=list)
        strategy.listen(grid)
        strategy.listen(grid)
    logging.getLogger("flwr").removeHandler(caplog.handler)
    logged = {record.getMessage() for record in caplog.records}
    assert f"bract: captures go to {operators}/run-17/captures" in logged and len(logged) == 2


def test_a_relative_or_unusable_folder_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def superlink() -> None:
        start_superlink(
            address="127.0.0.1:1",
            folder=tmp_path,
            certificate=None,
            authenticate=False,
            database=None,
        )

    monkeypatch.setenv(CAPTURES, "captured")
    for start in (superlink, lambda: start_superexec(tmp_path / "1.sock")):
        with refused("config-value", "BRACT_CAPTURES=captured"):
            start()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CAPTURES, str(tmp_path / "file" / "captured"))
    with refused("file-unwritable", tmp_path):
        superlink()
