"""Entries that installed packages bring to a registry."""

import logging
import subprocess
import sys
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import check_named, refused

from bract.attacks import ATTACKS
from bract.attacks.methods.portfolio.auto import Auto
from bract.audit.questions import QUESTIONS
from bract.audit.questions.rules import RULES
from bract.cli import signals
from bract.config import build_config, dump_config
from bract.config.config import parse_config
from bract.data import sources
from bract.errors import BractError, contained
from bract.inputs import INPUTS
from bract.installed import plugins, references
from bract.models import registry as models
from bract.registry import Outlines, Registry, named
from bract.schema.inputs import INPUT_OUTLINES
from bract.strategies import registry as strategies


class Thing:
    name = "?"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a package with one module and its entry points on the path, as pip would."""
    modules = []

    def put(name: Any, module: Any, group: Any, **entries: Any) -> None:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "".join(f"{key} = {name}:{value}\n" for key, value in entries.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
        (tmp_path / f"{name}.py").write_text(module)
        modules.append(name)

    monkeypatch.syspath_prepend(tmp_path)
    yield put
    for name in modules:
        sys.modules.pop(name, None)


def things(**options: Any) -> Any:
    return Registry("thing", group="bract.test", **options)


def test_an_entry_is_imported_when_the_registry_is_first_asked(package: Any) -> None:
    package("theirs_one", "VALUE = 1\n", "bract.test", one="VALUE")
    registry = things()
    registry.register("own")(2)
    assert "theirs_one" not in sys.modules
    assert list(registry) == ["one", "own"]
    assert registry["one"] == 1
    assert registry.plugins() == {"one": "theirs_one 1.0"}


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("bract.attackers", "soteria"),
        ("bract.attacks", "dlg"),
        ("bract.defenses", "censor"),
        ("bract.models", "vggface"),
    ],
)
def test_an_entry_of_bract_s_own_packages_names_the_line_that_installs_it(
    package: Any, monkeypatch: pytest.MonkeyPatch, group: str, name: str
) -> None:
    package("theirs_none", "VALUE = 1\n", "bract.test", one="VALUE")  # packages are read anew
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    registry: Registry[Any] = Registry("thing", group=group)
    with refused("package-missing", name, "bract[papers]", "./plugins/bract-papers"):
        registry[name]
    assert name not in registry
    with refused("unknown-name", "dlgg"):
        registry["dlgg"]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("other = 1\n", "AttributeError"),
        ("class Odd(Exception): pass\nraise Odd('odd')\n", "Odd: odd"),
        ("class Odd(BaseException): pass\nraise Odd('odd')\n", "Odd (odd)"),
        ("import sys\nsys.exit(3)\n", "SystemExit (3)"),
        ("raise SystemExit\n", "SystemExit"),
        ("import argparse\nargparse.ArgumentParser(prog='p').error('no')\n", "SystemExit (2)"),
    ],
)
def test_a_package_that_cannot_be_imported_is_left_out_by_name(
    package: Any, caplog: pytest.LogCaptureFixture, module: Any, reason: Any
) -> None:
    package("theirs_two", module, "bract.test", broken="VALUE")
    registry = things()
    registry.register("own")(2)
    with caplog.at_level(logging.WARNING):
        assert list(registry) == ["own"]
        assert registry["own"] == 2
    (warning,) = caplog.messages
    assert "plugin 'broken' of package theirs_two 1.0, group bract.test" in warning
    assert reason in warning
    assert "install what it needs or correct it, or uninstall the package" in warning
    with refused("plugin-faulty", "broken", "theirs_two", "1.0"):
        registry["broken"]


ENDS = """
import sys
class Ends:
    def __init__(self): sys.exit(4)
