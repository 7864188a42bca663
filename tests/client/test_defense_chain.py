from typing import Any

import pytest
import torch
from refusals import refused

from bract.client.defenses import (
    DEFENSES,
    AdaDefense,
    Defense,
    DefenseChain,
    Guardian,
    Noise,
    ProtectContext,
    Pruning,
    Stage,
    build_defenses,
)

UPDATE = {"w": torch.arange(6.0).reshape(2, 3) - 2.5, "b": torch.tensor([0.5, -0.5])}


class Broken(Defense):
    """A defense that breaks in a chosen way."""

    name = "broken"
    stage = Stage.SPARSIFY
    how: str

    def protect(self, update: Any, state: Any, context: Any) -> Any:
        state["touched"] = torch.tensor(1)
        changed = {k: v.clone() for k, v in update.items()}
        match self.how:
            case "raise":
                raise ZeroDivisionError("division by zero")
            case "nan":
                changed["w"][1, 2] = float("nan")
            case "inf":
                changed["b"][0] = float("inf")
            case "name":
                changed["w2"] = changed.pop("w")
            case "order":
                changed = dict(reversed(changed.items()))
            case "missing":
                del changed["b"]
            case "shape":
                changed["w"] = changed["w"].T
            case "dtype":
                changed["b"] = changed["b"].double()
            case "type":
                changed["b"] = [0.5, -0.5]
            case "none":
                return None
        return changed


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", ("defense-failed", "ZeroDivisionError")),
        ("nan", ("defense-failed", "NaN")),
        ("inf", ("defense-failed", "NaN")),
        ("name", ("defense-failed",)),
        ("order", ("defense-failed", "order")),
        ("missing", ("defense-failed",)),
        ("shape", ("defense-failed", "shape", "2", "3")),
        ("dtype", ("defense-failed", "dtype")),
        ("type", ("defense-failed",)),
        ("none", ("defense-failed", "NoneType")),
    ],
)
def test_a_broken_defense_lets_nothing_out_and_leaves_the_state_as_it_was(
    how: Any, said: tuple[str, ...]
) -> None:
    chain = DefenseChain([AdaDefense(), Broken(how=how)])
    state: dict[str, Any] = {}
    DefenseChain([AdaDefense()]).protect(UPDATE, state)
    before = {k: v.clone() for k, v in state.items()}
    with refused(*said):
        chain.protect(UPDATE, state)
    assert list(state) == list(before)
    assert all(torch.equal(state[k], before[k]) for k in before)


def test_an_update_that_is_not_finite_is_not_defended_but_refused() -> None:
    with refused("defense-failed", "NaN"):
        DefenseChain([Pruning()]).protect({"w": torch.tensor([1.0, float("nan")])}, {})


def test_large_finite_values_are_no_failure() -> None:
    huge = {"w": torch.full((4,), 3e38)}
    assert torch.equal(DefenseChain([]).protect(huge, {})["w"], huge["w"])


def test_defenses_run_in_order_on_each_others_result_and_keep_their_states_apart() -> None:
    chain = build_defenses(
        [{"name": "adadefense", "alpha": 1.0}, {"name": "pruning", "ratio": 0.5}]
    )
    state: dict[str, Any] = {}
    sent = chain.protect(UPDATE, state)
    defended_update = AdaDefense(alpha=1.0).protect(UPDATE, {}, ProtectContext())
    assert int(sum((v == 0).sum() for v in sent.values())) == 4
    for name, value in sent.items():
        assert torch.equal(value[value != 0], defended_update[name][value != 0])
    assert set(state) == {"adadefense.m", "adadefense.v", "adadefense.round", "adadefense.layout"}
    assert chain.report["cosine"] == pytest.approx(
        float(
            torch.nn.functional.cosine_similarity(
                torch.cat([v.flatten() for v in UPDATE.values()]),
                torch.cat([v.flatten() for v in sent.values()]),
                dim=0,
            )
        )
    )


