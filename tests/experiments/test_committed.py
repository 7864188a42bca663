"""What is committed: results with intervals, and a README that follows from them."""

from __future__ import annotations

from functools import cache

import pytest

from experiments.papers.catalog import experiments
from experiments.papers.page import write_page
from experiments.papers.readme import README, readme
from experiments.papers.results import COMMITTED, path_of
from experiments.papers.summary import Standing
from experiments.papers.summary import stand_all as stand

stand_all = cache(stand)

AT_LEAST = 48
"""Tables and figures at laptop scale or the paper's."""


def measured() -> list[Standing]:
    return [one for one in stand_all() if one.scale in ("laptop", "gpu")]


def test_the_readme_is_what_the_declarations_and_results_say() -> None:
    assert README.read_text(encoding="utf-8") == readme(stand_all()), (
        "run: python -m experiments.papers.readme"
    )


def test_tables_and_figures_are_committed_with_intervals() -> None:
    found = measured()
    assert len(found) >= AT_LEAST
    for one in found:
        assert any(figure.low is not None for row in one.rows for figure in row.ours.values()), (
            one.experiment.name
        )
        assert one.judged, one.experiment.name


def test_every_result_belongs_to_an_experiment() -> None:
    files = {path for path in COMMITTED.glob("*/*") if not path.name.startswith(".")}
    named = {path_of(COMMITTED, e, scale) for e in experiments().values() for scale in e.scales}
    assert {one.file for one in measured()} <= files <= named


@pytest.mark.thorough
def test_the_page_shows_pictures_beside_figures(tmp_path) -> None:  # type: ignore[no-untyped-def]
    page = write_page(stand_all(), tmp_path / "papers.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
