"""Rows of the audit of defenses: their reference, their leaks, their networks."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bract.inputs import Truth
from bract.scores import score_images
from experiments import audit
from experiments.audit import compare_to_reference
from experiments.audit_plan import REFERENCES, TIERS, standard_plan
from experiments.harness.clients import NETWORKS, Situation, uploads
from experiments.harness.command import Finished
from experiments.harness.images import image_set
from experiments.harness.leaks import judged, leaked


def row(tier: str, *psnr: float, attack: str = "grnn", code: str = "a") -> dict[str, Any]:
    return {
        **{"panel": "p", "tier": tier, "attack": attack, "code": code, "psnr_each": list(psnr)},
        **{"sources_each": list(range(len(psnr))), "networks_each": list(range(len(psnr)))},
    }


def test_a_row_goes_on_at_its_parts(monkeypatch: Any, tmp_path: Path) -> None:
    asked: list[list[int]] = []

    def run(setting: Any, options: Any, clients: range) -> dict[str, Any]:
        asked.append(list(clients))
        if len(asked) == 2:
            raise KeyboardInterrupt
        found = [{"client": client} for client in clients]
        return {"secret": "1", "seconds": 8.0, "network_accuracy": None, "uploads": found}

    monkeypatch.setattr(audit, "run", run)
    options = Namespace(split="score", seed=0, only_finished=False)
    setting, path = standard_plan()[0], tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        audit.measured(setting, Finished(path), options)
    row = audit.measured(setting, Finished(path), options)
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    options.only_finished = True
    assert audit.measured(setting, Finished(path), options) == row
    assert row is not None
    assert [one["client"] for one in row["uploads"]] == list(range(8))
    assert row["seconds_per_upload"] == 2.0


def test_the_reference_of_an_image_is_the_best_undefended_attack_or_the_row_itself() -> None:
    known = row("adaptive", 30.0, 45.0, 20.0)
    compare_to_reference(
        [row("plain", 20.0, 40.0, 21.0), row("plain", 32.0, 10.0, 19.0, attack="best"), known]
    )
    assert known["short_each"] == [2.0, 0.0, 1.0]
    assert known["references"] == 2
    assert known["short"] >= 0.0


def test_beyond_eight_bits_images_are_alike() -> None:
    known = row("adaptive", 62.0, 70.0, 65.0)
    compare_to_reference([row("plain", 100.0, 100.0, 100.0), known])
    assert known["short_each"] == [0.0, 0.0, 0.0] and known["verdict"] == "alike"


def test_rows_of_other_code_are_no_reference() -> None:
    known = row("adaptive", 30.0, 30.0)
    compare_to_reference([row("plain", 50.0, 50.0, code="b"), known])
    assert "short" not in known


def test_a_copy_leaks_and_another_image_does_not() -> None:
    images = image_set("digits", 8, "score")
    own = Truth(images.images, images.labels)
    rows = []
    for made in (images.images, images.candidates[:8]):
        uploads_of_one = []
        for index in range(8):
            truth = Truth(own.images[[index]], own.labels[[index]])
            scored = score_images(made[[index]], truth, perceptual=False)
            uploads_of_one.append(judged("digits", images, made[[index]], truth, scored))
        rows.append(leaked(uploads_of_one))
    (copies, left), (others, _) = rows
    assert copies == [True] * 8 and left == 0
    assert not any(others)


@pytest.mark.parametrize("count", [8, 16])
def test_pictures_and_networks_are_crossed(count: int) -> None:
    found = uploads(Situation("photos", "lenet-strided", uploads=count), split="score", secret=1)
    networks = [upload.network for upload in found]
    assert len(set(networks)) == NETWORKS == 8
    pairs = {(upload.source, upload.network) for upload in found}
    assert len(pairs) == count
    by_picture = {p: {n for q, n in pairs if q == p} for p, _ in pairs}
    assert len(by_picture) == 4 and all(len(met) == count // 4 for met in by_picture.values())


def test_every_panel_has_its_references_and_fedkl_one_column_of_secrets() -> None:
    plan = standard_plan()
    for panel in {setting.panel for setting in plan}:
        plain = {s.attack for s in plan if s.panel == panel and s.tier == "plain"}
        (attack,) = {s.attack for s in plan if s.panel == panel and s.tier == "oblivious"}
        assert plain == set(REFERENCES[attack]) and len(plain) > 1
        known = {s.attack for s in plan if s.panel == panel and s.tier == "adaptive"}
        assert known == (plain if attack == "grnn" else {attack})
        budgets = {s.iterations for s in plan if s.panel == panel}
        assert len(budgets) == 1 and {s.situation.uploads for s in plan} == {NETWORKS}
    assert {setting.tier for setting in plan} <= set(TIERS)
    assert not {"key known", "lock known"} & set(TIERS)
