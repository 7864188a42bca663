from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import check_refusal, refused

from bract.attacks import GRNN, IG, Budget, Engine, Reconstruction, Refusal, reconstruct
from bract.attacks.base import Attacker
from bract.attacks.problem.case import open_case
from bract.attacks.problem.client_model import LocalTraining
from bract.attacks.solve.checkpoints import content_of, made_by
from bract.attacks.solve.descent import Plateau
from bract.attacks.task import AttackTask
from bract.installed.versions import code_digest
from bract.models import create_model


@pytest.fixture
def seen(observe: Any, tiny: Any) -> Any:
    return [observe(tiny[0][i : i + 1], tiny[1][i : i + 1], client=f"c{i}") for i in range(2)]


def test_a_trial_holds_the_match_of_each_layer_as_a_loop_computes_it(seen: Any) -> None:
    (found,) = reconstruct(seen[0], IG(), budget=Budget(iterations=3), device="cpu")
    assert isinstance(found, Reconstruction)
    sent = seen[0]
    network = create_model("lenet-strided", classes=10, channels=1, image_size=8).double()
    network.load_state_dict({n: v.double() for n, v in sent.parameters.items()})
    made = torch.nn.functional.cross_entropy(
        network((found.images.double() - 0.3) / 0.4), found.labels
    )
    gradients = torch.autograd.grad(made, list(network.parameters()))
    dot = own = 0.0
    for (name, _), gradient in zip(network.named_parameters(), gradients, strict=True):
        target = sent.update[name].double()
        cosine = torch.cosine_similarity(gradient.flatten(), target.flatten(), dim=0)
        assert found.pick.layers[name] == pytest.approx(float(cosine), abs=1e-5), name
        dot += float((gradient * target).sum())
        own += float(gradient.square().sum())
    assert found.pick.scale == pytest.approx(dot / own, rel=1e-4)


def test_a_tensor_whose_update_is_zero_is_not_matched(seen: Any) -> None:
    bias = "classifier.1.bias"
    assert bias in seen[0].update
    seen = replace(seen[0], update=seen[0].update | {bias: torch.zeros(10)})
    (found,) = reconstruct(seen, IG(labels="joint"), budget=Budget(iterations=1), device="cpu")
    assert isinstance(found, Reconstruction)
    assert bias not in found.pick.layers and found.pick.layers


