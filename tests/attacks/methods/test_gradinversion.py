"""GradInversion: its terms, and what its restarts owe each other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from observing import one_step
from refusals import check_refusal

from bract.attacks import Budget, Engine, Problem, Reconstruction, Refusal, reconstruct
from bract.attacks.problem.case import open_case
from bract_papers.gradinversion.gradinversion import GradInversion
from bract_papers.gradinversion.priors import SquaredNorm

BUDGET = Budget(iterations=6, restarts=3)


@pytest.fixture
def seen(observe: Any, tiny: Any) -> Any:
    return [observe(tiny[0][i : i + 1], tiny[1][i : i + 1], client=f"c{i}") for i in range(3)]


def spread(found: Any) -> float:
    return float(torch.stack([t.images for t in found.trials]).var(dim=0).mean())


def test_it_matches_the_gradient_and_names_its_terms(observe: Any, tiny: Any) -> None:
    (found,) = reconstruct(
        [observe(tiny[0][:1], tiny[1][:1])],
        GradInversion(tv=0.0),
        budget=Budget(iterations=80, restarts=2),
    )
    assert isinstance(found, Reconstruction)
    assert found.pick.cosine is not None and found.pick.cosine > 0.98
    assert set(found.pick.components) == {
        *("relative error matching", "pixels", "labels analytic", "squared norm"),
        *("group consistency", "Langevin noise"),
    }
    assert found.labels.tolist() == tiny[1][:1].tolist()


def test_restarts_hold_each_other_together(seen: Any) -> None:
    apart, held = (
        reconstruct(seen[:1], GradInversion(group=weight), budget=replace(BUDGET, iterations=40))
        for weight in (0.0, 100.0)
    )
    assert spread(held[0]) < 0.5 * spread(apart[0])


@pytest.mark.parametrize("trials", [1, 4, 8, 9])
def test_what_a_restart_finds_depends_on_its_group_alone(seen: Any, trials: int) -> None:
    attack = GradInversion(group=10.0)
    alone = [reconstruct([o], attack, budget=BUDGET)[0] for o in seen]
    found = reconstruct(seen[::-1], attack, budget=BUDGET, engine=Engine(trials=trials))[::-1]
    for one, other in zip(alone, found, strict=True):
        assert isinstance(one, Reconstruction) and isinstance(other, Reconstruction)
        for a, b in zip(one.trials, other.trials, strict=True):
            assert torch.allclose(a.images, b.images, atol=1e-4)


def test_restarts_that_do_not_fit_together_are_refused(
    seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve, calls = GradInversion.solve, []

    def limited(self: Any, problem: Any, run: Any) -> Any:
        calls.append(problem.trials)
        if problem.trials > limit:
            raise torch.OutOfMemoryError("out of memory")
        return solve(self, problem, run)

    monkeypatch.setattr(GradInversion, "solve", limited)
    limit = 3
    found = reconstruct(seen, "gradinversion", budget=BUDGET, engine=Engine(trials=9))
    assert calls == [9, 6, 3, 3, 3]
    assert all(isinstance(one, Reconstruction) for one in found)
    limit = 2
    (left,) = reconstruct(seen[:1], "gradinversion", budget=BUDGET)
    assert isinstance(left, Refusal)
    check_refusal(left, "out-of-memory", "c0", 3, "budget.restarts")


def test_an_interrupted_run_goes_on_with_the_noise_that_it_would_have_had(
    seen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bract.attacks.solve.descent._CHECKPOINT_SECONDS", 0.0)
    attack = GradInversion(langevin=1.0)
    wanted = reconstruct(seen[:1], attack, budget=BUDGET)
    quiet = reconstruct(seen[:1], GradInversion(langevin=0.0), budget=BUDGET)

    def stop(progress: Any) -> None:
        if progress.fraction >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine = Engine(checkpoint=tmp_path, progress=stop)
        reconstruct(seen[:1], attack, budget=BUDGET, engine=engine)
    assert list(tmp_path.iterdir())
    found = reconstruct(seen[:1], attack, budget=BUDGET, engine=Engine(checkpoint=tmp_path))
    for results in (wanted, found, quiet):
        assert isinstance(results[0], Reconstruction)
    assert torch.equal(found[0].images, wanted[0].images)  # type: ignore[union-attr]
    assert not torch.equal(quiet[0].images, wanted[0].images)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "counted", "used"),
    [
        (lambda o: o, 0, True),
        (lambda o: replace(o, returned_buffers={}), 0, False),  # 0 and 1: no batch was counted
        (lambda o: replace(o, returned_buffers={}), 5, True),
    ],
)
def test_batch_statistics_count_where_the_capture_tells_some(
    digits: Any, change: Any, counted: int, used: bool
) -> None:
    seen = one_step(digits[0][:1], digits[1][:1])
    buffers = {
        name: value + counted if name.endswith("num_batches_tracked") else value
        for name, value in seen.buffers.items()
    }
    if counted:
        seen = replace(seen, buffers=buffers)
    (found,) = reconstruct([change(seen)], "gradinversion", budget=Budget(iterations=2))
    assert isinstance(found, Reconstruction)
    assert ("batch statistics" in found.components) is used


def test_the_norm_is_that_of_normalised_pixels(observe: Any, tiny: Any) -> None:
    seen = observe(tiny[0][:1], tiny[1][:1])
    seen = replace(seen, declaration=seen.declaration.updated({"mean": (0.5,), "std": (0.25,)}))
    case = open_case(seen, tier="oblivious", max_images=1, unroll=16)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))
    # (0.75 - 0.5) / 0.25 is 1, whose square is 1.
    images = torch.full((1, 1, 1, 8, 8), 0.75)
    assert float(SquaredNorm(weight=2.0)(problem, images)) == pytest.approx(2.0)
