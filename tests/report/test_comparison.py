"""The comparison: its rows, its pictures, its words, and its page."""

from __future__ import annotations

import base64
import json
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import check_words
from reporting import gather_comparison, variant
from safetensors.torch import save_file
from scipy.stats import binomtest

from bract import ObservationStore
from bract.report import write_report
from bract.report.comparison import comparison
from bract.report.comparison.comparison import write_comparison
from bract.report.comparison.comparison_charts import variant_colours
from bract.report.comparison.pairing import paired
from bract.report.comparison.scatter import HEIGHT, Point, accuracy_axis, scatter
from bract.report.comparison.variants import ExampleCounts, upload_bytes, wilson
from bract.schema.audit import Scores
from bract.schema.comparison import ComparedImage, VariantRow
from bract.schema.report_rows import ImageFacts
from bract.updates.rounding import rounded

GUARDIAN = variant("guardian", {"name": "guardian", "beta": 10.0})
PRUNING = variant("pruning", {"name": "pruning", "ratio": 0.9})
UNDEFENDED = variant("undefended")
CLIENTS = ["client-0", "client-1"]

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, writers: Any) -> Make:
    """Return ``make(name, noise=..., accuracy=...)``, which writes one variant's run directory."""
    root = tmp_path / "digits-compare"

    def make(
        name: str,
        *,
        noise: float = 0.06,
        accuracy: float = 0.0,
        seconds: float = 1.0,
        attack: bool = True,
        rounds: int = 2,
        extra: dict[str, Any] | None = None,
        **audit: Any,
    ) -> Path:
        folder = root / name
        writers.run(folder, clients=CLIENTS, rounds=rounds, name=name)
        writers.metrics(folder, CLIENTS, rounds)
        path = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["global"]["accuracy"] += accuracy
            for client in row["clients"].values():
                client["validation_accuracy"] += accuracy
                client |= {"seconds": seconds, "local_steps": 50, **(extra or {})}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for number in range(1, rounds + 1):
            for i, client in enumerate(CLIENTS):
                writers.capture(folder, number, client)
                if attack:
                    first = 20 * i + 3 * number
                    writers.audit(folder, number, client, noise=noise, first=first, **audit)
        return root

    return make


def read(root: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / "comparison.json").read_text())
    return content


def spoken(facts: dict[str, Any]) -> str:
    """All sentences of a comparison."""
    verdict = facts["verdict"]
    return "\n".join((verdict["sentence"], verdict["limits"], *facts["notes"]))


