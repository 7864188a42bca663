"""Stands for Ray: workers in this process, whose jobs are done when their outcomes are fetched."""

from __future__ import annotations

import types
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any


class LostError(Exception):
    """Stands for Ray's errors."""


class RaisedError(LostError):
    """Stands for what a worker raised."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


@dataclass(eq=False)
class Reference:
    """Stands for what a call will have returned."""

    call: Callable[[], Any]
    job: Any = None
    waits: int = 0
    outcome: Any = None


class FakeRay:
    """Does a job as it is waited for or fetched, the last that was handed out first.

    Parameters
    ----------
    fail
        Called with each job; what it returns stands for the outcome, an exception is raised.
    waits
        How often a job is waited for, while it is under way, before it is ready.
    """

    exceptions = types.SimpleNamespace(RayError=LostError, RayTaskError=RaisedError)

    def __init__(self, fail: Callable[[Any], Any] = lambda _: None, waits: int = 0) -> None:
        self.fail, self.waits, self.options = fail, waits, dict[str, Any]()
        self.alive = self.started = self.under_way = self.most = 0
        self.held: dict[str, float] = {"CPU": 2.0}
        self.done: list[Any] = []

    def remote(self, **options: Any) -> Callable[[type], Any]:
        self.options = options
        return lambda kind: types.SimpleNamespace(remote=lambda *a: self._start(kind(*a)))

    def _start(self, worker: Any) -> Any:
        self.alive += 1
        self.started += 1

        def do(job: Any, first: Any) -> Reference:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            return Reference(lambda: worker.do(job, deepcopy(first)), job, self.waits)

        return types.SimpleNamespace(
            do=types.SimpleNamespace(remote=do),
            state=types.SimpleNamespace(remote=lambda: Reference(worker.state)),
        )

    def wait(self, references: list[Reference], **_: Any) -> Any:
        last = references[-1]
        if last.waits == 0:
            return [last], references[:-1]
        if last.waits == self.waits:
            last.outcome = last.call()
        last.waits -= 1
        return [], references

    def get(self, reference: Reference) -> Any:
        if reference.job is None:
            return reference.call()
        self.under_way -= 1
        self.done.append(reference.job)
        instead = self.fail(reference.job)
        if isinstance(instead, Exception):
            raise instead
        if instead is not None:
            return instead
        return reference.outcome if self.waits else reference.call()

    def kill(self, _handle: Any) -> None:
        self.alive -= 1

    def cluster_resources(self) -> dict[str, float]:
        return self.held
