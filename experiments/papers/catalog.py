"""All declared experiments, by name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from bract.errors import BractError, one_line
from bract.parse import parse_yaml
from bract.registry import unknown
from experiments.papers.declaration import Experiment

HERE = Path(__file__).parent

PAPERS = {
    "adadefense": "AdaDefense (Hu et al.)",
    "guardian": "Guardian (Fan et al., WSDM 2024)",
    "grnn": "GRNN (Ren et al. 2022; thesis, chapter 3)",
    "fedboosting": "FedBoosting (Ren et al. 2024; thesis, chapter 4)",
    "fedkl": "FedKL (Ren et al.; thesis, chapter 5)",
}
"""Folders of declarations, and what their works are called."""


@cache
def experiments() -> dict[str, Experiment]:
    """Return every experiment by its name, paper by paper, as the papers number them.

    Raises
    ------
    BractError
        If a declaration is none, naming its file and the first thing that does not fit.
    """
    paths = [p for paper in PAPERS for p in sorted((HERE / paper).glob("*.yaml"), key=_order)]
    found = [read(path) for path in paths]
    return {experiment.name: experiment for experiment in found}


def _order(path: Path) -> tuple[str, int, str]:
    kind, _, rest = path.stem.partition("-")
    number = rest.split("-")[0]
    return kind, int(number) if number.isdecimal() else 0, rest


def read(path: Path) -> Experiment:
    """Read one declaration; its folder and file name are the experiment's.

    Raises
    ------
    BractError
        If it is none.
    """
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise BractError("expected a mapping", code="text-malformed")
        found = Experiment.model_validate({"paper": path.parent.name, "item": path.stem, **content})
    except ValidationError as error:
        # What is unknown first: what is missing is often only misspelt.
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        where = ".".join(str(part) for part in first["loc"])
        raise BractError(
            f"{path}: {where}: {one_line(first['msg'], 300)}", code="config-value"
        ) from error
    except BractError as error:
        raise BractError(f"{path}: {error}", code=error.code) from error
    return found


def find(names: Iterable[str]) -> list[Experiment]:
    """Return experiments by name; a paper's name stands for all of its experiments.

    Raises
    ------
    BractError
        If there is none of a name, naming the nearest.
    """
    known = experiments()
    found: dict[str, Experiment] = {}
    for name in names:
        several = {k: e for k, e in known.items() if e.paper == name}
        if name not in known and not several:
            raise BractError(unknown("experiment", name, [*known, *PAPERS]), code="unknown-name")
        found |= {name: known[name]} if name in known else several
    return list(found.values())
