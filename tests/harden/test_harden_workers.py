"""Searches with one worker and with several find the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bract.config import build_config
from bract.pool import Processes
from bract_harden.configuration import InProcess
from bract_harden.records import Candidate
from bract_harden.search import Hardening
from bract_harden.space import Space
from bract_harden.space_file import SpaceFile
from bract_harden.work import work_there

pytest.importorskip("optuna")

pytestmark = pytest.mark.processes

BASE = {
    "name": "small",
    "truth": True,
    "rounds": 1,
    "clients": 2,
    "data": {
        "image_size": 8,
        "validation": 0.0,
        "partition": {"kind": "sizes", "sizes": [40, 2]},
    },
    "model": {"name": "lenet-strided", "activation": "sigmoid"},
    "training": {"batch_size": 2},
    "audit": {"attacks": ["ig"], "clients": ["client-1"], "rounds": [1], "iterations": 10},
}
SPACE = {
    "space": {"training.lr": [0.05, 0.1]},
    "defenses": [[], [{"name": "pruning", "ratio": {"low": 0.5, "high": 0.9}}]],
    "constraints": {"accuracy_loss": 0.5, "leak": None},
    "search": {
        **{"trials": 3, "seeds": 1, "points": 1},
        **{"cheap": {"iterations": 3}, "middle": {"iterations": 5}},
    },
}


def searched(root: Path, count: int) -> list[Candidate]:
    root.mkdir()
    base = build_config(BASE).as_own_word()
    space = Space(base, SpaceFile.model_validate(SPACE))
    with Processes(partial(work_there, InProcess(base), Path.cwd()), count) as pool:
        search = Hardening(root, space, pool, say=lambda line: None)
        search.run()
    assert search.frontier(full=True)
    return search.candidates


def test_two_workers_find_what_one_finds(tmp_path: Path) -> None:
    one, two = searched(tmp_path / "one", 1), searched(tmp_path / "two", 2)

    def facts(found: list[Candidate]) -> list[Any]:
        return [(c.name, c.stage, c.accuracy, c.leak, c.leaks, len(c.measures)) for c in found]

    first, second = ({c.name: c for c in found} for found in (one, two))
    assert set(first) == set(second)
    for name in first:
        assert first[name].setting == second[name].setting
        assert first[name].accuracy == second[name].accuracy or (
            first[name].stage != second[name].stage
        )
    same = [n for n in first if first[n].stage == second[n].stage]
    assert same
    assert facts([first[n] for n in same]) == facts([second[n] for n in same])