def row(facts: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(r for r in facts["rows"] if r["variant"] == name)
    return found


def ssim(seeds: list[dict[str, Any]]) -> float:
    """The SSIM of the first seed of an image."""
    found: float = seeds[0]["scores"]["ssim"]
    return found


def test_each_variant_is_a_row_with_leakage_accuracy_and_costs(make: Make) -> None:
    make("undefended")
    root = make("guardian", noise=0.9, accuracy=-0.02, seconds=1.25)
    facts = gather_comparison(root, [UNDEFENDED, GUARDIAN], name="digits")
    plain, defended = row(facts, "undefended"), row(facts, "guardian")
    attacked = plain["attack"]
    assert attacked["scored"] == defended["attack"]["scored"] == 12
    assert attacked["leaked"] == 12 and defended["attack"]["leaked"] == 0
    assert attacked["ssim"]["low"] < attacked["ssim"]["mean"] < attacked["ssim"]["high"]
    assert attacked["psnr"]["low"] is not None and attacked["identified_top1"] == 1.0
    assert plain["costs"]["seconds_per_step"] == pytest.approx(0.02)
    assert defended["costs"]["time_ratio"] == pytest.approx(1.25)
    assert defended["shown"]["change"] == pytest.approx(-0.02)
    assert defended["accuracy"] == pytest.approx(0.1 + 0.85 * (1 - 0.45**2) - 0.02)
    assert [r["round"] for r in plain["rounds"]] == [0, 1, 2]
    assert (facts["schema"], facts["measure"]) == (4, "global")


def test_the_same_images_are_compared_with_the_undefended_run(make: Make) -> None:
    make("undefended")
    root = make("guardian", noise=0.9)
    make("pruning", attack=False)
    facts = gather_comparison(root, [UNDEFENDED, GUARDIAN, PRUNING], name="digits")
    assert row(facts, "undefended")["paired"] is None
    assert row(facts, "pruning")["paired"] is None
    apart = row(facts, "guardian")["paired"]
    assert apart["images"] == 12
    differences = [
        ssim(e["variants"]["guardian"]) - ssim(e["variants"]["undefended"])
        for e in facts["pictures"]
    ]
    assert apart["ssim"]["mean"] == pytest.approx(sum(differences) / 12)
    # Four uploads: the interval leaves out no difference for free, and none of it reaches 0.
    assert min(differences) <= apart["ssim"]["low"] < apart["ssim"]["high"] < 0
    page = write_comparison(root, [UNDEFENDED, GUARDIAN, PRUNING], name="digits").read_text()
    assert "on 12 same images" in page


def test_images_are_paired_by_their_originals_and_seeds_of_one_are_averaged() -> None:
    def images(*values: float) -> list[ImageFacts]:
        return [ImageFacts(index=0, scores=Scores(ssim=value)) for value in values]

    def entry(client: str, plain: list[float], defended: list[float], same: bool) -> ComparedImage:
        found = {"undefended": images(*plain), "guardian": images(*defended)}
        return ComparedImage(round=1, client=client, index=0, paired=same, variants=found)

    pictures = [
        entry("a", [0.8, 0.6], [0.2], True),
        entry("b", [0.5], [0.4, 0.2], True),
        entry("c", [1.0], [0.0], False),
    ]
    rows = [
        VariantRow(variant=name, title=name, defenses=[], settings="", all_settings="")
        for name in ("undefended", "guardian")
    ]
    plain, defended = (row.paired for row in paired(rows, pictures))
    assert plain is None and defended is not None and defended.images == 2
    assert defended.ssim.mean == pytest.approx(-0.35) and defended.ssim.low == -2.0
    assert defended.ssim.high == pytest.approx(-0.35 + 12.706204736 * 0.15)


def test_bytes_are_the_tensors_of_what_came_back(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3, 5)}, tmp_path / "update.safetensors")
    save_file({"m": torch.zeros(4)}, tmp_path / "returned_buffers.safetensors")
    save_file({"w": torch.zeros(99)}, tmp_path / "parameters.safetensors")
    assert upload_bytes(tmp_path) == 4 * (15 + 4)


def test_a_cut_upload_has_no_size(tmp_path: Path) -> None:
    path = tmp_path / "update.safetensors"
    save_file({"w": torch.zeros(3, 5)}, path)
    whole = path.read_bytes()
    for length in (3, 20, len(whole) - 4):
        path.write_bytes(whole[:length])
        assert upload_bytes(tmp_path) is None


def test_an_upload_twice_as_large_has_ratio_two(make: Make) -> None:
    make("undefended")
    root = make("guardian")
    store = ObservationStore(root / "guardian" / "captures")
    for observation in list(store):
        # Half as much on disk, but that is not what came.
        update, loss = rounded({"w": torch.ones(8)}, "float16")
        store.save(replace(observation, update=update, rounded=loss))
    facts = gather_comparison(root, [UNDEFENDED, GUARDIAN], name="digits")
    assert row(facts, "undefended")["costs"]["bytes_per_upload"] == 16
    assert row(facts, "guardian")["costs"]["bytes_ratio"] == 2.0


def test_the_wilson_interval_by_hand() -> None:
    # 8 of 10: (0.8 + 0.19207) / 1.38415 -+ 1.96 sqrt(0.016 + 0.0096037) / 1.38415
    low, high = wilson(0.8, 10) or (0, 0)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    low, high = wilson(1.0, 10) or (0, 0)
    assert low == pytest.approx(0.7225, abs=1e-4) and high == pytest.approx(1.0)
    for hits, count in ((0, 7), (7, 7), (1, 2), (250, 360)):
        found = binomtest(hits, count).proportion_ci(method="wilson")
        assert wilson(hits / count, count) == pytest.approx((found.low, found.high), abs=1e-12)
    assert wilson(None, 10) is None and wilson(0.5, None) is None


