"""Write ``report.html`` and ``summary.html``, which need nothing else, and ``report.json``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bract.config import dump_config
from bract.disk.files import write_text
from bract.report.facts import gather
from bract.report.order import severity
from bract.report.page import boosting, figures
from bract.report.page.charts import loss_curve
from bract.report.page.further import further
from bract.report.page.pictures import Picture, difference, picture
from bract.report.page.signals import Plot, plot
from bract.report.words import formatting
from bract.report.words.glossary import glossary
from bract.report.words.headline import finding
from bract.report.words.left import answered, openly, said, sent_openly, shown_rows, smallest
from bract.report.words.provenance import set_aside
from bract.report.words.reach import (
    by_round,
    examined_again,
    likeness,
    reach_lines,
    reach_note,
    rounds_done,
    score_name,
)
from bract.report.words.summary import measured_units, recipients, summary
from bract.schema import Report
from bract.schema.inputs import is_redacted, outline_of
from bract.schema.reach import RoundLeaks
from bract.schema.report import SinceFacts
from bract.schema.report_rows import ImageFacts, ObservationFacts

STRIP_IMAGES = 8
GALLERY_IMAGES = 240

SUMMARY = "summary.html"
"""The page for a data protection officer."""

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Pictures:
    """What fragments of inputs show of saved examples; redacted, no file is read."""

    root: Path
    redact: bool

    def show(self, name: str | None) -> Picture:
        """Return a picture."""
        return picture(self.root, name, redact=self.redact)

    def apart(self, image: ImageFacts) -> Picture | None:
        """Return the difference of a reconstructed picture and its original."""
        return difference(self.root, image.original, image.reconstruction, redact=self.redact)

    def over_time(self, image: ImageFacts, title: str) -> Plot | None:
        """Return a reconstructed signal drawn over its original."""
        return plot(
            self.root, image.original, image.reconstruction, title=title, redact=self.redact
        )


def write_report(
    run_dir: Path,
    redact: bool | None = None,
    *,
    since: SinceFacts | None = None,
    months: int | None = None,
) -> Path:
    """Write ``report.html``, ``report.json`` and ``summary.html``; return the first one's path.

    They replace earlier ones whole, and only their owner may read them (mode 0600): the first two
    show personal data. With ``redact`` they hold public fields alone: no picture, no picture's file
    name, no recovered or true label of a single image. None redacts a run in which an input that is
    withheld (`bract.inputs.base.Input`) was attacked. ``summary.html`` is one sheet to print for a
    data protection officer, with no picture and no label in any case. ``since``
    (`bract.report.since`) holds the page against an earlier one; ``months`` is as in `gather`.
    """
    report = gather(run_dir, months=months)
    if since is not None:
        report = report.model_copy(update={"since": since})
    if is_redacted(redact, {facts.input for facts in report.observations}):
        report = report.redact()
    page = render(run_dir, report)
    content = report.to_text(ascii_only=False)
    write_text(run_dir / "report.json", content + "\n")
    write_text(run_dir / SUMMARY, render_summary(report))
    return write_text(run_dir / "report.html", page)


def render(run_dir: Path, report: Report, *, live: str | None = None) -> str:
    """Return the page for `gather`'s facts; pictures are read from ``run_dir``.

    ``live`` is the state of the run, for a page that grows while it is watched.
    """
    css = figures.client_colours(report)
    kinds = {o.input for o in report.observations} or set(report.run.inputs) or {"image"}
    columns = {name for kind in kinds for name in outline_of(kind).columns}
    noun = formatting.noun_of(kinds)

    return (
        templates()
        .get_template("report.html.j2")
        .render(
            facts=report,
            live=live,
            css=style("report.css"),
            colours=css,
            worst=None if report.worst is None else report.observations[report.worst],
            strip_images=STRIP_IMAGES,
            gallery=_gallery(report),
            leakage_charts=figures.leakage_charts(report, css),
            accuracy_chart=figures.accuracy_chart(report, css),
            boosting=boosting.boosting_view(report, css),
            bar=lambda row: figures.bar(row, report),
            loss_curve=loss_curve,
            accuracy={row.round: row.accuracy for row in report.rounds},
            pictures=Pictures(run_dir, redact=report.redacted),
            plural=formatting.plural,
            answered=answered,
            left_said=said(report.left),
            smallest=smallest(report.left),
            units=measured_units(report),
            reach=reach_lines(report.reach, openly(report.left)),
            reach_note=reach_note(report.reach, report.verdict.thresholds.level),
            finding=finding(
                report.verdict.sentence, report.verdict.level, sent_openly(report.left)
            ),
            score_name=score_name(report.reach),
            by_round=by_round,
            rounds_done=rounds_done(report.run),
            examined_again=examined_again(report.examine),
            ranked=_ranked,
            glossary=glossary(noun, columns),
            columns=columns,
            measures=list(dict.fromkeys(row.measure for row in report.attacks)) or ["SSIM"],
            fragment=_fragment,
            noun=lambda kind: formatting.noun_of([kind]),
            config_yaml=dump_config(report.config) if report.config else None,
        )
    )


def render_cases(
    run_dir: Path, observation: ObservationFacts, *, key: str, most: int = 8
) -> list[Markup]:
    """Return an observation's examples as its input shows them: original and reconstruction.

    Parameters
    ----------
    key
        Prefix of their identifiers on the page.
    most
        Examples at most, the first ones.
    """
    module = templates().get_template(_fragment("inputs", observation.input, "image")).module
    shown = Pictures(run_dir, redact=False)
    return [
        module.case(f"{key}-{number}", observation, image, shown, False)  # type: ignore[attr-defined]
        for number, image in enumerate(observation.images[:most])
    ]


def render_worst(run_dir: Path, *, key: str) -> list[Markup]:
    """Return the examples of the observation of a run that leaked most; none where none was scored.

    Parameters
    ----------
    key
        Prefix of their identifiers on the page.
    """
    if not run_dir.is_dir():
        return []
    scored = [o for o in gather(run_dir).observations if o.scored and o.images]
    return render_cases(run_dir, max(scored, key=severity), key=key) if scored else []


def render_summary(report: Report) -> str:
    """Return the page for a data protection officer."""
    return (
        templates()
        .get_template("summary.html.j2")
        .render(
            facts=report,
            summary=summary(report),
            left=shown_rows(report.left),
            left_said=said(report.left),
            smallest=smallest(report.left),
            recipients=recipients(report),
            units=measured_units(report),
            reach=reach_lines(report.reach, openly(report.left)),
            reach_note=reach_note(report.reach, report.verdict.thresholds.level),
            likeness=likeness(report.reach),
            css=style("summary.css"),
        )
    )


def _fragment(folder: str, name: str, other: str) -> str:
    """Return the template of a question or an input; ``other`` where it has none of its own."""
    own = f"{folder}/{name}.html.j2"
    return own if (_HERE / own).is_file() else f"{folder}/{other}.html.j2"


@cache
def templates() -> Environment:
    """Return the pages' templates, compiled once, with escaping on and the filters of `words`."""
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        num=formatting.number,
        value=formatting.value,
        pct=formatting.percent,
        duration=formatting.duration,
        moment=formatting.moment,
        span=formatting.span,
        plural=formatting.plural,
        counted=formatting.counted,
        left_open=formatting.left_open,
        pieces=formatting.pieces,
        tight=formatting.tight,
        step=formatting.step_time,
        size=formatting.size,
        signed=formatting.signed,
        set_aside=set_aside,
        further=further,
    )
    return environment


