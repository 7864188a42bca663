"""Tables over observations: means, intervals and order."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bract.server.report import gather, write_report
from bract.server.report.summary import attack_rows, interval, severity, strength
from bract.server.report.words import percent


def test_an_interval_needs_three_values() -> None:
    assert interval([0.1, 0.9]) == (None, None)
    assert interval([0.4, 0.4, 0.4]) == (pytest.approx(0.4), pytest.approx(0.4))


def test_an_interval_repeats_and_holds_the_mean() -> None:
    values = [0.1, 0.2, 0.6, 0.7, 0.9]
    low, high = interval(values)
    assert (low, high) == interval(values)
    assert low is not None and high is not None
    assert low < np.mean(values) < high


def test_images_of_one_upload_are_drawn_together() -> None:
    # Four uploads of ten equal images: as wide as four values, not as forty.
    levels = [0.0, 0.2, 0.6, 1.0]
    values = [level for level in levels for _ in range(10)]
    uploads = [name for name in "abcd" for _ in range(10)]
    assert interval(values, uploads) == interval(levels)
    alone = interval(values)
    low, high = interval(values, uploads)
    assert low is not None and high is not None and alone[0] is not None and alone[1] is not None
    assert high - low > 2 * (alone[1] - alone[0])


def test_two_uploads_give_no_interval_however_many_images() -> None:
    assert interval([0.1] * 50 + [0.9] * 50, ["a"] * 50 + ["b"] * 50) == (None, None)


def test_the_margin_is_over_the_best_guess_for_each_image() -> None:
    def image(ssim: float, *guesses: float) -> dict[str, object]:
        scores = dict.fromkeys(("psnr", "mse", "lpips_alex", "lpips_vgg", "stlpips"), None) | {
            "ssim": ssim
        }
        scores |= {"identified_top1": None, "identified_top5": None}
        guess = {"ssim": max(guesses), "psnr": None}
        return {"scores": scores, "oracle": None, "leaked": False, "guess": guess}

    group = [
        {
            "attack": "ig", "attack_name": "IG", "method": "ig", "method_name": "IG",
            "tier": "oblivious", "round": number, "client": "a", "repeat": 0, "refused": None,
            "images": images, "label_accuracy": 1.0, "baselines": {},
            "gradient_cosine": 1.0, "seconds": 1.0, "failed": 0,
            "budget": {"iterations": 1, "seconds": None, "restarts": 1},
        }
        for number, images in enumerate(
            ([image(0.9, 0.1, 0.4)], [image(0.5, 0.2), image(0.7, 0.5)], [image(0.2, 0.4)]), 1
        )
    ]  # fmt: skip
    row = attack_rows(group)[0]
    # 0.5, 0.3, 0.2 and -0.2.
    assert row["margin"]["ssim"]["mean"] == pytest.approx(0.2)
    assert row["margin"]["ssim"]["low"] < 0.2 < row["margin"]["ssim"]["high"]
    assert row["margin"]["psnr"] == {"mean": None, "low": None, "high": None}
    assert row["uploads"] == 3


def test_an_interval_is_near_the_normal_one_for_many_values() -> None:
    values = np.random.default_rng(3).normal(0.5, 0.1, size=400)
    low, high = interval(list(values))
    half = 1.96 * values.std() / np.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.002)
    assert high == pytest.approx(values.mean() + half, abs=0.002)


def test_means_run_over_images_not_over_uploads(make_run, writers) -> None:
    root = make_run(clients=["a"], rounds=1, images=1)
    writers.audit(root, 2, "a", images=3, noise=0.6, first=40)
    facts = gather(root)
    images = [i["scores"]["ssim"] for o in facts["observations"] for i in o["images"]]
    row = next(r for r in facts["attacks"] if r["client"] == "a")
    assert row["ssim"]["mean"] == pytest.approx(np.mean(images))
    guesses = [o["baselines"]["class_mean"]["ssim"] for o in facts["observations"]]
    expected = (guesses[0] + 3 * guesses[1]) / 4
    assert row["baselines"]["class_mean"]["ssim"] == pytest.approx(expected)
    assert [o["label_accuracy"] for o in facts["observations"]] == [1.0, pytest.approx(2 / 3)]
    assert row["label_accuracy"] == pytest.approx(0.75)


@pytest.mark.parametrize("images", [1, 4])
def test_a_single_upload_has_no_interval_however_many_images(make_run, writers, images) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.audit(root, 1, "a", images=images, intervals={"ssim": [0.5, 0.5]})
    facts = gather(root)
    row = facts["attacks"][0]
    for name in ("ssim", "psnr"):
        assert row[name]["mean"] is not None
        assert row[name]["low"] is None and row[name]["high"] is None
    assert "no interval from 1 upload" in facts["verdict"]["tiers"][0]["sentence"]


def test_every_score_has_an_interval_over_uploads(make_run) -> None:
    root = make_run(rounds=2, clients=["a", "b"])
    for path in (root / "audit" / "ig").glob("*.json"):
        content = json.loads(path.read_text())
        for image in content["images"]:
            image["scores"] |= {"stlpips": image["scores"]["mse"], "identified_top1": True}
        path.write_text(json.dumps(content))
    row, first, _ = gather(root)["attacks"]
    assert set(row["intervals"]) == {
        "mse", "lpips_alex", "lpips_vgg", "stlpips", "identified_top1", "identified_top5",
        "label_accuracy",
    }  # fmt: skip
    for name in ("mse", "stlpips", "label_accuracy"):
        low, high = row["intervals"][name]
        assert low < row[name] < high, name
    assert row["intervals"]["identified_top1"] == [1.0, 1.0]
    assert row["intervals"]["lpips_vgg"] == [None, None]
    # One client's two uploads are too few.
    assert first["uploads"] == 2 and first["intervals"]["mse"] == [None, None]
    low, high = row["intervals"]["label_accuracy"]
    assert f"{percent(low)} to {percent(high)}" in write_report(root).read_text()


def test_leaks_outrank_scores_and_scores_outrank_nothing() -> None:
    def row(leaked: int, scored: int, ssim: float | None) -> dict[str, object]:
        score = {"mean": ssim}
        return {"leaked": leaked, "scored": scored, "ssim": score, "psnr": {"mean": None}}

    rows = [row(0, 0, None), row(0, 4, 0.4), row(0, 4, 0.45), row(1, 4, 0.1), row(1, 2, 0.1)]
    mixed = [rows[i] for i in (3, 0, 4, 2, 1)]
    assert sorted(mixed, key=strength) == rows


def test_severity_reads_the_images(make_run) -> None:
    facts = gather(make_run())
    order = sorted(facts["observations"], key=severity)
    assert (order[-1]["client"], order[-1]["round"]) == ("client-2", 1)
    assert (order[0]["client"], order[0]["round"]) == ("client-0", 3)


def test_clients_come_in_the_order_of_their_numbers(make_run) -> None:
    names = ["client-10", "client-2", "client-1"]
    facts = gather(make_run(clients=names, rounds=1, images=1))
    order = ["client-1", "client-2", "client-10"]
    assert [c["client"] for c in facts["clients"]] == order
    assert [a["client"] for a in facts["attacks"]] == [None, *order]
    assert [o["client"] for o in facts["observations"]] == order
