import pytest

from bract.cli.gate import Gate, LeakageError, hold
from bract.errors import BractError
from bract.server.report.leak import LeakRule

RULE = LeakRule()


def facts(tier, *ssims):
    images = [{"index": i, "scores": {"ssim": v, "psnr": 20.0}} for i, v in enumerate(ssims)]
    return {"attack": "ig", "tier": tier, "round": 1, "client": "client-0", "images": images} | {
        "scored": True
    }


def test_a_gate_reads_metric_threshold_and_tier():
    assert Gate.parse("ssim>0.5@adaptive") == Gate("ssim", ">", 0.5, "adaptive")
    assert Gate.parse("lpips_vgg <= 0.2") == Gate("lpips_vgg", "<=", 0.2, None)


@pytest.mark.parametrize("text", ["ssim", "leak>1", "ssim=0.5", "ssim>high", "ssim>0.5@", ""])
def test_another_form_is_refused_with_an_example(text):
    with pytest.raises(BractError, match=r"such as ssim>0\.5@adaptive"):
        Gate.parse(text)


def test_every_image_across_the_threshold_is_named():
    results = [facts("oblivious", 0.2, 0.7), facts("adaptive", 0.9)]
    with pytest.raises(LeakageError, match="in 2 images") as raised:
        hold([Gate.parse("ssim>0.5")], results, RULE)
    assert "image 1: ssim 0.700" in str(raised.value)
    with pytest.raises(LeakageError, match="in 1 images"):
        hold([Gate.parse("ssim>0.5@adaptive")], results, RULE)
    hold([Gate.parse("ssim>0.95")], results, RULE)


def test_a_gate_that_would_check_nothing_does_not_pass():
    with pytest.raises(BractError, match="no attacked image of tier adaptive has this score"):
        hold([Gate.parse("ssim>0.5@adaptive")], [facts("oblivious", 0.2)], RULE)
    unscored = facts("oblivious", 0.2) | {"images": [{"index": 0, "scores": None}]}
    with pytest.raises(BractError, match="switch on the clients' truth"):
        hold([Gate.parse("ssim>0.5")], [unscored], RULE)


def test_a_gate_on_leaked_images_counts_them_by_the_configured_rule():
    results = [facts("oblivious", 0.4, 0.6, 0.7), facts("adaptive", 0.9)]
    with pytest.raises(LeakageError, match="in 2 images") as raised:
        hold([Gate.parse("leaked>1@oblivious")], results, RULE)
    assert "ig (oblivious), round 1, client-0, image 1: leaked by ssim" in str(raised.value)
    hold([Gate.parse("leaked>2@oblivious")], results, RULE)
    hold([Gate.parse("leaked>0@oblivious")], results, LeakRule(ssim=0.8))
    with pytest.raises(BractError, match="no attacked image of tier colluding"):
        hold([Gate.parse("leaked>0@colluding")], results, RULE)
