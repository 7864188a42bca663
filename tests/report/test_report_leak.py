"""The rule by which an image counts as leaked, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from bract.config import build_config
from bract.schema import AuditResult
from bract.schema.audit import Baseline, CellResult, ImageResult, Retrieval, Scores
from bract.scores import LeakRule
from bract.scores.leaks import Decision, best, undecided

RULE = LeakRule()
BASELINES = {
    "class_mean": Baseline(ssim=0.6, psnr=15.0),
    "random_image": Baseline(ssim=0.2, psnr=9.0),
}
FOUND = Retrieval(chance=1e-6, least=1e-9, nearest=True, references=36, choices=8)


def audit(*images: ImageResult, **facts: Any) -> AuditResult:
    return AuditResult(
        **{"round": 1, "client": "a", "attack": "ig", "scored": True, "images": list(images)}
        | facts
    )


def image(index: int = 0, *, ssim: float | None = 0.7, **facts: Any) -> ImageResult:
    return ImageResult(
        **{"index": index, "scores": Scores(ssim=ssim, psnr=20.0), "retrieval": FOUND} | facts
    )


def decide(found: ImageResult, **facts: Any) -> Decision:
    return RULE.decide([audit(found, **facts)])[0][0]


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        (Scores(ssim=0.5), "ssim"),
        (Scores(ssim=0.49), None),
        (Scores(ssim=0.1, psnr=18.0), "identified"),
        (Scores(ssim=0.1, psnr=17.99), None),
        (Scores(ssim=None, psnr=30.0), "identified"),
        (Scores(), None),
    ],
)
def test_what_stands_out_leaked_where_it_can_be_seen(scores: Scores, why: Any) -> None:
    assert decide(image(scores=scores), baselines=BASELINES) == Decision(why)
    own = image(scores=scores, baselines=BASELINES)
    assert decide(own, baselines={"class_mean": Baseline(psnr=99.0)}) == Decision(why)


@pytest.mark.parametrize("known", [None, FOUND.model_copy(update={"chance": 0.3, "least": 0.3})])
@pytest.mark.parametrize(
    ("psnr", "baseline", "copied"),
    [(40.0, 15.0, True), (39.9, 15.0, False), (55.0, 35.1, False), (96.0, None, False)],
)
def test_a_copy_leaked_although_few_references_are_known(
    known: Any, psnr: float, baseline: float | None, copied: bool
) -> None:
    """Not where a baseline is nearly as near, as a plain colour is to a plain image."""
    without = {} if baseline is None else {"class_mean": Baseline(psnr=baseline)}
    found = decide(image(scores=Scores(ssim=0.99, psnr=psnr), retrieval=known), baselines=without)
    assert found == (Decision("ssim") if copied else Decision(decided=False))


@pytest.mark.parametrize(
    ("columns", "values", "baseline", "exact", "copied"),
    [
        (40, 40, 0.5, True, True),
        (40, 40, 0.55, True, False),
        (40, 40, 0.5, False, False),
        (19, 19, 0.0, True, False),
        (784, 256, 0.6, True, True),
        (40, 40, None, True, False),
        (64, 1, 0.0, True, False),
        (64, 19, 0.0, True, False),
        (64, 20, 0.0, True, True),
    ],
)
def test_a_row_that_is_right_in_all_of_many_columns_leaked_although_few_references_are_known(
    columns: int, values: int, baseline: float | None, exact: bool, copied: bool
) -> None:
    """Not where a row without the gradient has most of them right, too, nor of a blank row."""
    row = [str(n % values) for n in range(columns)]
    cells = [
        CellResult(column=f"c{n}", value=value, original=value, right=True)
        for n, value in enumerate([*row, "target"])
    ]
    without = {} if baseline is None else {"nearest_public_row": Baseline(features=baseline)}
    scores = Scores(features=1.0 if exact else 0.99, exact=exact)
    found = decide(image(scores=scores, retrieval=None, cells=cells), baselines=without)
    assert found == (Decision("features") if copied else Decision(decided=False))


def test_what_is_not_nearest_or_may_be_chance_did_not_leak_however_similar() -> None:
    alike = FOUND.model_copy(update={"chance": 0.06})
    assert decide(image(ssim=0.99, retrieval=alike)) == Decision(None)
    other = FOUND.model_copy(update={"nearest": False})
    assert decide(image(ssim=0.99, retrieval=other)) == Decision(None)


def test_without_baselines_the_second_part_cannot_apply() -> None:
    assert decide(image(scores=Scores(ssim=0.4, psnr=60.0))) == Decision(None)


def test_the_more_images_are_judged_together_the_rarer_each_has_to_be() -> None:
    near = image(retrieval=FOUND.model_copy(update={"chance": 0.01}))
    far = image(retrieval=FOUND.model_copy(update={"chance": 0.9}))
    assert [d.reason for d in RULE.decide([audit(near, *[far] * 4)])[0]] == ["ssim"] + [None] * 4
    assert not any(d.reason for d in RULE.decide([audit(near, *[far] * 5)])[0])
    # Uploads, attacks and tiers count alike.
    others = [audit(far, attack=name, tier="adaptive") for name in "abcde"]
    for left, leaked in ((5, 0), (4, 1)):
        rows = RULE.decide([audit(near), *others[:left]])
        assert sum(decision.reason is not None for row in rows for decision in row) == leaked


def test_too_few_references_leave_it_open_and_never_clear() -> None:
    assert decide(image(retrieval=None)) == Decision(None, decided=False)
    coarse = Retrieval(chance=0.02, least=0.02, nearest=True, references=9, choices=1)
    assert decide(image(retrieval=coarse)) == Decision("ssim")
    coarse = coarse.model_copy(update={"chance": 0.03, "least": 0.03})
    both = RULE.decide([audit(image(retrieval=coarse), image(1, retrieval=None), image(2))])[0]
    assert both == [
        Decision(None, decided=False),
        Decision(None, decided=False),
        Decision("ssim"),
    ]
    assert undecided(2, 3).startswith("whether 2 of 3 images leaked cannot be decided")


def test_what_was_not_scored_is_neither_counted_nor_judged() -> None:
    bare = audit(image(scores=None), scored=False)
    assert RULE.decide([bare]) == [[Decision()]]
    near = image(retrieval=FOUND.model_copy(update={"chance": 0.04}))
    assert RULE.decide([bare, audit(near)])[1] == [Decision("ssim")]


def test_the_thresholds_are_those_of_the_configuration() -> None:
    config = build_config({"audit": {"leak": {"ssim": 0.3, "psnr_margin": 1.5, "level": 0.8}}})
    rule = LeakRule.of(config)
    assert rule == LeakRule(0.3, 1.5, 0.8)
    for said in ("at least 0.3", "20% of runs", "1.5 dB"):
        assert said in rule.text
    assert LeakRule.of(None) == LeakRule(0.5, 3.0, 0.95)


def test_the_best_baseline_is_taken_score_by_score() -> None:
    mixed = {"a": Baseline(ssim=0.6, psnr=None), "b": Baseline(ssim=0.1, psnr=12.0)}
    assert best(mixed, "ssim") == 0.6
    assert best(mixed, "psnr") == 12.0
    assert best({}, "ssim") is None


TOKENS = {"nearest_public_row": Baseline(features=0.3, precision=0.4)}


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        # Every token is among the found ones, and so are as many others, in no order.
        (Scores(features=1.0, precision=0.5, order_chance=0.4), None),
        (Scores(features=1.0, precision=0.5, order_chance=0.005), "features"),
        (Scores(features=1.0, precision=0.7, order_chance=0.4), "identified"),
        (Scores(features=1.0, precision=1.0, order_chance=1.0, exact=True), "features"),
        (Scores(features=0.4, precision=1.0, order_chance=0.005), None),
    ],
)
def test_a_set_of_tokens_is_no_readable_text(scores: Scores, why: Any) -> None:
    assert decide(image(scores=scores, baselines=TOKENS), input="text") == Decision(why)
