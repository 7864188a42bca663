"""Versions on which a run's results depend."""

from __future__ import annotations

import platform
from functools import cache
from hashlib import file_digest, sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import bract
from bract.errors import BractError, one_line

PROTOCOL = 2
"""Number of what servers and clients of bract exchange: messages, the run's configuration, and what
both mean. A release that changes any of it in a way that an earlier one would misread raises it."""

PACKAGES = ("flwr", "torch", "torchvision", "safetensors", "numpy")

RESULT_LIBRARIES = (
    *("torch", "torchvision", "numpy", "scipy", "scikit-image", "scikit-learn"),
    *("lpips", "stlpips-pytorch", "pillow", "gmpy2"),
)
"""Libraries that images, attacks and scores are computed with."""

RESULT_CODE = (
    *(
        f"bract.{name}"
        for name in (
            *("captures", "config", "data", "defenses", "inputs", "masks", "models", "paillier"),
            *("protocol", "updates", "schema", "parse", "crypto", "registry", "seeds"),
            *("attacks", "audit", "scores"),
        )
    ),
    *("bract_papers", "bract_priors"),
)
"""Attacks, scores and what they use of the core, by the names of packages and modules; and bract's
own plug-ins with attacks, where they are installed."""


def release() -> str:
    """Return version and protocol number as they are sent, such as ``0.1.0/1``."""
    return f"{bract.__version__}/{PROTOCOL}"


def check_release(theirs: str, *, at: str = "the server") -> None:
    """Refuse a server whose release does not work together with this one.

    Two releases do where their protocol numbers are the same; versions may differ.

    Parameters
    ----------
    theirs
        What the server's `release` returned.
    at
        What the error calls it.

    Raises
    ------
    BractError
        Naming both releases, and which side is to be upgraded.
    """
    version, _, number = theirs.partition("/")
    if number == str(PROTOCOL):
        return
    newer = number.isdecimal() and len(number) < 9 and int(number) > PROTOCOL
    older = "this client" if newer else at
    raise BractError(
        f"{at} runs bract {one_line(version, 40)} (protocol {one_line(number, 20) or 'unknown'}), "
        f"this client {bract.__version__} (protocol {PROTOCOL}); upgrade {older}: both need the "
        "same protocol number",
        code="bract-version",
    )


@cache
def code_digest(*modules: str) -> str:
    """Return a digest of modules and packages, by their names: of every file that they consist of.

    A module that is not there counts as such; one without a file, as ``builtins`` has none, by its
    name alone.
    """
    digest = sha256()
    for name in modules:
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):  # as `__main__` raises it
            spec = None
        digest.update(f"{name} {spec is not None}\n".encode())
        if spec is None:
            continue
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        files = {
            path.relative_to(folder).as_posix(): path
            for folder in folders
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        if not folders and spec.origin is not None and Path(spec.origin).is_file():
            files = {Path(spec.origin).name: Path(spec.origin)}
        for where, path in sorted(files.items()):
            with path.open("rb") as file:
                digest.update(f"{where} {file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def audit_code() -> str:
    """Return a digest of all code of bract's that attacks and scores depend on."""
    return code_digest(*RESULT_CODE)


def library_versions() -> str:
    """Return the versions of `RESULT_LIBRARIES` in one line; missing ones are marked as such."""
    return ", ".join(f"{name} {_installed(name)}" for name in RESULT_LIBRARIES)


@cache
def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "is not installed"


def package_versions() -> dict[str, str]:
    """Return the versions of bract, Python, the platform and `PACKAGES`, by name."""
    return {
        "bract": bract.__version__,
        **{name: version(name) for name in PACKAGES[:2]},
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        **{name: version(name) for name in PACKAGES[2:]},
    }
