"""The one schema of results: experiment, command, device, versions, digest of the code, and rows.

`migrate` converts the two earlier forms, of benchmarks and of papers.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field

from bract.errors import BractError
from bract.parse import parse_json
from bract.schema.record import MOST_BYTES, VersionedRecord
from bract.versions import RESULT_CODE, code_digest, library_versions

RESULTS = Path(__file__).parents[1] / "results"
"""The committed results of benchmarks."""

PACKAGES = (
    *("bract", "flwr", "torch", "torchvision", "safetensors", "scikit-learn", "numpy"),
    *("matplotlib", "pillow", "gmpy2", "phe", "tenseal", "sf-heu"),
)


def own(*names: str) -> tuple[str, ...]:
    """Return modules of the experiments: ``harness.images`` is `experiments.harness.images`."""
    return tuple(f"experiments.{name}" for name in names)


ATTACKED = (
    *(*RESULT_CODE, "bract.attacks", "bract.audit.questions"),
    *("bract.client.defenses", "bract.client.training", "bract_papers"),
    *own("harness.attacking", "harness.clients", "harness.images", "harness.leaks"),
    *own("harness.mnist_package", "harness.data_folders", "harness.splits", "harness.uploads"),
)
"""Modules and packages that the row of an attack follows from."""

PRODUCT = (
    "bract",
    *("bract.attacks", "bract.audit", "bract.cli", "bract.client", "bract_harden", "bract_papers"),
    *(
        "bract.kits",
        "bract.runtime",
        "bract.report",
        "bract.server",
        "bract.strategies",
        "experiments.harness",
    ),
)
"""All that a benchmark's result can follow from, but the benchmark."""

Row = dict[str, Any]
R = TypeVar("R")


class Result(VersionedRecord, Generic[R]):
    """What one experiment measured.

    Attributes
    ----------
    experiment
        A benchmark's module, or a paper's table or figure: ``adadefense/table-4``.
    command
        The command line.
    device, versions
        Of the machine, and of Python and packages.
    code
        Digest of the code and libraries that the rows follow from; None in earlier files.
    """

    kind: ClassVar[str] = "experiment result"
    remedy: ClassVar[str] = "run the experiment again"

    schema_version: Literal[2] = Field(default=2, alias="schema")
    experiment: str
    command: str
    device: str
    versions: dict[str, str]
    code: str | None = None
    rows: tuple[R, ...]


class BenchmarkResult(Result[Row]):
    """A benchmark's rows, each a flat record of settings and figures.

    Attributes
    ----------
    split
        What the rows were scored on (`experiments.harness.splits`), where the command named it.
    """

    split: str | None = None


def migrate(content: object) -> object:
    """Convert content of an earlier form to schema 2; return any other content as it is."""
    if not isinstance(content, dict):
        return content
    if "schema" not in content and "command" in content:
        found = re.search(r"(?:benchmarks/|experiments\.)(\w+)", str(content["command"]))
        return content | {"schema": 2, "experiment": found[1] if found else ""}
    return content | {"schema": 2} if content.get("schema") == 1 else content


K = TypeVar("K", bound=Result[Any])


def read(kind: type[K], path: Path) -> K:
    """Read a result of a kind, in this schema or an earlier form.

    Raises
    ------
    BractError
        If the file is no such result.
    """
    try:
        content = parse_json(path.read_bytes(), most=MOST_BYTES)
    except BractError as error:
        raise BractError(
            f"{path}: {error}; remove it and run the experiment again", code="file-damaged"
        ) from error
    except OSError as error:
        raise BractError(
            f"{path}: cannot be read: {error.strerror or error}", code="file-unreadable"
        ) from error
    return kind.parse(migrate(content), source=str(path))


def committed_path(name: str, folder: Path = RESULTS) -> Path:
    """Return the one committed file whose name begins with ``NAME-``.

    Raises
    ------
    BractError
        If there is none, or more than one.
    """
    found = sorted(folder.glob(f"{name}-*.json"))
    if len(found) != 1:
        raise BractError(
            f"{folder}: found {len(found)} files {name}-*.json, expected one", code="file-missing"
        )
    return found[0]


def committed(name: str, folder: Path = RESULTS) -> list[Row]:
    """Return the rows of the one committed file whose name begins with ``NAME-``.

    Raises
    ------
    BractError
        If there is none, or more than one.
    """
    return list(read(BenchmarkResult, committed_path(name, folder)).rows)


def digest(*modules: str) -> str:
    """Return a digest of modules, packages and the versions of libraries."""
    found = f"{code_digest(*modules)} {library_versions()}"
    return sha256(found.encode()).hexdigest()[:16]


def device_name() -> str:
    """Return the processor's name and number of cores, and the GPU's where torch has one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    text = f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"
    return f"{text}, {gpu}" if (gpu := _gpu()) else text


def _gpu() -> str | None:
    torch = sys.modules.get("torch")  # what did not load it measured no GPU
    return torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and those of `PACKAGES` that are installed."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
