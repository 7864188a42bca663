import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import refusals
import torch

from bract.attacks import (
    ATTACKS,
    IG,
    Attack,
    Budget,
    Case,
    Cosine,
    Determined,
    Engine,
    Entered,
    Errors,
    InvertingAttack,
    Outcome,
    Problem,
    ReadingBudget,
    Reconstruction,
    Refusal,
    reconstruct,
)
from bract.attacks.methods.analytic import Analytic
from bract.attacks.methods.portfolio.auto import Auto
from bract.attacks.methods.portfolio.halving import Configuration, Contest
from bract.attacks.methods.r_gap.r_gap import RGAP
from bract.attacks.problem.case import open_case
from bract.attacks.problem.site import Site
from bract.attacks.result import Trial
from bract.attacks.task import AttackTask
from bract.client.defenses import ProtectContext, build_defenses
from bract.errors import BractError
from bract.installed import own_word


@pytest.fixture(autouse=True)
def _without_recursion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave something to choose: these images would be read off."""

    def refuse(*_: Any) -> Any:
        raise BractError("not here", code="usage")

    monkeypatch.setattr(RGAP, "prepare", refuse)


@pytest.fixture
def seen(observe: Any, tiny: Any) -> Any:
    return observe(tiny[0][:1], tiny[1][:1])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Names, starts and iterations of every attack that `Auto` ran, with two fakes in the pool.

    ``near`` returns the image faintly blurred, ``far`` noise that claims a loss of zero.
    """
    log = []

    @dataclass(frozen=True, kw_only=True)
    class Fake(Attack):
        iterations: ClassVar[int] = 80

        def image(self, case: Any, restart: Any) -> Any:
            raise NotImplementedError

        def solve(self, problem: Any, run: Any) -> Any:
            log.append((self.name, problem.restarts, run.iterations))
            shape = (problem.trials, *problem.image_shape)
            images = torch.stack([self.image(problem.cases[0], r) for r in problem.restarts])
            labels = torch.zeros(problem.trials, 1, problem.classes)
            labels[:, :, 7] = 1.0
            return Outcome(
                images.view(shape),
                labels,
                torch.zeros(problem.trials),
                {},
                [[]] * problem.trials,
                1,
            )

    class Near(Fake):
        name = "near"

        def image(self, case: Any, restart: Any) -> Any:
            noise = torch.rand(8, 8, generator=torch.Generator().manual_seed(restart))
            return case.observation.provenance["image"] + 0.01 * (1 + restart) * noise

    class Far(Fake):
        name = "far"

        def image(self, case: Any, restart: Any) -> Any:
            return torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(restart))

    for kind in (Near, Far):
        monkeypatch.setitem(ATTACKS._entries, kind.name, kind)
    return log


def with_image(observe: Any, tiny: Any) -> Any:
    image, label = tiny[0][:1], torch.tensor([7])
    observation = observe(image, label)
    observation.provenance["image"] = image
    return observation


def test_half_of_the_configurations_stay_in_each_pass_and_get_twice_the_iterations(
    asked: Any, observe: Any, tiny: Any
) -> None:
    auto = Auto(pool=("near", "far"))
    result = auto(with_image(observe, tiny), budget=Budget(iterations=80, restarts=2))
    passes = [(name, len(starts), steps) for name, starts, steps in asked]
    assert passes == [("near", 2, 20), ("far", 2, 20), ("near", 2, 40), ("near", 1, 80)]
    assert result.pick.attack == "near" and result.attack == "auto"


def test_the_choice_reads_the_match_and_not_the_loss_that_an_attack_claims(
    asked: Any, observe: Any, tiny: Any
) -> None:
    observation = with_image(observe, tiny)
    (result,) = reconstruct(observation, Auto(pool=("far", "near")), device="cpu")
    assert isinstance(result, Reconstruction)
    assert result.pick.attack == "near"
    trials = {t.attack: t.distance for t in result.trials}
    assert trials["near"] < trials["far"]
    assert result.gradient_cosine == pytest.approx(1 - trials["near"], abs=1e-12)
    assert float((result.images - observation.provenance["image"]).abs().max()) < 0.02
    assert len(result.trials) == 3  # both in the first pass, the better one in the second


def test_the_start_that_matched_best_is_the_one_that_goes_on(
    asked: Any, observe: Any, tiny: Any
) -> None:
    Auto(pool=("near",))(
        with_image(observe, tiny),
        budget=Budget(iterations=8, restarts=4, chosen_restarts=(3, 1, 2)),
    )
    assert asked[-1][1] == (1,)  # noise grows with the number of the start


