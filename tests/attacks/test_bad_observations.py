from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import check_refusal, refused

from bract.attacks import IG, Budget, Engine, Problem, Reconstruction, Refusal, reconstruct
from bract.attacks.methods.gauss_newton import GaussNewton
from bract.attacks.problem.target_model import target_model_of
from bract.models import create_model
from bract.updates.update import buffers_of


@pytest.fixture
def seen(observe: Any, tiny: Any) -> Any:
    return [observe(tiny[0][i : i + 1], tiny[1][i : i + 1], client=f"c{i}") for i in range(3)]


def spoiled(tensors: Any, name: Any, value: Any) -> Any:
    changed = tensors[name].clone()
    changed.view(-1)[0] = value
    return tensors | {name: changed}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("group", ["parameters", "buffers", "update"])
def test_what_is_not_finite_is_refused_by_name_with_the_mend(
    observe: Any, tiny: Any, group: Any, value: Any
) -> None:

    network = create_model("lenet-strided-bn", classes=10, channels=1, image_size=8)
    seen = observe(tiny[0][:2], tiny[1][:2], model=network)
    seen = replace(
        seen,
        declaration=seen.declaration.updated({"model": "lenet-strided-bn"}),
        returned_buffers=buffers_of(network),
    )
    seen.check()
    tensors = getattr(seen, group)
    name = next(n for n, v in tensors.items() if v.is_floating_point())
    bad = replace(seen, **{group: spoiled(tensors, name, value)})
    with refused("attack-evidence", name, "NaN"):
        bad.check()
    for using in ("auto", "best", "ig", "labels"):
        (result,) = reconstruct(bad, using, budget=Budget(iterations=1), device="cpu")
        assert isinstance(result, Refusal)
        check_refusal(result, "attack-evidence", name, "NaN")


@pytest.mark.parametrize(
    "error",
    [
        torch.linalg.LinAlgError("the matrix is singular"),  # type: ignore[attr-defined]
        RuntimeError("the matrix is singular"),
        ValueError("the matrix is singular"),
    ],
)
@pytest.mark.parametrize("where", ["prepare", "solve"])
def test_numbers_that_one_observation_breaks_on_leave_the_others_their_attack(
    seen: Any, monkeypatch: pytest.MonkeyPatch, error: Any, where: Any
) -> None:
    untouched = getattr(IG, where)

    def breaking(self: Any, first: Any, *rest: Any) -> Any:
        cases = [first] if where == "prepare" else first.cases
        if "c1" in [case.observation.client for case in cases]:
            raise error
        return untouched(self, first, *rest)

    monkeypatch.setattr(IG, where, breaking)
    one, two, three = reconstruct(seen, IG(), budget=Budget(iterations=2), device="cpu")
    assert isinstance(one, Reconstruction) and isinstance(three, Reconstruction)
    assert isinstance(two, Refusal)
    check_refusal(two, "attack-unsuited", "round-0001/c1", "ig", "the matrix is singular")


def test_a_mistake_in_the_program_is_not_taken_for_bad_input(
    seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def solve(self: Any, problem: Any, run: Any) -> None:
        raise TypeError("wrong argument")

    monkeypatch.setattr(IG, "solve", solve)
    with pytest.raises(TypeError, match="wrong argument"):
        reconstruct(seen, IG(), budget=Budget(iterations=1), device="cpu")


def test_a_restart_with_a_loss_that_is_no_number_is_never_the_blind_pick(
    seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve = IG.solve

    def spoil(self: Any, problem: Any, run: Any) -> Any:
        outcome = solve(self, problem, run)
        outcome.losses = outcome.losses.clone()
        outcome.losses[0] = float("nan")
        return outcome

    monkeypatch.setattr(IG, "solve", spoil)
    budget = Budget(iterations=2, restarts=2)
    (found,) = reconstruct(seen[:1], IG(), budget=budget, engine=Engine())
    assert isinstance(found, Reconstruction)
    assert found.trials[0].loss == float("inf")
    assert found.settings["restart"] == 1
    assert not found.failed


def test_solving_for_pixels_ends_where_the_jacobian_is_not_finite(
    seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def jacobian(residual: Any, point: Any, *_: Any) -> Any:
        value = residual(point)
        return torch.full((len(value), len(point)), float("nan"), dtype=point.dtype), value

    monkeypatch.setattr("bract.attacks.solve.levenberg_marquardt._sketched_jacobian", jacobian)
    found = GaussNewton()(seen[0])
    assert found.iterations == 0
    assert float(found.images.min()) == pytest.approx(0.5)
    assert 0 < found.final_loss < float("inf")


def test_solving_for_pixels_fails_as_a_trial_where_the_model_overflows(
    seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate = Problem.simulate

    def overflow(self: Any, images: Any, labels: Any, unknowns: Any) -> Any:
        return {n: v * float("inf") for n, v in simulate(self, images, labels, unknowns).items()}

    monkeypatch.setattr(Problem, "simulate", overflow)
    (found,) = reconstruct(seen[:1], GaussNewton(), device="cpu")
    assert isinstance(found, Reconstruction)
    assert found.failed


@pytest.mark.parametrize(
    "declared",
    [
        {"classes": 1_000_000, "image_shape": (1, 4096, 4096)},
        {"defenses": [{"name": "precode", "latent": 65_536}], "image_shape": (1, 4096, 4096)},
    ],
)
def test_a_declaration_of_an_enormous_model_is_refused_before_it_takes_memory(
    seen: Any, declared: Any
) -> None:
    huge = replace(seen[0], declaration=seen[0].declaration.updated(declared))
    with refused("model-mismatch", 4096, 4096):
        target_model_of(huge)
    first, _, last = reconstruct([huge, *seen[1:]], "ig", budget=Budget(iterations=1), device="cpu")
    assert isinstance(first, Refusal)
    assert isinstance(last, Reconstruction)
