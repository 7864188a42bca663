"""``bract init``, ``demo``, ``run`` and ``doctor``: federations on this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from bract.cli.options import (
    ConfigArgument,
    Format,
    FormatOption,
    InsecureOption,
    RootCertificatesOption,
    RunsOption,
)
from bract.cli.templates import DemoData, Template


def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("federation.yaml"),
    template: Annotated[
        Template,
        typer.Option(
            "--template",
            "-t",
            help="digits shows every key; the others what CIFAR-10 on a GPU, encryption, defenses, "
            "a model and images of your own, or rows of a table need.",
        ),
    ] = Template.DIGITS,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented configuration, and its schema for editors into .bract/ in its folder."""
    from bract.cli.templates import write_template

    write_template(path, template, force=force)


def demo(
    runs: RunsOption = Path("runs"),
    quick: Annotated[
        bool,
        typer.Option("--quick", help="One round and one short attack, to see that all works."),
    ] = False,
    data: Annotated[
        DemoData,
        typer.Option("--data", help="Digits, rows of a clinic's table, made-up notes, or signals."),
    ] = DemoData.DIGITS,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Run a federation on digits, a table, texts or signals, attack it, and write the report."""
    from bract.cli.launch.warming import warmed_up
    from bract.cli.templates import demo_config
    from bract.runtime.rules import has_runtime

    config = demo_config(quick=quick, data=data)
    with warmed_up(config.clients) if has_runtime() else contextlib.nullcontext() as processes:
        from bract.cli.demo import run_demo

        run_demo(config, runs, processes, as_json=output.is_json)


def run(
    config: ConfigArgument,
    runs: RunsOption = Path("runs"),
    superlink: Annotated[
        str | None,
        typer.Option(
            "--superlink",
            help="Running SuperLink: host:port or the name of a connection in Flower's config.toml "
            "(another machine, which then keeps the run), or the socket of one on this machine.",
        ),
    ] = None,
    root_certificates: RootCertificatesOption = None,
    insecure: InsecureOption = False,
    remote: Annotated[
        bool,
        typer.Option(
            "--remote", help="The socket leads to another machine (ssh -L), which keeps the run."
        ),
    ] = False,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="Device of client 0, 1, ...; repeat the option."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run of the same name.")
    ] = False,
    cold: Annotated[
        bool,
        typer.Option("--cold", help="Start Flower's processes afresh, without the fork server."),
    ] = False,
    private_seed_file: Annotated[
        Path | None,
        typer.Option(
            "--private-seed-file",
            help="File (mode 0600) with a whole number that keys and noise derive from, for an "
            "experiment that must repeat. Never the configuration's seed: the server knows it.",
        ),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Run the clients in Flower's simulation engine (Ray, bract's extra `simulation`) "
            "instead of a process each: thousands of them on this machine.",
        ),
    ] = False,
    at_once: Annotated[
        int | None,
        typer.Option(
            "--at-once",
            min=1,
            help="Clients that --simulate computes at a time, each in a process of a few hundred "
            "MB; without it one a core.",
        ),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Write where the time of each round went to profile.json in the run directory; "
            "chrome://tracing and ui.perfetto.dev open it.",
        ),
    ] = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Start the federation of CONFIG as real processes, or in a simulation, and train.

    At a SuperLink on another machine nothing is started or kept here: progress, metrics and errors
    come over its log, and Ctrl-C leaves the run going. See `bract follow`, `stop` and `pull`.
    """
    from bract.cli.console import print_json
    from bract.cli.run_options import RunOptions, train

    options = RunOptions(
        superlink=superlink,
        root_certificates=root_certificates,
        insecure=insecure,
        remote=remote,
        devices=device or [],
        resume=resume,
        overwrite=overwrite,
        cold=cold,
        private_seed_file=private_seed_file,
        simulate=simulate,
        at_once=at_once,
        profile=profile,
    )
    state = train(config, runs, options)
    if output.is_json:
        print_json(state)


def doctor(
    kit: Annotated[
        Path | None,
        typer.Option(
            "--kit",
            help="Check one party's start-up kit instead: files, certificates, gateway, clock, "
            "device, data.",
        ),
    ] = None,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Check this machine, and print how to install what is missing."""
    if kit is not None:
        from bract.cli.doctor_kit import examine_kit

        examine_kit(kit, as_json=output.is_json)
        return
    from bract.cli.doctor import examine

    examine(as_json=output.is_json)
