"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bract.errors import BractError, listed


class Format(StrEnum):
    """The format of a command's stdout."""

    DEFAULT = "default"
    JSON = "json"

    @property
    def is_json(self) -> bool:
        """Return whether one JSON document goes to stdout."""
        return self is Format.JSON


class ReportFormat(StrEnum):
    """The format of `bract report`'s stdout, or the paper that it prints."""

    DEFAULT = "default"
    JSON = "json"
    PDF = "pdf"


FormatOption = Annotated[
    Format,
    typer.Option("--format", help="json prints one JSON document to stdout, words to stderr."),
]


def _chosen(run: Path) -> Path:
    """Return the run that a folder stands for; name it, and the others, where there are several."""
    from bract.cli.console import say
    from bract.rundir import chosen_run

    latest, others = chosen_run(run)
    if others:
        say(
            f"run {latest.name}, the latest of {len(others) + 1}; name another by its folder: "
            f"{listed([str(folder) for folder in others], most=3)}"
        )
    return latest


RunArgument = Annotated[
    Path,
    typer.Argument(
        callback=_chosen,
        help="Run directory, such as runs/demo, or the folder of an app: its latest captured run.",
    ),
]
ConfigArgument = Annotated[
    Path, typer.Argument(help="YAML configuration; `bract init` writes one.")
]
RedactOption = Annotated[
    bool | None,
    typer.Option(
        "--redact/--show",
        show_default=False,
        help="Leave every example out of the page, or show them; without either, texts alone are "
        "left out.",
    ),
]
ExamineAgainOption = Annotated[
    int | None,
    typer.Option(
        "--examine-again",
        metavar="MONTHS",
        min=1,
        max=120,
        help="Months from the audit to its repetition; report.examine_again_months without it, 12.",
    ),
]
RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of run directories.")]
RootCertificatesOption = Annotated[
    Path | None,
    typer.Option("--root-certificates", help="CA of the SuperLink at host:port, PEM."),
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Ask the SuperLink at host:port without TLS.")
]
DEVICE = typer.Option("--device", help="auto, cpu or cuda:N.")
"""The option of commands that compute on one device; each has its own default."""


def refuse(given: Mapping[str, object], why: str) -> None:
    """Refuse options that do not go with another one."""
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise BractError(f"{', '.join(wrong)}: {why}", code="usage")
