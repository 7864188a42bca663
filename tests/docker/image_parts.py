"""What the image of each part holds, read from what builds it, and a Python that holds no more."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from containers import FOLDER, ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PARTS = ("client", "server", "audit")

HIDE = """
import importlib.abc, json, os, sys

with open(os.environ["HIDDEN"]) as file:
    hidden = json.load(file)
names, distributions = set(hidden["modules"]), set(hidden["distributions"])


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        top, _, rest = name.partition(".")
        if top in names or f"{top}.{rest.partition('.')[0]}" in names:
            return None
        return self.finder.find_spec(name, path, target)

    def find_distributions(self, *arguments, **named):
        found = getattr(self.finder, "find_distributions", lambda *a, **n: ())
        for one in found(*arguments, **named):
            name = os.path.basename(str(one._path)).split("-")[0]
            if name.lower().replace("_", "-").replace(".", "-") not in distributions:
                yield one


sys.meta_path[:] = [Finder(finder) for finder in sys.meta_path]
"""
"""``sitecustomize`` that finds neither hidden modules nor hidden distributions."""


def docker_script(name: str) -> ModuleType:
    """Import a script that the Dockerfile runs."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


ROLES = docker_script("roles")
TRIM = docker_script("trim_torch")


@functools.cache
def held(part: str) -> frozenset[str]:
    """Return the distributions that an image installs, by their normalised names."""
    layers = ROLES.packages(ROOT / "pyproject.toml")
    waiting = [(Requirement(text), "") for layer in ROLES.LAYERS[part] for text in layers[layer]]
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted, extra = waiting.pop()
        name = str(canonicalize_name(wanted.name))
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        if name == "uv" or (TRIM.GPU.match(name) and not TRIM.KEPT.match(name)):
            continue
        for asked in ("", *wanted.extras):
            if (name, asked) in seen:
                continue
            seen.add((name, asked))
            waiting += [
                (Requirement(text), asked) for text in importlib.metadata.requires(name) or ()
            ]
    return frozenset(name for name, _ in seen)


@functools.cache
def _modules() -> dict[str, set[str]]:
    """Return the distributions of every importable name of this environment."""
    return {
        module: {str(canonicalize_name(name)) for name in names}
        for module, names in importlib.metadata.packages_distributions().items()
    }


@dataclass(frozen=True)
class Part:
    """One image's Python: this environment without what the image does not hold.

    Attributes
    ----------
    name
        ``client``, ``server`` or ``audit``.
    folder
        Empty folder for what hides the rest.
    """

    name: str
    folder: Path

    def environment(self) -> dict[str, str]:
        """Return the variables that hide the rest, in every Python that is started with them."""
        here = self.folder / f"{self.name}-part"
        if not here.is_dir():
            here.mkdir(parents=True)
            (here / "sitecustomize.py").write_text(HIDE)
            own = held(self.name)
            rooms = [f"bract.{room}" for room in ROLES.LEFT_OUT[self.name]]
            foreign = [
                module for module, names in _modules().items() if not names & {*own, "bract"}
            ]
            installed = {str(canonicalize_name(d.name)) for d in importlib.metadata.distributions()}
            hidden = {
                "modules": rooms + foreign,
                "distributions": sorted(installed - own - {"bract"}),
            }
            (here / "hidden.json").write_text(json.dumps(hidden))
        return {"PYTHONPATH": str(here), "HIDDEN": str(here / "hidden.json")}

    def run(self, commands: Iterable[Sequence[str]], modules: Iterable[str] = ()) -> list[Ended]:
        """Run command lines up to the process that they would become, and import modules.

        One process imports what all of them need, and forks for each.
        """
        asked = {"commands": [*map(list, commands)], "modules": [*modules]}
        done = subprocess.run(
            [sys.executable, "-P", str(Path(__file__).with_name("probe.py"))],
            input=json.dumps(asked),
            env=os.environ | {"OMP_NUM_THREADS": "1"} | self.environment(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [Ended(**found) for found in json.loads(done.stdout)]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its words, exit code and output."""

    command: list[Any]
    code: int
    output: str
