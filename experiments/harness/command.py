"""The command line of a benchmark: shared options, rows that are kept, a table or JSON."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bract
from bract.errors import BractError
from experiments.harness.result import (
    ATTACKED,
    PRODUCT,
    RESULTS,
    BenchmarkResult,
    Row,
    device_name,
    digest,
    versions,
)
from experiments.harness.splits import kind_of, open_release


def _split(name: str) -> str:
    try:
        kind_of(name)
    except BractError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


SHARED: dict[str, dict[str, Any]] = {
    "split": {
        "type": _split,
        "default": "score",
        "help": "choose has other images and networks, on which settings are chosen; "
        "'release VERSION' others again, which are scored once a version, with --json",
    },
    "seed": {"type": int, "default": 0, "help": "of the attacker"},
    "device": {"default": "cpu"},
    "threads": {"type": int, "default": 1, "help": "of torch"},
    "resume": {"type": Path, "help": "file of finished rows: read first, appended to"},
}
"""Options of several benchmarks, by name."""


def parser(doc: str | None, *shared: str, picture: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with ``--json``, options of `SHARED`, and ``--picture`` with its default."""
    # The result reads the split off the command line, where its name must be whole.
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0], allow_abbrev=False)
    made.add_argument("--json", action="store_true", help="print JSON alone on stdout")
    for name in shared:
        made.add_argument(f"--{name}", **SHARED[name])
    if picture is not None:
        made.add_argument(
            "--picture",
            type=Path,
            default=RESULTS / f"{picture}.png",
            help="where to write the picture",
        )
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; torch takes the threads of ``--threads``, one without it.

    A release's split is opened by it, and only by a command that writes a result.
    """
    import torch

    options = made.parse_args()
    split = getattr(options, "split", "score")
    if kind_of(split) == "release":
        if not options.json:
            made.error(f"--split {split!r} is scored once, into a result: add --json")
        try:
            open_release(split, _name(), _command(), RESULTS, version=bract.__version__)
        except BractError as error:
            made.error(str(error))
    torch.set_num_threads(getattr(options, "threads", 1))
    return options


class Finished:
    """Finished rows in a file, from which an interrupted run continues.

    Parameters
    ----------
    path
        None keeps nothing.
    modules
        Modules and packages that rows follow from, in addition to `ATTACKED`: rows of other code,
        or of another torch, are measured again.
    keep_older
        Keep those of other code too.
    """

    def __init__(self, path: Path | None, *modules: str, keep_older: bool = False) -> None:
        import torch

        self.path, self.keep_older = path, keep_older
        self.made_by = {"code": digest(*ATTACKED, *modules), "torch": torch.__version__}
        self.rows: dict[str, Row] = {}
        text = path.read_text(encoding="utf-8") if path and path.exists() else ""
        self._begin = "" if text.endswith("\n") or not text else "\n"
        for line in text.splitlines():
            try:
                content = json.loads(line)
            except json.JSONDecodeError:
                continue  # an interrupted run left half a line
            self.rows[content["key"]] = content["row"]

    def get(self, about: object) -> Row | None:
        """Return the row of a setting, unless other code made it."""
        key = json.dumps(about)
        row = self.rows.get(key)
        if row is None or self.keep_older or self.made_by.items() <= row.items():
            return row
        note(f"{key}: measured by other code or another torch; measured again")
        return None

    def add(self, about: object, row: Row) -> Row:
        """Keep a new row, and return it with the digest and versions that made it."""
        key = json.dumps(about)
        self.rows[key] = row | self.made_by
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(self._begin + json.dumps({"key": key, "row": self.rows[key]}) + "\n")
            self._begin = ""
        return self.rows[key]

    def row(self, about: object, measure: Callable[[], Row]) -> Row:
        """Return the row of a setting, measured only if it is not kept."""
        return self.get(about) or self.add(about, measure())


def emit(
    rows: Sequence[Row],
    columns: Sequence[str],
    *,
    as_json: bool,
    more_versions: Mapping[str, str] | None = None,
) -> None:
    """Print rows as a table of ``columns``, or as a result in JSON.

    Parameters
    ----------
    more_versions
        Of what is not an installed package.
    """
    if not as_json:
        print_table(rows, columns)
        return
    name = _name()
    result = BenchmarkResult(
        experiment=name,
        command=_command(),
        split=_split_of(sys.argv[1:]),
        device=device_name(),
        versions=versions() | dict(more_versions or {}),
        code=digest(*PRODUCT, f"experiments.{name}"),
        rows=tuple(rows),
    )
    print(json.dumps(result.to_dict(), indent=1))


def _name() -> str:
    return Path(sys.argv[0]).stem


def _command() -> str:
    return shlex.join(["python", "-m", f"experiments.{_name()}", *sys.argv[1:]])


def _split_of(arguments: Sequence[str]) -> str | None:
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--split")
    found: str | None = reader.parse_known_args(arguments)[0].split
    return found


def print_table(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Print some columns of the rows."""
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    for line in [list(columns), *cells]:
        print("  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)))


def note(text: str) -> None:
    """Report progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def note_row(row: Row, columns: Sequence[str]) -> Row:
    """Report some columns of a finished row on stderr, and return the row."""
    note(" ".join(f"{column}={row.get(column)}" for column in columns))
    return row


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "-" if value is None else str(value)
