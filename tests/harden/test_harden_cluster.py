"""What a search asks of a Ray cluster, without a Ray."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from typer.testing import CliRunner

from bract.cli.launch.cluster import Asked, Cluster
from bract.cli.main import app
from bract.config import FederationConfig, build_config
from bract.errors import BractError, RunFailedError
from bract_harden import configuration as command
from bract_harden.cluster import ClusterPool, done_there
from bract_harden.work import Job, Outcome


class LostError(Exception):
    """Stands for Ray's errors."""


class RaisedError(LostError):
    """Stands for what a task raised."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class FakeRay:
    """Does a task when its result is fetched; ``answer`` replaces what a job's task answers."""

    exceptions = types.SimpleNamespace(RayError=LostError, RayTaskError=RaisedError)

    def __init__(self, answer: Callable[[str], Any] = lambda _: None) -> None:
        self.answer, self.options = answer, dict[str, Any]()
        self.under_way = self.most = 0

    def remote(self, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        self.options = options

        def made(function: Callable[..., Any]) -> Any:
            def begin(*words: Any) -> Any:
                self.under_way += 1
                self.most = max(self.most, self.under_way)
                return lambda: self.answer(words[1].candidate) or function(*words)

            return types.SimpleNamespace(remote=begin)

        return made

    def wait(self, references: list[Any], **_: Any) -> Any:
        return references[-1:], references[:-1]

    def get(self, reference: Any) -> Any:
        self.under_way -= 1
        found = reference()
        if isinstance(found, Exception):
            raise found
        return found


class Failing:
    """Attacks nothing, and fails with where it was and what it was asked."""

    def train(self, config: FederationConfig, root: Path) -> float:
        root.mkdir(parents=True)
        return 1.0

    def attack(self, root: Path, settings: Mapping[str, Any]) -> None:
        raise BractError(f"{root} {settings['do']} {Path.cwd()} {sys.path[0]}", code="usage")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    yield
    logging.disable(logging.NOTSET)


def jobs(*names: str) -> list[Job]:
    return [Job(n, build_config({}), Path("runs") / n / "seed-0", 0, {"do": n}) for n in names]


def pool(ray: FakeRay, root: Path, room: int = 2, gpus: float = 0.0) -> ClusterPool:
    root.mkdir(exist_ok=True)
    return ClusterPool(Cluster(ray, "cpu", room, gpus), Failing(), root)


def test_every_job_is_done_once_with_as_many_at_once_as_there_is_room_for(tmp_path: Path) -> None:
    ray = FakeRay()
    asked = jobs("a", "b", "c", "d", "e")
    found = list(pool(ray, tmp_path / "runs", gpus=0.5).run(asked))
    assert sorted(job.candidate for job, _ in found) == ["a", "b", "c", "d", "e"]
    assert ray.most == 2
    assert ray.options == {"num_cpus": 1, "num_gpus": 0.5, "max_retries": 0}
    for job, outcome in found:
        assert job in asked, "the search's own job, not the copy that was sent"
        context = f"{tmp_path / 'runs' / job.candidate / 'seed-0'} {job.candidate} {tmp_path}"
        assert outcome.error == f"{context} {tmp_path}"


def test_a_worker_that_is_lost_costs_its_job_alone(tmp_path: Path) -> None:
    ray = FakeRay(lambda name: LostError("killed\nfor memory") if name == "b" else None)
    found = {j.candidate: o for j, o in pool(ray, tmp_path / "runs").run(jobs("a", "b", "c"))}
    assert found["b"].error == "its worker was lost: killed for memory"
    assert f" a {tmp_path}" in str(found["a"].error) and f" c {tmp_path}" in str(found["c"].error)


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (
            RaisedError(BractError("/runs: not on other", code="usage")),
            BractError,
            "a worker: /runs: not on oth",
        ),
        (
            RaisedError(ModuleNotFoundError("No module named 'bract'")),
            RunFailedError,
            "a worker failed: ModuleNotFoundError",
        ),
        ({"no": "outcome"}, RunFailedError, "handed back dict, expected an outcome"),
    ],
)
def test_a_machine_that_can_do_no_job_ends_the_search(
    tmp_path: Path, answer: Any, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        list(pool(FakeRay(lambda _: answer), tmp_path / "runs").run(jobs("a")))


def test_a_worker_works_where_the_search_was_started(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    outcome = done_there(Failing(), jobs("a")[0], tmp_path, tmp_path / "there")
    assert str(outcome.error).endswith(f"{tmp_path / 'there'} {tmp_path / 'there'}")


@pytest.mark.parametrize("missing", ["root", "here"])
def test_a_machine_that_sees_no_folder_says_which(tmp_path: Path, missing: str) -> None:
    folders = {"root": tmp_path, "here": tmp_path, missing: tmp_path / "elsewhere"}
    with refused("file-missing", "elsewhere"):
        done_there(Failing(), jobs("a")[0], folders["root"], folders["here"])
    assert not (tmp_path / "runs").exists()


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
