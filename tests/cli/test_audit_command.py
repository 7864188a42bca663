from pathlib import Path
from typing import Any

import pytest
from audited import request_of
from refusals import refused

from bract import Observation, ObservationStore
from bract.cli.audit import auditing
from bract.cli.audit_requests import audit_requests, parse_budget, parse_clients
from bract.cli.settings import read_section
from bract.config import build_config
from bract.config.config import AuditConfig
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration


@pytest.fixture
def root(tmp_path: Path) -> Any:
    run = RunDirectory(tmp_path / "run")
    run.create(build_config({"audit": {"seconds": 30, "repeats": 2, "restarts": 3}}))
    return run.root


def capture(root: Any, client: Any, **declared: Any) -> None:
    declaration = ClientDeclaration(**declared)
    ObservationStore(root / "captures").save(Observation(1, client, {}, {}, declaration))


def tiers(root: Any, **options: Any) -> Any:
    return [choice.tier for choice in audit_requests(root, **options)]


def test_every_tier_that_applies_is_audited_unless_one_is_named(root: Any, tmp_path: Path) -> None:
    capture(root, "a")
    assert tiers(root) == ["oblivious"]
    capture(root, "b", defenses=({"name": "pruning"},))
    assert tiers(root) == tiers(root, tier="all") == ["oblivious", "adaptive"]
    assert tiers(root, tier="adaptive") == ["adaptive"]
    key = tmp_path / "key.pem"
    with refused("usage"):
        audit_requests(root, key=key)
    capture(root, "c", encryption="paillier")
    assert tiers(root) == ["oblivious", "adaptive"]
    choices = audit_requests(root, key=key)
    assert [(c.tier, c.key) for c in choices] == [
        ("oblivious", None),
        ("adaptive", None),
        ("colluding", key),
    ]


def test_the_configuration_names_a_tier_where_the_command_line_does_not(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(build_config({"audit": {"tier": "oblivious", "attacks": ["ig", "grnn"]}}))
    capture(run.root, "b", defenses=({"name": "pruning"},))
    (choice,) = audit_requests(run.root)
    assert (choice.tier, choice.attacks) == ("oblivious", ["ig", "grnn"])
    with refused("unknown-name", "all"):
        audit_requests(run.root, tier="al")


def test_a_budget_is_iterations_or_time() -> None:
    assert parse_budget("2000") == {"iterations": 2000}
    assert parse_budget("90s") == parse_budget(" 1.5m ") == {"total_seconds": 90.0}
    for text in ("", "fast", "0", "-3", "1.5", "3d", "0s"):
        with refused("usage", 2000, "90s"):
            parse_budget(text)


def test_the_command_line_s_budget_replaces_the_configuration_s(root: Any) -> None:
    choice = request_of(root)
    assert (choice.iterations, choice.seconds) == (None, 30.0)
    assert (choice.repeats, choice.restarts, choice.attacks) == (2, 3, ["auto"])
    choice = request_of(root, {**parse_budget("500"), "repeats": 1})
    assert (choice.iterations, choice.seconds, choice.repeats) == (500, None, 1)


def test_any_key_of_the_audit_section_can_be_set_and_no_other(root: Any) -> None:
    known = AuditConfig.model_fields
    assert read_section("audit", ["audit.over_rounds=3"], known) == {"over_rounds": 3}
    with refused("config-key"):
        read_section("audit", ["audit.over_round=3"], known)
    for key in ("training.lr", "audit.models", "audit.key"):
        with refused("config-key"):
            read_section("audit", [f"{key}=1"], known)
    with refused("config-value", "audit.over_rounds"):
        request_of(root, {"over_rounds": "many"})


def test_no_captured_round_is_removed_while_it_is_audited(root: Any) -> None:
    store = ObservationStore(root / "captures")
    capture(root, "a")
    with auditing(root):
        assert store.retire(keep=0, before=2) == []
    assert len(store.retire(keep=0, before=2)) == 1


def test_blanks_around_client_names_do_not_count() -> None:
    assert parse_clients("a, b ") == ["a", "b"]
    with refused("usage", "client-0,client-1"):
        parse_clients("a,,b")
