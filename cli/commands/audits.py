"""``bract describe``, ``schema``, ``audit`` and ``compare``: the questions of an audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bract.cli.options import DEVICE, Format, FormatOption, RedactOption, RunArgument, RunsOption
from bract.cli.settings import SetOption


def describe(
    run: RunArgument = Path(),
    model: Annotated[
        str | None,
        typer.Option("--model", help="package.module:callable without arguments; it is run."),
    ] = None,
    settings: SetOption = None,
    truth: Annotated[
        Path | None,
        typer.Option("--truth", help="Folder of the batches that clients kept; RUN/truth."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            "--work",
            help="A witness's round-NNNN.work.json that holds for every client, of the app's "
            "author; without it those beside the truth.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Replace an edited bract.yaml, or write one that what clients kept contradicts; "
            "its values are kept.",
        ),
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            min=0.0,
            help="Processor time in which another description is looked for, where what clients "
            "kept contradicts a guess.",
        ),
    ] = 60.0,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Propose RUN/bract.yaml: the facts of an app that its captures do not declare.

    Infers what it can from the captures, marks the rest as guesses, and checks both against the
    captures. Where clients kept what they trained on, they are repeated on it: the nearest
    description that explains the updates is taken, and one that is contradicted is an error.
    What clients' witnesses saw of their training is taken as it is, and checked alike.
    Edit the file and run the command again to check it. On a terminal you are asked
    about guesses; elsewhere (a pipe, < /dev/null) nothing is asked.
    """
    from bract.cli.describe import describe_app
    from bract.cli.settings import read_settings

    describe_app(
        run,
        read_settings(settings),
        model=model,
        truth=truth,
        work=work,
        force=force,
        seconds=seconds,
        as_json=output.is_json,
    )


def schema(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="CSV or Parquet file with a header.")
    ],
    target: Annotated[str, typer.Option("--target", help="Column that the model predicts.")],
    categorical: Annotated[
        list[str] | None,
        typer.Option("--categorical", help="Column whose numbers are codes; repeat the option."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="The rows are public, so the statistics are too.")
    ] = False,
    describe: Annotated[
        bool, typer.Option("--describe", help="Print a section of bract.yaml, for an own app.")
    ] = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Infer the schema of a table, and print it as a section of a configuration."""
    from bract.cli.table_schema import write_schema

    write_schema(
        path,
        target,
        categorical=categorical or (),
        public=public,
        described=describe,
        as_json=output.is_json,
    )


def audit(
    run: RunArgument,
    attack: Annotated[
        list[str] | None, typer.Option("--attack", help="Attack to run; repeat the option.")
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(
            "--question",
            help="reconstruction, membership or epsilon; repeat the option. All that the captures "
            "allow without it.",
        ),
    ] = None,
    clients: Annotated[
        str | None, typer.Option("--clients", help="Comma-separated client names.")
    ] = None,
    rounds: Annotated[
        str | None, typer.Option("--rounds", help="Rounds, such as 1,3 or 1-5.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="2000 (iterations a restart), or 90s, 5m: wall time of the whole audit, or of "
            "each upload with --set audit.budget_each=true.",
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option("--restarts", min=1, help="Starts; the attacker's own loss picks one."),
    ] = None,
    device: Annotated[str | None, DEVICE] = None,
    tier: Annotated[
        str | None,
        typer.Option(
            "--tier",
            help="What the attacker knows: oblivious, adaptive, surrogate, colluding, or all that "
            "apply.",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Key file of one client, for the colluding tier."),
    ] = None,
    prior_file: Annotated[
        Path | None,
        typer.Option("--prior", help="File of `bract prior train`, for the surrogate tier."),
    ] = None,
    truth: Annotated[
        Path | None,
        typer.Option("--truth", help="Folder of the clients' truth folders; RUN/truth without it."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="package.module:callable that captures may name; it is run."),
    ] = None,
    final: Annotated[
        Path | None,
        typer.Option(
            "--final",
            help="File of the final global model (safetensors, or a state_dict of torch.save); "
            "the one in RUN/models without it.",
        ),
    ] = None,
    settings: SetOption = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            help="Exit with 3 on a leak, such as ssim>0.5@adaptive; with 4 where uploads are not "
            "what is described.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            help="Attack on many workers: a Ray cluster's HOST:PORT, or auto for this machine.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip what an earlier audit has done.")
    ] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Do not ask before long or infeasible work."),
    ] = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Attack what the server captured in RUN, and score the reconstructions.

    Options and --set audit.KEY=VALUE replace keys of the configuration's audit section. The time
    is estimated first. On a terminal you are asked before more than a minute of work, or work of
    which nothing can be expected; elsewhere (a pipe, CI) it begins without asking. Where every
    attack is refused, for another reason than that uploads are ciphertexts, the exit code is 4;
    where a measured epsilon is above the account's, it is 5.
    """
    import bract.audit  # noqa: F401 - the room that an error names where an image has none
    from bract.cli.audit import audit_command
    from bract.cli.audit_requests import AuditOptions

    options = AuditOptions(
        attacks=attack,
        questions=question,
        clients=clients,
        rounds=rounds,
        budget=budget,
        restarts=restarts,
        device=device,
        settings=settings,
        tier=tier,
        key=key,
        prior=prior_file,
        truth=truth,
        models=model or (),
        final=final,
    )
    audit_command(
        run,
        options,
        ray=ray,
        resume=resume,
        ask=not yes,
        limits=fail_on or (),
        as_json=output.is_json,
    )


def compare(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML configuration, or the folder of an app that was run and described once."
        ),
    ],
    defense: Annotated[
        list[str] | None,
        typer.Option(
            "--defense",
            help="NAME, NAME:key=value,... or a chain NAME+NAME; repeat the option. Without it: "
            "AdaDefense, Guardian, FedKL, Gaussian noise, pruning, and those of CONFIG.",
        ),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option("--tier", help="all (default), oblivious, adaptive or colluding; repeat it."),
    ] = None,
    runs: RunsOption = Path("runs"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on; what is done stays as it is.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace earlier runs of these variants.")
    ] = False,
    redact: RedactOption = None,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Run CONFIG undefended and under each defense, attack each, and compare them on one page.

    The runs and the page are kept in RUNS/NAME-compare. Where a defense (FedKL) needs a model with
    normalisation and CONFIG's has none, every variant, the undefended one too, runs the model's
    -bn counterpart. An app of your own runs in Flower's simulation engine, on as many clients as
    its latest run captured; its client has a DefenseMod, whose defense each variant replaces.
    """
    from bract.config import load_config
    from bract.installed.app_folder import app_in

    own = app_in(config) if config.is_dir() else None
    if own is not None:
        from bract.cli.compare_app import compare_app

        compare_app(
            own,
            runs,
            defenses=defense,
            tiers=tier or ["all"],
            resume=resume,
            overwrite=overwrite,
            redact=redact,
            as_json=output.is_json,
        )
        return
    loaded = load_config(config)
    from bract.cli.compare import command_steps, compare_defenses
    from bract.schema.inputs import is_redacted

    redact = is_redacted(redact, [loaded.data.input])

    compare_defenses(
        loaded,
        runs,
        command_steps(resume=resume, redact=redact, tiers=tier or ["all"]),
        defenses=defense,
        resume=resume,
        overwrite=overwrite,
        redact=redact,
        as_json=output.is_json,
    )
