"""Rules replace each place of Flower once, in their order, or refuse before that."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from ruling import held, put

from bract import flower
from bract.runtime import arriving, clock, long_polling, parts, senders, sockets, trees, untrusted
from bract.runtime import rule as placing
from bract.runtime import rules as book

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide" / "flower.md").read_text()
PAGE = (ROOT / "docs" / "reference" / "flower-rules.md").read_text()
NAMES = "abcdef"
PLACES = ("one", "two", "three")
FIXTURES = [HealthCheck.function_scoped_fixture]
SECURITY = [rule.name for rule in book.RULES if rule.kind == "security"]
OPTIONAL = sorted(rule.name for rule in book.RULES if rule.kind != "security")


class Flower(ModuleType):
    """A module that counts how often each of its names is assigned."""

    def __init__(self) -> None:
        super().__init__("flwr_of_a_test")
        self.__dict__["assigned"] = Counter()
        self.__dict__.update(dict.fromkeys(PLACES, ()))

    def __setattr__(self, name: str, value: Any) -> None:
        self.assigned[name] += 1
        self.__dict__[name] = value


@pytest.fixture
def fake() -> Iterator[Flower]:
    made = sys.modules["flwr_of_a_test"] = Flower()
    yield made
    del sys.modules["flwr_of_a_test"]


def adding(name: str) -> placing.Layer:
    return lambda before: (*before, name)


def made(
    name: str, kind: placing.Kind, places: set[str], after: set[str], *, there: bool = True
) -> placing.Rule:
    used = [f"flwr_of_a_test:{place}" for place in sorted(places)]
    return placing.Rule(
        name,
        kind,
        ("flwr",),
        (*used, *([] if there else ["flwr_of_a_test:gone"])),
        "",
        "what is lost",
        after=tuple(sorted(after)),
        put=lambda _: {place: adding(name) for place in used},
    )


@st.composite
def some_rules(draw: st.DrawFn) -> list[placing.Rule]:
    """Rules without a circle; any of those that are not for security may lack a place."""
    found = []
    for number, name in enumerate(NAMES[: draw(st.integers(1, len(NAMES)))]):
        kinds: list[placing.Kind] = ["security", "reliability", "speed"]
        kind = draw(st.sampled_from(kinds))
        found.append(
            made(
                name,
                kind,
                draw(st.sets(st.sampled_from(PLACES))),
                draw(st.sets(st.sampled_from(NAMES[:number]))) if number else set(),
                there=kind == "security" or draw(st.booleans()),
            )
        )
    return draw(st.permutations(found))


@given(rules=some_rules())
@settings(suppress_health_check=FIXTURES)
def test_any_names_but_those_for_security_may_lack_and_each_place_is_assigned_once(
    fake: Flower, rules: list[placing.Rule]
) -> None:
    fake.__dict__.update(dict.fromkeys(PLACES, ()))
    fake.assigned.clear()
    off = {missing.rule.name for missing in placing.hold("flwr", rules)}
    assert off == {rule.name for rule in rules if "flwr_of_a_test:gone" in rule.needs}
    on = [rule for rule in rules if rule.name not in off]
    for place in PLACES:
        users = {rule.name for rule in on if f"flwr_of_a_test:{place}" in rule.needs}
        stack = vars(fake)[place]
        assert sorted(stack) == sorted(users), "each layer once"
        assert fake.assigned[place] == bool(users)
        for rule in on:
            for earlier in set(rule.after) & users if rule.name in users else ():
                assert stack.index(earlier) < stack.index(rule.name)


def test_a_missing_name_for_security_is_refused_before_anything_is_replaced(fake: Flower) -> None:
    rules = [
        made("open", "speed", {"one"}, set()),
        made("shut", "security", {"two"}, {"open"}, there=False),
    ]
    version = flower.installed()
    with refused("flower-version", "shut", "flwr_of_a_test:gone", version, "what is lost"):
        placing.hold("flwr", rules)
    assert not fake.assigned
    assert placing.hold("flower-superlink", rules) == [], "it holds in another process"


def test_rules_that_are_held_again_are_around_flower_s_own(fake: Flower) -> None:
    """A child of a process that has rules already puts its own; none is there twice."""
    placing.hold("flwr", [made("a", "speed", {"one"}, set())])
    placing.hold("flwr", [made("a", "speed", {"one"}, set()), made("b", "speed", {"one"}, {"a"})])
    assert vars(fake)["one"] == ("a", "b")


def test_rules_in_a_circle_are_no_rules() -> None:
    with pytest.raises(ValueError, match="cycle"):
        placing.ordered([made("a", "speed", set(), {"b"}), made("b", "speed", set(), {"a"})])


def test_every_place_of_every_rule_is_in_the_installed_flower() -> None:
    assert book.lacking() == []


def test_what_a_rule_relies_on_is_looked_for() -> None:
    assert placing.is_there(f"{flower.CLIENT}.__init__(base_url, verify)")
    assert placing.is_there(f"{flower.CLIENT}._client"), "which its constructor sets"
    assert placing.is_there(f"{flower.place('StartRunRequest')}(fab)")
    for wrong in (
        "flwr.no_such_module:Lost",
        "flwr.supercore.run:Gone",
        f"{flower.CLIENT}.gone",
        f"{flower.CLIENT}.__init__(no_such_parameter)",
        f"{flower.STATE}.no_such_lock",
        f"{flower.place('StartRunRequest')}(no_such_field)",
    ):
        assert not placing.is_there(wrong), wrong


def test_rules_are_named_once_and_name_others_and_processes_that_exist() -> None:
    names = [rule.name for rule in book.RULES]
    assert len(set(names)) == len(names)
    for rule in book.RULES:
        assert set(rule.after) <= set(names), rule.name
        assert set(rule.commands) <= {*placing.ALL, placing.BRACT}, rule.name
        assert rule.does and rule.without and rule.needs


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment in which every rule has something to put."""
    tmp_path.chmod(0o700)
    for name, value in {
        "BRACT_SOCKETS": tmp_path,
        "BRACT_AUDIT_LOG": tmp_path / "audit.jsonl",
        "BRACT_PARTS_FOLDER": tmp_path,
        "BRACT_CLIENT_APP": "bract.client.app:app",
        "BRACT_TIMELINE": tmp_path,
    }.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("configured")
