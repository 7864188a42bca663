"""The verdict sentence and the tiers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from golden import check_words
from reporting import gather

from bract.report import write_report


def spoken(verdict: dict[str, Any]) -> str:
    """All sentences of a verdict."""
    tiers = (f"{tier['tier']}: {tier['sentence']}" for tier in verdict["tiers"])
    parts = (verdict[name] for name in ("sentence", "explanation", "statistics"))
    return "\n".join((*parts, *tiers))


def test_a_leak_is_told_in_plain_words_with_client_and_counts(make_run: Any) -> None:
    verdict = gather(make_run())["verdict"]
    assert verdict["level"] == "leaked"
    found = re.fullmatch(
        r"(All|\d of the) 3 images attacked of client-2 in round \d (?:was|were) reconstructed "
        r"readably\.",
        verdict["sentence"],
    )
    own = re.search(
        r"In the 3 rounds of it that were attacked it is (\d) of 9, an image counted in each\.",
        verdict["explanation"],
    )
    over_all = re.search(r"Over all 3 clients it is (\d) of 27\.", verdict["explanation"])
    assert found and own and over_all and 1 <= int(own[1]) <= int(over_all[1])
    of_round = 3 if found[1] == "All" else int(found[1][0])
    assert 1 <= of_round <= int(own[1])


def test_a_client_whose_every_image_leaked_in_one_round_is_not_told_as_half(
    make_run: Any, writers: Any
) -> None:
    root = make_run(rounds=2, audit=False)
    writers.audit(root, 1, "client-0", noise=0.01)
    writers.audit(root, 2, "client-0", noise=1.2)
    sentence = gather(root)["verdict"]["sentence"]
    assert sentence == "All 3 images attacked of client-0 in round 1 were reconstructed readably."


def test_the_statistics_stand_apart_from_the_headline(make_run: Any) -> None:
    verdict = gather(make_run())["verdict"]
    assert re.fullmatch(
        r"IG \(oblivious, 4,000 iterations\); mean SSIM 0\.\d\d, 95 % interval -?0\.\d\d to "
        r"[01]\.\d\d\. Where nothing leaks, an image is counted as leaked in at most 5% of runs, "
        r"of clients whose data are like the references\.",
        verdict["statistics"],
    )
    plain = verdict["sentence"] + verdict["explanation"]
    words = r"interval|\bmean\b|SSIM|PSNR|strongest|chosen|%|iterations|baseline|oblivious"
    assert not re.search(words, plain), plain


def test_an_image_that_only_stands_out_is_not_called_readable(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1, audit=False)
    path = writers.audit(root, 1, "client-0", noise=0.05)
    content = json.loads(path.read_text())
    for image, ssim in zip(content["images"], (0.9, 0.2, 0.2), strict=True):
        image["scores"] |= {"ssim": ssim, "psnr": 60.0}
        image["retrieval"] |= {"nearest": True, "chance": 1e-7}
    path.write_text(json.dumps(content))
    check_words("verdicts", "one image readable", spoken(gather(root)["verdict"]))
    for image in content["images"]:
        image["scores"]["ssim"] = 0.2
    path.write_text(json.dumps(content))
    check_words("verdicts", "all images identified", spoken(gather(root)["verdict"]))


def test_nothing_above_the_threshold_is_told_with_its_limits(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1, audit=False)
    writers.audit(root, 1, "client-0", noise=1.2)
    verdict = gather(root)["verdict"]
    assert verdict["level"] == "none-leaked"
    check_words("verdicts", "nothing leaked", spoken(verdict))


def test_a_likeness_that_chance_explains_is_told(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1, audit=False)
    path = writers.audit(root, 1, "client-0", noise=0.05)
    content = json.loads(path.read_text())
    for image in content["images"]:
        image["retrieval"] |= {"chance": 0.9, "nearest": False}
    path.write_text(json.dumps(content))
    verdict = gather(root)["verdict"]
    assert verdict["level"] == "none-leaked"
    check_words("verdicts", "a likeness by chance", spoken(verdict))


def test_all_refused_is_not_told_as_a_success(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1, audit=False)
    writers.audit(root, 1, "client-0", images=0, scored=False, refused="encrypted")
    verdict = gather(root)["verdict"]
    assert verdict["level"] == "refused"
    check_words("verdicts", "all refused", spoken(verdict))


@pytest.mark.parametrize("tier", ["oblivious", "surrogate"])
def test_what_a_leak_took_beside_the_upload_is_told(make_run: Any, writers: Any, tier: str) -> None:
    root = make_run(rounds=1, audit=False)
    writers.audit(root, 1, "client-0", noise=0.05, tier=tier)
    check_words("verdicts", f"a leak, {tier}", spoken(gather(root)["verdict"]))


def test_the_strongest_tier_makes_the_headline(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1, audit=False)
    defenses = ["adadefense"]
    writers.audit(root, 1, "client-0", noise=1.2, defenses=defenses)
    writers.audit(
        root, 1, "client-0", noise=0.05, attack="grnn", tier="adaptive", defenses=defenses,
        budget={"iterations": 2000, "restarts": 4},
    )  # fmt: skip
    verdict = gather(root)["verdict"]
    check_words("verdicts", "the strongest tier", spoken(verdict))
    oblivious, adaptive, surrogate, colluding = verdict["tiers"]
    assert oblivious["tried"] and oblivious["leaked"] == 0
    assert adaptive["tried"] and adaptive["leaked"] > 0
    assert not surrogate["tried"] and not surrogate["needed"]
    assert not colluding["tried"] and not colluding["needed"]


def test_without_a_defense_the_higher_tiers_do_not_apply(make_run: Any) -> None:
    tiers = gather(make_run(rounds=1))["verdict"]["tiers"]
    assert [t["needed"] for t in tiers] == [True, False, False, False]


@pytest.mark.parametrize("shape", ["leaked", "none", "unscored", "refused", "bare"])
def test_no_verdict_says_safe(make_run: Any, writers: Any, shape: str) -> None:
    root = make_run(rounds=1, audit=shape == "leaked")
    if shape == "none":
        writers.audit(root, 1, "client-0", noise=1.2)
    elif shape == "unscored":
        writers.audit(root, 1, "client-0", truth=False)
    elif shape == "refused":
        writers.audit(root, 1, "client-0", images=0, scored=False, refused="encrypted")
    verdict = gather(root)["verdict"]
    words = " ".join(
        [
            *(verdict[name] for name in ("sentence", "explanation", "statistics")),
            *(t["sentence"] for t in verdict["tiers"]),
            *(step["text"] for step in verdict["next_steps"]),
        ]
    )
    assert not re.search(r"\b(safe|secure|private|protected)\b", words, re.IGNORECASE)


def test_the_verdict_is_by_the_thresholds_of_the_configuration(make_run: Any) -> None:
    root = make_run()
    leaked = gather(root)["verdict"]["headline"]["leaked"]
    config = root / "config.yaml"
    config.write_text(config.read_text().replace("ssim: 0.5", "ssim: 0.999"))
    config.write_text(config.read_text().replace("psnr_margin: 3.0", "psnr_margin: 90.0"))
    verdict = gather(root)["verdict"]
    assert verdict["headline"]["leaked"] == 0 < leaked
    assert verdict["thresholds"] == {"ssim": 0.999, "psnr_margin_db": 90.0, "level": 0.95}
    assert "at least 0.999" in verdict["rule"]


def test_attacks_run_one_by_one_are_not_called_a_blind_choice(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1)
    assert not any("one by one" in note for note in gather(root)["notes"])
    writers.audit(root, 1, "client-0", attack="grnn")
    assert any("GRNN, IG ran one by one in the oblivious tier" in n for n in gather(root)["notes"])


def test_a_choice_of_attacks_names_what_it_settled_on_and_its_time(
    make_run: Any, writers: Any
) -> None:
    root = make_run(rounds=1, audit=False)
    recipes = (("ig", "ig"), ("best", "gauss-newton"), ("ig", "ig"))
    for number, (chosen, method) in enumerate(recipes):
        writers.audit(
            root, 1, f"client-{number}", attack="auto", chosen_attack=chosen, method=method,
            noise=0.06, budget={"iterations": None, "seconds": 90.0, "restarts": 2},
        )  # fmt: skip
    statistics = gather(root)["verdict"]["statistics"]
    check_words("verdicts", "a choice of attacks", statistics)


def test_an_attack_that_chose_nothing_names_the_recipe_that_it_ran(
    make_run: Any, writers: Any
) -> None:
    root = make_run(rounds=1, audit=False)
    for client, method in (("client-0", "gauss-newton"), ("client-1", "grnn")):
        writers.audit(root, 1, client, attack="best", method=method, noise=0.06)
    statistics = gather(root)["verdict"]["statistics"]
    check_words("verdicts", "an attack with recipes", statistics)


def test_an_attack_on_an_aggregate_is_its_own_method(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1, audit=False)
    writers.audit(root, 1, "client-0", attack="ig", members=["client-0", "client-1"])
    row = gather(root)["attacks"][0]
    assert row["attack"] == "ig@aggregate"
    assert not row["methods"] and not row["chose"]


def test_the_strongest_of_several_is_said_to_be_chosen_with_the_originals(
    make_run: Any, writers: Any
) -> None:
    root = make_run(rounds=1)
    check_words("verdicts", "one attacker", spoken(gather(root)["verdict"]))
    for client in ("client-0", "client-1", "client-2"):
        writers.audit(root, 1, client, attack="grnn", noise=0.9)
    check_words("verdicts", "the strongest of two attackers", spoken(gather(root)["verdict"]))
    for path in (root / "audit").glob("*/*--client-[12].json"):
        path.unlink()
    check_words("verdicts", "the strongest of two, one client", spoken(gather(root)["verdict"]))


def test_without_originals_the_best_match_makes_the_headline(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1, audit=False)
    writers.audit(root, 1, "client-0", truth=False, attack="aa", gradient_cosine=0.2)
    writers.audit(root, 1, "client-0", truth=False, attack="zz", gradient_cosine=0.9)
    assert gather(root)["verdict"]["headline"]["attack"] == "zz"


def test_too_few_references_are_told_and_never_read_as_no_leak(
    make_run: Any, writers: Any, parse: Any
) -> None:
    root = make_run(rounds=1, audit=False)
    path = writers.audit(root, 1, "client-0", noise=0.05)
    content = json.loads(path.read_text())
    whole = content["images"][0]["retrieval"]
    for image in content["images"]:
        image["retrieval"] = None
    path.write_text(json.dumps(content))
    facts = gather(root)
    verdict = facts["verdict"]
    assert verdict["level"] == "undecided"
    check_words("verdicts", "undecided", "\n".join((spoken(verdict), *facts["notes"])))
    assert facts["observations"][0]["images"][0]["leaked"] is None
    text = parse(write_report(root).read_text()).text
    assert "3 undecided" in text and "0 of 3" not in text
    content["images"][0]["retrieval"] = whole
    path.write_text(json.dumps(content))
    verdict = gather(root)["verdict"]
    assert verdict["level"] == "leaked"
    check_words("verdicts", "partly undecided", spoken(verdict))


def steps(root: Any) -> list[str]:
    found = gather(root)["verdict"]["next_steps"]
    assert 1 <= len(found) <= 3
    return [f"{step['text']} {step['command'] or ''}".strip() for step in found]


def commands(root: Any) -> list[str | None]:
    return [step["command"] for step in gather(root)["verdict"]["next_steps"]]


def test_the_next_step_fits_what_was_found(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1, audit=False)
    assert commands(root) == ["bract audit RUN"]
    writers.audit(root, 1, "client-0", images=0, scored=False, refused="it is encrypted.")
    assert commands(root) == [None] and "it is encrypted." in steps(root)[0]
    writers.audit(root, 1, "client-0", truth=False)
    assert "bract audit RUN --truth DIR --resume" in steps(root)[1]
    writers.audit(root, 1, "client-0", noise=1.2)
    assert "--budget 10m --restarts 4 --attack auto" in steps(root)[0]
    writers.audit(root, 1, "client-0", noise=0.05)
    compared, encrypted, kept = steps(root)
    assert compared.endswith("bract compare RUN/config.yaml")
    assert encrypted.endswith("encryption: paillier") and "captures/" in kept
    (root / "config.yaml").unlink()
    assert steps(root)[0].endswith('app = ClientApp(mods=[DefenseMod("adadefense")])')


def test_the_tier_that_was_not_tried_is_the_next_step(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1, audit=False)
    writers.capture(root, 1, "client-0", defenses=({"name": "adadefense"},))
    writers.audit(root, 1, "client-0", noise=1.2, defenses=["adadefense"])
    assert steps(root)[0].endswith("bract audit RUN --tier adaptive")
    writers.audit(root, 1, "client-0", noise=0.05, defenses=["adadefense"])
    others = steps(root)[1:]
    assert any(step.endswith("bract audit RUN --tier adaptive") for step in others)


def test_no_tier_is_advised_that_refused_or_that_no_attacker_serves(
    make_run: Any, writers: Any
) -> None:
    """An adaptive audit that refused every upload is not asked for again."""
    root = make_run(rounds=1, audit=False)
    writers.capture(root, 1, "client-0", defenses=({"name": "guardian"},))
    writers.audit(root, 1, "client-0", noise=1.2, defenses=["guardian"])
    assert any("--tier adaptive" in step for step in steps(root))
    refused = {"images": 0, "scored": False, "refused": "another defense is in use."}
    writers.audit(
        root, 1, "client-0", tier="adaptive", attack="ig-l2", defenses=["guardian"], **refused
    )
    assert not any("--tier adaptive" in step for step in steps(root))
    (root / "audit").rename(root / "earlier")
    writers.audit(root, 1, "client-0", noise=1.2, defenses=["guardian", "adadefense"])
    assert not any("--tier adaptive" in step for step in steps(root))


def test_an_attack_on_the_sum_names_no_client(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1, audit=False)
    writers.audit(root, 1, "aggregate", noise=0.05, members=["client-0", "client-1"])
    check_words("verdicts", "the sum of all updates", spoken(gather(root)["verdict"]))


def test_the_headline_counts_images_that_are_identified(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1, audit=False)
    path = writers.audit(root, 1, "client-0", noise=1.2, candidates=361)
    content = json.loads(path.read_text())
    for image, identified in zip(content["images"], (True, True, None), strict=True):
        image["scores"]["identified_top1"] = identified
    path.write_text(json.dumps(content))
    facts = gather(root)
    verdict, row = facts["verdict"], facts["attacks"][0]
    assert (row["identified"], row["identifiable"], row["candidates"]) == (2, 2, 361)
    assert verdict["level"] == "none-leaked", "the rule that decides is the same"
    check_words("verdicts", "identified by retrieval", spoken(verdict))
    assert verdict["tiers"][0]["identified"] == 2


WRONG = {
    "state": "contradicted",
    "cosine": 0.12,
    "scale": 0.9,
    "tensors": [{"name": "fc.weight", "cosine": 0.1, "scale": 1.0, "share": 0.9}],
    "reason": "the client's steps, repeated on what it kept, give another (cosine 0.120)",
}
UNSURE = {
    "state": "open",
    "failing": ["fc.bias does not sum to 0"],
    "reason": "the client kept nothing to repeat its steps on, and fc.bias does not sum to 0",
}


@pytest.mark.parametrize(
    ("check", "level"),
    [(WRONG, "misdescribed"), (UNSURE, "unconfirmed"), ({"state": "open"}, "none-leaked")],
)
def test_no_upload_that_is_not_as_described_is_called_unleaked(
    make_run: Any, writers: Any, check: dict[str, Any], level: str
) -> None:
    root = make_run(rounds=1, audit=False)
    path = writers.audit(root, 1, "client-0", noise=1.2)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"check": check}))
    verdict = gather(root)["verdict"]
    assert verdict["level"] == level
    check_words("verdicts", f"description {level}", spoken(verdict))
    page = write_report(root)
    summary = (root / "summary.html").read_text()
    for text in (page.read_text(), summary):
        assert ("No verdict" in text) == (level != "none-leaked")
    assert ("judged, 0 were" in summary) == (level == "none-leaked")


def test_a_leak_is_a_leak_whatever_led_to_it_and_the_others_are_named(
    make_run: Any, writers: Any
) -> None:
    root = make_run(rounds=1, audit=False)
    writers.audit(root, 1, "client-0", noise=0.01)
    path = writers.audit(root, 1, "client-1", noise=1.2)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"check": WRONG}))
    verdict = gather(root)["verdict"]
    assert verdict["level"] == "leaked"
    check_words("verdicts", "a leak beside a wrong description", spoken(verdict))
