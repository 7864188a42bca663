"""Write the documents' measured sentences and tables from the committed results.

    python -m experiments.measured_text [--check]

A template in ``experiments/texts`` holds the words and names the rows that its figures come from.
What it makes stands in a document between ``<!-- measured: NAME -->`` and ``<!-- end -->``. Figures
are never typed: a digit in a template's prose is refused, and so is a row that was not measured.
"""

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bract.errors import BractError
from experiments.audit_plan import TIERS, standard_plan
from experiments.harness.result import RESULTS, Row, committed

HERE = Path(__file__).parent
TEXTS = HERE / "texts"
TARGET = re.compile(r"\{# goes to ([\w./-]+) #\}\n")
REGION = "<!-- measured: {name} -->\n{text}\n<!-- end -->"

_NOT_PROSE = re.compile(
    r"\{[{%#].*?[}%#]\}|```.*?```|`[^`\n]*`|\]\([^)]*\)|\bet al\. \d{4}|\(\w+ \d{4}\)|^\d+\. ",
    re.DOTALL | re.MULTILINE,
)


class MissingRowError(Exception):
    """A template names what no committed file holds."""


@cache
def results(name: str) -> list[Row]:
    """Return the rows of the one committed file whose name begins so."""
    try:
        return committed(name, RESULTS)
    except BractError as error:
        raise MissingRowError(str(error)) from error


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Return the rows whose columns have these values."""
    return [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]


def one(name: str, **wanted: Any) -> Row:
    """Return the one row of a file with these values.

    Raises
    ------
    MissingRowError
        If there is none, or more than one.
    """
    found = select(results(name), **wanted)
    if len(found) != 1:
        raise MissingRowError(f"{name}: {len(found)} rows with {wanted}, expected one")
    return found[0]


def audit(panel: str, defense: str = "none", tier: str | None = None) -> Row:
    """Return a row of the audit; of the undefended update where no defense is named."""
    if defense == "none":
        return one("audit", panel=panel, tier="plain")
    return one("audit", panel=panel, defense=defense, tier=tier or "adaptive")


def decibels(row: Row, digits: int = 1) -> str:
    """Return mean PSNR, its interval and how much of it is at the cap: ``58.1 [57.6, 58.5]``."""
    if row["psnr"] is None:
        return "refused"
    text = f"{row['psnr']:.{digits}f}{bracket(row, 'psnr', digits)}"
    capped = row.get("at_cap") or 0
    return text + (f" ({capped} of {row['images']} at the cap)" if capped else "")


def similarity(row: Row) -> str:
    """Return mean SSIM without its interval."""
    return "" if row["ssim"] is None else f"{round(row['ssim'], 2) + 0.0:.2f}"


def bracket(row: Row, column: str, digits: int = 1) -> str:
    """Return an interval in brackets, nothing where there is none."""
    low, high = row.get(f"{column}_low"), row.get(f"{column}_high")
    return "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"


def readable(row: Row) -> str:
    """Return how many images reached an SSIM of 0.5: ``13 of 16``."""
    return f"{round(row['recognisable'] * row['images'])} of {row['images']}"


def lowest(rows: Sequence[Row], column: str, digits: int = 2) -> str:
    """Return the lowest value of a column."""
    return f"{round(min(row[column] for row in rows), digits) + 0.0:.{digits}f}"


def highest(rows: Sequence[Row], column: str, digits: int = 2) -> str:
    """Return the highest value of a column."""
    return f"{max(row[column] for row in rows):.{digits}f}"


def panel_table(panel: str) -> str:
    """Return a panel as a Markdown table: a line a defense, a column a tier."""
    rows = select(results("audit"), panel=panel)
    if not rows:
        raise MissingRowError(f"audit: no rows of the panel {panel}")
    tiers = [t for t in TIERS if t != "plain" and any(row["tier"] == t for row in rows)]
    columns = ["defense", "cosine", *(TIERS[t] for t in tiers)]
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    plain = select(rows, tier="plain")
    if plain and plain[0]["defense"] == "none":
        shown = cell(plain[0])
        lines.append(f"| none | 1.00 | {shown} (undefended) |" + " |" * (len(tiers) - 1))
    for defense in dict.fromkeys(row["defense"] for row in rows if row["defense"] != "none"):
        here = {row["tier"]: row for row in select(rows, defense=defense)}
        cosine = next(iter(here.values()))["cosine"]
        cells = [cell(here[t]) if t in here else "" for t in tiers]
        lines.append(f"| {defense} | {cosine:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(row: Row) -> str:
    """Return a table cell: PSNR with its interval, SSIM, readable images."""
    if row["psnr"] is None:
        return "refused"
    face = row.get("at_face_value") or 0
    note = f"; {face} taken at face value" if face else ""
    return f"{decibels(row)} dB / {similarity(row)} / {readable(row)}{note}"


def panels(*names: str) -> list[str]:
    """Return those of the named panels of which a defended row is committed."""
    there = {row["panel"] for row in results("audit") if row["defense"] not in ("none", "-")}
    return [name for name in names if name in there]


def missing() -> list[str]:
    """Return what of the plan is still to be run: ``first round, lenet (3 of 14 rows)``."""
    planned = Counter(setting.panel for setting in standard_plan())
    done = Counter(row["panel"] for row in results("audit") if row["tier"] in TIERS)
    left = {name: count - done[name] for name, count in planned.items()}
    return [f"{name} ({left[name]} of {planned[name]} rows)" for name in planned if left[name]]


def guesses(data: str) -> Row:
    """Return the baseline without a gradient that scores highest on an image set."""
    rows = [row for row in select(results("audit"), data=data) if row["tier"] == "no gradient"]
    if not rows:
        raise MissingRowError(f"audit: no baseline on {data}")
    return max(rows, key=lambda row: float(row["psnr"]))


def lost(row: Row) -> str:
    """Return the paired difference to the undefended update: ``-6.5 dB [-7.1, -5.9]``."""
    return f"{row['to_plain']:+.1f} dB{bracket(row, 'to_plain')}".replace("-", "−")


def mean_of(rows: Sequence[Row], column: str) -> float:
    """Return the mean of a column over rows."""
    return statistics.fmean(row[column] for row in rows)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(results, select, one, audit, decibels, similarity, bracket, readable, lowest, highest),
        *(panel_table, cell, mean_of, panels, missing, lost, guesses, round, len, abs),
    )
}


def typed_figures(template: str) -> list[str]:
    """Return the digits that stand in a template's prose instead of coming from a row."""
    prose = _NOT_PROSE.sub(" ", template)
    return re.findall(r"\S*\d\S*", prose)


