"""Every adaptive attacker reads the fields of the very defense that clients protect with."""

from typing import Any

import pytest

from bract.attacks import ADAPTIVE, declared
from bract.attacks.task import evidence_for
from bract.defenses import DEFENSES
from bract.defenses.entries import read_defense
from bract.errors import BractError

WRONG: dict[str, dict[str, Any]] = {
    "adadefense": {"beta1": 1.0},
    "censor": {"trials": 0},
    "fedkl": {"rate": 2.0},
    "guardian": {"min_cosine": -0.5},
    "noise": {"std": 0.0},
    "per-example": {"max_grad_norm": 0.0},
    "precode": {"latent": 0},
    "pruning": {"ratio": 1.0},
    "soteria": {"ratio": 0.0},
    "truncated-svd": {"energy": 1.0},
}


def declaring(observe: Any, digits: Any, entry: Any) -> Any:
    return observe(digits[0][:1], digits[1][:1], defenses=(entry,))


def test_every_defense_has_an_adaptive_attacker() -> None:
    assert set(ADAPTIVE) >= set(DEFENSES) == set(WRONG)


@pytest.mark.parametrize("name", list(DEFENSES))
@pytest.mark.parametrize("wrong", ["range", "key"])
def test_a_wrong_declaration_stops_the_observation_in_the_client_s_words(
    observe: Any, digits: Any, name: Any, wrong: Any
) -> None:
    entry = {"name": name, **({"stdd": 1.0} if wrong == "key" else WRONG[name])}
    with pytest.raises(BractError) as at_the_client:
        read_defense(entry)
    seen = declaring(observe, digits, entry)
    with pytest.raises(BractError) as at_the_attacker:
        evidence_for(seen, "adaptive")
    said = str(at_the_client.value)
    assert next(iter(entry.keys() - {"name"})) in said
    assert str(at_the_attacker.value) == (
        f"round-0001/client-0: declared {said}; correct declaration.defenses"
    )


@pytest.mark.parametrize("name", sorted(set(DEFENSES) - {"noise", "per-example"}))
def test_what_a_declaration_leaves_out_is_the_client_s_default(
    observe: Any, digits: Any, name: Any
) -> None:
    seen = declaring(observe, digits, {"name": name})
    assert declared(DEFENSES[name], seen) == DEFENSES[name]()
