"""The verdict sentence and the tiers."""

from __future__ import annotations

import re

import pytest

from bract.server.report import gather


def test_a_leak_is_told_with_attack_tier_budget_client_and_counts(make_run) -> None:
    verdict = gather(make_run())["verdict"]
    assert verdict["level"] == "leaked"
    found = re.fullmatch(
        r"IG \(oblivious, 4,000 iterations\) reconstructed (\d) of 9 attacked images of client-2, "
        r"closer to the originals than any guess made without the gradient; "
        r"over all 3 clients, (\d) of 27; "
        r"mean SSIM 0\.\d\d, 95 % interval 0\.\d\d to 0\.\d\d\.",
        verdict["sentence"],
    )
    assert found and 1 <= int(found[1]) <= int(found[2])


def test_nothing_above_the_threshold_is_told_with_its_limits(make_run, writers) -> None:
    root = make_run(rounds=1, audit=False)
    writers.audit(root, 1, "client-0", noise=1.2)
    verdict = gather(root)["verdict"]
    assert verdict["level"] == "none-leaked"
    assert verdict["sentence"] == (
        "IG (oblivious, 4,000 iterations) brought back none of the 3 attacked images above the "
        "leak threshold; mean SSIM 0.03, no interval from 1 upload."
    )
    assert "nothing else" in verdict["limits"]


def test_all_refused_is_not_told_as_a_success(make_run, writers) -> None:
    root = make_run(rounds=1, audit=False)
    writers.audit(root, 1, "client-0", images=0, scored=False, refused="encrypted")
    verdict = gather(root)["verdict"]
    assert verdict["level"] == "refused"
    assert verdict["sentence"].startswith("No attack could run: 1 upload examined")


def test_the_strongest_tier_makes_the_headline(make_run, writers) -> None:
    root = make_run(rounds=1, audit=False)
    defenses = [{"name": "adadefense", "eps": 1e-8}]
    writers.audit(root, 1, "client-0", noise=1.2, defenses=defenses)
    writers.audit(
        root, 1, "client-0", noise=0.05, attack="grnn", tier="adaptive", defenses=defenses,
        budget={"iterations": 2000, "restarts": 4},
    )  # fmt: skip
    verdict = gather(root)["verdict"]
    assert verdict["sentence"].startswith("GRNN (adaptive, 2,000 iterations, 4 restarts) rec")
    oblivious, adaptive, colluding = verdict["tiers"]
    assert oblivious["tried"] and oblivious["leaked"] == 0
    assert adaptive["tried"] and adaptive["leaked"] > 0
    assert not colluding["tried"] and colluding["needed"]
    assert colluding["sentence"] == "Not tried in this audit."


def test_without_a_defense_the_higher_tiers_do_not_apply(make_run) -> None:
    tiers = gather(make_run(rounds=1))["verdict"]["tiers"]
    assert [t["needed"] for t in tiers] == [True, False, False]


@pytest.mark.parametrize("shape", ["leaked", "none", "unscored", "refused", "bare"])
def test_no_verdict_says_safe(make_run, writers, shape: str) -> None:
    root = make_run(rounds=1, audit=shape == "leaked")
    if shape == "none":
        writers.audit(root, 1, "client-0", noise=1.2)
    elif shape == "unscored":
        writers.audit(root, 1, "client-0", truth=False)
    elif shape == "refused":
        writers.audit(root, 1, "client-0", images=0, scored=False, refused="encrypted")
    verdict = gather(root)["verdict"]
    words = " ".join(
        [verdict["sentence"], verdict["limits"], *(t["sentence"] for t in verdict["tiers"])]
    )
    assert not re.search(r"\b(safe|secure|private|protected)\b", words, re.IGNORECASE)
