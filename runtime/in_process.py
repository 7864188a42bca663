"""Run a federation in this process, with the client's and the server's own code."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bract.client.app as client_app
from bract.config import FederationConfig, dump_config
from bract.config.sections import named_folders
from bract.installed.references import is_reference
from bract.rundir import RunDirectory
from bract.runtime.key_files import client_secrets
from bract.server.encrypted import EncryptedFederation
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid


def federate(config: FederationConfig, root: Path) -> float:
    """Train a federation and leave its run directory; return the CPU seconds of a round.

    Keys are made in the run directory where uploads are encrypted or masked. Flower and bract log
    errors alone.
    """
    run = RunDirectory(root)
    secrets = client_secrets(run.keys, config.encryption, config.clients)
    run.create(config)
    begun = time.process_time()
    with _quiet():
        _train(config, run, secrets)
    return (time.process_time() - begun) / config.rounds


def train_here(config: FederationConfig, run: RunDirectory) -> None:
    """Train a federation whose run directory is made, and whose uploads are not encrypted."""
    _train(config, run, [])


def _train(config: FederationConfig, run: RunDirectory, secrets: list[dict[str, str]]) -> None:
    sites = [_site(config, run, client) for client in range(config.clients)]
    for site, own in zip(sites, secrets, strict=False):
        site.update(own)
    grid = LoopbackGrid(client_app.app, sites, {"federation": dump_config(config)})
    kind = EncryptedFederation if config.encryption.uses_paillier else Federation
    run.update_state(status="running", name=config.name, started=time.time())
    kind(config, run).train(grid)
    run.update_state(status="finished", finished=time.time())


def _site(config: FederationConfig, run: RunDirectory, client: int) -> dict[str, Any]:
    name = f"client-{client}"
    site: dict[str, Any] = {
        "partition-id": client,
        "num-partitions": config.clients,
        "state-dir": str(run.root / "state" / name),
    }
    if is_reference(config.model.name):
        site["models"] = str(config.model.name)
    if folders := named_folders(config.data):
        site["data-paths"] = os.pathsep.join(str(folder) for folder in folders)
    if config.truth:
        site["truth-dir"] = str(run.truth / name)
    if config.encryption.uses_paillier:
        site["public-test"] = True
    return site


@contextmanager
def _quiet() -> Iterator[None]:
    """Log errors alone: a search trains many federations."""
    loggers = [logging.getLogger(name) for name in ("flwr", "bract")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
