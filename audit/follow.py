"""Attack what a run captures while it trains, in a process of its own beside the server.

    python -m bract.audit.follow RUN --attack auto --every 5

The process takes one thread and no GPU, the server that starts it leaves it idle processor time
alone, and it is the first to go where memory is short. It ends as soon as its standard input does,
so it never outlives its parent; what it has attacked is kept, and ``bract audit RUN --resume`` goes
on from there. Its state is in ``live.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bract.attacks.solve.engine import Progress
from bract.audit.audit import Audit
from bract.audit.captures import Captures
from bract.config.config import AuditRequest
from bract.disk.files import write_text
from bract.disk.locks import lock
from bract.disk.permissions import make_private_folder
from bract.errors import BractError, one_line
from bract.rundir import RunDirectory
from bract.schema.live import LiveAudit

_log = logging.getLogger(__name__)

QUEUE = 32
"""Uploads that may wait. Where more arrive, those that have waited longest are dropped."""

POLL = 1.0
"""Seconds between two looks for new captures."""

STATE_EVERY = 2.0
"""Seconds between two notes of how far an attack is."""

Upload = tuple[int, str]
"""Round and client."""


class Follower:
    """Attacks one upload after the other, as they come.

    Parameters
    ----------
    run
        The run, or the folder of a third-party app, that is training.
    attacks
        Names of the attacks.
    every
        Rounds from one that is attacked to the next; the first round captured is one of them.
    models
        References ``package.module:callable`` that captures may declare (`Captures`).
    """

    def __init__(
        self, run: RunDirectory, attacks: Sequence[str], every: int, models: Sequence[str] = ()
    ) -> None:
        self.run = run
        self.every = every
        config = run.config()
        section = config.audit.model_dump(exclude={"tier", "repeats", "rounds", "clients"})
        # Questions about a whole run wait for its end.
        live = {"questions": section["questions"] or ["reconstruction"]}
        self._request = AuditRequest.model_validate(
            section | live | {"attacks": attacks, "device": "cpu", "seed": config.seed}
        )
        self._models = frozenset(models)
        self.queue: deque[Upload] = deque()
        self._seen: set[Upload] = set()
        self._first: int | None = None
        self._writing = threading.Lock()
        self.state = LiveAudit(
            pid=os.getpid(), attacks=list(attacks), every=every, updated=time.time()
        )

    def follow(self) -> None:
        """Attack what comes, until the process ends."""
        while True:
            self.look()
            if not self.step():
                time.sleep(POLL)

    def look(self) -> None:
        """Add what was captured since to the queue."""
        for capture in Captures(self.run.captures).index:
            upload = (capture.round, capture.client)
            if upload in self._seen:
                continue
            self._seen.add(upload)
            self._first = capture.round if self._first is None else self._first
            if (capture.round - self._first) % self.every == 0:
                self.queue.append(upload)
        dropped = len(self.queue) - QUEUE
        for _ in range(dropped):
            self.queue.popleft()
        if dropped > 0:
            self.note(skipped=self.state.skipped + dropped)
        else:
            self.note()

    def step(self) -> bool:
        """Attack the upload that has waited longest; return whether there was one."""
        if not self.queue:
            return False
        number, client = self.queue.popleft()
        self.note(status="attacking", current=f"round {number}, {client}", fraction=0.0)
        try:
            with self.run.reading():
                for _ in self._attack(number, client):
                    pass
        except Exception as error:  # noqa: BLE001 - one upload that fails keeps no other from being attacked
            reason = (
                one_line(error, 300)
                if isinstance(error, BractError)
                else f"{type(error).__name__}: {one_line(error, 280)}"
            )
            _log.error("round %d, %s: %s", number, client, reason)
            self.note(failed=self.state.failed + 1, error=reason)
        else:
            self.note(done=self.state.done + 1)
        self.note(status="waiting", current=None, fraction=None)
        return True

    def _attack(self, number: int, client: str) -> Iterator[Any]:
        declared = {c.declaration.model for c in Captures(self.run.captures).index}
        chosen = {
            "rounds": [number],
            "clients": [client],
            "models": sorted(self._models & declared),
        }
        request = self._request.model_copy(update=chosen)
        audit = Audit(self.run, request, resume=True)
        noted = time.monotonic()

        def progress(found: Progress) -> None:
            nonlocal noted
            if time.monotonic() - noted > STATE_EVERY:
                noted = time.monotonic()
                self.note(fraction=found.fraction)

        yield from audit.execute(audit.plan(), progress)

    def note(self, **changes: Any) -> None:
        """Write the state of the audit; a full disk does not end it."""
        with self._writing, contextlib.suppress(BractError, OSError):
            changed = {"queue": len(self.queue), "updated": time.time(), **changes}
            self.state = self.state.model_copy(update=changed)
            write_text(self.run.live_path, self.state.to_text())


def _first_to_go() -> None:
    """Work in one thread, and let the kernel end this process first where memory is short."""
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _end_with_parent(follower: Follower) -> None:
    """End this process, wherever it is, as soon as standard input ends."""
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.buffer.read(4096):
            pass
    follower.note(status="ended", current=None, fraction=None)
    os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Follow a run until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m bract.audit.follow", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--attack", action="append", required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--model", action="append", default=[])
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    _first_to_go()
    try:
        make_private_folder(options.run)
        run = RunDirectory(options.run)
        follower = Follower(run, options.attack, options.every, options.model)
        with lock(run.live_lock_path, what=str(run.root), doing="live audit"):
            threading.Thread(target=_end_with_parent, args=(follower,), daemon=True).start()
            follower.follow()
    except BractError as error:
        sys.exit(f"live audit: {error}")


if __name__ == "__main__":
    main()