def style(*names: str) -> Markup:
    """Return style sheets, to be put into a page."""
    return Markup("\n".join((_HERE / name).read_text(encoding="utf-8") for name in names))


def _ranked(images: Sequence[ImageFacts]) -> list[ImageFacts]:
    """Order images worst first: what leaked, then by SSIM; those without stay in their order."""

    def rank(image: ImageFacts) -> tuple[bool, float]:
        found = image.scores
        near = None if found is None else found.primary
        return not image.leaked, math.inf if near is None else -near

    return sorted(images, key=rank)


@dataclass(frozen=True)
class Gallery:
    """The observations that are shown, worst first, of ``total``; ``start`` is the first round."""

    shown: list[ObservationFacts]
    total: int
    rounds: list[RoundLeaks]
    input: str
    start: int | None


def _gallery(report: Report) -> Gallery:
    """Choose the observations to show, worst first: all, or up to `GALLERY_IMAGES` images."""
    able = [o for o in report.observations if o.images and not o.refused]
    able.sort(key=lambda o: tuple(-s for s in severity(o)))
    shown: list[ObservationFacts] = []
    budget = GALLERY_IMAGES
    for observation in able:
        if shown and len(observation.images) > budget:
            break
        shown.append(observation)
        budget -= len(observation.images)
    numbers = {o.round for o in shown}
    return Gallery(
        shown,
        len(able),
        [row for row in report.by_round if row.round in numbers],
        shown[0].input if shown else "image",
        shown[0].round if shown else None,
    )
