"""Prometheus' text format, held against its own parser."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from bract.kits.metrics import METRICS, Sample, exposition, write_metrics


def test_metrics_are_grouped_with_help_and_type_and_escaped() -> None:
    text = exposition(
        [
            Sample("bract_run_round", 3, {"run": 'a"b\\c\nd'}),
            Sample("bract_refusals_total", 2),
            Sample("bract_run_round", 4, {"run": "e"}),
        ]
    )
    assert text == (
        f"# HELP bract_run_round {METRICS['bract_run_round']}\n"
        "# TYPE bract_run_round gauge\n"
        'bract_run_round{run="a\\"b\\\\c\\nd"} 3.0\n'
        'bract_run_round{run="e"} 4.0\n'
        f"# HELP bract_refusals_total {METRICS['bract_refusals_total']}\n"
        "# TYPE bract_refusals_total counter\n"
        "bract_refusals_total 2.0\n"
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(METRICS)),
            st.floats(),
            st.dictionaries(st.sampled_from(["run", "site"]), st.text(max_size=20), max_size=2),
        )
    )
)
def test_prometheus_reads_what_was_measured(found: list[tuple[str, float, dict[str, str]]]) -> None:
    # Prometheus splits lines at "\n" alone; its Python parser at every line end that Python knows.
    found = [(n, v, {k: "".join(t.splitlines()) for k, t in ls.items()}) for n, v, ls in found]
    text = exposition(Sample(*one) for one in found)
    read = [
        (sample.name, repr(sample.value), sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    expected = [(name, repr(float(value)), labels) for name, value, labels in found]
    key = str
    assert sorted(read, key=key) == sorted(expected, key=key)


def test_the_file_is_whole_and_other_users_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "bract.prom"
    write_metrics(path, [Sample("bract_up", 1.0, {"process": "superlink"})])
    assert path.read_text().endswith('bract_up{process="superlink"} 1.0\n')
    assert path.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["bract.prom"]


def test_an_unknown_metric_is_a_fault_of_the_code() -> None:
    with pytest.raises(KeyError):
        exposition([Sample("bract_other", math.pi)])
