"""Check the files of a worker of another process or machine before any of them is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bract.errors import BractError, shown
from bract.inputs import INPUTS
from bract.schema import AuditResult
from bract.schema.audit import ImageResult

MOST_BYTES = 64 * 2**20
"""Most bytes of one file, and of one picture's pixels."""

ALIKE = (
    *(
        "question",
        "input",
        "round",
        "client",
        "members",
        "attack",
        "tier",
        "read_as",
        "defenses",
        "encryption",
    ),
    *("num_examples", "local_steps", "repeat", "observer"),
)
"""Fields that do not depend on what is found."""


def read_returned(files: Mapping[str, bytes], stem: str, expected: AuditResult) -> AuditResult:
    """Read one result out of a worker's files, and check it and its pictures.

    Parameters
    ----------
    files
        Contents by name.
    stem
        Name of the result's file, without ``.json``; the names of its pictures begin with it.
    expected
        A result with what this audit knows of it beforehand.

    Raises
    ------
    BractError
        If a file is missing, too large, or not what it should be; the result is of another
        observation or other settings; or it depends on other code, versions or data.
    """
    name = f"{stem}.json"
    found = AuditResult.parse_text(_content(files, name), source=f"a worker's {name}")
    for field in ALIKE:
        theirs, ours = getattr(found, field), getattr(expected, field)
        if theirs != ours:
            raise BractError(
                f"a worker's {name}: {field} is {shown(theirs)}, expected {shown(ours)}",
                code="worker-failed",
            )
    if not _some_of(found.rounds, expected.rounds):
        raise BractError(
            f"a worker's {name}: rounds is {shown(found.rounds)}, expected some of "
            f"{shown(expected.rounds)}, in their order",
            code="worker-failed",
        )
    if found.basis != expected.basis:
        parts = [k for k in expected.basis if found.basis.get(k) != expected.basis[k]]
        raise BractError(
            f"a worker's {name}: made with another {', '.join(parts) or 'basis'} than here; every "
            "machine needs the same bract, libraries and plugins, and must see the run and its "
            "data at the same paths",
            code="worker-failed",
        )
    for image in found.images:
        _check_saved(files, stem, image, expected.input)
    return found


def _some_of(found: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether a part of the rounds was attacked: those that could be used."""
    return list(found) == [r for r in whole if r in found] and bool(found) == bool(whole)


def _check_saved(files: Mapping[str, bytes], stem: str, image: ImageResult, kind: str) -> None:
    """Check the examples that a result names, as its input writes them."""
    ending = re.escape(INPUTS[kind].suffix)
    for role in ("reconstruction", "original"):
        name = getattr(image, role)
        if name is None:
            continue
        if not re.fullmatch(re.escape(stem) + rf"--\d\d+-{role}" + ending, name):
            raise BractError(
                f"a worker's {stem}.json names {shown(name)} as its {role}", code="worker-failed"
            )
        INPUTS[kind].check_saved(f"a worker's {name}", _content(files, name))


def _content(files: Mapping[str, bytes], name: str) -> bytes:
    content = files.get(name)
    if not isinstance(content, bytes) or len(content) > MOST_BYTES:
        size = f"{len(content)} bytes" if isinstance(content, bytes) else shown(content)
        raise BractError(
            f"a worker's {name}: expected up to {MOST_BYTES} bytes, found {size}",
            code="worker-failed",
        )
    return content