def test_a_restart_begins_at_the_same_point_whatever_runs_beside_it(seen: Any) -> None:
    def losses(**starts: Any) -> Any:
        (result,) = reconstruct(
            seen, IG(), budget=Budget(iterations=5, **starts), device="cpu", seed=4
        )
        assert isinstance(result, Reconstruction)
        return {r.restart: r.loss for r in result.trials}

    every, one = losses(restarts=3), losses(chosen_restarts=(2,))
    assert set(every) == {0, 1, 2} and set(one) == {2}
    assert one[2] == pytest.approx(every[2], rel=1e-4)
    assert one[2] != pytest.approx(every[1], rel=1e-4)


def test_an_exact_input_ends_the_search(observe: Any, tiny: Any, asked: Any) -> None:
    dense = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    import sys

    module: Any = sys.modules[__name__]
    module.dense = lambda: dense
    observation = observe(tiny[0][:1], tiny[1][:1], model=dense)
    named = replace(observation.declaration, model=own_word(f"{__name__}:dense"))
    observation = replace(observation, declaration=named)
    (result,) = reconstruct(observation, Auto(pool=("far",)), device="cpu")
    assert asked == []
    assert isinstance(result, Reconstruction)
    assert result.pick.attack == "analytic"
    assert result.settings["labels_read"] == tiny[1][:1].tolist()
    exact = Analytic()(observation)
    assert isinstance(exact, Reconstruction)
    assert torch.equal(result.images, exact.images)
    assert float((result.images - tiny[0][:1]).abs().max()) < 1e-4


def test_what_no_attack_can_use_is_refused_with_their_reason(seen: Any) -> None:
    secret = type(seen)(
        **{
            **vars(seen),
            "update": {},
            "ciphertexts": {"c": torch.zeros(8, dtype=torch.uint8)},
            "declaration": seen.declaration.updated({"encryption": "paillier"}),
        }
    )
    (result,) = reconstruct(secret, Auto(), device="cpu")
    assert isinstance(result, Refusal)
    assert result.reason.count("no gradient attack applies") == 1


