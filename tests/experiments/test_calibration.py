"""Thresholds on the estimated information follow from the split that chose, and held elsewhere."""

from __future__ import annotations

from bract.report import findings
from experiments.identifiability import DEVIATIONS, MODELS, settings
from experiments.measured_text import above, below, one_digest, quantile, results, seen


def test_the_page_s_thresholds_are_those_of_the_split_that_chose() -> None:
    chose = results("identifiability-choose")
    assert {row["split"] for row in chose} == {"choose"}
    assert round(quantile(chose, "excess", 95), 1) == findings.EXCEEDED
    low = below(chose, "estimate", "guess", findings.LITTLE)
    assert low and not seen(low, "ig_ssim", "grnn_ssim")


def test_the_calibration_was_scored_on_two_hundred_other_uploads_by_one_code() -> None:
    scored = results("identifiability-score")
    one_digest(scored, "calibration")
    assert {row["split"] for row in scored} == {"score"}
    assert len(scored) == 200 == 10 * len(settings()) == 10 * len(MODELS) * len(DEVIATIONS)
    networks = {(row["model"], row["network"]) for row in scored}
    assert len(networks) == 8 * len({row["model"] for row in scored})
    assert above(scored, "excess", 0.0) > 0, "an estimate that nothing exceeds could be a bound"
    assert above(scored, "excess", findings.EXCEEDED) <= 0.05 * len(scored)
