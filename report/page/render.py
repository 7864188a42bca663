"""Write ``report.html``, one file that needs nothing else, and ``report.json`` beside it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bract.config import dump_config
from bract.files import write_text
from bract.report.facts import formatting
from bract.report.facts.facts import gather
from bract.report.facts.glossary import GLOSSARY
from bract.report.facts.summary import severity
from bract.report.page import boosting, figures
from bract.report.page.charts import loss_curve
from bract.report.page.pictures import Picture, difference, picture
from bract.schema import Report
from bract.strict_json import dump_json

STRIP_IMAGES = 8
GALLERY_IMAGES = 240

Facts = dict[str, Any]

_HERE = Path(__file__).parent


def write_report(run_dir: Path, redact: bool = False) -> Path:
    """Write ``report.html`` and ``report.json`` into a run directory; return the former's path.

    Both replace earlier ones whole, and only their owner may read them (mode 0600): they show
    personal data. With ``redact`` both hold the fields alone that `bract.schema.report` lists as
    public: no picture, no picture's file name, no recovered or true label of a single image.

    Raises
    ------
    BractError
        If ``run_dir`` is no run directory, or the files cannot be written.
    SchemaError
        If a file in it has another schema version than this one reads.
    """
    report = gather(run_dir)
    if redact:
        report = report.redact()
    page = render(run_dir, report)
    content = dump_json(report.to_dict(), ascii_only=False)
    write_text(run_dir / "report.json", content + "\n")
    return write_text(run_dir / "report.html", page)


def render(run_dir: Path, report: Report, *, live: str | None = None) -> str:
    """Return the page for `gather`'s facts; pictures are read from ``run_dir``.

    ``live`` is how the run stands, for a page that grows while it is watched.
    """
    facts = report.to_dict()
    css = figures.client_colours(facts)

    def show(name: str | None) -> Picture:
        return picture(run_dir, name, redact=report.redacted)

    def apart(image: Facts) -> Picture | None:
        original, rebuilt = image["original"], image["reconstruction"]
        return difference(run_dir, original, rebuilt, redact=report.redacted)

    worst = facts["worst"]
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            facts=facts,
            live=live,
            css=style("report.css"),
            colours=css,
            worst=None if worst is None else facts["observations"][worst],
            strip_images=STRIP_IMAGES,
            gallery=_gallery(facts),
            leakage_charts=figures.leakage_charts(facts, css),
            accuracy_chart=figures.accuracy_chart(facts, css),
            boosting=boosting.boosting_view(facts, css),
            bar=lambda row: figures.bar(row, facts),
            loss_curve=loss_curve,
            pictures=SimpleNamespace(show=show, apart=apart),
            plural=formatting.plural,
            ranked=_ranked,
            glossary=GLOSSARY,
            config_yaml=dump_config(report.config) if report.config else None,
        )
    )


def templates() -> Environment:
    """Return the pages' templates, with escaping on and the filters of `words`."""
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        num=formatting.number,
        pct=formatting.percent,
        duration=formatting.duration,
        moment=formatting.moment,
        span=formatting.span,
        tight=formatting.tight,
        step=formatting.step_time,
        size=formatting.size,
        signed=formatting.signed,
    )
    return environment


def style(*names: str) -> Markup:
    """Return style sheets, to be put into a page."""
    return Markup("\n".join((_HERE / name).read_text(encoding="utf-8") for name in names))


def _ranked(images: list[Facts]) -> list[Facts]:
    """Order images worst first: what leaked, then by SSIM; those without stay in their order."""

    def rank(image: Facts) -> tuple[bool, float]:
        ssim = image["scores"]["ssim"] if image["scores"] else None
        return not image["leaked"], math.inf if ssim is None else -ssim

    return sorted(images, key=rank)


def _gallery(facts: Facts) -> Facts:
    """Choose the observations to show, worst first: all, or up to `GALLERY_IMAGES` images.

    ``rounds`` has an entry for each round shown, ``start`` is the round that the page opens at.
    """
    observations = facts["observations"]
    able = [o for o in observations if o["images"] and not o["refused"]]
    able.sort(key=lambda o: tuple(-s for s in severity(o)))
    shown: list[Facts] = []
    budget = GALLERY_IMAGES
    for observation in able:
        if shown and len(observation["images"]) > budget:
            break
        shown.append(observation)
        budget -= len(observation["images"])
    numbers = sorted({o["round"] for o in shown})
    return {
        "shown": shown,
        "total": len(able),
        "rounds": [_round(facts, shown, number) for number in numbers],
        "start": shown[0]["round"] if shown else None,
    }


def _round(facts: Facts, shown: list[Facts], number: int) -> Facts:
    """Count what came back of one round, over the observations that are shown."""
    mine = [o for o in shown if o["round"] == number]
    accuracy = [r["accuracy"] for r in facts["rounds"] if r["round"] == number]
    return {
        "round": number,
        "images": sum(len(o["images"]) for o in mine),
        "scored": sum(o["scored"] for o in mine),
        "leaked": sum(o["leaked"] for o in mine),
        "accuracy": next(iter(accuracy), None),
    }
