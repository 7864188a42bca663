"""What is committed: results with intervals, and a README that follows from them."""

from __future__ import annotations

from experiments.papers.page import write_page
from experiments.papers.readme import README, readme
from experiments.papers.results import COMMITTED
from experiments.papers.summary import Standing, stand_all

AT_LEAST = 48
"""Tables and figures at laptop scale."""


def at_laptop() -> list[Standing]:
    return [one for one in stand_all() if one.scale == "laptop"]


def test_the_readme_is_what_the_declarations_and_results_say() -> None:
    assert README.read_text(encoding="utf-8") == readme(stand_all()), (
        "run: python -m experiments.papers.readme"
    )


def test_tables_and_figures_are_committed_at_laptop_scale_with_intervals() -> None:
    found = at_laptop()
    assert len(found) >= AT_LEAST
    for one in found:
        assert any(figure.low is not None for row in one.rows for figure in row.ours.values()), (
            one.experiment.name
        )
        assert one.judged, one.experiment.name


def test_every_result_belongs_to_an_experiment() -> None:
    files = {path for path in COMMITTED.glob("*/*") if not path.name.startswith(".")}
    assert files == {one.file for one in at_laptop()}


def test_the_page_shows_pictures_beside_figures(tmp_path) -> None:  # type: ignore[no-untyped-def]
    page = write_page(stand_all(), tmp_path / "papers.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
