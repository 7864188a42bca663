"""``bract harden``, as ``bract --help`` lists it; what searches is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bract.cli.examples import with_examples
from bract.cli.groups import command_group
from bract.cli.options import Format, FormatOption, RedactOption, RunsOption

app = command_group()


@app.command(
    epilog=with_examples(
        "bract harden federation.yaml",
        "bract harden federation.yaml --space space.yaml --trials 60 --resume",
        "bract harden federation.yaml --ray 10.0.0.5:6379 --resume",
        "bract harden .",
    )
)
def harden(
    target: Annotated[
        Path,
        typer.Argument(
            help="YAML configuration, or the folder of an app that was captured and described."
        ),
    ],
    space: Annotated[
        Path | None,
        typer.Option("--space", help="YAML file of what may change; a default without it."),
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="Candidates to try; 40 without it.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", min=1, help="Federations of each point of the frontier; 3."),
    ] = None,
    runs: RunsOption = Path("runs"),
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            help="Train and attack on a Ray cluster's HOST:PORT, or auto for this machine.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an earlier search.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier search.")
    ] = False,
    redact: RedactOption = None,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Search settings and defenses for what leaks least, at which price, and recommend one.

    Candidates train in processes of this machine, or of a Ray cluster's. Each is held to attackers
    that know its defenses: cheap ones first, and every point of the frontier to the full attack
    with several seeds. Writes harden.html, harden.json, recommended.yaml and policy.yaml into
    RUNS/NAME-harden.
    """
    from bract.config import load_config

    config = None if target.is_dir() else load_config(target)  # before torch is imported
    from bract_harden.configuration import HardenOptions
    from bract_harden.configuration import harden as harden_config
    from bract_harden.own_app import harden_app

    options = HardenOptions(
        space=space,
        trials=trials,
        seeds=seeds,
        ray=ray,
        resume=resume,
        overwrite=overwrite,
        redact=redact,
        as_json=output.is_json,
    )
    if config is None:
        harden_app(target, runs, options)
    else:
        harden_config(config, runs, options)
