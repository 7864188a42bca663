"""Write the documents' measured sentences and tables from the committed results.

    python -m experiments.measured_text [--check]

A template in ``experiments/texts`` holds the words and names the rows that its figures come from.
A template that goes to ``docs/measured`` makes a whole page there: a question as its title, an
answer, a table, `again` with the commands, and limits. The text of another stands in its document
between ``<!-- measured: NAME -->`` and ``<!-- end -->``. Figures are never typed: a digit in a
template's prose is refused, and so is a row that was not measured.
"""

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bract.audit.questions.epsilon.gaussian import gaussian_epsilon
from bract.errors import BractError
from experiments.audit_plan import TIERS, standard_plan
from experiments.harness.crossed import ALIKE_DB, EQUIVALENCE_DB
from experiments.harness.result import RESULTS, Row, committed, committed_path
from experiments.harness.scores import columns as score_columns

HERE = Path(__file__).parent
BOOK = HERE.parent / "docs" / "measured"
TEXTS = HERE / "texts"
TARGET = re.compile(r"\{# goes to ([\w./-]+) #\}\n")
OLD_COMMAND = re.compile(r"^python benchmarks/(\w+)\.py")
"""Command of a file that was made when experiments were in another folder."""
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
    tier = "plain" if defense == "none" else tier or "adaptive"
    return one("audit", panel=panel, defense=defense, tier=tier)


def audit_code() -> str:
    """Return the digest of the one code that made all rows of the audit.

    Raises
    ------
    MissingRowError
        If code of several digests made them.
    """
    return one_digest([row for row in results("audit") if row["tier"] in TIERS], "audit")


def best_plain(panel: str) -> Row:
    """Return the undefended row of a panel that has most dB."""
    rows = select(results("audit"), panel=panel, tier="plain")
    if not rows:
        raise MissingRowError(f"audit: no undefended row of {panel}")
    return max(rows, key=lambda row: float(row["psnr"]))


def situations(defense: str) -> list[str]:
    """Return the panels, in the order of the plan, in which a defense is ignored and known."""
    found = [name for name in panels_of_plan() if there("audit")]
    return [
        name
        for name in found
        if {"oblivious", "adaptive"}
        <= {row["tier"] for row in select(results("audit"), panel=name, defense=defense)}
    ]


def has(panel: str, *defenses: str) -> bool:
    """Return whether undefended, oblivious and adaptive rows of a panel are committed."""
    rows = [] if not there("audit") else select(results("audit"), panel=panel)
    found = {(row["defense"], row["tier"]) for row in rows}
    wanted = {(defense, tier) for defense in defenses for tier in ("oblivious", "adaptive")}
    return ("none", "plain") in found and wanted <= found


def strongest(panel: str, defense: str = "none") -> Row:
    """Return the committed row of a panel's attacker who knows the defense that has most dB."""
    tier = "plain" if defense == "none" else "adaptive"
    rows = select(results("audit"), panel=panel, defense=defense, tier=tier)
    if not rows:
        raise MissingRowError(f"audit: no row of {panel}, {defense}, {tier}")
    return max(rows, key=lambda row: float(row["psnr"]))


def one_digest(rows: Sequence[Row], what: str) -> str:
    """Return the digest of the code that made all rows.

    Raises
    ------
    MissingRowError
        If code of several digests made them: figures of one table come from one code.
    """
    found = sorted({str(row.get("code")) for row in rows})
    if len(found) != 1:
        raise MissingRowError(f"{what}: code of {len(found)} digests ({', '.join(found)})")
    return found[0]


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


def leaks(row: Row) -> str:
    """Return how many images leaked by the audit's rule: ``13 of 16``."""
    return f"{row['leaked']} of {row['images']}"


def labels(row: Row) -> str:
    """Return the share of the labels that the attacker found: ``100 %``."""
    share = row["label_accuracy"]
    return "" if share is None else f"{100 * share:.0f} %"


def seconds(row: Row) -> str:
    """Return the wall time of one upload's attack: ``12 s``."""
    return f"{row['seconds_per_upload']:.0f} s"


