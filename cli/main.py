"""The ``bract`` command.

Exit codes: 0 done, 1 failed, 2 bad input, 3 leakage above ``--fail-on``, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

import bract
from bract.errors import BractError, LeakageError, RunFailedError

app = typer.Typer(
    name="bract",
    help="Deploy a Flower federation that defends its gradients, and audit what its server sees.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunArgument = Annotated[Path, typer.Argument(help="Run directory, such as runs/demo.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"bract {bract.__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    from bract.cli.console import set_up_logging

    del version
    set_up_logging(verbose)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("federation.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented configuration."""
    from bract.cli.templates import write_template

    write_template(path, force=force)


@app.command()
def demo(
    runs: Annotated[Path, typer.Option("--runs", help="Folder of run directories.")] = Path("runs"),
) -> None:
    """Run a federation on handwritten digits, attack it, and write the report."""
    from bract.cli.demo import run_demo

    run_demo(runs)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="YAML configuration; `bract init` writes one.")],
    runs: Annotated[Path, typer.Option("--runs", help="Folder of run directories.")] = Path("runs"),
    superlink: Annotated[
        str | None,
        typer.Option("--superlink", help="host:port of a running SuperLink to use."),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Port of the SuperLink; free one if not given.")
    ] = None,
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
) -> None:
    """Start the federation of CONFIG as real processes and train."""
    from bract.cli.launcher import Launch
    from bract.cli.training import run_federation
    from bract.config import load_config

    run_federation(
        load_config(config),
        runs,
        Launch(superlink=superlink, port=port, devices=device or [], warm=not cold),
        resume=resume,
        overwrite=overwrite,
    )


@app.command()
def audit(
    run: RunArgument,
    attack: Annotated[
        list[str] | None, typer.Option("--attack", help="Attack to run; repeat the option.")
    ] = None,
    clients: Annotated[
        str | None, typer.Option("--clients", help="Comma-separated client names.")
    ] = None,
    rounds: Annotated[
        str | None, typer.Option("--rounds", help="Rounds, such as 1,3 or 1-5.")
    ] = None,
    restarts: Annotated[int | None, typer.Option("--restarts", min=1)] = None,
    iterations: Annotated[
        int | None, typer.Option("--iterations", min=1, help="Iterations a restart.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="2000 (iterations a restart), or 90s, 5m (wall time an upload, all restarts).",
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Whole attacks, each with its own seed.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda:N.")] = None,
    tier: Annotated[
        str | None,
        typer.Option(
            "--tier",
            help="What the attacker knows: oblivious, adaptive, colluding, or all that apply.",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Key file of one client, for the colluding tier."),
    ] = None,
    truth: Annotated[
        Path | None,
        typer.Option("--truth", help="Folder of the clients' truth folders; RUN/truth without it."),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option("--fail-on", help="Exit with 3 on a leak, such as ssim>0.5@adaptive."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip what an earlier audit has done.")
    ] = False,
    output: Annotated[str, typer.Option("--format", help="default or json.")] = "default",
) -> None:
    """Attack what the server captured in RUN, and score what came back."""
    from bract.cli.auditing import audit_run, choose_audits
    from bract.cli.console import print_json
    from bract.cli.gate import Gate, hold, rule_of

    gates = [Gate.parse(text) for text in fail_on or ()]
    as_json = _is_json(output)
    results = []
    for choice in choose_audits(
        run,
        attack,
        clients,
        rounds,
        restarts,
        iterations,
        device,
        budget=budget,
        repeats=repeats,
        tier=tier,
        key=key,
        truth=truth,
    ):
        results += audit_run(run, choice, resume=resume)
    if as_json:
        print_json(results)
    hold(gates, results, rule_of(run))


@app.command()
def report(
    run: RunArgument,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave every image out of the report.")
    ] = False,
    output: Annotated[str, typer.Option("--format", help="default or json.")] = "default",
) -> None:
    """Write RUN/report.html and RUN/report.json."""
    from bract.cli.reporting import report_run

    report_run(run, redact=redact, as_json=_is_json(output))


@app.command()
def keygen(
    folder: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Folder for the key files.")],
    bits: Annotated[int, typer.Option("--bits", help="2048 or 3072.")] = 2048,
    randomness: Annotated[str, typer.Option("--randomness", help="djn or standard.")] = "djn",
    clients: Annotated[int, typer.Option("--clients", min=1, help="Number of key shares.")] = 3,
    threshold: Annotated[
        int | None,
        typer.Option("--threshold", help="Deal shares of which this many decrypt together."),
    ] = None,
    degree: Annotated[
        int, typer.Option("--degree", help="Degree of the ciphertexts that shares decrypt: 1, 2.")
    ] = 1,
) -> None:
    """Write Paillier keys to OUT_DIR, for clients of encrypted runs."""
    from bract.cli.keygen import keygen as write
    from bract.config import build_config

    section = {
        "scheme": "paillier",
        "key_bits": bits,
        "randomness": randomness,
        "threshold": threshold,
        "degree": degree,
        "max_weight_sum": max(31, clients),
    }
    config = build_config({"clients": clients, "encryption": section}, source="keygen")
    write(folder, config.encryption, clients)


@app.command()
def compare(
    config: Annotated[Path, typer.Argument(help="YAML configuration; `bract init` writes one.")],
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
    runs: Annotated[Path, typer.Option("--runs", help="Folder of run directories.")] = Path("runs"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on; what is done stays as it is.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace earlier runs of these variants.")
    ] = False,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave every image out of the reports.")
    ] = False,
    output: Annotated[str, typer.Option("--format", help="default or json.")] = "default",
) -> None:
    """Run CONFIG undefended and under each defense, attack each, and compare them on one page.

    The runs and the page are kept in RUNS/NAME-compare. Where a defense (FedKL) needs a model with
    normalisation and CONFIG's has none, every variant, the undefended one too, runs the model's
    -bn counterpart.
    """
    from bract.cli.comparing import command_steps, compare_defenses
    from bract.config import load_config

    compare_defenses(
        load_config(config),
        runs,
        command_steps(resume=resume, redact=redact, tiers=tier or ["all"]),
        defenses=defense,
        resume=resume,
        overwrite=overwrite,
        redact=redact,
        as_json=_is_json(output),
    )


@app.command()
def doctor() -> None:
    """Check that this machine can run a federation and an audit."""
    from bract.cli.doctor import examine

    examine()


def _is_json(output: str) -> bool:
    if output not in ("default", "json"):
        raise BractError(f"--format {output!r}: expected default or json")
    return output == "json"


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line; never show a traceback for bad input."""
    from bract.cli.console import say

    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except RunFailedError as error:
        if error.details:
            say(error.details)
        say(f"error: {error}")
        sys.exit(1)
    except BractError as error:
        say(f"error: {error}")
        sys.exit(2)
    except LeakageError as error:
        say(str(error))
        sys.exit(3)
    except OSError as error:
        say(f"error: {error.filename or 'operating system'}: {error.strerror or error}")
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted; every process of the run has been ended")
        sys.exit(130)


if __name__ == "__main__":
    main()