def test_the_strongest_attack_stands_for_a_variant_and_all_are_kept(
    make: Make, writers: Any
) -> None:
    make("undefended")
    root = make("guardian", noise=0.9)
    for client in CLIENTS:
        writers.audit(
            root / "guardian", 1, client, noise=0.05, attack="ig-inverse", tier="adaptive"
        )
    facts = gather_comparison(root, [UNDEFENDED, GUARDIAN], name="digits")
    found = row(facts, "guardian")
    assert found["attack"]["tier"] == "adaptive" and found["attack"]["leaked"] == 6
    assert [a["tier"] for a in found["attacks"]] == ["oblivious", "adaptive"]
    check_words("comparisons", "the strongest of two attacks", spoken(facts))


def test_a_lock_at_the_clients_makes_theirs_the_accuracy_of_every_variant(make: Make) -> None:
    make("undefended")
    root = make("fedkl", accuracy=-0.1, extra={"random_key_accuracy": 0.11})
    locked = variant("fedkl", {"name": "fedkl"})
    facts = gather_comparison(
        root,
        [UNDEFENDED, locked],
        name="digits",
        tested=ExampleCounts(360, {"client-0": 50, "client-1": 50}),
    )
    assert facts["measure"] == "clients"
    fedkl, plain = row(facts, "fedkl"), row(facts, "undefended")
    assert fedkl["accuracy"] is None and fedkl["random_key_accuracy"] == pytest.approx(0.11)
    assert plain["shown"]["value"] == plain["client_accuracy"]
    assert fedkl["shown"]["change"] == pytest.approx(-0.1)
    assert plain["shown"]["low"] == pytest.approx((wilson(plain["client_accuracy"], 100) or [0])[0])
    assert any("one round behind" in note for note in facts["notes"])