def make(): sys.exit(5)
"""


def test_code_of_others_that_ends_the_process_costs_itself_alone(package: Any) -> None:
    package("theirs_ends", ENDS, "bract.attacks", ends="Ends")
    kind = plugins.plugins("bract.attacks")
    entry = next(one for one in kind if one.name == "ends").load()
    with refused("plugin-faulty", "theirs_ends", "SystemExit", "4"), plugins.blaming(entry):
        entry()
    with pytest.raises(SystemExit), plugins.blaming(Thing):
        sys.exit(4)  # bract's own
    with refused("model-faulty", "SystemExit", "5"):
        models._call_factory(references.TrustedReference("theirs_ends:make"))


DATA = """
import sys
from bract.data import Dataset
def opens(config, split): {ends}
theirs = Dataset(opens, 1, 10, (0.5,), (0.5,))
"""


@pytest.mark.parametrize("ends", ["sys.exit(6)", "1 / 0"])
def test_a_data_set_of_a_package_that_fails_names_the_package(
    package: Any, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    package("theirs_data", DATA.format(ends=ends), "bract.data", theirs="theirs")
    (entry,) = [one for one in plugins.plugins("bract.data") if one.name == "theirs"]
    monkeypatch.setattr(sources, "DATASETS", {"theirs": entry.load()})
    config: Any = SimpleNamespace(name="theirs")
    with refused("plugin-faulty", "opens", "theirs_data 1.0", "theirs_data.py"):
        sources.open_source(config, "train")


def test_a_module_of_a_user_that_ends_the_process_is_named(package: Any) -> None:
    package("theirs_script", "raise SystemExit('bye')\n", "bract.test")
    with refused("import-failed", "theirs_script:Net", "SystemExit", "bye"):
        references.import_reference(references.TrustedReference("theirs_script:Net"), what="model")


def test_a_signal_that_ends_bract_passes_through_code_of_others() -> None:
    """Flower's handler of a stopped run and bract's own raise inside whatever runs."""
    handler: dict[str, Any] = {"__name__": "flwr.common.exit_handlers"}
    exec("def handle():\n    raise SystemExit(0)\n", handler)
    with pytest.raises(SystemExit), contained():
        handler["handle"]()
    with pytest.raises(signals.Stopped), contained():
        signals._stop(2, None)
    signals.forget()


def test_a_taken_name_stays_with_its_owner(package: Any, caplog: pytest.LogCaptureFixture) -> None:
    package("theirs_a", "VALUE = 'a'\n", "bract.test", own="VALUE", shared="VALUE")
    package("theirs_b", "VALUE = 'b'\n", "bract.test", shared="VALUE")
    registry = things()
    registry.register("own")("bract's")
    assert registry["own"] == "bract's"
    assert registry["shared"] == "a"
    assert "theirs_b 1.0" in caplog.text
    check_named(caplog.text, "shared", "theirs_a", "1.0")
    assert "thing 'own' is taken by bract itself" in caplog.text


def test_an_entry_of_another_kind_or_name_is_refused(
    package: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = "from test_plugins import Thing\nclass Mine(Thing):\n    name = 'mine'\n"
    sys.modules.setdefault("test_plugins", sys.modules[__name__])
    names = {"mine": "Mine", "odd": "Mine", "no": "OTHER"}
    package("theirs_kind", module + "OTHER = 3\n", "bract.test", **names)
    registry = things(check=partial(named, Thing))
    assert list(registry) == ["mine"]
    check_named(caplog.text, "Mine.name", "mine", "odd")
    assert "3 is no subclass of" in caplog.text


STRATEGY = """
from typing import ClassVar, Literal
from bract.config import StrategySection
class Section(StrategySection):
    implementation: ClassVar[str] = "theirs_strategy:Strategy"
    name: Literal["test-theirs"]
    strength: float = 0.5
import sys
from bract.strategies import FedAvg
class Strategy(FedAvg):
    def __init__(self, strength, **options):
        sys.exit(3) if strength > 1 else 1 / strength
"""


@pytest.fixture
def strategy(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bract.config import sections

    package("theirs_strategy", STRATEGY, "bract.strategies", **{"test-theirs": "Section"})
    monkeypatch.setattr(sections.STRATEGY_SECTIONS, "_loaded", False)
    monkeypatch.setattr(
        sections.STRATEGY_SECTIONS, "_entries", dict(sections.STRATEGY_SECTIONS._entries)
    )


def test_a_strategy_brings_its_own_section(strategy: Any) -> None:
    config = build_config({"strategy": {"name": "test-theirs", "strength": 0.25}})
    section: Any = config.strategy
    assert section.strength == 0.25
    assert parse_config(dump_config(config)) == config
    for given, said in (
        ({"strenght": 1}, "unknown key 'strategy.strenght'. Did you mean 'strategy.strength'?"),
        ({"strength": "much"}, "strategy.strength: found 'much'"),
        ({"name": "test-their"}, "unknown strategy 'test-their'. Did you mean 'test-theirs'?"),
    ):
        with pytest.raises(BractError) as error:
            build_config({"strategy": {"name": "test-theirs"} | given})
        assert said in str(error.value)


@pytest.mark.parametrize("strength", [3.0, 0.0])
def test_a_strategy_of_a_package_that_cannot_be_made_is_named(
    strategy: Any, strength: float
) -> None:
    config = build_config({"strategy": {"name": "test-theirs", "strength": strength}})
    with refused("plugin-faulty", "theirs_strategy 1.0", "theirs_strategy.py"):
        strategies.create_strategy(config)


def test_a_strategy_of_a_package_is_not_run_over_ciphertexts(strategy: Any) -> None:
    with refused("config-value", "encryption"):
        build_config({"strategy": {"name": "test-theirs"}, "encryption": "paillier"})


ATTACK = """
from dataclasses import dataclass
from typing import ClassVar
from bract.attacks import IG
@dataclass(frozen=True, kw_only=True)
class Theirs(IG):
    name: ClassVar[str] = "test-theirs"
