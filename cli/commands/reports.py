"""``bract report``, ``release``, ``watch`` and ``export``: the results of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bract.cli.options import (
    ExamineAgainOption,
    Format,
    FormatOption,
    RedactOption,
    ReportFormat,
    RunArgument,
)


def report(
    run: RunArgument,
    redact: RedactOption = None,
    output: Annotated[
        ReportFormat,
        typer.Option(
            "--format",
            help="json prints report.json to stdout; pdf prints summary.html to summary.pdf "
            "with this machine's Chromium.",
        ),
    ] = ReportFormat.DEFAULT,
    since: Annotated[
        Path | None,
        typer.Option(
            "--since",
            help="An earlier run directory, or its report.json: what changed, and what it did.",
        ),
    ] = None,
    examine_again: ExamineAgainOption = None,
) -> None:
    """Write RUN/report.html, RUN/report.json and RUN/summary.html, a page for data protection."""
    from bract.cli.report import report_run

    as_json, as_pdf = output is ReportFormat.JSON, output is ReportFormat.PDF
    report_run(
        run, redact=redact, as_json=as_json, as_pdf=as_pdf, since=since, months=examine_again
    )


def release(
    run: RunArgument,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file",
            help="File that goes out, for its digest; repeat the option. RUN's final model without "
            "it.",
        ),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            help="A limit, as of bract audit; repeat the option. Without it: no leaked example in "
            "any tier that was tried, and membership>0.05@1% where it was asked.",
        ),
    ] = None,
    output: Annotated[
        ReportFormat,
        typer.Option(
            "--format",
            help="json prints release.json to stdout; pdf prints release.html to release.pdf with "
            "this machine's Chromium.",
        ),
    ] = ReportFormat.DEFAULT,
    examine_again: ExamineAgainOption = None,
) -> None:
    """Write RUN/release.json and RUN/release.html: limits held, what goes out, room for a name.

    Attacks nothing: it judges what earlier audits of RUN found. Where a limit is crossed, or had
    nothing to judge, the sheet says so and the exit code is 3.
    """
    from bract.cli.release import release_run

    release_run(
        run,
        files=file or [],
        limits=fail_on or [],
        as_json=output is ReportFormat.JSON,
        as_pdf=output is ReportFormat.PDF,
        months=examine_again,
    )


def watch(
    run: RunArgument,
    redact: RedactOption = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the state of the run and end; serve no page.")
    ] = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Serve RUN's growing page on this machine, and print its state, until Ctrl-C."""
    from bract.cli.watch import watch_run

    watch_run(run, redact=redact, once=once, as_json=output.is_json)


def export(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", help="tensorboard or mlflow.")],
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            help="TensorBoard's log folder or MLflow's tracking URI; one in RUN without it.",
        ),
    ] = None,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Write RUN's figures by round, but no picture, for TensorBoard or MLflow."""
    from bract.cli.export import export_run

    export_run(run, to, where, as_json=output.is_json)