def test_a_client_counts_by_its_validation_share_where_that_is_known(make: Make) -> None:
    root = make("undefended", rounds=1)
    path = root / "undefended" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    clients = rows[1]["clients"]
    clients["client-0"] |= {"validation_accuracy": 0.4}
    clients["client-1"] |= {"validation_accuracy": 1.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shares = ExampleCounts(validation={"client-0": 90, "client-1": 10})
    for tested, expected in ((shares, 0.46), (None, 0.7)):
        facts = gather_comparison(root, [UNDEFENDED], name="digits", tested=tested)
        assert row(facts, "undefended")["client_accuracy"] == pytest.approx(expected)


def test_a_lock_without_validation_data_has_no_accuracy_rather_than_a_wrong_one(
    make: Make,
) -> None:
    make("undefended", extra={"validation_accuracy": None})
    root = make("fedkl", extra={"validation_accuracy": None})
    facts = gather_comparison(
        root, [UNDEFENDED, variant("fedkl", {"name": "fedkl"})], name="digits"
    )
    assert facts["measure"] == "global"
    assert row(facts, "fedkl")["shown"]["value"] is None
    assert row(facts, "undefended")["shown"]["value"] is not None
    assert any("was not measured" in note for note in facts["notes"])


def test_pictures_are_paired_by_their_original_not_by_their_position(make: Make) -> None:
    make("undefended", rounds=1)
    root = make("guardian", noise=0.9, rounds=1)
    path = root / "guardian" / "audit" / "ig" / "round-0001--client-0.json"
    content = json.loads(path.read_text())
    content["images"] = [
        {**image, "index": i} for i, image in enumerate(reversed(content["images"]))
    ]
    path.write_text(json.dumps(content))
    facts = gather_comparison(root, [UNDEFENDED, GUARDIAN], name="digits")
    assert len(facts["pictures"]) == 6
    for entry in facts["pictures"]:
        plain, defended = (entry["variants"][name][0] for name in ("undefended", "guardian"))
        name = plain["reconstruction"].removeprefix("undefended/")
        assert defended["reconstruction"] == f"guardian/{name}"
        assert entry["original"].startswith("undefended/audit/")


def test_equal_originals_are_paired_one_to_one(make: Make) -> None:
    make("undefended", rounds=1)
    root = make("guardian", noise=0.9, rounds=1)
    for name in ("undefended", "guardian"):
        folder = root / name / "audit" / "ig"
        first = (folder / "round-0001--client-0--00-original.png").read_bytes()
        (folder / "round-0001--client-0--01-original.png").write_bytes(first)
    pictures = gather_comparison(root, [UNDEFENDED, GUARDIAN], name="digits")["pictures"]
    assert len(pictures) == 6
    assert all(set(entry["variants"]) == {"undefended", "guardian"} for entry in pictures)


def test_the_images_that_came_back_best_under_any_variant_come_first(make: Make) -> None:
    make("undefended", noise=0.9)
    root = make("guardian", noise=0.05)
    pictures = gather_comparison(root, [UNDEFENDED, GUARDIAN], name="digits")["pictures"]
    best = [max(ssim(v) for v in entry["variants"].values()) for entry in pictures]
    assert best == sorted(best, reverse=True)


def test_the_verdict_counts_by_variant_and_names_the_attackers(make: Make) -> None:
    make("undefended")
    make("pruning", noise=0.06)
    root = make("guardian", noise=0.9)
    facts = gather_comparison(root, [UNDEFENDED, GUARDIAN, PRUNING], name="digits")
    check_words("comparisons", "two defenses, oblivious", spoken(facts))


def test_an_adaptive_attacker_is_named_with_those_it_did_not_reach(make: Make) -> None:
    make("undefended")
    make("pruning", noise=0.9)
    root = make("guardian", noise=0.9, tier="adaptive")
    facts = gather_comparison(root, [UNDEFENDED, GUARDIAN, PRUNING], name="d")
    check_words("comparisons", "one defense without an adaptive attacker", spoken(facts))


def test_where_nothing_leaks_undefended_no_defense_gets_the_credit(make: Make) -> None:
    make("undefended", noise=0.9)
    root = make("guardian", noise=0.9)
    facts = gather_comparison(root, [UNDEFENDED, GUARDIAN], name="digits")
    assert facts["verdict"]["level"] == "none-leaked"
    check_words("comparisons", "nothing leaked undefended", spoken(facts))


@pytest.mark.parametrize(
    ("options", "level"),
    [({"truth": False}, "unscored"), ({"attack": False}, "not-attacked")],
)
def test_what_was_not_measured_is_said_to_be(
    make: Make, parse: Any, options: dict[str, Any], level: str
) -> None:
    make("undefended", **options)
    root = make("guardian", **options)
    variants = [UNDEFENDED, GUARDIAN]
    assert gather_comparison(root, variants, name="d")["verdict"]["level"] == level
    page = parse(write_comparison(root, variants, name="d").read_text())
    assert "nothing to draw" in page.text


def test_a_variant_of_which_a_result_cannot_be_read_is_named_before_the_verdict(
    make: Make,
) -> None:
    make("undefended")
    root = make("guardian")
    path = next((root / "guardian" / "audit").glob("*/*.json"))
    path.write_text("{")
    facts = gather_comparison(root, [UNDEFENDED, GUARDIAN], name="digits")
    title = row(facts, "guardian")["title"]
    assert facts["verdict"]["sentence"].startswith(f"Not all files of {title} could be read. ")
    name = path.relative_to(root / "guardian").as_posix()
    assert [note for note in facts["notes"] if name in note]


def test_no_sentence_calls_anything_safe(make: Make, parse: Any) -> None:
    make("undefended")
    root = make("guardian", noise=0.9)
    page = write_comparison(root, [UNDEFENDED, GUARDIAN], name="digits")
    text = parse(page.read_text()).text.lower()
    text = text.replace("private: null", "")  # of the configuration's training
    assert not re.search(r"\b(safe|secure|private|protected|immune)\b", text)


def test_a_failed_variant_is_a_row_with_its_reason(make: Make, parse: Any) -> None:
    root = make("undefended")
    broken = variant("soteria", {"name": "soteria"}, error="client-1: no fc.weight")
    page = write_comparison(root, [UNDEFENDED, broken], name="digits")
    text = parse(page.read_text()).text
    assert "client-1: no fc.weight" in text
    facts = read(root)
    assert row(facts, "soteria")["error"] == "client-1: no fc.weight"
    assert row(facts, "soteria")["accuracy"] is None
    check_words("comparisons", "a failed variant", spoken(facts))


def test_a_variant_that_failed_late_keeps_what_it_had(make: Make, parse: Any) -> None:
    make("undefended")
    root = make("guardian", attack=False)
    late = variant("guardian", *GUARDIAN.defenses, error="no capture to attack")
    page = write_comparison(root, [UNDEFENDED, late], name="digits")
    text = parse(page.read_text()).text
    assert "no capture to attack" in text and "77.8 %" in text
    check_words("comparisons", "a variant that failed late", spoken(read(root)))


def test_a_comparison_without_an_undefended_run_says_so(make: Make) -> None:
    root = make("guardian")
    failed = variant("undefended", error="out of memory")
    facts = gather_comparison(root, [failed, GUARDIAN], name="digits")
    assert facts["verdict"]["level"] == "no-control"
    check_words("comparisons", "without an undefended run", spoken(facts))


def test_the_page_is_whole_and_links_to_nothing_but_the_reports(make: Make, parse: Any) -> None:
    make("undefended")
    root = make("guardian", noise=0.9)
    write_report(root / "undefended")
    source = write_comparison(root, [UNDEFENDED, GUARDIAN], name="digits").read_text()
    page = parse(source)
    assert {"verdict", "tradeoff", "variants", "pictures", "costs", "attackers"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "http://" not in source and "https://" not in source and "url(" not in source
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    outside = {r for r in page.references if not r.startswith(("data:", "#"))}
    assert outside == {"undefended/report.html"}
    assert {r[1:] for r in page.references if r.startswith("#")} <= set(page.ids)
    assert {h.get("scope") for h in page.headers} <= {"col", "row", "colgroup"}


def test_the_matrix_shows_original_and_one_picture_a_variant(make: Make, parse: Any) -> None:
    make("undefended", rounds=1)
    root = make("guardian", noise=0.9, rounds=1)
    page = parse(write_comparison(root, [UNDEFENDED, GUARDIAN], name="digits").read_text())
    assert len(page.images) == 6 * 3
    assert all(i["src"].startswith("data:image/png;base64,") and i["alt"] for i in page.images)
    shown = {base64.b64decode(i["src"].partition(",")[2]) for i in page.images}
    wanted = {p.read_bytes() for p in root.glob("*/audit/ig/*-reconstruction.png")}
    assert wanted <= shown


def test_many_images_are_cut_and_the_page_says_so(
    make: Make, parse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("undefended")
    root = make("guardian", noise=0.9)
    monkeypatch.setattr(comparison, "MATRIX_IMAGES", 2)
    page = parse(write_comparison(root, [UNDEFENDED, GUARDIAN], name="digits").read_text())
    assert len(page.images) == 2 * 3
    assert "The 2 of 12 attacked images that were reconstructed best under any variant" in page.text


def test_redaction_leaves_no_pixel_and_no_single_label(make: Make, parse: Any) -> None:
    make("undefended")
    root = make("guardian", noise=0.9)
    page = write_comparison(root, [UNDEFENDED, GUARDIAN], name="digits", redact=True).read_text()
    facts = (root / "comparison.json").read_text()
    for path in root.glob("*/audit/ig/*.png"):
        assert base64.b64encode(path.read_bytes()).decode() not in page
        assert path.name not in page and path.name not in facts
    assert "image/png" not in page
    assert "Redacted" in parse(page).text and "class 7" not in parse(page).text
    for entry in json.loads(facts)["pictures"]:
        assert entry["true_label"] is None
        assert all(v[0]["label"] is None and ssim(v) for v in entry["variants"].values())


def test_both_files_are_for_the_owner_alone(make: Make) -> None:
    root = make("undefended", rounds=1)
    write_comparison(root, [UNDEFENDED], name="digits")
    for name in ("report.html", "comparison.json"):
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o600


def test_hostile_names_and_reasons_stay_text(make: Make, parse: Any) -> None:
    hostile = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
    root = make("undefended", rounds=1)
    odd = variant("guardian", {"name": hostile, "beta": hostile}, error=hostile)
    page = write_comparison(root, [UNDEFENDED, odd], name=hostile, notes=[hostile])
    found = parse(page.read_text())
    assert "script" not in found.tags
    assert all("onerror" not in image for image in found.images)
    assert found.text.count("<script>alert('x')</script>") > 3


def test_marks_stand_at_their_accuracy_and_leakage() -> None:
    points = [
        Point("a", "c0", x=0.9, y=0.25, y_span=(0.0, 0.5), x_span=(0.88, 0.92), label="A"),
        Point("b", "c1", x=0.8, y=1.0, tier="adaptive", label="B"),
    ]
    assert accuracy_axis(points).ticks == pytest.approx((0.8, 0.85, 0.9, 0.95))
    svg = scatter(points, title="t", threshold=0.5, band=(0.1, 0.2))
    assert f'<path class="point" transform="translate(0 {0.75 * HEIGHT:.1f})"' in svg
    upright = f'<line class="interval" x1="0" y1="{HEIGHT:.1f}" x2="0" y2="{HEIGHT / 2:.1f}"/>'
    assert f'<svg x="66.67%" overflow="visible">{upright}' in svg
    assert re.search('<line class="interval" x1="53.33%" y1="[0-9.]+" x2="80.00%"', svg)
    assert f'class="band" x="0%" y="{0.8 * HEIGHT:.1f}" width="100%" height="33.0"' in svg
    assert svg.count("M0 -7.5L7.5 0L0 7.5") == 1


def test_labels_at_the_edge_keep_their_distance() -> None:
    points = [Point(f"{i}", "c0", x=0.9, y=0.02, label=f"L{i}") for i in range(6)]
    svg = scatter(points, title="t", threshold=0.5, band=None)
    heights = [float(y) for y in re.findall(r'class="end" x="16" y="([\d.]+)"', svg)]
    assert len(heights) == 6
    assert all(b - a >= 16.9 for a, b in pairwise(heights))
    assert heights[-1] <= HEIGHT


@pytest.mark.parametrize(
    ("values", "axis"),
    [
        ([0.97, 0.971], (0.97, 0.975)),
        ([1.0], (0.995, 1.0)),
        ([0.1, 0.95], (0.0, 1.0)),
        ([], (0, 1)),
    ],
)
def test_the_accuracy_axis_takes_round_numbers_inside_0_and_1(
    values: list[float], axis: tuple[float, float]
) -> None:
    ticks = accuracy_axis([Point("p", "c0", x=v, y=0.5) for v in values]).ticks
    assert (ticks[0], ticks[-1]) == pytest.approx(axis)
    assert max(b - a for a, b in pairwise(ticks)) == pytest.approx(ticks[1] - ticks[0])


def test_the_undefended_run_has_the_inks_colour() -> None:
    rows = [
        VariantRow(variant=name, title=name, defenses=[], settings="", all_settings="")
        for name in ("undefended", *"abcdefgh")
    ]
    css = variant_colours(rows)
    assert css["undefended"] == "total" and css["a"] == "c0" and css["h"] == "rest"


WRONG = {"state": "contradicted", "reason": "the steps give another update"}


def test_variants_that_are_not_as_described_are_no_comparison(make: Make) -> None:
    make("undefended", check=WRONG, noise=1.2)
    facts = gather_comparison(make("guardian", noise=0.9), [UNDEFENDED, GUARDIAN], name="digits")
    assert facts["verdict"]["level"] == "misdescribed"


def test_a_defended_variant_that_is_not_as_described_is_not_spared(make: Make) -> None:
    make("undefended")
    facts = gather_comparison(
        make("guardian", noise=1.2, check=WRONG), [UNDEFENDED, GUARDIAN], name="digits"
    )
    assert facts["verdict"]["level"] == "leaked"
    assert "not judged: Guardian" in facts["verdict"]["sentence"]
    assert row(facts, "guardian")["attack"]["unjudged"] > 0
