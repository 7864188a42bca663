"""The papers' tables and figures, run and compared with the published ones: list, run, report."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bract.cli.main import main
from bract.cli.options import Format, FormatOption
from bract.errors import BractError

paper = typer.Typer(
    no_args_is_help=True,
    suggest_commands=False,
    pretty_exceptions_enable=False,
    help="Run the papers' tables and figures, and compare them with the published ones.",
)


DATA = Path("data")


class ScaleName(StrEnum):
    """How large an experiment is run."""

    SMOKE = "smoke"
    LAPTOP = "laptop"
    GPU = "gpu"


ResultsOption = Annotated[
    Path | None,
    typer.Option("--results", help="Folder of results; the committed ones without it."),
]


def _folder(results: Path | None) -> Path:
    """Return the folder of results that was named, which has to be there, or the committed one."""
    from experiments.papers.results import COMMITTED

    if results is None:
        return COMMITTED
    if not results.is_dir():
        raise BractError(
            f"--results {results}: no such folder; name the --out of an earlier `run`, or leave it "
            "out for the committed results",
            code="file-missing",
        )
    return results


@paper.callback()
def _options() -> None:
    from bract.cli.console import set_up_logging

    set_up_logging(False)


@paper.command("list")
def list_experiments(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Papers or experiments; all without one."),
    ] = None,
    results: ResultsOption = None,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """List every table and figure with its state, and what decided it."""
    from rich.console import Console
    from rich.table import Table

    from bract.cli.console import print_json
    from experiments.papers.catalog import experiments, find
    from experiments.papers.summary import stand

    chosen = find(names) if names else list(experiments().values())
    found = [stand(one, _folder(results)) for one in chosen]
    if output.is_json:
        print_json([standing.to_dict() for standing in found])
        return
    table = Table(box=None, pad_edge=False)
    for column in ("experiment", "printed as", "state", "scale", "what it shows"):
        # A name is there to be copied.
        table.add_column(column, overflow="fold", no_wrap=column == "experiment")
    for one in found:
        table.add_row(
            one.experiment.name,
            one.experiment.number,
            one.state,
            one.scale or "-",
            one.experiment.title,
        )
    Console(file=sys.stdout, highlight=False).print(table)


@paper.command("run")
def run_experiments(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Experiments such as adadefense/table-4, or papers; all that have the scale "
            "without one.",
        ),
    ] = None,
    scale: Annotated[
        ScaleName,
        typer.Option(
            "--scale",
            help="smoke: seconds. laptop: two cores, hours at most, at a reduced size that is "
            "stated. gpu: the paper's own setting.",
        ),
    ] = ScaleName.SMOKE,
    out: Annotated[
        Path,
        typer.Option("--out", help="Folder of results; what is done there is not done again."),
    ] = Path("runs/papers"),
    data: Annotated[
        Path, typer.Option("--data", help="Folder of data sets that no package brings.")
    ] = DATA,
    device: Annotated[str, typer.Option("--device", help="Of torch: cpu, cuda, cuda:1.")] = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of torch.")] = 1,
    max_hours: Annotated[
        float | None,
        typer.Option(
            "--max-hours",
            min=0.0,
            help="Refuse an experiment that takes longer. 0.1 for smoke, 4 for laptop, 72 for gpu.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate the cost, and run nothing.")
    ] = False,
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Run experiments one after the other, and report the outcome of each.

    What it costs is estimated and said before it starts; an experiment that was interrupted goes on
    where it was.
    """
    from experiments.papers.command import Options, run_all

    if data != DATA and not data.is_dir():
        raise BractError(
            f"--data: {data} is no folder; name one that holds the data sets, or leave it out",
            code="file-missing",
        )
    run_all(
        names or [],
        Options(
            scale=scale.value,
            out=out,
            data=data,
            device=device,
            threads=threads,
            max_hours=max_hours,
            dry_run=dry_run,
        ),
        as_json=output.is_json,
    )


@paper.command("report")
def report_experiments(
    results: ResultsOption = None,
    out: Annotated[Path, typer.Option("--out", help="File to write.")] = Path("papers.html"),
    output: FormatOption = Format.DEFAULT,
) -> None:
    """Write one page: the published figures and ours, pictures included."""
    from bract.cli.console import print_json, say
    from experiments.papers.page import write_page
    from experiments.papers.summary import stand_all

    found = stand_all(_folder(results))
    page = write_page(found, out)
    if output.is_json:
        print_json([standing.to_dict() for standing in found])
    say(f"done: {page}; next: open it in a browser")


if __name__ == "__main__":
    main(paper, "python -m experiments.papers")