def verdict(row: Row) -> str:
    """Return what the test of equivalence with the undefended update came to, with its figure."""
    words = {
        "alike": f"alike within {EQUIVALENCE_DB:g} dB",
        "apart": f"short of it by {EQUIVALENCE_DB:g} dB or more",
        "open": "not decided",
    }
    text = f"{words[row['verdict']]} (short by {row['short']:.1f} dB{bracket(row, 'short')})"
    one_attack = row.get("references", 2) < 2
    return f"{text}, of one undefended attack alone" if one_attack else text


def quantile(rows: Sequence[Row], column: str, percent: float) -> float:
    """Return a percentile of a column, linear between the two nearest values."""
    return float(np.percentile([row[column] for row in rows], percent))


def above(rows: Sequence[Row], column: str, limit: float) -> int:
    """Count the rows whose column exceeds a limit."""
    return sum(row[column] > limit for row in rows)


def share_above(rows: Sequence[Row], column: str, limit: float) -> str:
    """Return the share of rows that exceed a limit, in percent: ``4.5``."""
    return f"{100 * above(rows, column, limit) / len(rows):.1f}"


def below(rows: Sequence[Row], column: str, other: str, by: float) -> list[Row]:
    """Return the rows whose column is less than another one plus ``by``."""
    return [row for row in rows if row[column] < row[other] + by]


def seen(rows: Sequence[Row], *columns: str) -> int:
    """Count the rows of which any column, an SSIM, reaches 0.5."""
    return sum(any((row[column] or 0.0) >= 0.5 for column in columns) for row in rows)


