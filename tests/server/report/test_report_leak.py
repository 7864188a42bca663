"""The rule by which an image counts as leaked, case by case."""

import pytest

from bract.server.report.leak import LEAK_RULE, best, leak_reason
from bract.server.report.schema import Baseline, Scores

GUESSES = {
    "class_mean": Baseline(ssim=0.6, psnr=15.0),
    "random_image": Baseline(ssim=0.2, psnr=9.0),
}


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        (Scores(ssim=0.61), "ssim"),
        (Scores(ssim=0.60), None),
        (Scores(ssim=0.55), None),
        (Scores(ssim=0.1, psnr=18.0, identified_top1=True), "identified"),
        (Scores(ssim=0.1, psnr=17.99, identified_top1=True), None),
        (Scores(ssim=0.1, psnr=30.0, identified_top1=False, identified_top5=True), None),
        (Scores(ssim=None, psnr=30.0, identified_top1=True), "identified"),
        (Scores(), None),
    ],
)
def test_an_image_leaks_only_above_the_best_guess(scores: Scores, reason: str | None) -> None:
    assert leak_reason(scores, GUESSES) == reason


def test_the_ssim_threshold_holds_where_every_guess_is_poor() -> None:
    poor = {"random_image": Baseline(ssim=0.05, psnr=20.0)}
    assert leak_reason(Scores(ssim=0.5), poor) == "ssim"
    assert leak_reason(Scores(ssim=0.49), poor) is None


def test_missing_baselines_do_not_hide_a_leak() -> None:
    assert leak_reason(Scores(ssim=0.5), {}) == "ssim"
    assert leak_reason(Scores(ssim=0.4, psnr=30.0, identified_top1=True), {}) is None


def test_the_best_guess_is_taken_score_by_score() -> None:
    mixed = {"a": Baseline(ssim=0.6, psnr=None), "b": Baseline(ssim=0.1, psnr=12.0)}
    assert best(mixed, "ssim") == 0.6
    assert best(mixed, "psnr") == 12.0
    assert best({}, "ssim") is None


def test_the_stated_rule_names_the_thresholds_in_force() -> None:
    assert "0.5" in LEAK_RULE and "3 dB" in LEAK_RULE
