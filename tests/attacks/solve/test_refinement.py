"""Refining an evidence: stages under the engine's budget, progress, device and checkpoint."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import check_refusal

from bract.attacks import ADAPTIVE, IG, Budget, Case, Engine, Evidence, Reconstruction, Refusal
from bract.attacks.adaptive.guardian import guardian
from bract.attacks.methods.portfolio.auto import Auto
from bract.attacks.solve import refinement as refining_module
from bract.attacks.task import AttackTask, open_cases
from bract.client.defenses import ProtectContext, build_defenses


@dataclass
class Counting:
    """A refinement of four stages that counts them, and takes as long as it is told."""

    stages: int = 4
    seen: list[int] = field(default_factory=list)
    devices: set[torch.device] = field(default_factory=set)
    update: dict[str, torch.Tensor] = field(default_factory=dict)
    interrupt: int | None = None
    checks: bool = False

    def __call__(self, evidence: Any, fit: Any) -> Any:
        stage = int(evidence.notes.get("stage", 0))
        if stage == self.interrupt:
            raise KeyboardInterrupt
        if self.checks:
            fit.check()
        self.seen.append(stage)
        self.devices.add(fit.device)
        if stage:
            fitted = fit(evidence, [3], 5)
            assert all(v.dtype == torch.float64 for v in fitted.values())
            assert set(fitted) == set(evidence.target)
        return replace(
            evidence,
            target={n: v + 0.01 * stage for n, v in self.update.items()},
            notes={"stage": stage + 1},
            refine=self if stage + 1 < self.stages else None,
        )


@pytest.fixture
def refining(observe: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An observation of a defense whose evidence is refined, and the refinement."""
    seen = observe(tiny[0][:1], tiny[1][:1])
    seen = replace(seen, declaration=replace(seen.declaration, defenses=({"name": "slow"},)))
    refinement = Counting()
    refinement.update = dict(seen.update)

    def undo(observation: Any, known: Any) -> Any:
        return Evidence(target={}, refine=refinement)

    monkeypatch.setitem(ADAPTIVE._entries, "slow", undo)
    return seen, refinement


def test_every_attack_of_a_choice_shares_one_refinement(refining: Any) -> None:
    seen, refinement = refining
    task = AttackTask(budget=Budget(iterations=2), tier="adaptive")
    (result,) = Auto(pool=("ig", "idlg")).attack([seen], task)
    assert refinement.seen == [0, 1, 2, 3]
    assert isinstance(result, Reconstruction)
    assert result.settings["evidence"] == {"stage": 4}
    assert refinement.devices == {torch.device("cpu")}


def test_a_budget_in_seconds_ends_the_stages_but_not_before_something_can_be_matched(
    refining: Any,
) -> None:
    seen, refinement = refining
    task = AttackTask(budget=Budget(seconds=1e-9), tier="adaptive")
    ((case,), left) = open_cases([seen], task, attack="ig")
    assert refinement.seen == [0]
    assert isinstance(case, Case)
    assert "ended by the budget after 1 stages" in case.evidence.notes["refinement"]
    assert left.budget.seconds is not None and task.budget.seconds is not None
    assert left.budget.seconds < task.budget.seconds


@pytest.mark.parametrize("seconds", [None, 1e-9])
def test_a_first_stage_is_broken_off_some_time_after_the_whole_budget(
    refining: Any, monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    seen, refinement = refining
    monkeypatch.setattr(refining_module, "LATE", 0.0)
    refinement.checks = True
    task = AttackTask(budget=Budget(seconds=seconds, iterations=1), tier="adaptive")
    ((found,), _) = open_cases([seen], task, attack="ig")
    if seconds is None:
        assert isinstance(found, Case)
    else:
        assert isinstance(found, Refusal)
        check_refusal(found, "budget-spent")


def test_the_time_of_the_stages_is_taken_from_the_attack_and_shown(refining: Any) -> None:
    seen, _ = refining
    fractions = []
    engine = Engine(progress=lambda progress: fractions.append(progress.fraction))
    task = AttackTask(budget=Budget(iterations=3), tier="adaptive", engine=engine)
    (result,) = IG().attack([seen], task)
    assert fractions == sorted(fractions) and fractions[-1] == pytest.approx(1.0)
    assert 0.0 < fractions[0] < 0.2
    assert isinstance(result, Reconstruction)
    assert result.seconds > sum(trial.seconds for trial in result.trials)


def test_an_interrupted_refinement_goes_on_where_it_stopped(refining: Any, tmp_path: Path) -> None:
    seen, refinement = refining
    task = AttackTask(tier="adaptive", engine=Engine(checkpoint=tmp_path))
    refinement.interrupt = 2
    with pytest.raises(KeyboardInterrupt):
        open_cases([seen], task, attack="ig")
    refinement.interrupt = None
    ((case,), _) = open_cases([seen], task, attack="ig")
    assert isinstance(case, Case)
    assert refinement.seen == [0, 1, 2, 3] and case.evidence.notes["stage"] == 4
    ((again,), _) = open_cases([seen], task, attack="ig")
    assert isinstance(again, Case)
    assert refinement.seen == [0, 1, 2, 3]
    for name, value in case.evidence.target.items():
        assert torch.equal(again.evidence.target[name], value)
    (kept,) = tmp_path.glob("*.evidence")
    other = replace(seen, client="another")
    open_cases([other], task, attack="ig")
    assert len(list(tmp_path.glob("*.evidence"))) == 2 and kept.exists()


@pytest.mark.slow
def test_guardian_is_undone_in_stages_of_the_engine(
    observe: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian, "_STAGES", 2)
    clean = observe(tiny[0][:1], tiny[1][:1])
    chain = build_defenses([{"name": "guardian"}])
    seen = replace(
        clean,
        update=chain.protect(clean.update, {}, ProtectContext()),
        declaration=replace(clean.declaration, defenses=tuple(chain.public())),
    )
    short = AttackTask(
        budget=Budget(seconds=1e-9), tier="adaptive", engine=Engine(checkpoint=tmp_path)
    )
    ((one,), _) = open_cases([seen], short, attack="ig")
    assert isinstance(one, Case)
    assert one.evidence.notes["stages"] == 1
    full = replace(short, budget=Budget())
    ((resumed,), _) = open_cases([seen], full, attack="ig")
    ((afresh,), _) = open_cases([seen], AttackTask(tier="adaptive"), attack="ig")
    assert isinstance(resumed, Case) and isinstance(afresh, Case)
    for name, value in afresh.evidence.target.items():
        assert torch.equal(resumed.evidence.target[name], value)
    assert resumed.evidence.notes == afresh.evidence.notes
