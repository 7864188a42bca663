"""The rule by which an image counts as leaked, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from bract.config import build_config
from bract.server.report.leak import LeakRule, best, leaked_images
from bract.server.report.schema import AuditFile, Baseline, ImageResult, Scores

RULE = LeakRule()
GUESSES = {
    "class_mean": Baseline(ssim=0.6, psnr=15.0),
    "random_image": Baseline(ssim=0.2, psnr=9.0),
}


def audit(*images: ImageResult, **facts: Any) -> AuditFile:
    return AuditFile(round=1, client="a", attack="ig", scored=True, images=list(images), **facts)


def reason(scores: Scores, guesses: dict[str, Baseline], **facts: Any) -> str | None:
    """Judge one image of an upload with these means of guesses."""
    image = ImageResult(index=0, scores=scores)
    return RULE.reason(image, audit(image, baselines=guesses, **facts), {})


@pytest.mark.parametrize(
    ("scores", "why"),
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
def test_an_image_leaks_only_above_the_best_guess(scores: Scores, why: str | None) -> None:
    assert reason(scores, GUESSES) == why


def test_the_ssim_threshold_holds_where_every_guess_is_poor() -> None:
    poor = {"random_image": Baseline(ssim=0.05, psnr=20.0)}
    assert reason(Scores(ssim=0.5), poor) == "ssim"
    assert reason(Scores(ssim=0.49), poor) is None


def test_missing_baselines_do_not_hide_a_leak() -> None:
    assert reason(Scores(ssim=0.5), {}) == "ssim"
    assert reason(Scores(ssim=0.4, psnr=30.0, identified_top1=True), {}) is None


def test_identification_among_few_candidates_shows_nothing() -> None:
    found = Scores(ssim=0.1, psnr=30.0, identified_top1=True)
    assert reason(found, GUESSES, candidates=20) == "identified"  # by chance one in twenty
    assert reason(found, GUESSES, candidates=19) is None


def guessed(*ssims: float, scores: tuple[float, ...]) -> AuditFile:
    """Images with these class means of their own, and these scores."""
    return audit(
        *(
            ImageResult(
                index=i,
                scores=Scores(ssim=s, psnr=10.0),
                baselines={"class_mean": Baseline(ssim=g, psnr=9.0), "random": Baseline(ssim=0.0)},
            )
            for i, (g, s) in enumerate(zip(ssims, scores, strict=True))
        )
    )


def test_an_image_must_beat_what_guesses_reach_over_all_images() -> None:
    # Of the guesses 0, 0.1, ..., 0.8 and 1.0, 90 % are at most 0.82 by linear interpolation.
    guesses = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
    scores = (0.83, 0.81, 0.83, 0.0, 0.0, 0.0, 0.0, 0.0, 0.83, 0.99)
    rule = LeakRule(level=0.9)
    found = guessed(*guesses, scores=scores)
    assert rule.reach([found]) == {("ig", "oblivious", False): pytest.approx(0.82)}
    leaked = [(image.index, why) for _, image, why in leaked_images([found], rule)]
    # The last one stays below the guess for itself.
    assert leaked == [(0, "ssim"), (2, "ssim"), (8, "ssim")]


def test_each_tier_and_the_aggregate_have_guesses_of_their_own() -> None:
    one, other = guessed(0.1, scores=(0.6,)), guessed(0.9, scores=(0.6,))
    joint = other.model_copy(update={"client": "aggregate", "members": ["a", "b"]})
    assert [a.client for a, _, _ in leaked_images([one, joint], RULE)] == ["a"]
    assert leaked_images([one, other], RULE) == []


def test_the_thresholds_are_those_of_the_configuration() -> None:
    config = build_config({"audit": {"leak": {"ssim": 0.3, "psnr_margin": 1.5, "level": 0.8}}})
    rule = LeakRule.of(config)
    assert rule == LeakRule(0.3, 1.5, 0.8)
    for said in ("at least 0.3", "80%", "1.5 dB"):
        assert said in rule.text
    assert LeakRule.of(None) == LeakRule(0.5, 3.0, 0.95)


def test_the_best_guess_is_taken_score_by_score() -> None:
    mixed = {"a": Baseline(ssim=0.6, psnr=None), "b": Baseline(ssim=0.1, psnr=12.0)}
    assert best(mixed, "ssim") == 0.6
    assert best(mixed, "psnr") == 12.0
    assert best({}, "ssim") is None
