"""The doctor checks what matters, and names the fix of each lack."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import check_named
from typer.testing import CliRunner

from bract.cli import doctor
from bract.cli.main import app
from bract.installed import GROUPS, flower
from bract.registry import Registry
from bract.runtime import rule, rules


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def choose(*names: str) -> None:
        kept = {name: doctor._CHECKS[name] for name in names}
        monkeypatch.setattr(doctor, "_CHECKS", kept)

    return choose


def findings() -> Any:
    return json.loads(CliRunner().invoke(app, ["doctor", "--format", "json"]).stdout)


def test_the_doctor_looks_at_what_a_federation_and_an_audit_need() -> None:
    assert set(doctor._CHECKS) == {
        "python", "flower", "runtime", "flower's commands", "device", "torchvision", "cores",
        "memory", "paillier", "lpips", "docker", "loopback", "disk", "plugins",
    }  # fmt: skip


def test_what_lacks_is_said_with_a_mend(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only("docker", "lpips", "device")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.hub.get_dir", lambda: "/nowhere")
    found = findings()
    assert [(f["check"], f["level"]) for f in found] == [
        ("docker", "note"),
        ("lpips", "note"),
        ("device", "note"),
    ]
    assert all(finding["fix"] for finding in found)
    assert "alexnet-owt-7be5be79.pth" in found[1]["fix"]


def test_what_a_federation_cannot_do_without_ends_with_an_error(
    only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("flower", "disk")
    monkeypatch.setattr(flower, "installed", lambda: "1.20.0")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code != 0
    check_named(str(done.exception), 1, 2)
    check_named(done.stderr, "1.20.0", "1.21", "flwr")


def test_a_flower_without_rules_is_a_note_and_its_styles_of_apps_are_named(
    only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("flower", "runtime")
    monkeypatch.setattr(flower, "installed", lambda: "1.30.0")
    styles, runtime = findings()
    assert styles["level"] == "ok" and "NumPyClient" in styles["found"]
    assert runtime["level"] == "note" and "1.30.0" in runtime["found"] and runtime["fix"]


@pytest.mark.parametrize("kind", ["security", "speed"])
def test_what_of_the_runtime_is_off_is_named(
    only: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    only("runtime")
    lost = next(one for one in rules.RULES if one.kind == kind)
    places = ("flwr.lost:Name", *(f"flwr.lost:Name{i}" for i in range(40)))
    monkeypatch.setattr(rules, "lacking", lambda: [rule.Off(lost, places)])
    (found,) = findings()
    assert found["level"] == "note" and found["fix"]
    check_named(found["found"], lost.name, places[0], "40 more", f"{len(rules.RULES) - 1} of")
    assert len(found["found"]) < 400


def test_the_speed_of_encryption_is_measured(only: Any) -> None:
    only("paillier")
    (found,) = findings()
    assert "us to encrypt a value" in found["found"]


def test_busy_cores_and_little_memory_are_named(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    only("cores", "memory")
    monkeypatch.setattr("os.getloadavg", lambda: (500.0, 0.0, 0.0))

    class Memory:
        available, total = 2**30, 2**31

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    assert [f["level"] for f in findings()] == ["note", "note"]


def test_plugins_of_every_group_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A group that is added to `GROUPS` without a line in the doctor fails here."""
    assert set(GROUPS) == {*doctor._REGISTRIES, "bract.commands"}
    for module, name in doctor._REGISTRIES.values():
        assert isinstance(getattr(importlib.import_module(module), name), Registry)
    put_package(
        tmp_path, "def greet(): ...\nVALUE = 3\n", {"bract.commands": "hello = theirs:greet"}
    )
    monkeypatch.syspath_prepend(tmp_path)
    said = doctor._plugins()
    check_named(
        said, "commands", "hello (theirs 1.0)", "harden (bract-harden", "prior (bract-priors"
    )
    check_named(said, "attacks", "dlg (bract-papers", "priors generator (bract-priors")


@pytest.mark.parametrize("module", ["1 / 0\n", "import sys\nsys.exit(1)\n"])
def test_a_faulty_command_of_a_plugin_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str
) -> None:
    put_package(tmp_path, module, {"bract.commands": "hello = theirs:greet"})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(doctor._BrokenError) as broken:
        doctor._plugins()
    check_named(str(broken.value), "hello", "theirs 1.0", "bract.commands")


def put_package(folder: Path, module: str, entries: dict[str, str]) -> None:
    sys.modules.pop("theirs", None)
    info = folder / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    lines = "".join(f"[{group}]\n{line}\n" for group, line in entries.items())
    (info / "entry_points.txt").write_text(lines)
    (folder / "theirs.py").write_text(module)
