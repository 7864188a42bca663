"""``bract run``: prepare a run directory, start the federation, follow it."""

from __future__ import annotations

import platform
import shutil
import sys
import time
from pathlib import Path

import torch

import bract
from bract.cli.console import RoundProgress, say
from bract.cli.launcher import Launch, LocalFederation
from bract.client.defending import defenses_of
from bract.config import FederationConfig
from bract.data import data_spec, open_source, partition_indices
from bract.errors import BractError, RunFailedError
from bract.models import create_model
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
    check_feasible(config)
    run = _prepare(config, runs, resume=resume, overwrite=overwrite)
    if resume and run.state().get("status") == "finished":
        say(f"{run.root}: finished already")
        return run
    say(f"federation {config.name}: {config.clients} clients, {config.rounds} rounds")
    for caution in config.encryption.cautions(config.clients, config.strategy.name):
        say(f"warning: {caution}")
    run.update_state(
        status="starting",
        name=config.name,
        started=time.time(),
        command=" ".join(["bract", *sys.argv[1:]]),
        versions=_versions(),
        device=config.device,
    )
    done = max((int(row["round"]) for row in run.metrics()), default=0)
    try:
        with (
            LocalFederation(config, run, launch) as federation,
            RoundProgress(config.rounds, done) as progress,
        ):
            federation.train(progress.update)
    except BaseException as error:
        if isinstance(error, RunFailedError):
            run.update_state(status="failed", finished=time.time(), error=str(error))
        elif run.state().get("status") in ("starting", "running"):
            run.update_state(status="interrupted", finished=time.time())
        raise
    say(f"done: {run.root}")
    return run


def check_feasible(config: FederationConfig) -> None:
    """Refuse what would fail only after processes have started.

    Raises
    ------
    BractError
        If the data or the model is not there, the defenses do not fit it or each other, or a
        client would hold no examples.
    """
    source = open_source(config.data, "train")
    for client in range(config.clients):
        part = partition_indices(
            source.labels,
            config.data.partition,
            clients=config.clients,
            client=client,
            seed=config.seed,
        )
        if len(part) - int(len(part) * config.data.validation) < 1:
            raise BractError(
                f"data.partition gives client {client} no training examples; "
                "raise alpha or min_examples, or lower clients"
            )
    chain = defenses_of(config)
    if ":" not in config.model.name:
        spec = data_spec(config.data)
        with torch.device("meta"):
            chain.prepare_model(
                create_model(
                    config.model.name,
                    classes=spec.classes,
                    channels=spec.image_shape[0],
                    image_size=spec.image_shape[1],
                    activation=config.model.activation,
                )
            )


def _prepare(
    config: FederationConfig, runs: Path, *, resume: bool, overwrite: bool
) -> RunDirectory:
    run = RunDirectory(runs / config.name)
    if run.root.exists() and any(run.root.iterdir()):
        if resume:
            check_resumable(run, config)
        elif overwrite:
            shutil.rmtree(run.root)
        else:
            raise BractError(
                f"{run.root}: holds an earlier run; pass --resume to go on with it, "
                "--overwrite to replace it, or choose another name"
            )
    run.create(config)
    return run


def check_resumable(run: RunDirectory, config: FederationConfig) -> None:
    """Refuse to go on with a run of another federation; rounds and audit may differ.

    Raises
    ------
    BractError
        If the run's configuration differs elsewhere.
    """
    earlier = RunDirectory.open(run.root).config()
    if earlier.model_copy(update={"rounds": config.rounds, "audit": config.audit}) != config:
        raise BractError(
            f"{run.root}: was made with another configuration; "
            "resume it with the one in its config.yaml, or pass --overwrite"
        )


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    packages = ("flwr", "torch", "torchvision", "safetensors", "numpy")
    return {
        "bract": bract.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        **{name: version(name) for name in packages},
    }
