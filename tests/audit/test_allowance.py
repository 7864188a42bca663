"""The time of a whole audit is kept, whatever an attack takes beyond its share."""

from __future__ import annotations

from pathlib import Path

import pytest
from audited import audited_run

from bract.audit.allowance import LEAST, Allowance
from bract.cli.audit import audit_requests, open_audits, parse_budget
from bract.schema import AuditResult


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
        if allowance.is_spent:
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


def test_an_audit_shares_its_time_and_names_what_it_did_not_reach(tmp_path: Path) -> None:
    run = audited_run(tmp_path / "run", 3)
    (request,) = audit_requests(
        run.root, {"attacks": ["ig"], "device": "cpu", "batch": 1, **parse_budget("3s")}
    )
    (audit,) = open_audits(run.root, [request])
    first, *_ = audit.execute(audit.plan())
    assert isinstance(first, AuditResult) and first.budget is not None
    assert first.budget.seconds == 1.0
    # What was found within an earlier share is not attacked again.
    (again,) = open_audits(run.root, [request], resume=True)
    done = [r for r in audit.results() if r.refused is None]
    assert sum(len(batch.captures) for batch in again.plan()) == 3 - len(done)
    short = request.model_copy(update={"total_seconds": 0.01})
    (audit,) = open_audits(run.root, [short])
    found = [r for r in audit.execute(audit.plan()) if isinstance(r, AuditResult)]
    refused = [r.refused for r in found if r.refused is not None]
    assert len(refused) == 2
    assert all("the budget of 0.01 s for the whole audit was spent" in why for why in refused)


def test_attacks_elsewhere_have_even_shares_from_the_start(tmp_path: Path) -> None:
    run = audited_run(tmp_path / "run", 2)
    (request,) = audit_requests(run.root, {"attacks": ["ig"], **parse_budget("1m")})
    (audit,) = open_audits(run.root, [request], shared=False)
    assert audit.request.seconds == audit.seconds == 30.0
