"""``bract harden``: search what a federation's operator may change."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bract.cli.audit import audit_all_tiers
from bract.cli.console import print_json, say
from bract.cli.launch.cluster import Asked, connected, uninterrupted
from bract.cli.signals import explained, resumed
from bract.config import FederationConfig
from bract.disk import write_text
from bract.errors import BractError, RunFailedError, one_line
from bract.inputs import is_redacted
from bract.pool import Pool, Processes, Ray, cores
from bract.rundir import RunDirectory
from bract.runtime.in_process import federate
from bract_harden.page import write_hardening
from bract_harden.search import Hardening
from bract_harden.space import Space, load_space
from bract_harden.study import load_optuna
from bract_harden.work import Job, Outcome, work_there


class InProcess:
    """Federations in the process that it is called in, and the audits of ``bract audit``."""

    def __init__(self, base: FederationConfig) -> None:
        self._models = {base.model.name} if ":" in base.model.name else set()

    def train(self, config: FederationConfig, root: Path) -> float | None:
        """Train, with keys made here where uploads are encrypted."""
        return federate(config, root)

    def attack(self, root: Path, settings: Mapping[str, Any]) -> None:
        """Attack in all tiers that apply; what an earlier stage did is not done again."""
        audit_all_tiers(root, settings, models=self._models)


@dataclass(frozen=True, kw_only=True)
class HardenOptions:
    """Options of ``bract harden``.

    Attributes
    ----------
    space
        YAML file of what may change; None takes a default.
    trials, seeds
        Limits over those of the space's file.
    ray
        Address of a cluster whose workers train and attack; None is this machine.
    resume, overwrite
        Go on with, or replace, an earlier search.
    redact
        Leave examples out of the page; None decides by the input.
    as_json
        Print the facts to stdout.
    """

    space: Path | None = None
    trials: int | None = None
    seeds: int | None = None
    ray: str | None = None
    resume: bool = False
    overwrite: bool = False
    redact: bool | None = None
    as_json: bool = False

    def limit(self, space: Space) -> Space:
        """Return the space with the limits over those of its file."""
        given = {"trials": self.trials, "seeds": self.seeds}
        update = {k: v for k, v in given.items() if v is not None}
        search = space.file.search.model_copy(update=update)
        space.file = space.file.model_copy(update={"search": search})
        return space


def harden(config: FederationConfig, runs: Path, options: HardenOptions) -> Path:
    """Search around a configuration; return the page, ``runs/<name>-harden/harden.html``."""
    load_optuna()
    config = config.as_own_word()
    found = options.limit(load_space(config, options.space))
    root = runs / f"{config.name}-harden"
    with _pool(found, config, root, options.ray) as pool:
        return harden_with(found, root, pool, options, inputs=[config.data.input])


@contextmanager
def _pool(
    space: Space, config: FederationConfig, root: Path, ray: str | None
) -> Iterator[Pool[Job, Outcome]]:
    """Have the workers while the block runs."""
    count, here = space.file.search.workers, Path.cwd()
    do = partial(work_there, InProcess(config), here)
    if ray is None:
        with Processes(do, count or cores()) as processes:
            yield processes
        return
    gpus = 1.0 if config.audit.gpus is None else config.audit.gpus
    with uninterrupted(), connected(Asked(ray, count, gpus, config.device)) as cluster:
        say(f"workers: {cluster.workers} on {cluster.device}")
        folders = [root.absolute(), here]
        with Ray(
            cluster.ray, do, workers=cluster.workers, gpus=cluster.gpus, folders=folders
        ) as workers:
            yield workers


def harden_with(
    space: Space,
    root: Path,
    pool: Pool[Job, Outcome],
    options: HardenOptions,
    *,
    inputs: Collection[str],
) -> Path:
    """Search a space with a pool of workers, write the page and what it recommends.

    Parameters
    ----------
    inputs
        Names of the inputs that clients train on.
    """
    run = RunDirectory(root)
    again = resumed("harden", "bract harden CONFIG --resume")
    with run.claim(), explained(f"{root}; what is done is kept", again):
        _claim(run, space, resume=options.resume, overwrite=options.overwrite)
        for note in space.notes:
            say(note)
        search = Hardening(root, space, pool, say=say)
        search.run()
        facts, page = write_hardening(search, redact=is_redacted(options.redact, inputs))
    if options.as_json:
        print_json(facts.to_dict())
    say(facts.sentence)
    say(f"done: {page}; next: open it in a browser")
    if not facts.frontier:
        raise RunFailedError("no candidate could be trained and attacked; the page has the reasons")
    return page


def _earlier(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BractError(
            f"{path}: does not say what was searched ({one_line(error)}); pass --overwrite to "
            "search anew, or choose another name",
            code="file-damaged",
        ) from error


def _claim(run: RunDirectory, space: Space, *, resume: bool, overwrite: bool) -> None:
    """See that the folder is free, is to be replaced, or holds the same search."""
    free = {"search": {"trials", "points", "frontier", "workers", "seeds"}}
    asked = {
        "config": space.base.model_dump(mode="json"),
        "space": space.file.model_dump(mode="json", exclude=free),
    }
    path = run.root / "search.json"
    if overwrite:
        run.clear()
    elif path.is_file() and not resume:
        raise BractError(
            f"{run.root}: holds an earlier search; pass --resume to go on with it, --overwrite to "
            "replace it, or choose another name",
            code="file-taken",
        )
    elif path.is_file() and _earlier(path) != asked:
        raise BractError(
            f"{run.root}: its search was of another configuration or space; pass --overwrite to "
            "replace it, or choose another name",
            code="file-taken",
        )
    write_text(path, json.dumps(asked, indent=1))
