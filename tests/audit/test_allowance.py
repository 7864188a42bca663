"""The time of a whole audit is kept, whatever an attack takes beyond its share."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from audited import SETTINGS, audited_run, captured_run, upload_gradient
from observing import ticking

from bract.attacks import ATTACKS, IG, Attack, Outcome, Problem, Run, hard_labels
from bract.audit import allowance
from bract.audit.allowance import LEAST, Allowance, CutOffError
from bract.cli import audit_requests
from bract.cli.audit import open_audits
from bract.schema import AuditResult

__all__ = ["ticking"]


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(total: float, attacks: int, over: float) -> tuple[float, list[float]]:
    """Attack until the time is spent; return what it took in all, and the shares."""
    clock, shares = Clock(), []
    allowance = Allowance(total, attacks, clock)
    for _ in range(attacks):
        allowance.begin()
        if allowance.is_spent():
            break
        shares.append(allowance.share)
        clock.now += allowance.share + over
        allowance.finish(1, allowance.share + over)
    return clock.now - 100.0, shares


def test_attacks_without_overhead_have_even_shares() -> None:
    took, shares = run(60.0, 4, 0.0)
    assert shares == [15.0] * 4 and took == 60.0


def test_what_the_first_attack_took_longer_is_taken_from_the_others() -> None:
    took, shares = run(60.0, 4, 5.0)
    # 60 - 20 are left for three, of which each costs 5 s beyond its share.
    assert shares == pytest.approx([15.0, 40 / 3 - 5.0, 40 / 3 - 5.0, 40 / 3 - 5.0])
    assert took == pytest.approx(60.0)


def test_a_budget_that_opening_alone_uses_up_ends_with_one_attack_over() -> None:
    took, shares = run(10.0, 20, 6.0)
    assert len(shares) == 2 and shares[1] == LEAST
    assert took < 10.0 + 6.0 + LEAST


def test_attacks_that_ran_together_count_as_several() -> None:
    clock = Clock()
    allowance = Allowance(60.0, 6, clock)
    allowance.begin()
    clock.now += 40.0
    allowance.finish(4, 40.0)
    allowance.begin()
    assert allowance.left == 2 and allowance.share == pytest.approx(10.0)


@pytest.mark.thorough
@pytest.mark.usefixtures("ticking")
def test_an_audit_shares_its_time_and_names_what_it_did_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(
        "bract.cli.audit.Allowance", lambda total, attacks: Allowance(total, attacks, clock)
    )
    run = audited_run(tmp_path / "run", 3)
    (request,) = audit_requests.audit_requests(
        run.root,
        {"attacks": ["ig"], "device": "cpu", "batch": 1, **audit_requests.parse_budget("30s")},
    )
    (audit,) = open_audits(run.root, [request])
    first, *_ = audit.execute(audit.plan())
    assert isinstance(first, AuditResult) and first.budget is not None
    assert first.refused is None and first.budget.seconds == 10.0
    # What was found within an earlier share is not attacked again.
    (run.audit / "ig" / "round-0001--client-2.json").unlink()
    (again,) = open_audits(run.root, [request], resume=True)
    assert sum(len(batch.captures) for batch in again.plan()) == 1
    (audit,) = open_audits(run.root, [request])
    refused = []
    for result in audit.execute(audit.plan()):
        assert isinstance(result, AuditResult)
        refused.append(result.refused)
        clock.now += 30.0
    assert refused[0] is None and len(refused) == 3
    assert all("the budget of 30 s for the whole audit was spent" in (r or "") for r in refused[1:])


@dataclass(frozen=True, kw_only=True)
class Deaf(Attack):
    """Never looks at the clock: a closed form of a minute, in steps that Python can end between."""

    name: ClassVar[str] = "deaf"

    def solve(self, problem: Problem, run: Run) -> Outcome:
        begun = time.process_time()
        while time.process_time() < begun + 60.0:  # far beyond the budget
            try:
                sum(range(10_000))
            except Exception:  # noqa: BLE001 - what an attack catches must not be the end of it
                continue
        images = torch.full((problem.trials, *problem.image_shape), 0.5)
        labels = hard_labels(problem)
        return Outcome(images=images, labels=labels, losses=torch.ones(problem.trials))


def soon_cut_off(monkeypatch: pytest.MonkeyPatch, kind: type[Attack], late: float) -> None:
    """Register an attack, and cut off what is so many seconds late."""
    monkeypatch.setattr(ATTACKS, "_entries", {**ATTACKS._entries, kind.name: kind})
    monkeypatch.setattr(allowance, "LEAST_LATE", late)


def test_an_attack_that_never_looks_at_the_clock_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon_cut_off(monkeypatch, Deaf, 0.2)
    handler = signal.getsignal(signal.SIGALRM)
    timer, _ = signal.getitimer(signal.ITIMER_REAL)
    run = audited_run(tmp_path / "run", 2)
    (request,) = audit_requests.audit_requests(
        run.root,
        {"attacks": ["deaf"], "device": "cpu", "batch": 1, **audit_requests.parse_budget("0.1s")},
    )
    (audit,) = open_audits(run.root, [request])
    begun = time.process_time()
    first, second = (r for r in audit.execute(audit.plan()) if isinstance(r, AuditResult))
    assert time.process_time() - begun < 50.0
    assert "cut off: the budget of 0.1 s for the whole audit was over" in (first.refused or "")
    assert "was spent" in (second.refused or "")
    # The process' own alarm is back, such as that of these tests' time limit.
    assert signal.getsignal(signal.SIGALRM) is handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0.0) == (timer > 0.0)


@dataclass(frozen=True, kw_only=True)
class Stubborn(IG):
    """Descends without an end, whatever its budget."""

    name: ClassVar[str] = "stubborn"

    def solve(self, problem: Problem, run: Run) -> Outcome:
        return super().solve(problem, replace(run, seconds=600.0))


def test_an_attack_that_is_cut_off_keeps_its_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon_cut_off(monkeypatch, Stubborn, 3.0)
    run = audited_run(tmp_path / "run", 1)
    (request,) = audit_requests.audit_requests(
        run.root, {"attacks": ["stubborn"], "device": "cpu", **audit_requests.parse_budget("1s")}
    )
    (audit,) = open_audits(run.root, [request])
    (found,) = (r for r in audit.execute(audit.plan()) if isinstance(r, AuditResult))
    assert found.refused is None and found.images and found.gradient_cosine is not None
    assert found.settings["cut_off"] is True and any("cut off" in note for note in found.notes)


@pytest.mark.parametrize(("budget", "together"), [({}, [4]), ({"total_seconds": 2.0}, [2, 2])])
def test_uploads_of_the_fewest_examples_come_first_and_too_little_time_goes_to_fewer(
    tmp_path: Path, budget: dict[str, float], together: list[int]
) -> None:
    run = audited_run(tmp_path / "run", 4)
    for number, path in enumerate(sorted(run.captures.rglob("observation.json"))):
        content = json.loads(path.read_text())
        content["declaration"]["num_examples"] = 40 - number
        path.write_text(json.dumps(content))
    (request,) = audit_requests.audit_requests(
        run.root, {"attacks": ["ig"], "device": "cpu", "max_images": 64, **budget}
    )
    (audit,) = open_audits(run.root, [request])
    batches = audit.plan()
    assert [len(b.captures) for b in batches] == together, "with a budget each needs a second"
    examples = [c.declaration.num_examples or 0 for b in batches for c in b.captures]
    assert examples == sorted(examples)


def test_an_attack_gets_what_it_needs_where_the_even_share_is_less() -> None:
    clock = Clock()
    allowance = Allowance(10.0, 20, clock)
    allowance.open("oblivious", 10)
    allowance.begin("oblivious", need=3.0)
    assert allowance.share == 3.0
    clock.now += 3.0
    allowance.finish(1, 3.0)
    allowance.begin("oblivious", need=3.0)
    assert allowance.share == 2.0, "half of the time is the other tier's"
    clock.now += 2.0
    allowance.finish(1, 2.0)
    assert allowance.is_spent("oblivious") and allowance.remaining == 5.0
    allowance.finish(8, 0.0)
    allowance.open("adaptive", 10)
    assert not allowance.is_spent("adaptive")


def test_a_method_that_auto_tries_is_cut_off_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    soon_cut_off(monkeypatch, Deaf, 0.1)
    with pytest.raises(CutOffError):  # noqa: SIM117 - the block is what is cut off
        with Allowance(0.01, 1).bounded():
            allowed = time.monotonic() + 60.0
            while time.monotonic() < allowed:
                try:
                    sum(range(10_000))
                except Exception:  # noqa: BLE001 - as `auto` does
                    continue


def test_the_clock_runs_while_the_work_is_estimated() -> None:
    clock = Clock()
    allowance = Allowance(60.0, 3, clock)
    clock.now += 30.0
    allowance.begin()
    assert allowance.share == pytest.approx(10.0)


def test_attacks_elsewhere_have_even_shares_from_the_start(tmp_path: Path) -> None:
    run = audited_run(tmp_path / "run", 2)
    (request,) = audit_requests.audit_requests(
        run.root, {"attacks": ["ig"], **audit_requests.parse_budget("1m")}
    )
    (audit,) = open_audits(run.root, [request], shared=False)
    assert audit.request.seconds == audit.seconds == 30.0


def test_several_processes_get_even_shares_of_the_time_from_the_start(tmp_path: Path) -> None:
    run = audited_run(tmp_path / "run", uploads=2)
    (request,) = audit_requests.audit_requests(
        run.root,
        {"attacks": ["ig"], "workers": 2, **audit_requests.parse_budget("10s")},
        tier="oblivious",
    )
    (audit,) = open_audits(run.root, [request])
    assert audit.request.seconds == 5.0, "another process knows the request alone"
    alone = request.model_copy(update={"workers": 1})
    (audit,) = open_audits(run.root, [alone])
    assert audit.request.seconds is None and audit.seconds == 5.0


def test_an_audit_with_a_budget_in_seconds_begins_with_a_sample_of_all_rounds(
    tmp_path: Path,
) -> None:
    run, config, model = captured_run(tmp_path / "run", SETTINGS | {"clients": 2})
    for number in (1, 2, 3):
        for client in range(2):
            upload_gradient(run, config, model, client, number=number)
    settings = {"attacks": ["ig"], "device": "cpu", "batch": 1}

    def rounds(**limits: object) -> list[int]:
        (request,) = audit_requests.audit_requests(run.root, settings | limits)
        (audit,) = open_audits(run.root, [request])
        return [capture.round for batch in audit.plan() for capture in batch.captures]

    assert rounds(**audit_requests.parse_budget("30s")) == [1, 2, 3, 1, 2, 3]
    assert rounds() == [1, 1, 2, 2, 3, 3]