def failing_above(limit: Any, calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    solve = IG.solve

    def limited(self: Any, problem: Any, run: Any) -> Any:
        calls.append(problem.trials)
        if problem.trials > limit:
            raise torch.OutOfMemoryError("out of memory")
        return solve(self, problem, run)

    monkeypatch.setattr(IG, "solve", limited)


def test_a_batch_that_does_not_fit_is_halved_until_it_does(
    seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(iterations=3, restarts=4)
    wanted = reconstruct(seen, IG(signed=False), budget=budget, engine=Engine(trials=1))
    calls: list[Any] = []
    failing_above(2, calls, monkeypatch)
    found = reconstruct(seen, IG(signed=False), budget=budget, engine=Engine(trials=8))
    assert calls[:3] == [8, 4, 2]
    for one, other in zip(found, wanted, strict=True):
        assert isinstance(other, Reconstruction)
        assert isinstance(one, Reconstruction)
        assert torch.allclose(one.images, other.images, atol=1e-4)


def test_a_single_trial_that_does_not_fit_is_a_clear_error(
    seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_above(0, [], monkeypatch)
    results = reconstruct(seen, IG(), budget=Budget(iterations=1), engine=Engine())
    for client, result in zip(("c0", "c1"), results, strict=True):
        assert isinstance(result, Refusal)
        check_refusal(result, "out-of-memory", client, "max_images")


def test_an_interrupted_attack_resumes_and_ends_as_if_it_had_not_been(
    seen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bract.attacks.solve.descent._CHECKPOINT_SECONDS", 0.0)
    budget = Budget(iterations=30)
    wanted = reconstruct(seen, GRNN(width=4), budget=budget, engine=Engine())

    def stop(progress: Any) -> None:
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
        assert isinstance(other, Reconstruction)
        assert isinstance(one, Reconstruction)
        assert torch.equal(one.images, other.images)
        assert one.final_loss == other.final_loss


def test_a_finished_attack_is_not_run_again(
    seen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, budget = Engine(checkpoint=tmp_path), Budget(iterations=3)
    wanted = reconstruct(seen, IG(), budget=budget, engine=engine)
    calls: list[Any] = []
    failing_above(-1, calls, monkeypatch)
    found = reconstruct(seen, IG(), budget=budget, engine=engine)
    assert calls == []
    assert isinstance(wanted[0], Reconstruction)
    assert isinstance(found[0], Reconstruction)
    assert torch.equal(found[0].images, wanted[0].images)


def test_other_settings_do_not_use_each_others_checkpoints(seen: Any, tmp_path: Path) -> None:
    engine, budget = Engine(checkpoint=tmp_path), Budget(iterations=3)
    first = reconstruct(seen, IG(), budget=budget, engine=engine)
    second = reconstruct(seen, IG(lr=0.01), budget=budget, engine=engine)
    assert isinstance(second[0], Reconstruction)
    assert isinstance(first[0], Reconstruction)
    assert not torch.equal(first[0].images, second[0].images)


def test_state_of_other_code_or_versions_is_not_used(
    seen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, budget = Engine(checkpoint=tmp_path), Budget(iterations=3)
    reconstruct(seen, IG(), budget=budget, engine=engine)
    kept = set(tmp_path.iterdir())
    reconstruct(seen, IG(), budget=budget, engine=engine)
    assert set(tmp_path.iterdir()) == kept
    monkeypatch.setattr("bract.attacks.solve.engine.made_by", lambda: ("1", "2", "other"))
    reconstruct(seen, IG(), budget=budget, engine=engine)
    assert len(set(tmp_path.iterdir())) == 2 * len(kept)


def test_state_belongs_to_the_code_of_plug_ins_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "theirs_of_state-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs_of_state\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[bract.attacks]\nit = theirs_of_state:IT\n")
    module = tmp_path / "theirs_of_state.py"
    monkeypatch.syspath_prepend(tmp_path)
    digests = set()
    for text in ("IT = 1\n", "IT = 2\n"):
        module.write_text(text)
        code_digest.cache_clear()
        digests.add(made_by()[2])
    assert len(digests) == 2


def test_a_checkpoint_is_for_the_same_evidence_only(seen: Any) -> None:
    case = open_case(seen[0], tier="oblivious", max_images=1, unroll=16)
    bias = "classifier.1.bias"
    evidence: list[dict[str, Any]] = [
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
        {"declaration": replace(seen[0].declaration, mean=(0.1,))},
    ]
    cases = [
        case,
        replace(case, forward=LocalTraining(steps=2, batch_size=1, lr=0.1)),
        *[replace(case, evidence=replace(case.evidence, **c)) for c in evidence],
        *[replace(case, observation=replace(case.observation, **c)) for c in observation],
    ]
    assert len({content_of(c) for c in cases}) == len(cases)
    again = open_case(seen[0], tier="oblivious", max_images=1, unroll=16)
    assert content_of(again) == content_of(case)


def test_neither_another_tier_nor_another_plateau_uses_a_checkpoint(
    seen: Any, tmp_path: Path
) -> None:
    def run(tier: Any, plateau: Any) -> Any:
        engine = Engine(checkpoint=tmp_path, plateau=plateau)
        budget = Budget(iterations=2)
        IG().attack(seen[:1], AttackTask(budget=budget, tier=tier, engine=engine))
        return len(list(tmp_path.iterdir()))

    assert run("oblivious", None) == 1
    assert run("adaptive", None) == 2
    assert run("adaptive", Plateau(patience=1)) == 3
    assert run("oblivious", None) == 3


def test_a_plateau_stops_early(seen: Any) -> None:
    engine = Engine(plateau=Plateau(patience=5, tolerance=0.9999))
    (found,) = reconstruct(seen[:1], IG(), budget=Budget(iterations=500), engine=engine)
    assert isinstance(found, Reconstruction)
    assert found.iterations < 50


def test_a_device_that_is_not_there_is_named() -> None:
    with refused("device-missing", "cuda:99"):
        Engine(device="cuda:99").torch_device()
    with refused("device-missing", "toaster"):
        Engine(device="toaster").torch_device()


def test_every_registered_attack_is_an_attack_with_its_own_name() -> None:
    from bract.attacks import ATTACKS

    names = list(ATTACKS)
    assert {"ig", "grnn", "dlg", "idlg", "analytic", "labels", "best"} <= set(names)
    for name in names:
        assert issubclass(ATTACKS[name], Attacker)
        assert ATTACKS[name].name == name
