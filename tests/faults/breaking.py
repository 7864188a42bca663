"""A federation as real processes in which something is broken, and what is said of it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from test_processes import Command, wait_for_round

from bract.rundir import RunDirectory

CONFIG = """
name: broken
clients: 1
rounds: {rounds}
data: {{image_size: 16, validation: 0.0}}
model: {{name: lenet-strided, activation: relu}}
training: {{local_steps: 1}}
capture: {{rounds: {captured}}}
"""

LONG = 5000


class Broken:
    """A federation of one client that goes on for long, and the folder it runs in.

    Parameters
    ----------
    captured
        The rounds to capture, as the configuration has them.
    before
        A command that runs the federation.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rounds: int = LONG,
        captured: str = "[1]",
        before: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.captured = captured
        self.run = RunDirectory(folder / "runs" / "broken")
        self.configure(rounds)
        self.command = Command(folder, "run", "f.yaml", before=before)

    def configure(self, rounds: int) -> None:
        (self.folder / "f.yaml").write_text(CONFIG.format(rounds=rounds, captured=self.captured))

    def wait(self, number: int = 1) -> None:
        wait_for_round(self.run, number, self.command)

    def process(self, log: str, word: str) -> psutil.Process:
        """The oldest process that writes to a log and has a word in its command line."""
        found = []
        for process in self.command.descendants():
            output = Path(f"/proc/{process.pid}/fd/1")
            if output.exists() and output.resolve() == (self.run.logs / log).resolve():
                found += [process] if any(word in part for part in process.cmdline()) else []
        return min(found, key=lambda process: process.create_time())

    def end(self, within: float = 180) -> tuple[int, str, float]:
        """Exit code, the last line that was said, and the seconds that it took."""
        begun = time.monotonic()
        code, said = self.command.finish(within)
        assert "Traceback" not in said
        return code, said.strip().splitlines()[-1] if said.strip() else "", time.monotonic() - begun

    def rounds(self) -> list[int]:
        return [row.round for row in self.run.metrics()]

    def finish(self) -> None:
        """See that nothing is left, and that --resume finishes the run without a row twice."""
        assert self.command.nothing_is_left()
        goal = max(self.rounds()) + 1
        self.configure(goal)
        code, said = Command(self.folder, "run", "f.yaml", "--resume").finish()
        assert code == 0, said
        assert self.run.state().status == "finished"
        assert self.rounds() == list(range(goal + 1))


def measured(fault: str, code: int, seconds: float, said: str) -> None:
    print(f"\nMEASURED | {fault} | {code} | {seconds:.1f} | {said}")


def python_path(*folders: Path) -> str:
    """Return a PYTHONPATH with folders in front of what it holds."""
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
