"""Hand the federations of a search to the workers of a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bract.cli.launch.cluster import Cluster, raised_there
from bract.errors import BractError, RunFailedError, one_line
from bract_harden.work import Federations, Job, Outcome, work


class ClusterPool:
    """Does jobs as tasks of a Ray cluster, as many at once as there is room for.

    A task that is lost with its worker costs the job that it had.

    Parameters
    ----------
    cluster
        Whose workers do the jobs, one core each.
    bench
        Goes to each worker; it must be picklable.
    root
        The search's folder; every machine of the cluster sees it, and the folder of this process,
        at these paths.
    """

    def __init__(self, cluster: Cluster, federations: Federations, root: Path) -> None:
        self._ray, self._room = cluster.ray, cluster.workers
        self._federations, self._root, self._here = federations, root.absolute(), Path.cwd()
        self._task = self._ray.remote(num_cpus=1, num_gpus=cluster.gpus, max_retries=0)(done_there)

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Outcome]]:
        """Do all jobs and yield the outcome of each as it comes.

        Raises
        ------
        BractError
            If a machine does not see the folders.
        RunFailedError
            If a machine cannot do such a job at all, as without this package.
        """
        waiting, busy = deque(jobs), dict[Any, Job]()
        while waiting or busy:
            while waiting and len(busy) < self._room:
                job = waiting.popleft()
                there = replace(job, run=job.run.absolute())
                busy[self._task.remote(self._federations, there, self._root, self._here)] = job
            (ready, *_), _ = self._ray.wait(list(busy), num_returns=1)
            yield busy.pop(ready), self._outcome(ready)

    def _outcome(self, reference: Any) -> Outcome:
        errors = self._ray.exceptions
        try:
            found = self._ray.get(reference)
        except errors.RayTaskError as error:
            raise raised_there(error) from None
        except errors.RayError as error:
            return Outcome(error=f"its worker was lost: {one_line(error, 300)}")
        if not isinstance(found, Outcome):
            raise RunFailedError(
                f"a worker handed back {type(found).__name__}, expected an outcome",
                code="worker-failed",
            )
        return found


def done_there(federations: Federations, job: Job, root: Path, here: Path) -> Outcome:
    """Do a job in a worker's process, in the folder that the search was started in.

    Raises
    ------
    BractError
        If this machine does not see a folder.
    """
    import torch

    for folder in (root, here):
        if not folder.is_dir():
            raise BractError(
                f"{folder}: not on {socket.gethostname()}; every machine of the cluster must see "
                "it at this path, as on a shared file system",
                code="file-missing",
            )
    os.chdir(here)
    if str(here) not in sys.path:
        sys.path.insert(0, str(here))
    logging.disable(logging.ERROR)  # a candidate's record has its error
    torch.set_num_threads(1)
    return work(federations, job)
