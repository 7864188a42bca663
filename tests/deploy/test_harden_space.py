"""What a search may change, and what is refused before it begins."""

from pathlib import Path
from typing import Any

import pytest

from bract.config import build_config
from bract.deploy.harden.measure import spent
from bract.deploy.harden.space import Range, Space, SpaceFile, app_chains, load_space
from bract.errors import BractError

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
        ("space: {training.batch_sise: [1]}", "unknown key 'training.batch_sise'.*batch_size"),
        ("constraints: {leaks: none}", "unknown key 'leaks'. Did you mean 'leak'"),
        ("defenses: [[guardien]]", "unknown defense 'guardien'. Did you mean 'guardian'"),
        ("defenses: [[fedkl]]", "no candidate of the space can run: .*normalisation"),
        ("defenses: [[], [fedkl]]", "defenses 1: fedkl can run with no candidate"),
        ("space: {training.batch_size: []}", "training.batch_size has no value to choose"),
        ("space: {training.lr: {low: 2, high: 1}}", "low 2 is above high 1"),
        ("space: {rounds: [0]}", "no candidate of the space can run: .*rounds: found 0"),
        ("constraints: {bytes: 1000}", "constraints.bytes is 1000, and an update of lenet"),
        (
            "space: {}\nconstraints: {epsilon: 1.0}\ndefenses: [[], [{name: noise, std: 0.001}]]",
            "constraints.epsilon is 1 over 5 rounds, and the least of the space is",
        ),
        (
            "space: {}\nconstraints: {epsilon: 1.0}\ndefenses: [[]]",
            "and no chain has one; add noise",
        ),
        ("constraints: {accuracy: 2}", "constraints.accuracy: found 2"),
        ("- 1", "found"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BractError, match=said) as caught:
        written(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert "space.yaml" in str(caught.value)


def test_an_epsilon_that_per_example_privacy_keeps_is_no_contradiction() -> None:
    keys = {"training.private": [None, {"epsilon": 0.5}]}
    found = space(space=keys, defenses=[[]], constraints={"epsilon": 1.0})
    config = found.configure({"training.private": {"epsilon": 0.5}, "defenses": "0: none"})
    assert spent(config) == 0.5
    with pytest.raises(BractError, match="the least of the space is"):
        space(space=keys, defenses=[[]], constraints={"epsilon": 0.1})


def test_an_apps_chains_change_no_model_and_name_the_defenses_that_would() -> None:
    chains, left = app_chains()
    used = {e if isinstance(e, str) else e["name"] for chain in chains for e in chain}
    assert {"fedkl", "precode"} <= set(left)
    assert not used & set(left)
    assert "adadefense" in used
