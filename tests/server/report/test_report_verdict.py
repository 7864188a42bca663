"""The verdict sentence and the tiers."""

from __future__ import annotations

import json
import re

import pytest

from bract.server.report import gather


def test_a_leak_is_told_with_attack_tier_budget_client_and_counts(make_run) -> None:
    verdict = gather(make_run())["verdict"]
    assert verdict["level"] == "leaked"
    found = re.fullmatch(
        r"IG \(oblivious, 4,000 iterations\) reconstructed (\d) of 9 attacked images of client-2, "
        r"each above the guesses made without the gradient for its upload; "
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
    assert not colluding["tried"] and not colluding["needed"]
    assert colluding["sentence"] == "No keys were in use."


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


def test_the_verdict_is_by_the_thresholds_of_the_configuration(make_run) -> None:
    root = make_run()
    leaked = gather(root)["verdict"]["headline"]["leaked"]
    config = root / "config.yaml"
    config.write_text(config.read_text().replace("ssim: 0.5", "ssim: 0.999"))
    config.write_text(config.read_text().replace("psnr_margin: 3.0", "psnr_margin: 90.0"))
    verdict = gather(root)["verdict"]
    assert verdict["headline"]["leaked"] == 0 < leaked
    assert verdict["thresholds"] == {"ssim": 0.999, "psnr_margin_db": 90.0, "level": 0.95}
    assert "at least 0.999" in verdict["rule"]


def test_attacks_run_one_by_one_are_not_called_a_blind_choice(make_run, writers) -> None:
    root = make_run(rounds=1)
    assert not any("one by one" in note for note in gather(root)["notes"])
    writers.audit(root, 1, "client-0", attack="grnn")
    assert any("GRNN, IG ran one by one in the oblivious tier" in n for n in gather(root)["notes"])


def test_a_choice_of_attacks_names_what_it_settled_on_and_its_time(make_run, writers) -> None:
    root = make_run(rounds=1, audit=False)
    for client, method in (("client-0", "ig"), ("client-1", "best"), ("client-2", "ig")):
        writers.audit(
            root, 1, client, attack="auto", method=method, noise=0.06,
            budget={"iterations": None, "seconds": 90.0, "restarts": 2},
        )  # fmt: skip
    sentence = gather(root)["verdict"]["sentence"]
    start = "Auto (oblivious, 90 s an upload, 2 restarts, settling blind on IG or Best recipe)"
    assert sentence.startswith(start)


def test_the_strongest_of_several_is_said_to_be_chosen_with_the_originals(
    make_run, writers
) -> None:
    root = make_run(rounds=1)
    alone = gather(root)["verdict"]
    assert "chosen with the originals" not in alone["sentence"] + alone["tiers"][0]["sentence"]
    for client in ("client-0", "client-1", "client-2"):
        writers.audit(root, 1, client, attack="grnn", noise=0.9)
    verdict = gather(root)["verdict"]
    said = "; the strongest of 2 attackers, chosen with the originals, a choice that its interval"
    assert said in verdict["sentence"] and said in verdict["tiers"][0]["sentence"]
    for path in (root / "audit").glob("*/*--client-[12].json"):
        path.unlink()
    sentence = gather(root)["verdict"]["sentence"]
    assert sentence.endswith("; the strongest of 2 attackers, chosen with the originals.")


def test_without_originals_the_best_match_makes_the_headline(make_run, writers) -> None:
    root = make_run(rounds=1, audit=False)
    writers.audit(root, 1, "client-0", truth=False, attack="aa", gradient_cosine=0.2)
    writers.audit(root, 1, "client-0", truth=False, attack="zz", gradient_cosine=0.9)
    assert gather(root)["verdict"]["headline"]["attack"] == "zz"


def test_a_leak_is_held_against_the_guesses_that_were_recorded(make_run, writers) -> None:
    root = make_run(rounds=1, audit=False)
    path = writers.audit(root, 1, "client-0", noise=0.05)
    content = json.loads(path.read_text())

    def sentence(baselines, guess, **scores) -> str:
        for image in content["images"]:
            image["baselines"] = {"random_image": guess} if guess else {}
            image["scores"] |= scores
        path.write_text(json.dumps(content | {"baselines": baselines}))
        return gather(root)["verdict"]["sentence"]

    assert "with no guess made without the gradient recorded" in sentence({}, None)
    mean = {"random_image": {"ssim": 0.1, "psnr": 8.0}}
    assert "the guesses made without the gradient for its upload;" in sentence(mean, None)
    guess = {"ssim": 0.1, "psnr": 8.0}
    level = "for its image and 95% of those for all attacked images;"
    assert level in sentence(mean, guess)
    identified = sentence(mean, guess, ssim=0.4, identified_top1=True)
    assert "for its image;" in identified and level not in identified
