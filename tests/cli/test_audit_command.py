from pathlib import Path
from typing import Any

import pytest

from bract.cli.audit import auditing, choose_audit, choose_audits, parse_budget
from bract.config import build_config
from bract.errors import BractError
from bract.protocol.observation import ClientDeclaration, Observation, ObservationStore
from bract.rundir import RunDirectory


@pytest.fixture
def root(tmp_path: Path) -> Any:
    run = RunDirectory(tmp_path / "run")
    run.create(build_config({"audit": {"seconds": 30, "repeats": 2, "restarts": 3}}))
    return run.root


def capture(root: Any, client: Any, **declared: Any) -> None:
    declaration = ClientDeclaration(**declared)
    ObservationStore(root / "captures").save(Observation(1, client, {}, {}, declaration))


def tiers(root: Any, **options: Any) -> Any:
    return [choice.tier for choice in choose_audits(root, **options)]


def test_every_tier_that_applies_is_audited_unless_one_is_named(root: Any, tmp_path: Path) -> None:
    capture(root, "a")
    assert tiers(root) == ["oblivious"]
    capture(root, "b", defenses=({"name": "pruning"},))
    assert tiers(root) == tiers(root, tier="all") == ["oblivious", "adaptive"]
    assert tiers(root, tier="adaptive") == ["adaptive"]
    key = tmp_path / "key.pem"
    with pytest.raises(BractError, match="no captured upload is encrypted"):
        choose_audits(root, key=key)
    capture(root, "c", encryption="paillier")
    assert tiers(root) == ["oblivious", "adaptive"]
    choices = choose_audits(root, key=key)
    assert [(c.tier, c.key) for c in choices] == [
        ("oblivious", None),
        ("adaptive", None),
        ("colluding", key),
    ]


def test_the_configuration_names_a_tier_where_the_command_line_does_not(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(build_config({"audit": {"tier": "oblivious", "attacks": ["ig", "grnn"]}}))
    capture(run.root, "b", defenses=({"name": "pruning"},))
    (choice,) = choose_audits(run.root)
    assert (choice.tier, choice.attacks) == ("oblivious", ("ig", "grnn"))
    with pytest.raises(BractError, match="Did you mean 'all'"):
        choose_audits(run.root, tier="al")


def test_a_budget_is_iterations_or_time() -> None:
    assert parse_budget("2000") == (2000, None)
    assert parse_budget("90s") == (None, 90.0)
    assert parse_budget(" 1.5m ") == (None, 90.0)
    for text in ("", "fast", "0", "-3", "1.5", "3d", "0s"):
        with pytest.raises(BractError, match="such as 2000, or a time such as 90s"):
            parse_budget(text)


def test_the_command_line_s_budget_replaces_the_configuration_s(root: Any) -> None:
    choice = choose_audit(root)
    assert (choice.iterations, choice.seconds) == (None, 30.0)
    assert (choice.repeats, choice.restarts, choice.attacks) == (2, 3, ("auto",))
    choice = choose_audit(root, budget="500", repeats=1)
    assert (choice.iterations, choice.seconds, choice.repeats) == (500, None, 1)
    choice = choose_audit(root, iterations=7)
    assert (choice.iterations, choice.seconds) == (7, 30.0)
    with pytest.raises(BractError, match="give one of them"):
        choose_audit(root, budget="5", iterations=5)


def test_no_captured_round_is_removed_while_it_is_audited(root: Any) -> None:
    store = ObservationStore(root / "captures")
    capture(root, "a")
    with auditing(root):
        assert store.retire(keep=0, before=2) == []
    assert len(store.retire(keep=0, before=2)) == 1


def test_blanks_around_client_names_do_not_count(root: Any) -> None:
    assert choose_audit(root, clients="a, b ").clients == frozenset({"a", "b"})
    with pytest.raises(BractError, match="such as client-0,client-1"):
        choose_audit(root, clients="a,,b")
