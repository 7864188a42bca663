"""The files that an audit leaves: where they lie, what they hold, and which of them go."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bract.audit.captures import Capture
from bract.errors import BractError
from bract.files import write_bytes, write_text
from bract.schema import AuditResult
from bract.strict_json import dump_json


@dataclass(frozen=True)
class Results:
    """Results of one tier: one JSON file an attack, observation and repeat, its pictures beside it.

    Attributes
    ----------
    root
        The run's ``audit/``. Results of the tier ``oblivious`` lie in ``<attack>/``, those of
        others in ``<attack>-<tier>/``; of attacks on ``over_rounds`` rounds together, or by a
        client as the ``observer``, in folders that say so.
    """

    root: Path
    tier: str
    over_rounds: int = 1
    observer: str | None = None

    def folder(self, attack: str) -> Path:
        """Return where an attack's results of this tier lie; those of the others stay."""
        seen = "" if self.observer is None else f"-seen-by-{self.observer}"
        together = f"-over-{self.over_rounds}-rounds" if self.over_rounds > 1 else ""
        tier = "" if self.tier == "oblivious" else f"-{self.tier}"
        return self.root / f"{attack}{tier}{seen}{together}"

    def unfinished(self, attack: str) -> Path:
        """Return where an attack that runs keeps its state."""
        return self.folder(attack) / "unfinished"

    def path(self, attack: str, capture: Capture, repeat: int) -> Path:
        """Return the JSON file of one result; repeats count from 0."""
        again = f"--repeat-{repeat}" if repeat else ""
        return self.folder(attack) / f"{_stem(capture)}{again}.json"

    def read(self, attack: str, capture: Capture, repeat: int) -> AuditResult | None:
        """Return what one file says; None where it is not there, or not of this version."""
        path = self.path(attack, capture, repeat)
        try:
            return AuditResult.parse_text(path.read_bytes(), source=str(path))
        except (OSError, BractError):
            return None

    def write(self, attack: str, capture: Capture, repeat: int, result: AuditResult) -> None:
        """Write one result whole."""
        path = self.path(attack, capture, repeat)
        write_text(path, dump_json(result.to_dict()))

    def keep(
        self,
        attack: str,
        capture: Capture,
        repeat: int,
        result: AuditResult,
        pictures: Mapping[str, bytes],
    ) -> None:
        """Write one result and, before it, the pictures that it names."""
        for image in result.images:
            for name in filter(None, (image.reconstruction, image.original)):
                write_bytes(self.folder(attack) / name, pictures[name])
        self.write(attack, capture, repeat, result)

    def remove(self, attack: str, capture: Capture, repeat: int | None = None) -> None:
        """Remove one observation's results and their pictures; None takes every repeat."""
        again = r"(--repeat-\d+)?"
        if repeat is not None:
            again = f"--repeat-{repeat}" if repeat else ""
        wanted = re.compile(re.escape(_stem(capture)) + again + r"(\.json|--\d+-\w+\.png)")
        for path in self.folder(attack).glob("*"):
            if wanted.fullmatch(path.name):
                path.unlink()

    def forget(self, attack: str) -> None:
        """Remove the state of an attack that was interrupted."""
        shutil.rmtree(self.unfinished(attack), ignore_errors=True)


def _stem(capture: Capture) -> str:
    return capture.key.replace("/", "--")
