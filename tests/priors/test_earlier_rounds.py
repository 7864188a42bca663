"""Reconstructing a client's earlier rounds first, for the moments of AdaDefense."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from observing import observed as observe
from refusals import check_named
from torch import Tensor

from bract import Observation
from bract.attacks import Budget, Case, Known, Reconstruction, Refusal, reconstruct
from bract.attacks.adaptive.adadefense.moments import DefendedUpdate, Moments
from bract.attacks.problem.case import open_case
from bract.attacks.problem.evidence import FORWARD
from bract.attacks.task import AttackTask
from bract.client.defenses import ProtectContext, build_defenses
from bract.config import DataConfig
from bract.data.sources import open_source
from bract.defenses import AdaDefense
from bract.updates.update import Tensors, flatten, unflatten
from bract_priors import earlier_rounds
from bract_priors.gias import GIAS
from bract_priors.prior_training import PriorSettings, train_prior
from bract_priors.trained_prior import TrainedPrior

EARLIER = earlier_rounds.EARLIER
ENTRY = {"name": "adadefense", "eps_placement": "outside"}


@dataclass(frozen=True)
class Rounds:
    """Three uploads of one client, one digit each; moments are those before the third."""

    sent: list[Observation]
    plain: list[Observation]
    m: Tensors
    v: Tensors


@pytest.fixture(scope="module", params=[None, 1], ids=["gradient", "one step"])
def rounds(request: Any, tiny: tuple[Tensor, Tensor]) -> Rounds:
    return client_of(tiny, request.param)


def client_of(tiny: tuple[Tensor, Tensor], steps: int | None) -> Rounds:
    chain = build_defenses([ENTRY])
    state: Tensors = {}
    before: Tensors = {}
    sent, plain = [], []
    for number in (1, 2, 3):
        part = slice(number - 1, number)
        seen = replace(observe(tiny[0][part], tiny[1][part], steps=steps), round=number)
        before = {name: value.clone() for name, value in state.items()}
        update = chain.protect(seen.update, state, ProtectContext(round=number))
        plain.append(seen)
        declared = replace(seen.declaration, defenses=(ENTRY,))
        sent.append(replace(seen, update=update, declaration=declared))
    m, v = (
        unflatten(next(x for n, x in before.items() if n.endswith(end)), plain[0].update)
        for end in ("m", "v")
    )
    return Rounds(sent, plain, m, v)


@pytest.fixture(scope="module")
def prior() -> TrainedPrior:
    source = open_source(DataConfig(name="digits"), "train")
    images = source.images(range(600), channels=1, size=8)
    settings = PriorSettings(latent=8, width=8, epochs=20, lr=5e-3)
    return train_prior(images, source.labels[:600], settings, source="digits", classes=10)


def error_of_moments(rounds: Rounds, buffers: Tensors) -> tuple[float, float]:
    """Relative errors of what is carried over, and of the second moment under the root."""
    like = rounds.sent[-1].update
    m, v = (flatten({n: t[n] for n in like}).double() for t in (rounds.m, rounds.v))
    true = DefendedUpdate(AdaDefense(eps_placement="outside"), Moments(2, m, v, m * 0, v * 0))
    carried, second = (
        flatten({n: buffers[f"adadefense.{kind}.{n}"] for n in like}).double()
        for kind in ("carried", "second")
    )
    return (
        float((carried - true.a0).norm() / true.a0.norm()),
        float((second.sqrt() - true.w.sqrt()).norm() / true.w.sqrt().norm()),
    )


def test_true_earlier_gradients_give_the_moments_of_the_client(rounds: Rounds) -> None:
    last, history = rounds.sent[2], rounds.sent[:2]
    true = [seen.gradient() for seen in rounds.plain[:2]]
    found = error_of_moments(
        rounds, FORWARD["adadefense"](last, Known(history=history, earlier=true)).buffers
    )
    replayed = error_of_moments(rounds, FORWARD["adadefense"](last, Known(history=history)).buffers)
    assert max(found) < 1e-3 < 0.2 < max(replayed), (found, replayed)
    # Scaled by 2 where float32 leaves it open, the moments are others.
    other = [{n: 2.0 * g for n, g in one.items()} for one in true]
    wrong = FORWARD["adadefense"](last, Known(history=history, earlier=other))
    assert max(error_of_moments(rounds, wrong.buffers)) > 0.2


def test_the_gradient_of_the_true_image_is_that_of_the_client(
    rounds: Rounds, tiny: tuple[Tensor, Tensor], prior: TrainedPrior
) -> None:
    seen = rounds.sent[1]
    (found,) = reconstruct(
        seen, GIAS(earlier="replay"), budget=Budget(iterations=2), tier="surrogate", public=prior
    )
    assert isinstance(found, Reconstruction)
    rows = torch.nn.functional.one_hot(tiny[1][1:2], 10).float()
    true = replace(found.trials[0], images=tiny[0][1:2], label_probabilities=rows)
    made = earlier_rounds.simulated_gradient(seen, replace(found, trials=(true,)), unroll=16)
    wanted = rounds.plain[1].gradient()
    assert set(made) == set(seen.update)
    for name, value in made.items():
        assert torch.allclose(value, wanted[name], rtol=1e-3, atol=1e-5), name


def attacked(
    seen: Observation, history: list[Observation], prior: TrainedPrior, **settings: Any
) -> dict[str, Any]:
    (found,) = reconstruct(
        seen,
        GIAS(**settings),
        budget=Budget(iterations=60),
        tier="surrogate",
        history=lambda _: history,
        public=prior,
    )
    assert isinstance(found, Reconstruction)
    notes: dict[str, Any] = found.settings["evidence"]
    return notes


def test_a_later_round_is_read_with_the_moments_of_reconstructed_rounds(
    tiny: tuple[Tensor, Tensor], prior: TrainedPrior, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bract_priors.ggl._RESOLVED", 1.1)
    rounds = client_of(tiny, None)
    seen: list[Case] = []
    prepare = GIAS.prepare

    def kept(self: GIAS, case: Case) -> Case:
        seen.append(prepare(self, case))
        return seen[-1]

    monkeypatch.setattr(GIAS, "prepare", kept)
    # The order in which earlier uploads are told does not matter.
    notes = attacked(rounds.sent[2], rounds.sent[1::-1], prior)
    assert notes[EARLIER]["reconstructed"] == [1, 2] and len(notes[EARLIER]["cosine"]) == 2
    assert "left" not in notes[EARLIER] and "assumed" not in notes[EARLIER]
    assert [case.observation.round for case in seen] == [1, 2, 3]
    found = error_of_moments(rounds, seen[-1].evidence.buffers)
    replayed = error_of_moments(
        rounds, FORWARD["adadefense"](rounds.sent[2], Known(history=rounds.sent[:2])).buffers
    )
    assert max(found) < 0.6 * max(replayed), (found, replayed)
    seen.clear()
    assert EARLIER not in attacked(rounds.sent[2], rounds.sent[:2], prior, earlier="replay")
    assert len(seen) == 1


def test_what_is_not_captured_stands_in_the_notes(
    tiny: tuple[Tensor, Tensor], prior: TrainedPrior, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bract_priors.ggl._RESOLVED", 1.1)
    rounds = client_of(tiny, None)
    first, second, third = rounds.sent
    # A client that took no part in round 2.
    notes = attacked(replace(second, round=3), [first], prior)[EARLIER]
    assert notes["reconstructed"] == [1] and notes["assumed"].endswith("a capture: 2")
    # The second upload is above what a first round can send; its moments are not the client's.
    refuse = "bract.attacks.adaptive.adadefense.inversion._refuse_misfit"
    monkeypatch.setattr(refuse, lambda *_: None)
    notes = attacked(third, [second], prior)[EARLIER]
    assert notes["reconstructed"] == []
    check_named(notes["left"], "1 rounds")


def test_a_round_that_cannot_be_attacked_leaves_the_later_ones(
    tiny: tuple[Tensor, Tensor], prior: TrainedPrior
) -> None:
    rounds = client_of(tiny, None)
    case = open_case(
        rounds.sent[2],
        tier="surrogate",
        known=Known(history=rounds.sent[:2]),
        max_images=1,
        public=prior,
    )
    asked = []

    def refusing(cases: Any, task: AttackTask) -> list[Any]:
        asked.append([c.observation.round for c in cases])
        assert task.budget.seconds == 10.0
        return [Refusal(attack="gias", observation=c.observation.key, reason="no") for c in cases]

    task = AttackTask(budget=Budget(seconds=30.0), tier="surrogate", public=prior)
    (found,), left = earlier_rounds.after_earlier([case], task, refusing)
    assert asked == [[1]] and found.known.earlier == () and left.budget.seconds == 10.0
    assert found.evidence.notes[EARLIER]["left"] == "no"
