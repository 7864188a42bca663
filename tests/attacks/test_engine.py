from dataclasses import replace

import pytest
import torch

from bract.attacks import GRNN, IG, Budget, Engine, Plateau, Refusal, reconstruct
from bract.attacks.engine import _content
from bract.attacks.matching import Attacker
from bract.attacks.problem import open_case
from bract.attacks.simulation import LocalTraining
from bract.errors import BractError


@pytest.fixture
def seen(observe, tiny):
    return [observe(tiny[0][i : i + 1], tiny[1][i : i + 1], client=f"c{i}") for i in range(2)]


def failing_above(limit, calls, monkeypatch):
    solve = IG.solve

    def limited(self, problem, run):
        calls.append(problem.lanes)
        if problem.lanes > limit:
            raise torch.OutOfMemoryError("out of memory")
        return solve(self, problem, run)

    monkeypatch.setattr(IG, "solve", limited)


def test_a_batch_that_does_not_fit_is_halved_until_it_does(seen, monkeypatch):
    budget = Budget(iterations=3, restarts=4)
    wanted = reconstruct(seen, IG(signed=False), budget=budget, engine=Engine(lanes=1))
    calls = []
    failing_above(2, calls, monkeypatch)
    found = reconstruct(seen, IG(signed=False), budget=budget, engine=Engine(lanes=8))
    assert calls[:3] == [8, 4, 2]
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.images, other.images, atol=1e-4)


def test_a_single_lane_that_does_not_fit_is_a_clear_error(seen, monkeypatch):
    failing_above(0, [], monkeypatch)
    results = reconstruct(seen, IG(), budget=Budget(iterations=1), engine=Engine())
    for client, result in zip(("c0", "c1"), results, strict=True):
        assert isinstance(result, Refusal)
        assert f"{client}: one restart does not fit" in result.reason
        assert "max_images" in result.reason


def test_an_interrupted_attack_resumes_and_ends_as_if_it_had_not_been(seen, tmp_path, monkeypatch):
    monkeypatch.setattr("bract.attacks.descent._CHECKPOINT_SECONDS", 0.0)
    budget = Budget(iterations=30)
    wanted = reconstruct(seen, GRNN(width=4), budget=budget, engine=Engine())

    def stop(progress):
        if progress.fraction > 0.5:
            raise KeyboardInterrupt

    engine = Engine(checkpoint=tmp_path, progress=stop)
    with pytest.raises(KeyboardInterrupt):
        reconstruct(seen, GRNN(width=4), budget=budget, engine=engine)
    assert list(tmp_path.iterdir())
    steps = []
    engine = Engine(checkpoint=tmp_path, progress=lambda p: steps.append(p.fraction))
    found = reconstruct(seen, GRNN(width=4), budget=budget, engine=engine)
    assert steps[0] > 0.4
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.images, other.images)
        assert one.final_loss == other.final_loss


def test_a_finished_attack_is_not_run_again(seen, tmp_path, monkeypatch):
    engine, budget = Engine(checkpoint=tmp_path), Budget(iterations=3)
    wanted = reconstruct(seen, IG(), budget=budget, engine=engine)
    calls = []
    failing_above(-1, calls, monkeypatch)
    found = reconstruct(seen, IG(), budget=budget, engine=engine)
    assert calls == []
    assert torch.equal(found[0].images, wanted[0].images)


def test_other_settings_do_not_use_each_others_checkpoints(seen, tmp_path):
    engine, budget = Engine(checkpoint=tmp_path), Budget(iterations=3)
    first = reconstruct(seen, IG(), budget=budget, engine=engine)
    second = reconstruct(seen, IG(lr=0.01), budget=budget, engine=engine)
    assert not torch.equal(first[0].images, second[0].images)


def test_a_checkpoint_is_for_the_same_evidence_only(seen):
    case = open_case(seen[0], tier="oblivious", max_images=1, unroll=16)
    bias = "classifier.1.bias"
    evidence = [
        {"weights": {bias: torch.full((10,), 0.5)}},
        {"weights": {bias: torch.full((10,), 0.25)}},
        {"alternatives": {bias: torch.zeros(1, 10)}},
        {"alternatives": {bias: torch.ones(1, 10)}},
        {"nuisance": {bias: torch.eye(10)[:1]}},
        {"nuisance": {bias: torch.eye(10)[1:2]}},
        {"unknown_factor": True},
        {"labels": torch.tensor([1])},
        {"labels": torch.tensor([2])},
        {"buffers": {"noise": torch.ones(1, 4)}},
        {"target": {bias: torch.ones(10)}},
    ]
    observation = [
        {"buffers": {"norm.running_mean": torch.ones(4)}},
        {"returned_buffers": {"norm.running_mean": torch.ones(4)}},
        {"protocol": replace(seen[0].protocol, mean=(0.1,))},
    ]
    cases = [
        case,
        replace(case, forward=LocalTraining(steps=2, batch_size=1, lr=0.1)),
        *[replace(case, evidence=replace(case.evidence, **c)) for c in evidence],
        *[replace(case, observation=replace(case.observation, **c)) for c in observation],
    ]
    assert len({_content(c) for c in cases}) == len(cases)
    again = open_case(seen[0], tier="oblivious", max_images=1, unroll=16)
    assert _content(again) == _content(case)


def test_neither_another_tier_nor_another_plateau_uses_a_checkpoint(seen, tmp_path):
    def run(tier, plateau):
        engine = Engine(checkpoint=tmp_path, plateau=plateau)
        budget = Budget(iterations=2)
        IG().run(seen[:1], budget=budget, seed=0, tier=tier, engine=engine)
        return len(list(tmp_path.iterdir()))

    assert run("oblivious", None) == 1
    assert run("adaptive", None) == 2
    assert run("adaptive", Plateau(patience=1)) == 3
    assert run("oblivious", None) == 3


def test_a_plateau_stops_early(seen):
    engine = Engine(plateau=Plateau(patience=5, tolerance=0.9999))
    (found,) = reconstruct(seen[:1], IG(), budget=Budget(iterations=500), engine=engine)
    assert found.iterations < 50


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(BractError, match="cuda:99"):
        Engine(device="cuda:99").torch_device()
    with pytest.raises(BractError, match="toaster"):
        Engine(device="toaster").torch_device()


def test_every_registered_attack_is_an_attack_with_its_own_name():
    from bract.attacks import ATTACKS

    names = list(ATTACKS)
    assert {"ig", "grnn", "dlg", "idlg", "analytic", "labels", "best"} <= set(names)
    for name in names:
        assert issubclass(ATTACKS[name], Attacker)
        assert ATTACKS[name].name == name