def grouped(rows: Sequence[Row], *columns: str) -> list[list[Row]]:
    """Return the rows with equal columns together, in their order."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[column] for column in columns), []).append(row)
    return list(found.values())


def lowest(rows: Sequence[Row], column: str, digits: int = 2) -> str:
    """Return the lowest value of a column."""
    return f"{round(min(row[column] for row in rows), digits) + 0.0:.{digits}f}"


def highest(rows: Sequence[Row], column: str, digits: int = 2) -> str:
    """Return the highest value of a column."""
    return f"{max(row[column] for row in rows):.{digits}f}"


def attacker(row: Row) -> str:
    """Return who attacked, and how far he could not undo the defense."""
    text = TIERS[row["tier"]]
    if left := row.get("at_face_value"):
        text += f"; {left} uploads at face value"
    if (resolved := row.get("resolved")) is not None and round(resolved, 2) < 1.0:
        text += f"; {100 * resolved:.0f} % of the coordinates undone"
    return text


def panel_table(panel: str) -> str:
    """Return a panel as a Markdown table: a line a row, all of one code."""
    rows = select(results("audit"), panel=panel)
    if not rows:
        raise MissingRowError(f"audit: no rows of the panel {panel}")
    one_digest(rows, f"panel {panel}")
    columns = ("defense", "cosine", "attacker", "attack", "PSNR, dB", "SSIM", "leaked", "labels")
    lines = [
        f"| {' | '.join((*columns, 'seconds', 'compared with the undefended update'))} |",
        f"|{' --- |' * (len(columns) + 2)}",
    ]
    for row in rows:
        cells = [
            *(row["defense"], f"{row['cosine']:.2f}", attacker(row), f"`{row['attack']}`"),
            *(decibels(row), similarity(row), leaks(row), labels(row), seconds(row)),
            verdict(row) if "verdict" in row else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def earlier() -> str:
    """Return the rows that earlier code made: a table a panel and digest."""
    parts = []
    for rows in grouped(
        [row for row in results("earlier-audit") if row["tier"] in TIERS], "panel", "code"
    ):
        lines = [
            f"**{rows[0]['panel']}**, code `{one_digest(rows, rows[0]['panel'])}`",
            "",
            "| defense | attacker | PSNR, dB | SSIM | labels | seconds |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in rows:
            cells = (
                *(row["defense"], TIERS[row["tier"]], decibels(over_both(row))),
                *(similarity(row), labels(row), seconds(row)),
            )
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def over_both(row: Row) -> Row:
    """Return an earlier row with its interval over pictures and networks, which were in step."""
    clients = row["clients_each"]
    pictures = row["data"] in ("grey", "photos") and row["batch"] == 1
    images = [client % 4 for client in clients] if pictures else clients
    return row | score_columns("psnr", row["psnr_each"], images, row["networks_each"])


def there(name: str) -> bool:
    """Return whether one committed file begins so."""
    return len(list(RESULTS.glob(f"{name}-*.json"))) == 1


def panels(*names: str) -> list[str]:
    """Return those of the named panels of which a defended row is committed."""
    if not there("audit"):
        return []
    found = {row["panel"] for row in results("audit") if row["defense"] not in ("none", "-")}
    return [name for name in names if name in found]


def panels_of_plan() -> list[str]:
    """Return the names of all panels, in the order of the plan."""
    return list(dict.fromkeys(setting.panel for setting in standard_plan()))


def missing() -> list[str]:
    """Return what of the plan is still to be run: ``first round, lenet (3 of 14 rows)``."""
    planned = Counter(setting.panel for setting in standard_plan())
    done = Counter(
        row["panel"] for row in (results("audit") if there("audit") else ()) if row["tier"] in TIERS
    )
    left = {name: count - done[name] for name, count in planned.items()}
    return [f"{name} ({left[name]} of {planned[name]} rows)" for name in planned if left[name]]


def guesses(data: str) -> Row:
    """Return the baseline without a gradient that scores highest on an image set."""
    name = "audit" if there("audit") else "earlier-audit"
    rows = [row for row in select(results(name), data=data) if row["tier"] == "no gradient"]
    if not rows:
        raise MissingRowError(f"{name}: no baseline on {data}")
    return max(rows, key=lambda row: float(row["psnr"]))


def mean_of(rows: Sequence[Row], column: str) -> float:
    """Return the mean of a column over rows."""
    return statistics.fmean(row[column] for row in rows)


def again(*names: str) -> str:
    """Return the section of a page that says how its rows were made, by file.

    Each line has the file, the command, the device and the version of bract that it ran; an older
    version is thereby marked.
    """
    lines = []
    for name in names:
        path = committed_path(name, RESULTS)
        head = json.loads(path.read_text())
        command = OLD_COMMAND.sub(r"python -m experiments.\1", head["command"])
        lines.append(
            f"- `{path.name}`: `{command}` on {head['device']}, by bract "
            f"{head['versions'].get('bract', 'before 0.1')}"
        )
    return "\n".join(["## Run it again", "", *lines])


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(
            results,
            select,
            one,
            audit,
            audit_code,
            best_plain,
            situations,
            has,
            there,
            strongest,
            decibels,
            similarity,
            bracket,
        ),
        *(leaks, labels, seconds, verdict, lowest, highest, quantile, above, share_above, below),
        *(
            seen,
            grouped,
            panel_table,
            earlier,
            mean_of,
            panels,
            panels_of_plan,
            again,
            attacker,
            missing,
            guesses,
            gaussian_epsilon,
            round,
            len,
            abs,
        ),
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
    environment.globals.update(FUNCTIONS, ALIKE_DB=ALIKE_DB)
    text = environment.from_string(source[goes_to.end() :]).render()
    return HERE.parent / goes_to[1], text.strip("\n")


def written(document: Path, name: str, text: str) -> str:
    """Return a document with its measured text: a whole page of the book, or one region."""
    if document == BOOK / f"{name}.md":
        return f"<!-- made from experiments/texts/{name}.md -->\n{text}\n"
    return placed(document.read_text(), name, text)


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
        after = written(document, path.stem, text)
        if not document.exists() or after != document.read_text():
            stale.append(str(document.relative_to(HERE.parent)))
            if not options.check:
                document.write_text(after)
    if stale and options.check:
        sys.exit(f"not what the results say: {', '.join(stale)}; run measured_text.py")


if __name__ == "__main__":
    main()
