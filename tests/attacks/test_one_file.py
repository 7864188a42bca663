"""Adding an attack, or an adaptive attacker, touches one file of bract's own folders."""

import importlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bract.attacks import ADAPTIVE, ATTACKS, Budget, Reconstruction, adaptive, methods, reconstruct
from bract.attacks.problem.case import open_case
from bract.registry import import_modules

ATTACK = """
from dataclasses import dataclass
from typing import ClassVar

from bract.attacks import ATTACKS
from bract.attacks.methods.label_inference import LabelInference


@ATTACKS.register("one-file")
@dataclass(frozen=True, kw_only=True)
class OneFile(LabelInference):
    name: ClassVar[str] = "one-file"
"""

ATTACKER = """
from bract.attacks import ADAPTIVE, Evidence


@ADAPTIVE.register("one-file")
def undo(observation, known):
    return Evidence(target=observation.gradient(), notes={"undone": "in one file"})
"""

AddFile = Callable[..., None]


@pytest.fixture
def add_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AddFile:
    """Write one file into a copy of a folder that holds its ``__init__`` alone, and import that.

    The folder's other modules are registered already, so the copy leaves them out.
    """
    for registry in (ATTACKS, ADAPTIVE):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.syspath_prepend(tmp_path)

    def add(package: ModuleType, source: str, *, folder: str = "") -> None:
        assert package.__file__ is not None
        copied = tmp_path / f"copied_{package.__name__.rpartition('.')[2]}_{folder}"
        (copied / folder).mkdir(parents=True)
        if folder:
            (copied / folder / "__init__.py").touch()
        shutil.copy(package.__file__, copied)
        (copied / folder / "one_file.py").write_text(source)
        import_modules(importlib.import_module(copied.name))

    return add


def test_an_attack_is_added_by_one_file(add_file: AddFile, observe: Any, tiny: Any) -> None:
    assert "one-file" not in ATTACKS
    add_file(methods, ATTACK)
    seen = observe(tiny[0][:1], tiny[1][:1])
    (found,) = reconstruct(seen, "one-file", budget=Budget(iterations=1), device="cpu")
    assert isinstance(found, Reconstruction)
    assert found.method == "one-file"
    assert torch.equal(found.labels, tiny[1][:1])


@pytest.mark.parametrize("folder", ["", "one_file"])
def test_an_adaptive_attacker_is_added_by_one_file(
    add_file: AddFile, observe: Any, tiny: Any, folder: str
) -> None:
    assert "one-file" not in ADAPTIVE
    add_file(adaptive, ATTACKER, folder=folder)
    seen = observe(tiny[0][:1], tiny[1][:1])
    seen = replace(seen, declaration=seen.declaration.updated({"defenses": [{"name": "one-file"}]}))
    case = open_case(seen, tier="adaptive", max_images=1, unroll=1)
    assert case.evidence.notes == {"undone": "in one file"}
