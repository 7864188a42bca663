"""What a search asks of a Ray cluster, without a Ray."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_ray import FakeRay
from refusals import refused
from typer.testing import CliRunner

from bract.cli.launch.cluster import Asked, Cluster
from bract.cli.main import app
from bract.config import FederationConfig, build_config
from bract.errors import BractError, RunFailedError
from bract.pool import Lost
from bract_harden import configuration as command
from bract_harden.work import Job, Outcome, outcome_of, work_there


class Failing:
    """Attacks nothing, and fails with where it was and what it was asked."""

    def train(self, config: FederationConfig, root: Path) -> float:
        root.mkdir(parents=True)
        return 1.0

    def attack(self, root: Path, settings: Mapping[str, Any]) -> None:
        raise BractError(f"{root} {settings['do']} {Path.cwd()}", code="usage")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    yield
    logging.disable(logging.NOTSET)


def jobs(*names: str) -> list[Job]:
    return [Job(n, build_config({}), Path("runs") / n / "seed-0", 0, {"do": n}) for n in names]


def test_a_worker_trains_and_attacks_where_the_search_was_started(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    outcome = work_there(Failing(), tmp_path / "there", jobs("a")[0], print)
    assert outcome.error == f"runs/a/seed-0 a {tmp_path / 'there'}"


def test_a_lost_worker_costs_its_candidate_alone_and_another_outcome_is_refused() -> None:
    assert outcome_of(Lost("its worker was lost: killed")).error == "its worker was lost: killed"
    assert outcome_of(Outcome(error="own")).error == "own"
    strange: Any = {"no": "outcome"}
    with refused("worker-failed", "dict", kind=RunFailedError):
        outcome_of(strange)


def test_the_option_asks_for_the_spaces_workers_and_the_audits_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Asked] = []

    @contextlib.contextmanager
    def connected(what: Asked) -> Iterator[Cluster]:
        asked.append(what)
        yield Cluster(FakeRay(lambda _: Outcome(error="seen")), "cpu", 2, 0.0)

    monkeypatch.setattr(command, "connected", connected)
    (tmp_path / "f.yaml").write_text("name: f\naudit: {gpus: 0.25}\n")
    (tmp_path / "s.yaml").write_text("space: {training.lr: [0.1, 0.2]}\nsearch: {workers: 3}\n")
    found = CliRunner().invoke(
        app, ["harden", "f.yaml", "--space", "s.yaml", "--trials", "1", "--ray", "10.0.0.5:6379"]
    )
    assert asked == [Asked("10.0.0.5:6379", 3, 0.25, "auto")]
    assert found.exit_code == 1, found.output
    assert '"seen"' in Path("runs/f-harden/harden.json").read_text()


def test_an_apps_search_takes_no_cluster(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["harden", str(tmp_path), "--ray", "auto"])
    assert isinstance(found.exception, BractError)
    assert "run one after the other" in str(found.exception)
