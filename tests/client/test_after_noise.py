"""What follows noise in a chain: nothing of the data reaches it, or no guarantee is counted."""

from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from refusals import refused

from bract.client import accounting, answered, defenses
from bract.client import answers as kept
from bract.client import policy as policies

NOISE = {"name": "noise", "std": 0.5, "clip": 2.0}


class Peeking(defenses.Defense):
    """A plug-in that reads whatever it is given, and declares none of it."""

    name = "peeking"
    stage = defenses.Stage.TRANSFORM

    def protect(self, update: Any, state: Any, context: Any) -> Any:
        seen = [context.model, context.images, context.labels]
        state["seen"] = torch.tensor([value is not None for value in seen])
        return dict(update)


class Declaring(Peeking):
    """The same, with its needs declared."""

    name = "declaring"
    needs = ("labels",)


def test_a_chain_that_reads_the_data_after_its_noise_has_no_mechanism() -> None:
    assert accounting.mechanism_of(defenses.build_defenses([NOISE, {"name": "censor"}])) is None
    assert (
        accounting.mechanism_of(
            defenses.DefenseChain([defenses.Noise(std=0.5, clip=2.0), Declaring()])
        )
        is None
    )
    for chain in (
        defenses.build_defenses([{"name": "censor"}, NOISE]),
        defenses.build_defenses([NOISE, {"name": "adadefense"}]),
        defenses.DefenseChain([Declaring(), defenses.Noise(std=0.5, clip=2.0)]),
    ):
        assert accounting.mechanism_of(chain) == accounting.Mechanism("gaussian", 0.125)


def test_max_epsilon_refuses_a_chain_that_reads_the_data_after_its_noise(tmp_path: Any) -> None:
    policy = policies.SitePolicy(max_epsilon=100.0)
    answers = kept.Answers(RecordDict(), directory=tmp_path, site="a", policy=policy)
    request = answered.Request("train", 1, "digest", 1, "asked", "config", 3)
    chain = defenses.build_defenses([NOISE, {"name": "censor"}])
    with refused("policy-refused", "max_epsilon", kind=policies.PolicyError):
        answers.admit(request, accounting.mechanism_of(chain))


@pytest.mark.parametrize("after", [False, True])
def test_a_defense_after_noise_is_given_none_of_the_data_that_it_does_not_declare(
    after: bool,
) -> None:
    context = defenses.ProtectContext(
        model=torch.nn.Linear(1, 1), images=torch.ones(1), labels=torch.ones(1)
    )
    noise, peeking = defenses.Noise(std=0.5, clip=2.0), Peeking()
    chain = defenses.DefenseChain([noise, peeking] if after else [peeking, noise])
    state: dict[str, Any] = {}
    chain.protect({"w": torch.ones(3)}, state, context)
    seen = next(value for key, value in state.items() if key.endswith("seen"))
    assert bool(seen.any()) is not after


def test_state_of_updates_without_noise_reaches_no_defense_after_noise() -> None:
    """A federation's next run keeps its state, and may have another order of the same defenses."""
    noise, ada = defenses.Noise(std=0.5, clip=2.0), defenses.AdaDefense()
    state: dict[str, Any] = {}
    defenses.DefenseChain([ada, noise]).protect({"w": torch.ones(3)}, state)
    exact = {key: value.clone() for key, value in state.items() if "adadefense" in key}
    assert exact
    defenses.DefenseChain([noise, ada]).protect({"w": torch.zeros(3)}, state)
    for key, value in exact.items():
        assert torch.equal(state[key], value)
