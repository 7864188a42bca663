"""Examples outside the report: each input's own fragment shows them."""

from pathlib import Path

import pytest

from bract.report.page.render import render_cases
from bract.schema import audit, report_rows

CELL = audit.CellResult(column="age", value="61<b>", original="62", right=False, certainty=0.5)


def observation(kind: str, count: int = 1) -> report_rows.ObservationFacts:
    examples = [
        report_rows.ImageFacts.model_construct(index=n, cells=[CELL], scores=None)
        for n in range(count)
    ]
    return report_rows.ObservationFacts.model_construct(
        input=kind,
        client="a",
        round=1,
        attack="row-span",
        attack_name="Row span",
        method_name="Row span",
        tier="oblivious",
        images=examples,
    )


@pytest.mark.parametrize("kind", ["table", "text"])
def test_cells_are_shown_and_escaped_as_their_input_shows_them(kind: str, tmp_path: Path) -> None:
    (case,) = render_cases(tmp_path, observation(kind), key="point")
    assert "61&lt;b&gt;" in case
    assert 'id="point-0"' in case
    assert ("Tokens of" in case) == (kind == "text")
    assert ("Cells of" in case) == (kind == "table")


def test_no_more_examples_are_shown_than_asked_for(tmp_path: Path) -> None:
    assert len(render_cases(tmp_path, observation("table", 5), key="p", most=3)) == 3
