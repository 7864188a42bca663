"""What an audit will take, and what it has no hope for, is said before it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import attacked, with_keys
from observing import observed
from refusals import check_named, refused

from bract import Observation, ObservationStore
from bract.attacks import IG, Attack
from bract.audit.audit import Audit
from bract.audit.captures import Capture
from bract.audit.forecast import forecast
from bract.audit.questions.reconstruction.plan import infeasible
from bract.cli import approval as command
from bract.config import build_config
from bract.config.config import AuditRequest
from bract.models import create_model
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration

CHOICE = AuditRequest(attacks=["ig"], iterations=400, device="cpu")
DECLARED = ClientDeclaration(
    algorithm="fedsgd", model="lenet-strided", image_shape=(1, 8, 8), classes=10, batch_size=1,
    num_examples=1,
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create(build_config({"data": {"image_size": 8}}))
    torch.manual_seed(0)
    model = create_model("lenet-strided", classes=10, channels=1, image_size=8)
    seen = observed(torch.rand(1, 1, 8, 8), torch.tensor([3]), model=model, normalised=False)
    store = ObservationStore(directory.captures)
    for client, declared in (
        ("one", DECLARED),
        ("many", replace(DECLARED, batch_size=432, num_examples=432)),
    ):
        store.save(replace(seen, client=client, declaration=declared))
    return directory


@pytest.mark.thorough
def test_infeasible_work_is_named_with_its_reason(run: RunDirectory) -> None:
    found = forecast([Audit(run, CHOICE)])
    assert (found.uploads, found.attacks, found.device) == (2, 2, "cpu")
    (group,) = found.infeasible
    assert group.uploads == ("round-0001/many",)
    check_named(group.reason, 432, 8)


LOUD = {"name": "noise", "std": 100.0, "clip": None}


@pytest.fixture
def noisy(run: RunDirectory) -> RunDirectory:
    """The same run with a client whose noise drowns its update."""
    store = ObservationStore(run.captures)
    (folder,) = run.captures.rglob("*one*")
    clean = store.load(folder)
    drowned = {n: v + 100.0 * torch.randn_like(v) for n, v in clean.update.items()}
    declared = replace(DECLARED, defenses=(LOUD,))
    store.save(Observation(1, "loud", clean.parameters, drowned, declared))
    return run


@pytest.mark.thorough
def test_no_estimate_of_information_keeps_an_upload_from_being_attacked(
    noisy: RunDirectory,
) -> None:
    found = {group.uploads for group in forecast([Audit(noisy, CHOICE)]).infeasible}
    assert found == {("round-0001/many",)}
    results = {r.client: r for r in attacked(Audit(noisy, with_keys(CHOICE, iterations=2)))}
    assert results["loud"].refused is None


def test_what_an_upload_tells_is_written_beside_what_came_back(noisy: RunDirectory) -> None:
    audit = Audit(noisy, with_keys(CHOICE, iterations=2, clients=["one", "loud"]))
    estimates = {r.client: r.signals.estimate if r.signals else None for r in attacked(audit)}
    assert (
        estimates["one"] is not None and estimates["one"].psnr > estimates["one"].prior_psnr + 3.0
    )
    assert (
        estimates["loud"] is not None
        and estimates["loud"].psnr < estimates["loud"].prior_psnr + 1.0
    )


@pytest.mark.thorough
def test_what_an_upload_tells_does_not_depend_on_the_one_before(noisy: RunDirectory) -> None:
    def estimate_of(*clients: str) -> Any:
        audit = Audit(noisy, with_keys(CHOICE, iterations=1, clients=frozenset(clients)))
        results = {r.client: r.signals for r in attacked(audit)}
        found = results[clients[-1]]
        return found and found.estimate

    store = ObservationStore(noisy.captures)
    (folder,) = noisy.captures.rglob("*one*")
    clean = store.load(folder)
    halved = {n: v * (torch.arange(v.numel()).view(v.shape) % 2) for n, v in clean.update.items()}
    store.save(Observation(1, "half", clean.parameters, halved, DECLARED))
    assert estimate_of("half").numbers < estimate_of("one").numbers
    assert estimate_of("one", "half") == estimate_of("half")


def test_what_may_bring_something_back_is_attacked_first_and_of_it_the_cheapest(
    run: RunDirectory,
) -> None:
    plan = Audit(run, with_keys(CHOICE, attacks=("grnn", "ig", "labels"))).plan()
    order = [(batch.attack, [c.client for c in batch.captures]) for batch in plan]
    assert {name for name, _ in order[:2]} == {"labels"}, "a closed form may find something"
    assert order[2:4] == [("ig", ["one"]), ("grnn", ["one"])]
    assert order[4:] == [("ig", ["many"]), ("grnn", ["many"])]


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        (DECLARED, None),
        (replace(DECLARED, model=None), "no model is declared"),
        (replace(DECLARED, encryption="paillier"), "ciphertexts"),
        (replace(DECLARED, batch_size=None, num_examples=None), "neither batch_size nor"),
    ],
)
def test_what_the_declaration_alone_rules_out(declared: Any, reason: str | None) -> None:
    found = infeasible(Capture(1, "a", declared), CHOICE, "ig")
    assert (found is None) if reason is None else reason in (found or "")


def test_a_budget_in_seconds_is_the_estimate(run: RunDirectory) -> None:
    audit = Audit(run, with_keys(CHOICE, seconds=40.0, repeats=3))
    assert forecast([audit]).seconds == pytest.approx(2 * 3 * 40.0)


def test_an_estimate_scales_with_the_budget_and_leaves_nothing_behind(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the estimate is steps: one second each."""
    now = [0.0]

    def solve(self: Any, problem: Any, task: Any) -> Any:
        for step in range(1, task.iterations + 1):
            now[0] += 1.0
            task.report(step / task.iterations, 0.5)
        raise AssertionError("a probe went to the end")

    monkeypatch.setattr(Attack, "solve", solve)
    monkeypatch.setattr(IG, "solve", solve)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    chosen = with_keys(CHOICE, clients=["one"])
    before = sorted(run.root.rglob("*"))
    short, long = (
        forecast([Audit(run, with_keys(chosen, iterations=n))]).seconds for n in (400, 4000)
    )
    assert short == pytest.approx(400.0)
    assert long == pytest.approx(4000.0)
    assert sorted(run.root.rglob("*")) == before


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Pretend that somebody sits at a terminal; the list is what they answer."""
    answers: list[bool] = []
    monkeypatch.setattr(command, "at_a_terminal", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: answers.pop())
    return answers


def test_a_no_on_a_terminal_attacks_nothing(
    run: RunDirectory, terminal: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    audit = Audit(run, with_keys(CHOICE, seconds=100.0))
    terminal.append(False)
    with refused("run-failed", "attacked"):
        command.approve([audit], ask=True)
    said = capsys.readouterr().err
    assert "2 attacks on 2 uploads, about 3 min on cpu" in said
    check_named(said, 1, "round-0001/many")
    terminal.append(True)
    command.approve([audit], ask=True)


def test_nobody_is_asked_with_yes_off_a_terminal_or_about_little(
    run: RunDirectory, terminal: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = Audit(run, with_keys(CHOICE, seconds=100.0))
    little = Audit(run, with_keys(CHOICE, seconds=2.0, clients=["one"]))
    command.approve([long], ask=False)
    command.approve([little], ask=True)
    monkeypatch.setattr(command, "at_a_terminal", lambda: False)
    command.approve([long], ask=True)
    assert terminal == []


def test_memory_is_that_of_the_trials_that_ran_together(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 200_000_000
    solve = IG.solve

    def large(self: Any, problem: Any, task: Any) -> Any:
        torch.ones(size // 4)
        return solve(self, problem, task)

    monkeypatch.setattr(IG, "solve", large)
    chosen = with_keys(CHOICE, clients=["one"], iterations=3, restarts=2)
    found = forecast([Audit(run, chosen)])
    assert found.trials == 2
    assert found.memory is not None and 0.9 * size < found.memory < 2.5 * size
    budgeted = forecast([Audit(run, with_keys(chosen, iterations=None, seconds=40.0))])
    assert budgeted.memory is None and budgeted.trials == 0
