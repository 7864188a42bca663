"""What a search may change, and what is refused before it begins."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from refusals import refused

from bract.config import build_config
from bract_harden.chains import app_chains
from bract_harden.measure import spent
from bract_harden.space import Space, load_space
from bract_harden.space_file import Range, SpaceFile

BASE: dict[str, Any] = {
    "model": {"name": "lenet-strided", "activation": "relu"},
    "data": {"image_size": 16, "validation": 0.0},
}
NOISE = {"name": "noise", "clip": 1.0, "std": {"low": 0.01, "high": 0.1}}


def space(**content: Any) -> Space:
    return Space(build_config(BASE), SpaceFile.model_validate(content))


def written(folder: Path, text: str) -> Space:
    path = folder / "space.yaml"
    path.write_text(text)
    return load_space(build_config(BASE), path)


class First:
    """Takes the last choice, and the low end of a range."""

    def categorical(self, name: str, choices: Any) -> Any:
        return choices[-1]

    def number(self, name: str, among: Range) -> float:
        return among.low


def test_a_setting_becomes_a_configuration_with_the_chain_and_its_fields() -> None:
    found = space(space={"training.batch_size": [1, 4]}, defenses=[[], ["guardian", NOISE]])
    setting = found.suggest(First())
    assert setting == {
        "training.batch_size": 4,
        "defenses": "1: guardian + noise",
        "defenses[1].noise.std": 0.01,
    }
    config = found.configure(setting)
    assert config.training.batch_size == 4
    assert [entry["name"] for entry in config.defenses] == ["guardian", "noise"]
    assert config.defenses[1]["std"] == 0.01


def test_the_default_space_leaves_out_what_the_model_lacks_and_says_so() -> None:
    found = space(space={})
    names = " ".join(found.names())
    assert "fedkl" not in names
    assert "fedkl" in found.notes[0]
    assert "guardian + noise" in names
    assert "adadefense + pruning" in names


def test_the_server_takes_the_rate_that_a_defense_leaves_to_it() -> None:
    entry = {"name": "adadefense", "alpha": 0.02, "alpha_at": "server"}
    found = space(space={}, defenses=[[entry]])
    assert found.configure({"defenses": "0: adadefense"}).strategy.server_lr == 0.02


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("space: {training.batch_sise: [1]}", ("config-key", "training.batch_sise", "batch_size")),
        ("constraints: {leaks: none}", ("config-key", "leaks", "leak")),
        ("defenses: [[guardien]]", ("unknown-name", "guardien", "guardian")),
        ("defenses: [[fedkl]]", ("config-conflict",)),
        ("defenses: [[], [fedkl]]", ("config-conflict", "1")),
        ("space: {training.batch_size: []}", ("config-value", "training.batch_size")),
        ("space: {training.lr: {low: 2, high: 1}}", ("config-value", "2", "1")),
        ("space: {rounds: [0]}", ("config-conflict", "0")),
        (
            "constraints: {bytes: 1000}",
            (
                "config-conflict",
                "constraints.bytes",
                "1000",
                "model.name",
                "lenet-strided",
                "37864",
            ),
        ),
        (
            "space: {model.name: [lenet, lenet-strided]}\nconstraints: {bytes: 1000}",
            ("config-conflict", "constraints.bytes", "1000", "model.name"),
        ),
        (
            "space: {rounds: [9, 5, 4]}\ndefenses: [[], [{name: noise, epsilon: 4.0}]]\n"
            "constraints: {epsilon: 1.0}",
            ("config-conflict", "constraints.epsilon", "1", "4", "training.private"),
        ),
        ("space: {training.batch_size: [8]}\ndefenses: [[]]", ("config-conflict",)),
        ("search: {full: {attacks: [grn]}}", ("unknown-name", "search.full.attacks", "grn")),
        ("search: {cheap: {iteration: 5}}", ("config-key", "search.cheap")),
        ("search: {middle: {iterations: 0}}", ("config-value", "search.middle")),
        (
            "search: {full: {clients: [client-3]}}",
            ("unknown-name", "search.full.clients", "client-3"),
        ),
        ("search: {full: {rounds: [6]}}", ("config-conflict", "search.full.rounds", "6", "5")),
        (
            "space: {}\nconstraints: {epsilon: 1.0}\ndefenses: [[], [{name: noise, std: 0.001}]]",
            ("config-conflict", "constraints.epsilon", "1", "5"),
        ),
        (
            "space: {}\nconstraints: {epsilon: 1.0}\ndefenses: [[]]",
            ("config-conflict",),
        ),
        ("constraints: {accuracy: 2}", ("config-value", "constraints.accuracy", "2")),
        ("- 1", ("config-value",)),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(
    tmp_path: Path, text: str, said: tuple[str, ...]
) -> None:
    with refused(*said) as caught:
        written(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert "space.yaml" in str(caught.value)


def test_an_update_of_16_bits_keeps_a_limit_that_one_of_32_does_not() -> None:
    limit = {"bytes": 20_000}  # of 9,466 values
    space(space={"training.update_dtype": ["float32", "bfloat16"]}, constraints=limit)
    with refused("config-conflict", 37864):
        space(space={}, constraints=limit)


def test_noise_before_a_defense_that_reads_the_data_again_has_no_epsilon() -> None:
    noise = {"name": "noise", "clip": 1.0, "epsilon": 0.1}
    chains: list[Any] = [[noise], [noise, {"name": "censor"}], [{"name": "censor"}, noise]]
    found = [spent(build_config({**BASE, "rounds": 1, "defenses": chain})) for chain in chains]
    assert found == [pytest.approx(0.1), None, pytest.approx(0.1)]
    with refused("config-conflict", "constraints.epsilon"):
        space(space={}, defenses=[chains[1]], constraints={"epsilon": 1.0})


def test_an_epsilon_that_per_example_privacy_keeps_is_no_contradiction() -> None:
    keys = {"training.private": [None, {"epsilon": 0.5}]}
    found = space(space=keys, defenses=[[]], constraints={"epsilon": 1.0})
    config = found.configure({"training.private": {"epsilon": 0.5}, "defenses": "0: none"})
    assert spent(config) == 0.5
    with refused("config-conflict", "space"):
        space(space=keys, defenses=[[]], constraints={"epsilon": 0.1})


def test_an_apps_chains_change_no_model_and_name_the_defenses_that_would() -> None:
    chains, left = app_chains()
    used = {e if isinstance(e, str) else e["name"] for chain in chains for e in chain}
    assert {"fedkl", "precode"} <= set(left)
    assert not used & set(left)
    assert "adadefense" in used


KEYS: dict[str, Any] = {
    "training.batch_size": [1, 4, 6, 64],
    "training.lr": {"low": 0.2, "high": 0.8, "log": True},
    "model.activation": ["sigmoid", "relu"],
    "training.private": [None, {"epsilon": 8.0}],
}


def test_a_start_has_the_configured_values_or_the_nearest_of_the_space() -> None:
    found = space(space=KEYS, defenses=[[], [NOISE]])
    own = {
        "training.batch_size": 6,  # 8 is configured
        "training.lr": 0.2,  # 0.1
        "model.activation": "relu",
        "training.private": None,
    }
    assert found.base.training.batch_size == 8
    assert found.base.training.lr == 0.1
    assert found.starts() == [
        own | {"defenses": "0: none"},
        own | {"defenses": "1: noise", "defenses[1].noise.std": 0.055},
    ]


def test_a_neighbour_differs_a_little_and_keeps_the_chain() -> None:
    found = space(space=KEYS, defenses=[[], [NOISE]])
    start = found.starts()[1]
    drawn = [found.neighbour(start, Random(seed)) for seed in range(60)]
    assert sum(one != start for one in drawn) > 50
    assert all(one["defenses"] == "1: noise" for one in drawn)
    assert {one["training.batch_size"] for one in drawn} == {4, 6, 64}
    assert {one["model.activation"] for one in drawn} == {"relu", "sigmoid"}
    rates = [one["training.lr"] for one in drawn]
    assert 0.2 <= min(rates) < max(rates) < 0.5
    assert drawn == [found.neighbour(start, Random(seed)) for seed in range(60)]
    for one in drawn:
        found.configure(one)


@pytest.mark.parametrize(("log", "middle"), [(True, 0.1), (False, 0.505)])
def test_a_range_is_walked_in_its_own_scale(*, log: bool, middle: float) -> None:
    among = Range(low=0.01, high=1.0, log=log)
    assert among.middle == pytest.approx(middle)
    assert among.share(among.at(0.25)) == pytest.approx(0.25, abs=1e-3)
    assert among.at(-1.0) == 0.01
    assert among.at(2.0) == 1.0
    assert Range(low=1, high=4, whole=True).at(0.5) in (2, 3)
