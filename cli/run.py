"""``bract run``: prepare a run directory, start the federation, follow it."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bract.cli.console import RoundProgress, say
from bract.cli.launch.launcher import Launch, LocalFederation, how_to_resume
from bract.cli.launch.simulated import SimulatedFederation, check_simulable
from bract.cli.signals import Stopped
from bract.client.defending import defenses_of
from bract.client.defenses import DefenseChain
from bract.client.training import smallest_batch
from bract.config import FederationConfig
from bract.config.agreed import FREE_ON_RESUME
from bract.data.partition import Partitions
from bract.data.sources import open_source
from bract.data.views import DataSpec, data_spec
from bract.defenses.configured import configured_declaration, configured_model
from bract.errors import BractError, RunStoppedError, in_words, missing_room
from bract.installed.versions import package_versions
from bract.models import create_model
from bract.models.dropout import with_dropout
from bract.models.single_values import single_value_norm
from bract.rundir import RunDirectory


def run_federation(
    config: FederationConfig,
    runs: Path,
    launch: Launch,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> RunDirectory:
    """Train the federation; return its run directory.

    Raises
    ------
    BractError
        If the configuration cannot work, or the run directory is taken.
    RunFailedError
        If the run fails; the message names the client.
    """
    if launch.simulate:
        check_simulable(config)
    config = config.as_own_word()
    _check_chosen_clients(config, local=launch.superlink is None)
    check_feasible(config)
    run = RunDirectory(runs / config.name)
    with run.claim():
        prepare_run(run, config, resume=resume, overwrite=overwrite)
        if resume and run.state().status == "finished":
            say(f"{run.root}: finished already")
        else:
            _train(config, run, launch)
    return run


def _train(config: FederationConfig, run: RunDirectory, launch: Launch) -> None:
    how = " in Flower's simulation engine" if launch.simulate else ""
    rounds = "1 round" if config.rounds == 1 else f"{config.rounds} rounds"
    say(f"federation {config.name}: {config.clients} clients{how}, {rounds}")
    for caution in config.encryption.cautions(config.clients, config.strategy.name):
        say(f"warning: {caution}")
    run.update_state(
        status="starting",
        name=config.name,
        started=time.time(),
        finished=None,
        error=None,
        waiting=None,
        command=" ".join(["bract", *sys.argv[1:]]),
        versions=package_versions(),
        device=config.device,
    )
    kind = SimulatedFederation if launch.simulate else LocalFederation
    failed = False
    try:
        with (
            kind(config, run, launch) as federation,
            RoundProgress(config.rounds, _last_round(run)) as progress,
        ):
            try:
                federation.train(progress.update)
            except Stopped:
                failed = _status(run) == "failed"
                raise
    except Stopped as stopped:
        if not failed and _status(run) == "failed":
            # What its server app runs on ended before it did, with this command.
            with contextlib.suppress(BractError):
                run.update_state(status="interrupted", error=None)
        _note(run, status="interrupted")
        stopped.add_note(
            f"{run.root} after round {_last_round(run)} of {config.rounds}, its processes have "
            f"ended; go on with `{how_to_resume(run)}`"
        )
        raise
    except RunStoppedError:
        _note(run, status="stopped")
        raise
    except Exception as error:
        _note(run, status="failed", error=in_words(error))
        raise
    except BaseException:
        _note(run, status="interrupted")
        raise
    following = f"bract audit {run.root}" if config.capture.enabled else f"bract report {run.root}"
    place = config.capture.place(config.name) if config.capture.enabled else None
    if place is not None:
        following = f"bract fetch {shlex.quote(place)} {run.root}, then {following}"
    say(f"done: {run.root}; next: {following}")


def _status(run: RunDirectory) -> str | None:
    """Return the status in ``run.json``; None if it cannot be read."""
    try:
        return run.state().status
    except BractError:
        return None


def _last_round(run: RunDirectory) -> int:
    return max((row.round for row in run.metrics()), default=0)


def _note(run: RunDirectory, **changes: Any) -> None:
    """Write down how a run ended, unless its server app did; a full disk hides no other error."""
    try:
        found = run.state().status
        if found in ("starting", "running") or (found, changes["status"]) == ("unknown", "failed"):
            run.update_state(finished=time.time(), **changes)
    except BractError as error:
        say(f"warning: {error}")


def _check_chosen_clients(config: FederationConfig, *, local: bool) -> None:
    """Refuse to capture or audit clients that this run does not have."""
    started_here = [f"client-{number}" for number in range(config.clients)]
    clients = started_here if local else config.sites
    if clients is not None:  # else each client of the SuperLink has a name of its own choice
        config.check_chosen_clients(clients, config.name)


def check_feasible(config: FederationConfig) -> None:
    """Refuse what would fail only after processes have started.

    Raises
    ------
    BractError
        If the data or the model is not there, the defenses do not fit it or each other, a client
        would hold no examples, or a batch of one image would leave the model nothing to train with.
    """
    source = open_source(config.data, "train")
    parts = Partitions(
        source.labels, config.data.partition, clients=config.clients, seed=config.seed
    )
    counts = []
    for client in range(config.clients):
        part = parts.indices(client)
        counts.append(len(part) - int(len(part) * config.data.validation))
        if counts[-1] < 1:
            raise BractError(
                f"data.partition gives client {client} no training examples; "
                "raise alpha or min_examples, or lower clients",
                code="data-partition",
            )
    chain = defenses_of(config)
    if ":" not in config.model.name:
        spec = data_spec(config.data)
        with torch.device("meta"):
            model = configured_model(config, spec)
        _check_batches(config, counts, single_value_norm(model, spec.image_shape))
        _check_attacks(config, spec)
    elif config.training.dropout:
        _check_dropout(config, chain)


def _check_attacks(config: FederationConfig, spec: DataSpec) -> None:
    """Refuse attacks of the audit that the model cannot serve.

    A server's installation has no attacks; there `bract audit` refuses them, after training.
    """
    try:
        from bract.audit.handled import check_attacks
    except ModuleNotFoundError as error:
        if missing_room(error) is None:
            raise
        return

    def model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            return configured_model(config, spec)

    if config.capture.enabled:
        check_attacks(config.audit.attacks, model, configured_declaration(config, spec))


def _check_dropout(config: FederationConfig, chain: DefenseChain) -> None:
    """Refuse dropout in a third-party model that has no place for it, where it is at hand."""
    spec = data_spec(config.data)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as for the processes that will be started
    with torch.random.fork_rng(devices=[]):
        try:
            model = create_model(
                config.model.name,
                classes=spec.classes,
                channels=spec.image_shape[0],
                image_size=spec.image_shape[1],
                **spec.schemas,
            )
        except BractError:
            return  # it may be on the clients' path alone; the process that makes it reports errors
        model = chain.prepare_model(model)
    with_dropout(model, config.training.dropout, classes=spec.classes)


def _check_batches(config: FederationConfig, counts: Sequence[int], layer: str | None) -> None:
    """Refuse batches of one image where a batch normalisation would have one value of it."""
    if layer is None:
        return
    size, side = config.training.batch_size, config.data.image_size
    for client, count in enumerate(counts):
        if smallest_batch(config.training, count) == 1:
            raise BractError(
                f"training.batch_size {size} leaves client {client}, which has {count} training "
                f"images, a batch of one image, and at {side} pixels {layer} of model "
                f"{config.model.name!r} would normalise one value a channel of it; choose a "
                "batch size that leaves no single image, a larger data.image_size or another "
                "model",
                code="config-conflict",
            )


def prepare_run(
    run: RunDirectory, config: FederationConfig, *, resume: bool = False, overwrite: bool = False
) -> None:
    """Make a run's directory, or check that an earlier one may be gone on with or replaced."""
    if not run.is_fresh:
        if resume:
            check_resumable(run, config)
        elif overwrite:
            run.clear()
        else:
            raise BractError(
                f"{run.root}: holds an earlier run; pass --resume to go on with it, "
                "--overwrite to replace it, or choose another name",
                code="file-taken",
            )
    run.create(config)


def check_resumable(run: RunDirectory, config: FederationConfig) -> None:
    """Refuse to go on with a run of another federation; `FREE_ON_RESUME` may differ."""
    earlier = RunDirectory.open(run.root).config()
    free = {name: getattr(config, name) for name in FREE_ON_RESUME}
    if earlier.model_copy(update=free) != config:
        raise BractError(
            f"{run.root}: was made with another configuration; "
            "resume it with the one in its config.yaml, or pass --overwrite",
            code="file-taken",
        )
