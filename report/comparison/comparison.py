"""The comparison: one federation undefended and under each defense, on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from bract import __version__
from bract.config import dump_config
from bract.disk.files import write_text
from bract.report.comparison.alignment import align
from bract.report.comparison.comparison_charts import comparison_charts
from bract.report.comparison.comparison_verdict import comparison_verdict
from bract.report.comparison.pairing import paired
from bract.report.comparison.scatter import SHAPES
from bract.report.comparison.variants import (
    UNDEFENDED,
    ExampleCounts,
    Variant,
    compared,
    variant_row,
)
from bract.report.facts import gather
from bract.report.order import total
from bract.report.page.pictures import Picture, picture
from bract.report.page.render import style, templates
from bract.report.words.formatting import plural
from bract.report.words.glossary import glossary
from bract.schema import Report
from bract.schema.comparison import Comparison, VariantRow
from bract.scores.leaks import LeakRule

MATRIX_IMAGES = 10


def write_comparison(
    root: Path,
    variants: Sequence[Variant],
    *,
    name: str,
    tested: ExampleCounts | None = None,
    notes: Sequence[str] = (),
    redact: bool = False,
) -> Path:
    """Write ``comparison.json`` and ``report.html`` over several runs; return the page's path.

    Parameters
    ----------
    root
        Folder that holds one run directory for each variant; both files go there, for their owner
        alone (mode 0600).
    variants
        What ran, in the order of the page; one of them is `UNDEFENDED`.
    name
        Of the federation.
    tested, notes, redact
        As in `gather_comparison`; with ``redact`` neither file holds a picture, a picture's file
        name or a label of a single image.
    """
    facts = gather_comparison(root, variants, name=name, tested=tested, notes=notes)
    if redact:
        facts = facts.redact()
    page = render_comparison(root, facts)
    content = facts.to_text(ascii_only=False)
    write_text(root / "comparison.json", content + "\n")
    return write_text(root / "report.html", page)


def gather_comparison(
    root: Path,
    variants: Sequence[Variant],
    *,
    name: str,
    tested: ExampleCounts | None = None,
    notes: Sequence[str] = (),
) -> Comparison:
    """Return the facts of a comparison, from the report of each variant.

    Parameters
    ----------
    tested
        Examples behind the accuracies, for their intervals; None if not known.
    notes
        What the reader has to know about how the runs were made.
    """
    reports = {
        v.name: gather(root / v.name)
        for v in variants
        if any((root / v.name / part).exists() for part in ("config.yaml", "captures"))
    }
    counts = tested or ExampleCounts()
    rows = [variant_row(v, root / v.name, reports.get(v.name), counts) for v in variants]
    measure = _measure(rows)
    rows = compared(rows, measure, counts)
    pictures = align(root, rows, reports)
    rows = paired(rows, pictures)
    base = reports.get(UNDEFENDED) or next(iter(reports.values()), None)
    config = base.config if base else None
    return Comparison(
        bract=__version__,
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        name=name,
        verdict=comparison_verdict(rows, LeakRule.of(config), _unread(rows, reports)),
        measure=measure,
        tested=counts.count(measure),
        rows=rows,
        pictures=pictures,
        notes=[
            *notes,
            *_notes(rows, measure),
            *(
                f"Not compared, of {title}: {what}."
                for title, what in _unread(rows, reports).items()
            ),
        ],
        not_tried=_not_tried(reports),
        config=config,
    )


def _measure(rows: Sequence[VariantRow]) -> Literal["global", "clients"]:
    """Choose the accuracy that every variant has: a fair comparison has one measure.

    ``global``: the server's model on test data. ``clients``: each client's model on its own
    validation data, where some variant keeps part of the model at the clients.
    """
    locked = any(row.locked for row in rows)
    known = all(row.client_accuracy is not None for row in rows if row.rounds)
    return "clients" if locked and known else "global"


def _notes(rows: Sequence[VariantRow], measure: str) -> list[str]:
    notes = []
    locked = [row.title for row in rows if row.locked]
    if locked and measure == "clients":
        notes.append(
            f"{', '.join(locked)} keeps part of the model at each client, so accuracy is that of "
            "the clients’ own models on their own validation data, for every variant alike; "
            "clients judge what they receive, so it is one round behind."
        )
    elif locked:
        notes.append(
            f"{', '.join(locked)} keeps part of the model at each client and no client holds "
            "validation data (data.validation), so its accuracy was not measured."
        )
    strongest = {r.attack.row_key for r in rows if r.attack}
    if len(strongest) > 1:
        notes.append(
            "Leakage is that of the strongest attack on each variant, by images leaked and then "
            "by mean SSIM; it is not the same attack for all."
        )
    if any(row.costs.bytes_per_upload for row in rows):
        notes.append(
            "Bytes are the tensors of one client’s upload as the server received them; values "
            "that a defense sets to zero travel like any others."
        )
    if any(row.costs.seconds_per_step for row in rows):
        notes.append(
            "Times come from one run of each variant, medians over clients and rounds, and "
            "include loading and evaluation; other work on the machine shows in them."
        )
    return notes


def _unread(rows: Sequence[VariantRow], reports: Mapping[str, Report]) -> dict[str, str]:
    """Return what could not be read of variants, by their titles."""
    held = {row.title: reports[row.variant] for row in rows if row.variant in reports}
    return {
        title: report.threat_model.unread
        for title, report in held.items()
        if report.threat_model.unread
    }


def _not_tried(reports: Mapping[str, Report]) -> list[str]:
    """Return what no variant's audit tried."""
    lists = [report.threat_model.not_tried for report in reports.values()]
    defended = [lists[i] for i, name in enumerate(reports) if name != UNDEFENDED] or lists
    return (
        [item for item in defended[0] if all(item in other for other in defended)] if lists else []
    )


def render_comparison(root: Path, comparison: Comparison) -> str:
    """Return the page for `gather_comparison`'s facts; pictures are read from ``root``."""

    def show(name: str | None) -> Picture:
        return picture(root, name, redact=comparison.redacted)

    rows = comparison.rows
    runs = [row.run for row in rows if row.run]
    return (
        templates()
        .get_template("compare.html.j2")
        .render(
            facts=comparison,
            css=style("report.css", "compare.css"),
            show=show,
            plural=plural,
            matrix=comparison.pictures[:MATRIX_IMAGES],
            undefended=UNDEFENDED,
            any_key=any(row.random_key_accuracy is not None for row in rows),
            shapes=SHAPES,
            glossary=glossary("image"),
            config_yaml=dump_config(comparison.config) if comparison.config else None,
            base=next((r.run for r in rows if r.run and r.variant == UNDEFENDED), None)
            or next(iter(runs), None),
            started=min((run.started for run in runs if run.started), default=None),
            training_seconds=total(run.training_seconds for run in runs),
            audit_seconds=total(run.audit_seconds for run in runs),
            audit_devices=sorted({device for run in runs for device in run.audit_devices}),
            charts=comparison_charts(comparison),
        )
    )