def test_where_closed_forms_alone_take_an_input_their_reasons_are_those_of_auto(
    seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal without a reason would be a row of nothing that was found."""

    def refuse(self: Any, case: Case) -> Case:
        raise BractError(f"{case.observation.key}: unfit", code="attack-unsuited")

    monkeypatch.setattr(Analytic, "prepare", refuse)
    monkeypatch.setattr(Auto, "_suiting", lambda self, case, kind: ["analytic"])
    (result,) = reconstruct(seen, Auto(), device="cpu")
    assert isinstance(result, Refusal) and "unfit" in result.reason
    assert Refusal(attack="near", observation="o", reason="").reason


def test_one_refused_observation_leaves_the_others_their_attacks(
    asked: Any, observe: Any, tiny: Any
) -> None:
    good = with_image(observe, tiny)
    bad = observe(tiny[0][1:2], tiny[1][1:2], client="c1", loss="hinge")
    refused, done = reconstruct([bad, good], Auto(pool=("near",)), device="cpu")
    assert isinstance(refused, Refusal) and "hinge" in refused.reason
    assert isinstance(done, Reconstruction)
    assert done.pick.attack == "near"


def test_a_failed_trial_is_never_chosen() -> None:
    def trial(name: Any, loss: Any, cosine: Any) -> Any:
        blank = torch.zeros(1, 1, 8, 8)
        return Trial(
            images=blank,
            label_probabilities=torch.ones(1, 1),
            loss=loss,
            cosine=cosine,
            attack=name,
            pass_number=1,
        )

    search = Contest([Configuration("a", 0), Configuration("b", 0), Configuration("c", 0)])
    search.trials = [
        trial("a", math.inf, 1.0),
        trial("b", 3.0, -0.2),
        trial("c", 0.0, math.nan),
    ]
    search.halve(1)
    assert search.configurations == [Configuration("b", 0)]
    assert search.trials[search.best()].attack == "b"
    assert search.trials[0].record().distance is None


@pytest.fixture
def noisy(observe: Any, digits: Any, monkeypatch: Any) -> Any:
    """Upload under noise, its image, label and what fits the noise better than the image does.

    The latter two are attacks of the pool, ``smooth`` and ``grainy``.
    """
    image, label = digits[0][:1], digits[1][:1]
    clean = observe(image, label, init="uniform")
    chain = build_defenses([{"name": "noise", "std": 0.5, "clip": None}])
    seen = replace(
        clean,
        update=chain.protect(clean.update, {}, ProtectContext(seed=0)),
        declaration=replace(clean.declaration, defenses=tuple(chain.public())),
    )
    case = open_case(seen, tier="oblivious", max_images=1)
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"))
    rows = torch.nn.functional.one_hot(label, 10)[None].float()
    fitted = image[None].clone().requires_grad_()
    steps = torch.optim.Adam([fitted], lr=0.03)
    for _ in range(10):
        steps.zero_grad()
        distance = problem.distance(Cosine(), problem.simulate(fitted, rows, {}))
        distance.sum().backward()
        steps.step()
    candidates = {"smooth": image, "grainy": fitted.detach()[0]}

    @dataclass(frozen=True, kw_only=True)
    class Fixed(Attack):
        iterations: ClassVar[int] = 4

        def solve(self, problem: Any, run: Any) -> Any:
            found = candidates[self.name].clamp(0.0, 1.0)[None]
            return Outcome(found, rows, torch.zeros(1), {}, [[]], 1)

    for name in candidates:
        monkeypatch.setitem(ATTACKS._entries, name, type(name, (Fixed,), {"name": name}))
    return SimpleNamespace(seen=seen, image=image, rows=rows)


def test_under_noise_the_likelier_image_is_chosen_and_not_the_better_cosine(noisy: Any) -> None:
    """One candidate is the truth; the other fits the noise better, and is no natural image."""
    seen, pool = noisy.seen, ("smooth", "grainy")
    (adaptive,) = reconstruct(seen, Auto(pool=pool), tier="adaptive", device="cpu")
    (oblivious,) = reconstruct(seen, Auto(pool=pool), tier="oblivious", device="cpu")
    assert isinstance(adaptive, Reconstruction) and isinstance(oblivious, Reconstruction)
    assert oblivious.pick.attack == "grainy" and "cosine" in oblivious.settings["criterion"]
    assert adaptive.pick.attack == "smooth" and "posterior" in adaptive.settings["criterion"]
    assert min(adaptive.trials, key=lambda t: t.distance).attack == "grainy"
    assert adaptive.pick.record().nats == min(t.nats for t in adaptive.trials if t.nats)
    assert all(trial.nats is None for trial in oblivious.trials)


@dataclass(frozen=True, kw_only=True)
class Certain(InvertingAttack):
    """A reading of another package: what entered the first layer, and the image that did."""

    name: ClassVar[str] = "certain"
    found_below: ClassVar[float | None] = 0.5
    image: ClassVar[torch.Tensor]
    rows: ClassVar[torch.Tensor]
    left: ClassVar[float] = 0.0
    loss: ClassVar[float] = 0.0

    def entered(self, case: Case, budget: ReadingBudget) -> Entered:
        del budget
        layer = Site("features.0")
        return Entered(
            site=layer,
            values=self.image.flatten(1).double(),
            errors=Errors.of(case, layer.names),
            certificate=Determined(self.image.numel(), self.left, 1e-6),
            component="what entered",
        )

    def inverted(self, problem: Problem, run: Any, read: Any) -> Outcome:
        return Outcome(self.image[None], self.rows, torch.full((1,), self.loss))


def test_what_an_update_determines_of_a_layer_comes_before_what_matches_it_better(
    noisy: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Certain, "image", noisy.image, raising=False)
    monkeypatch.setattr(Certain, "rows", noisy.rows, raising=False)
    monkeypatch.setitem(ATTACKS._entries, "certain", Certain)

    def found() -> Reconstruction:
        (result,) = reconstruct(noisy.seen, Auto(pool=("grainy", "certain")), device="cpu")
        assert isinstance(result, Reconstruction)
        assert min(result.trials, key=lambda trial: trial.distance).attack == "grainy"
        return result

    taken = found()
    assert taken.pick.attack == "certain" and "certificate" in taken.settings["criterion"]
    assert taken.pick.determined == Determined(noisy.image.numel(), 0.0, 1e-6)
    monkeypatch.setattr(Certain, "left", 1e-3)  # more than rounding leaves
    assert found().pick.attack == "grainy"
    monkeypatch.setattr(Certain, "left", 0.0)
    monkeypatch.setattr(Certain, "loss", 0.9)  # images far from what was read
    assert found().pick.attack == "grainy"


def test_progress_only_rises_and_ends_at_one(seen: Any) -> None:
    fractions = []
    engine = Engine(progress=lambda progress: fractions.append(progress.fraction))
    task = AttackTask(budget=Budget(iterations=6), engine=engine)
    Auto(pool=("ig", "idlg")).attack([seen], task)
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0)


def test_a_pool_of_unknown_attacks_or_itself_is_refused() -> None:
    for name in ("auto", "igg"):
        with refusals.refused("config-value", name):
            Auto(pool=(name,))
    with refusals.refused("config-value", "budget.chosen_restarts"):
        Budget(chosen_restarts=())
