"""CONTRIBUTING.md maps the rooms that exist; the picture of them and the decisions are current."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from rooms import LINKED, PLUG_INS, ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def drawing() -> Any:
    path = ROOT / "docs" / "draw_architecture.py"
    spec = importlib.util.spec_from_file_location("draw_architecture", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_map_names_each_room_and_no_other() -> None:
    rows = re.findall(r"^\| `([\w/-]+)/` \| (.+) \|$", TEXT, re.MULTILINE)
    inner = {path.parent.name for path in (ROOT / "bract").glob("*/__init__.py")} - set(LINKED)
    rooms = {*LINKED, *(f"bract/{room}" for room in inner)}
    plug_ins = {path.parent.relative_to(ROOT).as_posix() for path in PLUG_INS}
    assert sorted(name for name, _ in rows) == sorted(rooms | plug_ins)
    for name, purpose in rows:
        assert len(re.findall(r"\.(?=\s|$)", purpose)) == 1, f"{name}: one sentence"
        assert not re.search(r"\band\b", purpose), f"{name}: one thing"


def test_the_map_names_each_module_that_is_in_no_room() -> None:
    loose = {path.name for path in (ROOT / "bract").glob("*.py")} - {"__init__.py"}
    assert loose == set(re.findall(r"`bract/(\w+\.py)`", TEXT))


def test_the_files_that_the_ways_name_exist() -> None:
    for section in re.findall(r"^### The way of .*?(?=^##)", TEXT, re.DOTALL | re.MULTILINE):
        steps = re.findall(r"^\d+\. .*", section, re.MULTILINE)
        assert len(steps) == 10
        named = {n for step in steps for n in re.findall(r"`(\w+/[\w/]*(?:\.py|/))`", step)}
        missing = [name for name in named if not (ROOT / name).exists()]
        assert named and missing == [], section.splitlines()[0]


def test_the_picture_of_the_rooms_is_current() -> None:
    found = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert found == drawing().drawing(), "run: python docs/draw_architecture.py"


def test_an_arrow_that_follows_from_others_is_left_out() -> None:
    uses = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert drawing().reduced(uses) == [("a", "b"), ("b", "c")]
    assert drawing().depths(set(uses), [("a", "b"), ("b", "c")]) == {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_says_why_and_is_linked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]
    body = re.sub(r"^#.*", "", text, flags=re.MULTILINE)
    assert 150 <= len(body.split()) <= 300
    assert f"](docs/decisions/{page.name})" in TEXT, "link it from CONTRIBUTING.md"


def test_ten_decisions_are_kept() -> None:
    assert len(DECISIONS) >= 10
