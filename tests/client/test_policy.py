import re
from pathlib import Path
from typing import Any

import pytest
from refusals import check_named, refused

from bract.client.defenses import build_defenses
from bract.client.policy import PolicyError, SitePolicy, load_policy
from bract.client.policy_checks import check
from bract.defenses import DEFENSES
from bract.defenses.entries import read_defense
from bract.installed import is_of_bract

POLICY = """
require:
  - name: noise
    minimum: {std: 0.01}
    maximum: {clip: 1.0}
    equal: {kind: gaussian}
  - name: adadefense
"""


PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "defenses.md").read_text()


def recommended(folder: Path) -> SitePolicy:
    """The requirements of the page on defenses, as a site reads them."""
    page = PAGE.partition("## Site policy")[2]
    (example,) = re.findall(r"```yaml\n(.*?)```", page.partition("\n## ")[0], re.DOTALL)
    path = folder / "policy.yaml"
    path.write_text(example)
    return load_policy(path)


def test_the_page_on_defenses_bounds_every_one_of_them(tmp_path: Path) -> None:
    found = recommended(tmp_path)
    ours = {name for name in DEFENSES if is_of_bract(DEFENSES[name])}
    assert {r.name for r in found.require} == ours
    assert not found.cautions()


@pytest.mark.parametrize(
    "weak",
    [
        {"name": "noise", "std": 1e-18},
        {"name": "adadefense", "epsilon": 1e20, "alpha": 1e10},
        {"name": "adadefense", "beta2": 0.999999999},
        {"name": "adadefense", "bias_correction": False},
        {"name": "guardian", "min_cosine": 0.999999},
        {"name": "guardian", "lr": 1e-30},
        {"name": "guardian", "optimizer": "sgd"},
        {"name": "guardian", "beta": 0.0},
        {"name": "pruning", "ratio": 1e-9},
        {"name": "soteria", "ratio": 1e-9},
        {"name": "truncated-svd", "energy": 0.999999},
        {"name": "precode", "weight": 0.0},
        {"name": "fedkl", "key_length": 1},
        {"name": "per-example", "noise_multiplier": 1e-9},
    ],
)
def test_a_defense_that_does_nothing_does_not_meet_the_recommended_bounds(
    weak: dict[str, Any], tmp_path: Path
) -> None:
    found = recommended(tmp_path)
    (requirement,) = [r for r in found.require if r.name == weak["name"]]
    assert requirement.violations({weak["name"]: read_defense(weak).public()})


def test_the_defaults_of_the_defenses_meet_the_recommended_bounds(tmp_path: Path) -> None:
    # Noise, per-example privacy and truncation need a number of their own.
    own = {
        "noise": {"std": 0.001},
        "per-example": {"epsilon": 8.0},
        "truncated-svd": {"energy": 0.5},
    }
    for requirement in recommended(tmp_path).require:
        entry = {"name": requirement.name, **own.get(requirement.name, {})}
        assert not requirement.violations({requirement.name: read_defense(entry).public()})


def test_a_requirement_without_bounds_is_named_with_what_can_be_bounded() -> None:
    bare = {"name": "guardian"}
    bounded = {"name": "pruning", "minimum": {"ratio": 0.9}}
    (caution,) = SitePolicy.model_validate({"require": [bare, bounded]}).cautions()
    check_named(caution, "guardian", "min_cosine", "iterations", "optimizer")


@pytest.fixture
def policy(tmp_path: Path) -> Any:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return load_policy(path)


def test_a_run_that_meets_the_policy_is_taken(policy: Any) -> None:
    check(policy, build_defenses([{"name": "adadefense"}, {"name": "noise", "std": 0.01}]))


