"""Write ``report.html``, one file that needs nothing else, and ``report.json`` beside it."""

from __future__ import annotations

import copy
import math
import os
import uuid
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bract.config import build_config, dump_config
from bract.errors import BractError
from bract.server.report import boosting, figures, words
from bract.server.report.charts import loss_curve
from bract.server.report.facts import gather
from bract.server.report.glossary import GLOSSARY
from bract.server.report.pictures import Picture, picture
from bract.server.report.summary import severity
from bract.strict_json import dump_json

STRIP_IMAGES = 8
GALLERY_IMAGES = 240

Facts = dict[str, Any]

_HERE = Path(__file__).parent


def write_report(run_dir: Path, redact: bool = False) -> Path:
    """Write ``report.html`` and ``report.json`` into a run directory; return the former's path.

    Both replace earlier ones whole, and only their owner may read them (mode 0600): they show
    personal data. With ``redact`` neither holds a picture, a picture's file name or a recovered
    or true label of a single image.

    Raises
    ------
    BractError
        If ``run_dir`` is no run directory, or the files cannot be written.
    SchemaError
        If a file in it has another schema version than this one reads.
    """
    facts = gather(run_dir)
    if redact:
        facts = redacted(facts)
    page = render(run_dir, facts)
    content = dump_json(facts, ascii_only=False)
    write_private(run_dir / "report.json", content + "\n")
    return write_private(run_dir / "report.html", page)


def redacted(facts: Facts) -> Facts:
    """Return a copy of the facts without what shows or describes a single person's image."""
    result = copy.deepcopy(facts)
    result["redacted"] = True
    for observation in result["observations"]:
        observation["settings"].pop("labels_read", None)
        for image in observation["images"]:
            for key in ("reconstruction", "original", "label", "label_confidence", "true_label"):
                image[key] = None
    return result


def render(run_dir: Path, facts: Facts) -> str:
    """Return the page for `gather`'s facts; pictures are read from ``run_dir``."""
    css = figures.client_colours(facts)

    def show(name: str | None) -> Picture:
        return picture(run_dir, name, redact=facts["redacted"])

    worst = facts["worst"]
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            facts=facts,
            css=style("report.css"),
            colours=css,
            worst=None if worst is None else facts["observations"][worst],
            strip_images=STRIP_IMAGES,
            gallery=_gallery(facts["observations"]),
            leakage_charts=figures.leakage_charts(facts, css),
            accuracy_chart=figures.accuracy_chart(facts, css),
            boosting=boosting.boosting_view(facts, css),
            bar=lambda row: figures.bar(row, facts),
            loss_curve=loss_curve,
            show=show,
            plural=words.plural,
            ranked=_ranked,
            glossary=GLOSSARY,
            config_yaml=dump_config(build_config(facts["config"])) if facts["config"] else None,
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
        num=words.number,
        pct=words.percent,
        duration=words.duration,
        moment=words.moment,
        span=words.span,
        tight=words.tight,
        step=words.step_time,
        size=words.size,
        signed=words.signed,
    )
    return environment


def style(*names: str) -> Markup:
    """Return style sheets, to be put into a page."""
    return Markup("\n".join((_HERE / name).read_text(encoding="utf-8") for name in names))


def _ranked(images: list[Facts]) -> list[Facts]:
    """Order images by SSIM, best reconstruction first; those without stay in their order."""

    def rank(image: Facts) -> float:
        ssim = image["scores"]["ssim"] if image["scores"] else None
        return math.inf if ssim is None else -ssim

    return sorted(images, key=rank)


def _gallery(observations: list[Facts]) -> Facts:
    """Choose the observations to show: all, or the worst ones up to `GALLERY_IMAGES` images."""
    able = [i for i, o in enumerate(observations) if o["images"] and not o["refused"]]
    chosen: set[int] = set()
    budget = GALLERY_IMAGES
    for i in sorted(able, key=lambda i: (*(-s for s in severity(observations[i])), i)):
        if chosen and len(observations[i]["images"]) > budget:
            break
        chosen.add(i)
        budget -= len(observations[i]["images"])
    return {"shown": [observations[i] for i in sorted(chosen)], "total": len(able)}


def write_private(path: Path, text: str) -> Path:
    """Write a file whole, for its owner alone (mode 0600); return its path.

    Raises
    ------
    BractError
        If it cannot be written; an earlier one is then still there.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise BractError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path