@pytest.mark.parametrize("name", ["adadefense", "guardian", "pruning", "noise"])
def test_every_floating_dtype_comes_back_as_it_went_in_even_mixed(name: Any) -> None:
    update = {
        "half": torch.tensor([1e-4, -2e-4], dtype=torch.float16),
        "brain": torch.tensor([0.5], dtype=torch.bfloat16),
        "double": torch.tensor([[1.0, -2.0]], dtype=torch.float64),
        "single": torch.tensor([0.25]),
    }
    chain = build_defenses([{"name": name, **({"std": 0.1} if name == "noise" else {})}])
    sent = chain.protect(update, {})
    assert {k: v.dtype for k, v in sent.items()} == {k: v.dtype for k, v in update.items()}
    if name == "adadefense":
        # The square of 1e-4 is below float16; computed there, the defended update would not be
        # finite.
        torch.testing.assert_close(
            sent["half"].float(), torch.tensor([0.01, -0.01]) * 0.5**0.5, rtol=0.3, atol=0
        )


def test_the_update_that_went_in_is_not_changed() -> None:
    for entry in ({"name": "adadefense"}, {"name": "guardian"}, {"name": "pruning"}):
        update = {k: v.clone() for k, v in UPDATE.items()}
        build_defenses([entry]).protect(update, {})
        assert all(torch.equal(update[k], UPDATE[k]) for k in UPDATE)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["noise", "pruning"], ("config-conflict", "pruning", "noise")),
        (["pruning", "soteria"], ("config-conflict", "soteria", "pruning")),
        (["guardian", "soteria"], ("config-conflict", "soteria", "guardian")),
        (["noise", "fedkl"], ("config-conflict", "fedkl", "noise")),
        (["adadefense", "guardian"], ("config-conflict", "adadefense", "guardian")),
        (["pruning", "pruning"], ("config-conflict", "pruning", "2")),
    ],
)
def test_orders_that_undo_a_defense_are_refused_with_the_reason(
    names: Any, said: tuple[str, ...]
) -> None:
    entries = [{"name": n, **({"std": 0.1} if n == "noise" else {})} for n in names]
    with refused(*said):
        build_defenses(entries)


def test_a_sensible_order_of_all_stages_is_taken() -> None:
    entries = [{"name": n} for n in ("fedkl", "precode", "soteria", "guardian", "pruning")]
    assert len(build_defenses([*entries, {"name": "noise", "std": 0.1}])) == 6


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "adadefence"}, ("unknown-name", "adadefence", "adadefense")),
        ({"name": "guardian", "betta": 1}, ("config-value", "betta", "beta")),
        ({"name": "pruning", "ratio": 1.5}, ("config-value", "ratio", "1.5")),
        ({"name": "noise"}, ("config-value", "noise")),
        ({"name": "noise", "epsilon": 1.0, "clip": None}, ("config-value", "epsilon", "clip")),
        ({"beta": 1}, ("config-value", "beta")),
    ],
)
def test_a_wrong_entry_is_named(entry: Any, said: tuple[str, ...]) -> None:
    with refused(*said):
        build_defenses([entry])


def test_what_is_public_rebuilds_the_same_chain() -> None:
    chain = DefenseChain([Guardian(beta=3.0), Pruning(ratio=0.25), Noise(std=0.5)])
    again = build_defenses(chain.public())
    assert again.defenses == chain.defenses
    assert chain.public()[0]["beta"] == 3.0


def test_a_defense_that_needs_the_batch_says_so() -> None:
    with refused("defense-failed", "soteria"):
        build_defenses([{"name": "soteria"}]).protect(UPDATE, {})


def test_every_defense_registers_under_its_own_name_and_has_defaults() -> None:
    assert set(DEFENSES) == {
        "adadefense",
        "censor",
        "fedkl",
        "guardian",
        "noise",
        "per-example",
        "precode",
        "pruning",
        "soteria",
        "truncated-svd",
    }
    for name in DEFENSES:
        noise = {"noise": {"std": 1.0}, "per-example": {"noise_multiplier": 1.0}}
        built = DEFENSES[name](**noise.get(name, {}))
        assert built.name == name
        assert built.public()["name"] == name


def test_private_seeds_give_repeatable_draws_and_none_gives_fresh_ones() -> None:
    def draw(seed: Any, server_round: Any = 1, purpose: Any = "noise") -> Any:
        stream = ProtectContext(round=server_round, seed=seed).stream(purpose)
        return stream.uniform((4,)).tolist()

    assert draw(5) == draw(5)
    drawn = (draw(5), draw(6), draw(5, 2), draw(5, 1, "key"), draw(5 + 2**32), draw(5 + 2**200))
    assert len({tuple(d) for d in drawn}) == 6
    assert draw(None) != draw(None)