@pytest.mark.parametrize(
    ("defenses", "said"),
    [
        ([], ["(no defense)", "'noise' must be on", "'adadefense' must be on"]),
        ([{"name": "noise", "std": 0.01}], ["(noise)", "'adadefense' must be on"]),
        (
            [{"name": "adadefense"}, {"name": "noise", "std": 0.001, "clip": 5.0}],
            [
                "noise.std must be at least 0.01, the run has 0.001",
                "noise.clip must be at most 1.0, the run has 5.0",
            ],
        ),
        (
            [{"name": "adadefense"}, {"name": "noise", "std": 0.1, "kind": "laplace"}],
            ["noise.kind must be exactly 'gaussian', the run has 'laplace'"],
        ),
        # What the run leaves unset cannot be compared, so it meets no bound.
        (
            [{"name": "adadefense"}, {"name": "noise", "std": 0.1, "clip": None}],
            ["noise.clip must be at most 1.0, the run has None"],
        ),
        (
            [{"name": "adadefense"}, {"name": "noise", "epsilon": 1.0}],
            ["noise.std must be at least 0.01, the run has None"],
        ),
    ],
)
def test_a_run_that_asks_for_less_is_refused_with_every_reason(
    policy: Any, defenses: Any, said: Any
) -> None:
    for text in said:
        with refused("policy-refused", text, kind=PolicyError):
            check(policy, build_defenses(defenses))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("require: [{name: adadefence}]", ("unknown-name", "adadefense")),
        ("require: [{name: noise, minimum: {sdt: 1}}]", ("config-key", "sdt")),
        ("requires: []", ("config-value",)),
        ("require: [{name: noise, minimum: {std: high}}]", ("config-value", "minimum.std")),
        ("require: [", ("text-malformed", "YAML")),
        ("- noise", ("config-value",)),
    ],
)
def test_a_wrong_policy_stops_the_site_rather_than_meaning_nothing(
    tmp_path: Path, text: Any, said: tuple[str, ...]
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with refused(*said):
        load_policy(path)


def test_a_missing_policy_stops_the_site(tmp_path: Path) -> None:
    with refused("file-unreadable", tmp_path):
        load_policy(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_round_total: 3", "unknown key 'max_round_total'. Did you mean 'max_rounds_total'"),
        ("data: {path: [/srv]}", "unknown key 'data.path'. Did you mean 'data.paths'"),
        ("local_steps: {minimun: 2}", "Did you mean 'local_steps.minimum'"),
        ("plain_updates: 'false'", "plain_updates: found 'false'; Input should be a valid boolean"),
        ("min_validation_images: 0", "min_validation_images: found 0; Input should be greater"),
        ("max_epsilon: .inf", "max_epsilon: found inf"),
        ("{plain_updates: false, plain_updates: true}", "key 'plain_updates' is given twice"),
        ("data: {names: [a], names: [b]}", "key 'names' is given twice"),
        (
            "initial_model: seed",
            "initial_model: found 'seed'; Input should be 'any' or 'from-seed'",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named_with_file_what_was_found_and_the_nearest(
    tmp_path: Path, text: Any, said: Any
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(PolicyError) as error:
        load_policy(path)
    assert str(error.value).startswith(str(path))
    assert said in str(error.value)


def test_the_documented_example_is_a_policy_with_every_key(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "guide" / "site-policy.md"
    example, guarded = (part.split("```")[0] for part in page.read_text().split("```yaml\n")[1:3])
    (tmp_path / "policy.yaml").write_text(example)
    policy = load_policy(tmp_path / "policy.yaml")
    # A guard goes with no epsilon, and has an example of its own.
    assert policy.model_fields_set == set(SitePolicy.model_fields) - {"guard"}
    (tmp_path / "policy.yaml").write_text(guarded)
    guard = load_policy(tmp_path / "policy.yaml").guard
    assert guard is not None and guard.model_fields_set == set(type(guard).model_fields)
    assert policy.min_validation_images == SitePolicy().min_validation_images == 10


def test_a_site_without_a_file_still_has_a_policy() -> None:
    assert load_policy(None) == SitePolicy()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch_size: {minimum: 8, maximum: 4}", ("config-value", "8", "4")),
        (
            "require: [{name: noise, minimum: {std: 2.0}, maximum: {std: 1.0}}]",
            ("config-value", "noise.std", "2.0", "1.0"),
        ),
        ("require: [{name: noise, minimum: {std: .nan}}]", ("config-value",)),
    ],
)
def test_bounds_that_no_run_meets_are_refused(
    tmp_path: Path, text: str, said: tuple[str, ...]
) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with refused(*said):
        load_policy(tmp_path / "policy.yaml")
