"""The files that an audit leaves: where they are, what they hold, and which of them are removed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bract.audit.captures import Capture
from bract.config.client_names import check_name
from bract.disk.files import write_bytes, write_text
from bract.errors import BractError
from bract.rundir import QUESTIONS_FOLDER
from bract.schema import Answer, AuditResult


@dataclass(frozen=True)
class Batch:
    """Captures that are worked on together, for one question.

    Attributes
    ----------
    attack
        The attack that runs on them; empty where a question runs none by name.
    repeat
        Number of the repetition, from 0.
    """

    question: str
    attack: str
    repeat: int
    captures: tuple[Capture, ...]


@dataclass(frozen=True)
class Results:
    """Results of one tier: one JSON file an attack, observation and repeat, with its pictures.

    Attributes
    ----------
    root
        The run's ``audit/``. Results of the tier ``oblivious`` are in ``<attack>/``, those of
        others in ``<attack>-<tier>/``; of attacks on ``over_rounds`` rounds together, or by a
        client as the ``observer``, in folders whose names say so. Answers of another question are
        in ``questions/<question>/``, named in the same way.
    state
        Name of what every observation's half-made state depends on.
    """

    root: Path
    tier: str
    over_rounds: int = 1
    observer: str | None = None
    state: str = "state"

    def folder(self, attack: str, question: str = "reconstruction") -> Path:
        """Return the folder of an attack's results of this tier, or of a question's answers."""
        seen = "" if self.observer is None else f"-seen-by-{self.observer}"
        together = f"-over-{self.over_rounds}-rounds" if self.over_rounds > 1 else ""
        tier = "" if self.tier == "oblivious" else f"-{self.tier}"
        if question != "reconstruction":
            return self.root / QUESTIONS_FOLDER / f"{question}{tier}{seen}{together}"
        return self.root / f"{attack}{tier}{seen}{together}"

    def unfinished(self, attack: str) -> Path:
        """Return the folder of the state of an attack that runs."""
        return self.folder(attack) / "unfinished"

    def path(self, batch: Batch, capture: Capture) -> Path:
        """Return the JSON file of one attack's result."""
        again = f"--repeat-{batch.repeat}" if batch.repeat else ""
        return self.folder(batch.attack) / f"{_stem(capture)}{again}.json"

    def read(self, batch: Batch, capture: Capture) -> AuditResult | None:
        """Return the result in one file; None where there is none, or of another version."""
        path = self.path(batch, capture)
        try:
            return AuditResult.parse_text(path.read_bytes(), source=str(path))
        except (OSError, BractError):
            return None

    def of_answer(self, answer: Answer) -> Path:
        """Return the JSON file of an answer: by its round and client, or of the whole run."""
        stem = "run"
        if answer.round is not None and answer.client is not None:
            stem = f"round-{answer.round:04d}--{check_name(answer.client)}"
        return self.folder("", answer.question) / f"{stem}.json"

    def write(self, path: Path, result: Answer) -> None:
        """Write one result whole, mode 0600; one that has no ``made`` is of this moment."""
        if result.made is None:
            made = datetime.now(UTC).isoformat(timespec="seconds")
            result = result.model_copy(update={"made": made})
        write_text(path, result.to_text())

    def keep(self, path: Path, result: AuditResult, pictures: Mapping[str, bytes]) -> None:
        """Write one result and, before it, the pictures that it names, all mode 0600."""
        for image in result.images:
            for name in filter(None, (image.reconstruction, image.original)):
                write_bytes(path.with_name(name), pictures[name])
        self.write(path, result)

    def remove(self, attack: str, capture: Capture, repeat: int | None = None) -> None:
        """Remove one observation's results and their pictures; None takes every repeat."""
        again = r"(--repeat-\d+)?"
        if repeat is not None:
            again = f"--repeat-{repeat}" if repeat else ""
        wanted = re.compile(re.escape(_stem(capture)) + again + r"(\.json|--\d+-\w+\.\w+)")
        for path in self.folder(attack).glob("*"):
            if wanted.fullmatch(path.name):
                path.unlink()

    def clear(self, question: str) -> None:
        """Remove all answers of a question of its own folder."""
        shutil.rmtree(self.folder("", question), ignore_errors=True)

    def forget(self, attack: str) -> None:
        """Remove the state of an attack that was interrupted."""
        shutil.rmtree(self.unfinished(attack), ignore_errors=True)


def _stem(capture: Capture) -> str:
    return capture.key.replace("/", "--")
