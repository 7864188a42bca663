"""Tables over observations: means, intervals and order."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import rooms
from refusals import check_named
from reporting import gather

from bract.audit.intervals import mean_interval
from bract.report import tables, write_report
from bract.report.facts import gather as gather_typed
from bract.report.order import severity, strength
from bract.report.words.formatting import percent
from bract.schema import report_rows
from bract.schema.audit import Scores


def test_a_spread_is_over_clients_and_of_one_there_is_none() -> None:
    values = [("a", 0.1), ("a", 0.2), ("b", 0.6), ("c", 0.7), ("c", 0.9)]
    found = tables.spread(values, "ssim")
    expected = mean_interval([v for _, v in values], groups=[c for c, _ in values])
    assert expected is not None and expected[0] > -1.0
    assert (found.low, found.high) == pytest.approx((expected[0], min(expected[1], 1.0)))
    assert tables.spread([("a", 0.1), ("a", 0.9)]) == report_rows.Spread(mean=0.5)
    assert tables.spread([]) == report_rows.Spread()


def test_a_share_of_all_has_an_interval_below_one() -> None:
    found = tables.spread([(name, 1.0) for name in "abcd"], "identified_top1")
    assert found.mean == found.high == 1.0
    assert found.low == pytest.approx(0.025**0.25, abs=0.01)


def test_a_mean_of_exact_copies_says_how_many_are_at_the_cap(make_run: Any, parse: Any) -> None:
    root = make_run(rounds=1, clients=["a", "b"], images=2)
    for path in (root / "audit" / "ig").glob("*a.json"):
        content = json.loads(path.read_text())
        for image in content["images"]:
            image["scores"] |= {"psnr": 100.0, "mse": 0.0}
        path.write_text(json.dumps(content))
    row, first, _ = gather(root)["attacks"]
    assert (row["psnr"]["at_cap"], row["psnr"]["count"]) == (2, 4)
    assert (first["psnr"]["mean"], first["psnr"]["at_cap"]) == (100.0, 2)
    text = parse(write_report(root).read_text()).text
    assert "2 of 4 at the cap of 100 dB" in text and "2 of 2 at the cap of 100 dB" in text


def test_the_margin_is_over_the_best_baseline_for_each_image() -> None:
    def image(ssim: float, *baselines: float) -> report_rows.ImageFacts:
        best = report_rows.SsimPsnr(ssim=max(baselines))
        return report_rows.ImageFacts(
            index=0, scores=Scores(ssim=ssim), baseline=best, leaked=False
        )

    group = [
        report_rows.ObservationFacts(
            attack="ig",
            attack_name="IG",
            method_name="IG",
            round=1,
            client=f"c{number}",
            images=images,
        )
        for number, images in enumerate(
            ([image(0.9, 0.1, 0.4)], [image(0.5, 0.2), image(0.7, 0.5)], [image(0.2, 0.4)]), 1
        )
    ]
    row = tables.attack_rows(group)[0]
    # 0.5, 0.3, 0.2 and -0.2.
    margin = row.margin.ssim
    assert margin.mean == pytest.approx(0.2)
    assert (margin.low or 1.0) < 0.2 < (margin.high or 0.0)
    assert row.margin.psnr == report_rows.Spread()
    assert row.uploads == row.clients == 3


def of_input(kind: str, client: str) -> report_rows.ObservationFacts:
    scores = Scores(ssim=0.9, psnr=20.0) if kind == "image" else Scores(features=0.4)
    image = report_rows.ImageFacts(index=0, scores=scores, leaked=kind == "image")
    names = {"attack": "best", "attack_name": "Best", "method_name": "Best"}
    return report_rows.ObservationFacts(
        round=1, client=client, images=[image], scored=1, input=kind, **names
    )


def test_a_row_is_of_one_input() -> None:
    both = [of_input(kind, client) for client in "ab" for kind in ("image", "text")]
    rows = tables.attack_rows(both)
    assert [(row.input, row.client) for row in rows] == [
        *(("image", None), ("image", "a"), ("image", "b")),
        *(("text", None), ("text", "a"), ("text", "b")),
    ]
    for kind in ("image", "text"):
        mine = [row for row in rows if row.input == kind]
        assert mine == tables.attack_rows([o for o in both if o.input == kind])
        assert {(row.noun, row.images) for row in mine} == {(kind, 2), (kind, 1)}
    assert len({row.row_key for row in tables.leakage_rows(both)}) == 2


def test_the_page_names_the_input_where_there_are_several(make_run: Any, parse: Any) -> None:
    root = make_run(clients=["a", "b"], rounds=1)
    alone = parse(write_report(root).read_text()).text
    for path in (root / "audit" / "ig").glob("*b.json"):
        content = json.loads(path.read_text()) | {"input": "text"}
        for image in content["images"]:
            image["scores"] = {"features": 0.4}
        path.write_text(json.dumps(content))
    rows = [row for row in gather(root)["attacks"] if row["client"] is None]
    assert [(row["input"], row["images"]) for row in rows] == [("image", 3), ("text", 3)]
    both = parse(write_report(root).read_text()).text
    for words in ("image, oblivious", "text, oblivious"):
        check_named(both, words)
        assert words not in alone


def test_nothing_in_the_report_takes_attack_and_tier_for_a_row() -> None:
    """Two of the three are not enough: a run may hold uploads of several inputs."""
    pair = re.compile(r"\(\w[\w.]*\.attack(_name)?, \w[\w.]*\.tier(, [\w.]+\.round)?\) [=!]=")
    folder = rooms.ROOT / "report"
    found = [p.name for p in sorted(folder.rglob("*.py")) if pair.search(p.read_text("utf-8"))]
    assert found == []


def test_means_run_over_images_not_over_uploads(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["a"], rounds=1, images=1)
    writers.audit(root, 2, "a", images=3, noise=0.6, first=40)
    facts = gather(root)
    images = [i["scores"]["ssim"] for o in facts["observations"] for i in o["images"]]
    row = next(r for r in facts["attacks"] if r["client"] == "a")
    assert row["ssim"]["mean"] == pytest.approx(np.mean(images))
    baselines = [o["baselines"]["class_mean"]["ssim"] for o in facts["observations"]]
    expected = (baselines[0] + 3 * baselines[1]) / 4
    assert row["baselines"]["class_mean"]["ssim"] == pytest.approx(expected)
    assert [o["label_accuracy"] for o in facts["observations"]] == [1.0, pytest.approx(2 / 3)]
    assert row["label_accuracy"] == pytest.approx(0.75)


@pytest.mark.parametrize("images", [1, 4])
def test_a_single_client_has_no_interval_however_many_images(
    make_run: Any, writers: Any, images: Any
) -> None:
    root = make_run(clients=["a"], rounds=1, audit=False)
    writers.audit(root, 1, "a", images=images)
    facts = gather(root)
    row = facts["attacks"][0]
    for name in ("ssim", "psnr"):
        assert row[name]["mean"] is not None
        assert row[name]["low"] is None and row[name]["high"] is None
    assert "no interval from 1 client" in facts["verdict"]["tiers"][0]["sentence"]


def test_every_score_has_an_interval_over_clients(make_run: Any) -> None:
    root = make_run(rounds=1, clients=["a", "b", "c"])
    for path in (root / "audit" / "ig").glob("*.json"):
        content = json.loads(path.read_text())
        for image in content["images"]:
            image["scores"] |= {"stlpips": image["scores"]["mse"], "identified_top1": True}
        path.write_text(json.dumps(content))
    row, first, *_ = gather(root)["attacks"]
    assert set(row["intervals"]) == {
        "exact", "mse", "nrmse", "lpips_alex", "lpips_vgg", "stlpips", "identified_top1",
        "identified_top5", "label_accuracy",
    }  # fmt: skip
    for name in ("mse", "stlpips", "label_accuracy"):
        low, high = row["intervals"][name]
        assert low < row[name] < high, name
    assert row["intervals"]["identified_top1"] == [pytest.approx(0.025 ** (1 / 3), abs=0.01), 1.0]
    assert row["intervals"]["lpips_vgg"] == [None, None]
    assert first["clients"] == 1 and first["intervals"]["mse"] == [None, None]
    low, high = row["intervals"]["label_accuracy"]
    assert f"{percent(low)} to {percent(high)}" in write_report(root).read_text()


def test_leaks_outrank_scores_and_scores_outrank_nothing(make_run: Any) -> None:
    made = gather_typed(make_run(rounds=1)).attacks[0]

    def row(leaked: int, scored: int, ssim: float | None) -> report_rows.AttackRow:
        changes = {"leaked": leaked, "scored": scored, "psnr": report_rows.ScoreSpread()}
        return made.model_copy(update=changes | {"ssim": report_rows.ScoreSpread(mean=ssim)})

    rows = [row(0, 0, None), row(0, 4, 0.4), row(0, 4, 0.45), row(1, 4, 0.1), row(1, 2, 0.1)]
    mixed = [rows[i] for i in (3, 0, 4, 2, 1)]
    assert sorted(mixed, key=strength) == rows


def test_severity_reads_the_images(make_run: Any) -> None:
    order = sorted(gather_typed(make_run()).observations, key=severity)
    assert (order[-1].client, order[-1].round) == ("client-2", 1)
    assert (order[0].client, order[0].round) == ("client-0", 3)


def test_clients_come_in_the_order_of_their_numbers(make_run: Any) -> None:
    names = ["client-10", "client-2", "client-1"]
    facts = gather(make_run(clients=names, rounds=1, images=1))
    order = ["client-1", "client-2", "client-10"]
    assert [c["client"] for c in facts["clients"]] == order
    assert [a["client"] for a in facts["attacks"]] == [None, *order]
    assert [o["client"] for o in facts["observations"]] == order
