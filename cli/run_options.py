"""``bract run``: its options, which decide whose machine trains."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bract.cli.options import refuse
from bract.errors import BractError


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of ``bract run``.

    Attributes
    ----------
    superlink
        Running SuperLink to train at; None starts one.
    root_certificates, insecure
        How a SuperLink on another machine is reached, as `bract.cli.remote.where.Where` has them.
    remote
        Whether the socket ``superlink`` leads to another machine.
    devices, private_seed_file, simulate, at_once, profile
        As `bract.cli.launch.launcher.Launch` has them, the seed in a file.
    resume, overwrite
        Go on with an earlier run of the same name, or replace it.
    cold
        Start processes without the fork server.
    """

    superlink: str | None = None
    root_certificates: Path | None = None
    insecure: bool = False
    remote: bool = False
    devices: list[str] = field(default_factory=list)
    resume: bool = False
    overwrite: bool = False
    cold: bool = False
    private_seed_file: Path | None = None
    simulate: bool = False
    at_once: int | None = None
    profile: bool = False

    @property
    def trains_elsewhere(self) -> bool:
        """Return whether the run is another machine's."""
        named = self.superlink
        return named is not None and (self.remote or not named.endswith(".sock"))

    def check(self) -> None:
        """Refuse options that exclude each other.

        Raises
        ------
        BractError
            With the options, and what to leave out.
        """
        if self.simulate:
            refuse(
                {
                    "--superlink": self.superlink,
                    "--root-certificates": self.root_certificates,
                    "--insecure": self.insecure,
                    "--remote": self.remote,
                    "--profile": self.profile,
                },
                "not with --simulate, which starts a SuperLink of its own on this machine and "
                "whose clients are no processes of their own; leave one of them out",
            )
        elif self.at_once is not None:
            raise BractError(
                "--at-once goes with --simulate; add it, or leave --at-once out", code="usage"
            )
        if self.trains_elsewhere:
            from bract.cli.remote.running import refuse_local

            refuse_local(
                {
                    "--device": self.devices,
                    "--resume": self.resume,
                    "--overwrite": self.overwrite,
                    "--cold": self.cold,
                    "--private-seed-file": self.private_seed_file,
                    "--profile": self.profile,
                }
            )
            return
        if self.root_certificates is not None or self.insecure or self.remote:
            raise BractError(
                "--root-certificates, --insecure and --remote go with a SuperLink on another "
                "machine; name it with --superlink, or leave them out",
                code="usage",
            )
        if self.profile and self.superlink is not None:
            raise BractError(
                "--profile looks into processes that this command starts, and with --superlink it "
                "starts none; leave one of them out",
                code="usage",
            )


def train(config: Path, runs: Path, options: RunOptions) -> dict[str, Any]:
    """Train the federation of a configuration; return its state, for ``--format json``.

    Raises
    ------
    BractError
        If options exclude each other, the configuration cannot work or its run directory is taken.
    RunFailedError
        If the run fails.
    """
    options.check()
    if options.trains_elsewhere:
        return _train_elsewhere(config, options)
    return _train_here(config, runs, options)


def _train_elsewhere(config: Path, options: RunOptions) -> dict[str, Any]:
    from bract.cli.remote.running import run_remotely
    from bract.cli.remote.where import Where
    from bract.config import load_config

    assert options.superlink is not None
    where = Where(options.superlink, options.root_certificates, options.insecure)
    return run_remotely(load_config(config), where).to_dict()


def _train_here(config: Path, runs: Path, options: RunOptions) -> dict[str, Any]:
    from bract.config import load_config

    loaded = load_config(config)  # before torch is imported, which takes seconds
    with contextlib.ExitStack() as stack:
        processes = None
        if options.superlink is None and not options.cold:
            from bract.cli.launch.warming import warmed_up

            processes = stack.enter_context(warmed_up(loaded.clients, simulate=options.simulate))
        from bract.cli.launch.launcher import Launch
        from bract.cli.run import run_federation
        from bract.client.site import read_private_seed

        seed = options.private_seed_file
        trained = run_federation(
            loaded,
            runs,
            Launch(
                superlink=options.superlink,
                devices=options.devices,
                fork_server=not options.cold,
                private_seed=None if seed is None else read_private_seed(seed),
                profile=options.profile,
                processes=processes,
                simulate=options.simulate,
                at_once=options.at_once,
            ),
            resume=options.resume,
            overwrite=options.overwrite,
        )
    return trained.state().to_dict() | {"run": str(trained.root)}