def render(path: Path) -> tuple[Path, str]:
    """Return the document that a template belongs to, and its text.

    Raises
    ------
    MissingRowError
        If the template types a figure, names no document, or a row that was not measured.
    """
    source = path.read_text()
    goes_to = TARGET.match(source)
    if goes_to is None:
        raise MissingRowError(f"{path}: begins with no '{{# goes to docs/page.md #}}'")
    if typed := typed_figures(source[goes_to.end() :]):
        raise MissingRowError(f"{path}: typed figures {', '.join(typed)}; take them from a row")
    environment = Environment(
        loader=FileSystemLoader(TEXTS), undefined=StrictUndefined, autoescape=False
    )
    environment.globals.update(FUNCTIONS)
    text = environment.from_string(source[goes_to.end() :]).render()
    return HERE.parent / goes_to[1], text.strip("\n")


def placed(document: str, name: str, text: str) -> str:
    """Return a document with a region's text replaced.

    Raises
    ------
    MissingRowError
        If the document has no such region.
    """
    region = re.compile(rf"<!-- measured: {re.escape(name)} -->\n.*?\n?<!-- end -->", re.DOTALL)
    if not region.search(document):
        raise MissingRowError(f"no region '<!-- measured: {name} -->' in the document")
    return region.sub(lambda _: REGION.format(name=name, text=text), document, count=1)


def main() -> None:
    """Rewrite every document, or say which ones differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on difference")
    options = parser.parse_args()
    stale = []
    for path in sorted(TEXTS.glob("*.md")):
        document, text = render(path)
        before = document.read_text()
        after = placed(before, path.stem, text)
        if after != before:
            stale.append(str(document.relative_to(HERE.parent)))
            if not options.check:
                document.write_text(after)
    if stale and options.check:
        sys.exit(f"not what the results say: {', '.join(stale)}; run measured_text.py")


if __name__ == "__main__":
    main()
