import pytest

from bract.client.defenses import build_defenses
from bract.client.policy import PolicyError, check, load_policy

POLICY = """
require:
  - name: noise
    minimum: {std: 0.01}
    maximum: {clip: 1.0}
    equal: {kind: gaussian}
  - name: adadefense
"""


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return load_policy(path)


def test_a_run_that_meets_the_policy_is_taken(policy):
    check(policy, build_defenses([{"name": "adadefense"}, {"name": "noise", "std": 0.01}]))


@pytest.mark.parametrize(
    ("defenses", "said"),
    [
        ([], [r"\(no defense\)", "'noise' must be on", "'adadefense' must be on"]),
        ([{"name": "noise", "std": 0.01}], [r"refuses the run \(noise\): 'adadefense' must be on"]),
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
def test_a_run_that_asks_for_less_is_refused_with_every_reason(policy, defenses, said):
    for text in said:
        with pytest.raises(PolicyError, match=text):
            check(policy, build_defenses(defenses))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("require: [{name: adadefence}]", "Did you mean 'adadefense'"),
        ("require: [{name: noise, minimum: {sdt: 1}}]", "noise: unknown hyper-parameter 'sdt'"),
        ("requires: []", "requires: Extra inputs"),
        ("require: [{name: noise, minimum: {std: high}}]", "minimum.std"),
        ("require: [", "not valid YAML"),
        ("- noise", "policy: "),
    ],
)
def test_a_wrong_policy_stops_the_site_rather_than_meaning_nothing(tmp_path, text, said):
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=said):
        load_policy(path)


def test_a_missing_policy_stops_the_site(tmp_path):
    with pytest.raises(PolicyError, match="cannot be read"):
        load_policy(tmp_path / "none.yaml")