def test_a_rule_replaces_what_it_says_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(clock.EPOCH, "1.5")
    for rule in book.RULES:
        needed = {place.partition("(")[0] for place in rule.needs}
        for command in rule.commands:
            assert set(rule.put(command)) <= needed, rule.name


def stacks(command: str) -> dict[str, list[str]]:
    """Which rules replace each place in a process, the innermost first."""
    found: dict[str, list[str]] = {}
    for rule in book.RULES:
        for place in rule.put(command) if command in rule.commands else ():
            found.setdefault(place, []).append(rule.name)
    return found


@pytest.mark.usefixtures("configured")
def test_layers_are_in_the_order_that_their_rules_need() -> None:
    link, node, app = map(stacks, ("flower-superlink", "flower-supernode", "flwr-serverapp"))
    together, waiting = parts.TOGETHER_AT_LINK.name, long_polling.HELD_AT_LINK.name
    assert link[f"{flower.FLEET}.push_object"] == [senders.RULE.name, together, waiting]
    assert link[f"{flower.STATE}.store_object"] == [arriving.RULE.name, trees.RULE.name]
    assert link["uvicorn:Server.startup"] == ["audit log", "servers on sockets"]
    assert node[sockets.CONSTRUCTED] == [
        "requests to sockets",
        "repeated requests",
        "patience of a refused SuperNode",
        "signs of life",
        "several connections",
        "profile",
    ]
    pulled = "flwr.supernode.start_client_internal:_pull_and_store_message"
    assert node[pulled] == [
        "the operator's app at the SuperNode",
        "held questions at the SuperNode",
    ]
    assert app[f"{flower.CLIENT}._unary_unary"] == [parts.ASKED_TOGETHER.name, untrusted.RULE.name]


@pytest.mark.usefixtures("configured")
@given(off=st.sets(st.sampled_from(OPTIONAL)), command=st.sampled_from(placing.ALL))
@settings(max_examples=50, deadline=None, suppress_health_check=FIXTURES)
def test_flower_starts_without_any_of_the_rules_that_are_not_for_security(
    off: set[str], command: str
) -> None:
    lost = "flwr.no_such_module:Lost"
    rules = [replace(r, needs=(*r.needs, lost)) if r.name in off else r for r in book.RULES]
    with pytest.MonkeyPatch.context() as monkeypatch:
        put(monkeypatch, command, *rules)
        missing = placing.hold(command, rules)
        named = {one.rule.name for one in missing}
        assert named == {r.name for r in book.RULES if command in r.commands and r.name in off}
        assert len(placing.report(missing)) == len({one.rule.kind for one in missing})
        assert all(lost in line and "Flower" in line for line in placing.report(missing))


@pytest.mark.usefixtures("configured")
@pytest.mark.parametrize("lost", SECURITY)
def test_a_process_without_a_rule_for_security_replaces_nothing(lost: str) -> None:
    gone = "flwr:gone"
    rules = [replace(r, needs=(*r.needs, gone)) if r.name == lost else r for r in book.RULES]
    (command,) = {rule.commands[0] for rule in book.RULES if rule.name == lost}
    places = stacks(command)
    before = {place: held(place) for place in places}
    with refused("flower-version", lost, gone, flower.installed()):
        placing.hold(command, rules)
    assert {place: held(place) for place in places} == before


def test_a_flower_that_was_not_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placing.report([]) == []
    monkeypatch.setattr(flower, "installed", lambda: "1.99.0")
    (line,) = placing.report([])
    assert "1.99.0" in line


def test_no_other_code_of_the_runtime_replaces_anything() -> None:
    """One function assigns, so that no place is replaced twice."""
    for path in (ROOT / "runtime").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
                target = ast.unparse(node.args[0])
                allowed = {"rule.py": {"holder", "module"}, "senders.py": {"of_nothing"}}
                assert target in allowed.get(path.name, set()), path


def test_the_table_of_the_documents_is_that_of_the_rules() -> None:
    """`python -m bract.runtime.rules` prints it."""
    begin, end = "<!-- rules -->\n", "<!-- end of rules -->"
    assert PAGE.partition(begin)[2].partition(end)[0].strip() == book.table().strip()


def test_few_private_names_are_used() -> None:
    names, messages = book.private_names(), book.messages()
    assert len(names) - len(messages) <= 24 and len(messages) <= 10
    assert f"{len(names) - len(messages)} private names" in GUIDE and flower.CLIENT in names
