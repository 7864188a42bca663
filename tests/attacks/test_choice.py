import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from bract.attacks import ATTACKS, IG, Analytic, Attack, Auto, Budget, Engine, Refusal, reconstruct
from bract.attacks.choice import Arm, Trial, _Search
from bract.attacks.descent import Outcome
from bract.attacks.reconstruction import Restart
from bract.errors import BractError


@pytest.fixture
def seen(observe, tiny):
    return observe(tiny[0][:1], tiny[1][:1])


@pytest.fixture
def asked(monkeypatch):
    """Names, starts and iterations of every attack that `Auto` ran, with two fakes in the pool.

    ``near`` returns the image faintly blurred, ``far`` noise that claims a loss of zero.
    """
    log = []

    @dataclass(frozen=True, kw_only=True)
    class Fake(Attack):
        iterations: ClassVar[int] = 80

        def solve(self, problem, run):
            log.append((self.name, problem.restarts, run.iterations))
            shape = (problem.lanes, *problem.image_shape)
            images = torch.stack([self.image(problem.cases[0], r) for r in problem.restarts])
            labels = torch.zeros(problem.lanes, 1, problem.classes)
            labels[:, :, 7] = 1.0
            return Outcome(
                images.view(shape), labels, torch.zeros(problem.lanes), {}, [[]] * problem.lanes, 1
            )

    class Near(Fake):
        name = "near"

        def image(self, case, restart):
            noise = torch.rand(8, 8, generator=torch.Generator().manual_seed(restart))
            return case.observation.provenance["image"] + 0.01 * (1 + restart) * noise

    class Far(Fake):
        name = "far"

        def image(self, case, restart):
            return torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(restart))

    for kind in (Near, Far):
        monkeypatch.setitem(ATTACKS._entries, kind.name, kind)
    return log


def with_image(observe, tiny):
    image, label = tiny[0][:1], torch.tensor([7])
    observation = observe(image, label)
    observation.provenance["image"] = image
    return observation


def test_half_of_the_arms_stay_in_each_pass_and_get_twice_the_iterations(asked, observe, tiny):
    auto = Auto(pool=("near", "far"))
    result = auto(with_image(observe, tiny), budget=Budget(iterations=80, restarts=2))
    passes = [(name, len(starts), steps) for name, starts, steps in asked]
    assert passes == [("near", 2, 20), ("far", 2, 20), ("near", 2, 40), ("near", 1, 80)]
    assert result.settings["chosen"] == "near" and result.attack == "auto"


def test_the_choice_reads_the_match_and_not_the_loss_that_an_attack_claims(asked, observe, tiny):
    observation = with_image(observe, tiny)
    (result,) = reconstruct(observation, Auto(pool=("far", "near")), device="cpu")
    assert result.settings["chosen"] == "near"
    trials = {t["attack"]: t["distance"] for t in result.settings["trials"]}
    assert trials["near"] < trials["far"]
    assert result.gradient_cosine == pytest.approx(1 - trials["near"], abs=1e-12)
    assert float((result.images - observation.provenance["image"]).abs().max()) < 0.02
    assert len(result.all_restarts) == 3  # both in the first pass, the better one in the second


def test_the_start_that_matched_best_is_the_one_that_goes_on(asked, observe, tiny):
    Auto(pool=("near",))(
        with_image(observe, tiny), budget=Budget(iterations=8, restarts=4, starts=(3, 1, 2))
    )
    assert asked[-1][1] == (1,)  # noise grows with the number of the start


def test_a_restart_begins_at_the_same_point_whatever_runs_beside_it(seen):
    def losses(**starts):
        (result,) = reconstruct(
            seen, IG(), budget=Budget(iterations=5, **starts), device="cpu", seed=4
        )
        return {r.number: r.loss for r in result.all_restarts}

    every, one = losses(restarts=3), losses(starts=(2,))
    assert set(every) == {0, 1, 2} and set(one) == {2}
    assert one[2] == pytest.approx(every[2], rel=1e-4)
    assert one[2] != pytest.approx(every[1], rel=1e-4)


def test_an_exact_input_ends_the_search(observe, tiny, asked):
    dense = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    import sys

    module = sys.modules[__name__]
    module.dense = lambda: dense
    observation = observe(tiny[0][:1], tiny[1][:1], model=dense)
    observation = type(observation)(
        **{
            **vars(observation),
            "protocol": observation.protocol.updated({"model": f"{__name__}:dense"}),
        }
    )
    (result,) = reconstruct(observation, Auto(pool=("far",)), device="cpu")
    assert asked == []
    assert result.settings["chosen"] == "analytic"
    assert result.settings["labels_read"] == tiny[1][:1].tolist()
    exact = Analytic()(observation)
    assert torch.equal(result.images, exact.images)
    assert float((result.images - tiny[0][:1]).abs().max()) < 1e-4


def test_what_no_attack_can_use_is_refused_with_their_reason(seen):
    secret = type(seen)(
        **{
            **vars(seen),
            "update": {},
            "ciphertexts": {"c": torch.zeros(8, dtype=torch.uint8)},
            "protocol": seen.protocol.updated({"encryption": "paillier"}),
        }
    )
    (result,) = reconstruct(secret, Auto(), device="cpu")
    assert isinstance(result, Refusal)
    assert result.reason.count("no gradient attack applies") == 1


def test_one_refused_observation_leaves_the_others_their_attacks(asked, observe, tiny):
    good = with_image(observe, tiny)
    bad = observe(tiny[0][1:2], tiny[1][1:2], client="c1", loss="hinge")
    refused, done = reconstruct([bad, good], Auto(pool=("near",)), device="cpu")
    assert isinstance(refused, Refusal) and "hinge" in refused.reason
    assert done.settings["chosen"] == "near"


def test_a_failed_trial_is_never_chosen():
    def trial(name, loss, cosine):
        blank = torch.zeros(1, 1, 8, 8)
        restart = Restart(
            images=blank, label_probabilities=torch.ones(1, 1), loss=loss, cosine=cosine
        )
        return Trial(Arm(name, 0), restart, {}, 1)

    search = _Search([Arm("a", 0), Arm("b", 0), Arm("c", 0)])
    search.trials = [
        trial("a", math.inf, 1.0),
        trial("b", 3.0, -0.2),
        trial("c", 0.0, math.nan),
    ]
    search.halve(1)
    assert search.arms == [Arm("b", 0)]
    assert search.best().arm.attack == "b"
    assert search.trials[0].summary()["distance"] is None


def test_progress_only_rises_and_ends_at_one(seen):
    told = []
    engine = Engine(progress=lambda progress: told.append(progress.fraction))
    Auto(pool=("ig", "idlg")).run(
        [seen], budget=Budget(iterations=6), seed=0, tier="oblivious", engine=engine
    )
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)


def test_a_pool_of_unknown_attacks_or_itself_is_refused():
    for name in ("auto", "igg"):
        with pytest.raises(BractError, match=f"cannot choose '{name}'"):
            Auto(pool=(name,))
    with pytest.raises(BractError, match=r"budget\.starts is empty"):
        Budget(starts=())
