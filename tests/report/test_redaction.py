"""A redacted report holds the fields that are marked as public."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from typing import Any

import pytest
from reporting import variant

from bract.cli.report import report_run
from bract.inputs import is_redacted
from bract.report import write_report
from bract.report.comparison.comparison import gather_comparison
from bract.report.facts import gather
from bract.rundir import RunDirectory
from bract.schema import Record
from bract.schema.metrics import ClientRow, MetricsRow
from bract.schema.record import is_public
from bract.schema.report_rows import ImageFacts


class WiderImage(ImageFacts):
    """An image's facts with one more field, which is not marked."""

    face: str | None = None


def records(kind: type[Record] = Record) -> Iterator[type[Record]]:
    for child in kind.__subclasses__():
        yield child
        yield from records(child)


def test_a_field_that_is_not_marked_is_redacted(make_run: Any) -> None:
    report = gather(make_run(rounds=1))
    observation = report.observations[0]
    images = [WiderImage(**dict(image), face="somebody") for image in observation.images]
    wider = observation.model_copy(update={"images": images})
    report = report.model_copy(update={"observations": [wider, *report.observations[1:]]})
    shown = report.observations[0].images[0]
    assert isinstance(shown, WiderImage) and shown.face == "somebody"
    hidden = report.redact().observations[0].images[0]
    assert isinstance(hidden, WiderImage) and hidden.face is None
    assert hidden.scores == shown.scores and hidden.index == shown.index


def test_a_setting_that_is_not_listed_is_redacted(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    settings = {"tv": 1e-4, "labels_read": [7], "portrait_of": "somebody"}
    writers.audit(root, 1, "a", settings=settings)
    write_report(root, redact=True)
    content = json.loads((root / "report.json").read_text())
    assert content["observations"][0]["settings"] == {"tv": 1e-4}


def as_texts(root: Any) -> None:
    """Let a run's results be of texts."""
    for path in (root / "audit").rglob("round-*.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"input": "text"}))


def test_texts_are_left_out_unless_they_are_asked_for(
    make_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def left_out(root: Any, redact: bool | None) -> bool:
        report_run(root, redact=redact, as_json=False)
        found: bool = json.loads((root / "report.json").read_text())["redacted"]
        return found

    root = make_run(rounds=1)
    assert left_out(root, True) and not left_out(root, None)
    capsys.readouterr()
    as_texts(root)
    assert left_out(root, None) and "--show" in capsys.readouterr().err
    assert not left_out(root, False)
    write_report(root)
    assert json.loads((root / "report.json").read_text())["redacted"]
    assert is_redacted(None, ["image", "of-a-package-that-is-not-installed"])


def test_a_metric_by_a_clients_own_name_is_redacted(make_run: Any) -> None:
    root = make_run(clients=["a"], rounds=1)
    row = ClientRow.of({"train_loss": 1.0, "age": 41.0}, num_examples=3, weight=1.0)
    RunDirectory(root).append_metrics(MetricsRow(round=2, clients={"a": row}))
    report = gather(root)
    assert report.rounds[-1].clients["a"].other == {"age": 41.0}
    hidden = report.redact().rounds[-1].clients["a"]
    assert hidden.other == {} and hidden.train_loss == 1.0


def test_a_redacted_report_still_has_every_fact_but_the_images(make_run: Any) -> None:
    report = gather(make_run(rounds=1))
    hidden = report.redact()
    assert hidden.redacted and not report.redacted
    assert hidden.verdict == report.verdict
    assert hidden.attacks == report.attacks and hidden.clients == report.clients
    for image in hidden.observations[0].images:
        kept = {name for name, value in dict(image).items() if value is not None}
        assert not kept & {"label", "label_confidence", "true_label", "reconstruction", "original"}
        assert not image.baselines


def test_a_redacted_comparison_holds_no_picture_and_no_label(make_run: Any) -> None:
    root = make_run(clients=["a"], rounds=1)
    root = root.rename(root.with_name("undefended")).parent
    facts = gather_comparison(root, [variant("undefended")], name="digits")
    shown, hidden = facts.pictures[0], facts.redact().pictures[0]
    (before,), (after,) = shown.variants["undefended"], hidden.variants["undefended"]
    assert shown.original and before.reconstruction and before.original
    assert hidden.original is None and hidden.true_label is None
    assert after.reconstruction is None and after.original is None and after.label is None
    assert after.scores == before.scores


@pytest.mark.parametrize("kind", sorted(set(records()), key=operator.attrgetter("__name__")))
def test_what_is_not_public_has_a_default(kind: type[Record]) -> None:
    """Else a redacted copy could not be made."""
    fields = kind.model_fields
    if any(is_public(kind, name) for name in fields):
        left = [n for n, f in fields.items() if f.is_required() and not is_public(kind, n)]
        assert not left
