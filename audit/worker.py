"""One of several processes, on one machine or many, that attack the batches of one audit."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bract.attacks.solve.engine import Progress
from bract.audit.audit import Audit
from bract.config.config import AuditRequest
from bract.disk.permissions import make_private_folder
from bract.inputs import INPUTS
from bract.installed.plugins import blaming
from bract.rundir import RunDirectory

Standing = tuple[float, float]
"""How far a batch is, in [0, 1], and its lowest loss."""


def few_threads() -> None:
    """Attacked models are small: threads that wait for each other cost more than they give."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


class Worker:
    """Attacks batches and returns the files that an audit would have written.

    It reads the run where it lies and writes into a folder of its own there, which it empties after
    each batch; keeping results is the business of the audit that asked.

    Parameters
    ----------
    root
        The run, at an absolute path that this machine sees too.
    scratch
        Folder below which half-made results are.
    threads
        Threads of PyTorch; as many as one machine's audit has, since the last bits go by them.
    """

    def __init__(self, root: Path, scratch: Path, threads: int) -> None:
        self._root, self._threads = root, threads
        self._folder = scratch / uuid.uuid4().hex
        self._audits: dict[str, Audit] = {}

    def attack(
        self,
        request: AuditRequest,
        attack: str,
        repeat: int,
        keys: Sequence[str],
        note: Callable[[Standing], None] | None = None,
    ) -> dict[str, bytes]:
        """Attack the observations ``keys`` as one batch; ``note`` is told how far it is.

        Returns
        -------
        dict
            Contents of results and of the examples that they name, by the file's name.

        Raises
        ------
        PluginError
            If the question or attack is another package's and fails.
        """
        # Of the thread that calls, which need not be the one that imported torch.
        torch.set_num_threads(self._threads)
        shutil.rmtree(self._folder, ignore_errors=True)
        make_private_folder(self._folder)
        try:
            audit = self._audit(request)
            batch = audit.batch(attack, repeat, keys)
            question = audit.question(batch)

            def noted(progress: Progress) -> None:
                if note is not None:
                    note((float(progress.fraction), float(progress.loss)))

            with blaming(type(question)):
                for _ in question.execute(batch, noted):
                    pass
            endings = {".json", *(INPUTS[kind].suffix for kind in INPUTS)}
            return {
                path.name: path.read_bytes()
                for path in sorted(self._folder.rglob("*"))
                if path.suffix in endings
            }
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _audit(self, request: AuditRequest) -> Audit:
        key = request.model_dump_json()
        if key not in self._audits:
            run = RunDirectory.open(self._root)
            self._audits[key] = Audit(run, request, output=self._folder)
        return self._audits[key]