"""


def test_an_attack_of_a_package_competes_in_auto(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package("theirs_attack", ATTACK, "bract.attacks", **{"test-theirs": "Theirs"})
    monkeypatch.setattr(ATTACKS, "_entries", dict(ATTACKS._entries))
    monkeypatch.setattr(ATTACKS, "_packages", {})
    monkeypatch.setattr(ATTACKS, "_loaded", False)
    assert Auto(pool=("ig", "test-theirs")).pool == ("ig", "test-theirs")
    assert ATTACKS["test-theirs"].iterations == ATTACKS["ig"].iterations


@pytest.mark.processes
def test_help_and_a_configuration_load_no_plugin(package: Any, tmp_path: Path) -> None:
    package("theirs_loud", "raise SystemExit('loaded')\n", "bract.attacks", loud="X")
    code = (
        "import sys; from bract.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as done: assert not done.code, done\n"
        "assert 'torch' not in sys.modules and 'theirs_loud' not in sys.modules\n"
        "import bract.config; bract.config.build_config({})\n"
        "assert 'theirs_loud' not in sys.modules\n"
    )
    path = [str(tmp_path), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_packages_are_looked_through_once_where_they_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []

    def look(group: str) -> list[Any]:
        looked.append(group)
        return []

    monkeypatch.setattr(plugins, "_remembered", {})
    monkeypatch.setattr(plugins, "entry_points", look)
    plugins._installed.cache_clear()
    plugins.remember_plugins()
    assert looked == list(plugins.GROUPS)
    assert [list(plugins.plugins(group)) for group in plugins.GROUPS] == [[] for _ in looked]
    assert looked == list(plugins.GROUPS)
    plugins._installed.cache_clear()


def test_packages_are_read_again_where_the_path_gained_one_and_not_otherwise(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def look(group: str) -> Any:
        looked.append(group)
        return entry_points(group=group)

    monkeypatch.setattr(plugins, "entry_points", look)
    group = "bract.test-again"
    package("theirs_first", "", group, one="VALUE")
    for _ in range(2):
        assert [plugin.name for plugin in plugins.plugins(group)] == ["one"]
    assert looked == [group]
    package("theirs_second", "", group, two="VALUE")
    assert [plugin.name for plugin in plugins.plugins(group)] == ["one", "two"]
    assert looked == [group, group]


class Outline:
    name = "own"


class Own(Outline):
    pass


def test_an_outline_stands_for_an_own_entry_and_a_package_s_entry_for_itself(
    package: Any, tmp_path: Path
) -> None:
    place = "import bract.registry\nTHINGS = bract.registry.Registry('thing', group='bract.test')\n"
    (tmp_path / "room.py").write_text(place)
    package("theirs_out", "class Out:\n    name = 'out'\n", "bract.test", out="Out")
    outlines: Any = Outlines(Outline, group="bract.test", place="room:THINGS")
    assert outlines["own"] is Outline and outlines.get("none") is None
    assert list(outlines) == ["out", "own"] and "out" in outlines and "none" not in outlines
    assert not {"room", "theirs_out"} & set(sys.modules)
    assert outlines["out"].__module__ == "theirs_out" and outlines["out"] is outlines.get("out")
    sys.modules["room"].THINGS.register("late")(Own)
    assert outlines.get("late") is Own
    sys.modules.pop("room")


def test_bracts_own_inputs_and_questions_are_what_their_outlines_are() -> None:
    pairs: list[tuple[Any, Any]] = [(INPUT_OUTLINES, INPUTS), (RULES, QUESTIONS)]
    for outlines, registry in pairs:
        own = [name for name in registry if registry[name].__module__.startswith("bract.")]
        assert own
        for name in own:
            assert issubclass(registry[name], outlines[name])
            assert registry[name] is not outlines[name]
