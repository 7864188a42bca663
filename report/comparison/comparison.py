"""The comparison: one federation undefended and under each defense, on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bract import __version__
from bract.audit.scoring.leak import LeakRule
from bract.config import dump_config
from bract.files import write_text
from bract.report.comparison.alignment import align
from bract.report.comparison.comparison_charts import comparison_charts
from bract.report.comparison.comparison_verdict import comparison_verdict
from bract.report.comparison.pairing import add_differences
from bract.report.comparison.scatter import SHAPES
from bract.report.comparison.variants import (
    UNDEFENDED,
    ExampleCounts,
    Variant,
    add_ratios,
    variant_row,
    wilson,
)
from bract.report.facts.facts import gather
from bract.report.facts.formatting import plural
from bract.report.facts.glossary import GLOSSARY
from bract.report.facts.summary import total
from bract.report.page.pictures import Picture, picture
from bract.report.page.render import style, templates
from bract.schema import Comparison
from bract.strict_json import dump_json

MATRIX_IMAGES = 10

Facts = dict[str, Any]


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

    Raises
    ------
    BractError
        If the files cannot be written.
    SchemaError
        If a file of a run has another schema version than this one reads.
    """
    facts = gather_comparison(root, variants, name=name, tested=tested, notes=notes)
    if redact:
        facts = facts.redact()
    page = render_comparison(root, facts)
    content = dump_json(facts.to_dict(), ascii_only=False)
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
    """Return the facts of a comparison.

    ``rows`` has one entry a variant, whether it finished or not; its leakage is that of the
    strongest attack on it, and ``attacks`` holds every one. ``pictures`` has one entry for each
    attacked image, with what came back under each variant.

    Parameters
    ----------
    tested
        Examples behind the accuracies, for their intervals; None if not known.
    notes
        What the reader has to know about how the runs were made.
    """
    runs = {v.name: found for v in variants if (found := _gather(root / v.name)) is not None}
    tested = tested or ExampleCounts()
    rows = [variant_row(v, root / v.name, runs.get(v.name), tested) for v in variants]
    for row in rows:
        if (root / row["variant"] / "report.html").is_file():
            row["report"] = f"{row['variant']}/report.html"
    add_ratios(rows)
    measure = _measure(rows)
    for row in rows:
        row["shown"] = _shown(row, measure, tested)
    pictures = align(root, rows, runs)
    add_differences(rows, pictures)
    started = [found["run"]["started"] for found in runs.values() if found["run"]["started"]]
    base = runs.get(UNDEFENDED) or next(iter(runs.values()), None)
    content = {
        "bract": __version__,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "name": name,
        "verdict": comparison_verdict(rows, _rule(base)),
        "measure": measure,
        "tested": tested.count(measure),
        "rows": rows,
        "pictures": pictures,
        "notes": [*notes, *_notes(rows, measure)],
        "not_tried": _not_tried(runs),
        "config": base["config"] if base else None,
        "run": {
            "device": base["run"]["device"] if base else None,
            "versions": base["run"]["versions"] if base else {},
            "seed": base["run"]["seed"] if base else None,
            "audit_devices": sorted({d for r in runs.values() for d in r["run"]["audit_devices"]}),
            "started": min(started, default=None),
            "training_seconds": total(row["training_seconds"] for row in rows),
            "audit_seconds": total(row["audit_seconds"] for row in rows),
        },
    }
    return Comparison.model_validate(content)


def _gather(folder: Path) -> Facts | None:
    return gather(folder).to_dict() if (folder / "config.yaml").is_file() else None


def _rule(base: Facts | None) -> LeakRule:
    section = base["config"]["audit"]["leak"] if base and base["config"] else {}
    return LeakRule(**section)


def _measure(rows: Sequence[Facts]) -> str:
    """Choose the accuracy that every variant has: a fair comparison has one measure.

    ``global``: the server's model on test data. ``clients``: each client's model on its own
    validation data, where some variant keeps part of the model at the clients.
    """
    locked = any(row["locked"] for row in rows)
    known = all(row["client_accuracy"] is not None for row in rows if row["rounds"])
    return "clients" if locked and known else "global"


def _shown(row: Facts, measure: str, tested: ExampleCounts) -> Facts:
    key = "client_accuracy" if measure == "clients" else "accuracy"
    span = wilson(row[key], tested.count(measure))
    return {
        "value": row[key],
        "low": span[0] if span else None,
        "high": span[1] if span else None,
        "change": row[f"{key}_change"],
    }


def _notes(rows: Sequence[Facts], measure: str) -> list[str]:
    notes = []
    locked = [row["title"] for row in rows if row["locked"]]
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
    strongest = {(r["attack"]["attack"], r["attack"]["tier"]) for r in rows if r["attack"]}
    if len(strongest) > 1:
        notes.append(
            "Leakage is that of the strongest attack on each variant, by images leaked and then "
            "by mean SSIM; it is not the same attack for all."
        )
    if any(row["bytes_per_upload"] for row in rows):
        notes.append(
            "Bytes are the tensors of one client’s upload as the server received them; values "
            "that a defense sets to zero travel like any others."
        )
    if any(row["seconds_per_step"] for row in rows):
        notes.append(
            "Times come from one run of each variant, medians over clients and rounds, and "
            "include loading and evaluation; other work on the machine shows in them."
        )
    return notes


def _not_tried(runs: Mapping[str, Facts]) -> list[str]:
    """Return what no variant's audit tried."""
    lists = [run["threat_model"]["not_tried"] for run in runs.values()]
    defended = [lists[i] for i, name in enumerate(runs) if name != UNDEFENDED] or lists
    return (
        [item for item in defended[0] if all(item in other for other in defended)] if lists else []
    )


def render_comparison(root: Path, comparison: Comparison) -> str:
    """Return the page for `gather_comparison`'s facts; pictures are read from ``root``."""
    facts = comparison.to_dict()

    def show(name: str | None) -> Picture:
        return picture(root, name, redact=comparison.redacted)

    return (
        templates()
        .get_template("compare.html.j2")
        .render(
            facts=facts,
            css=style("report.css", "compare.css"),
            show=show,
            plural=plural,
            matrix=facts["pictures"][:MATRIX_IMAGES],
            undefended=UNDEFENDED,
            any_key=any(row["random_key_accuracy"] is not None for row in facts["rows"]),
            shapes=SHAPES,
            glossary=GLOSSARY,
            config_yaml=dump_config(comparison.config) if comparison.config else None,
            **comparison_charts(facts),
        )
    )
