import pytest
from typer.testing import CliRunner

from bract.cli.gate import Gate, LeakageError, check_tiers, hold
from bract.cli.main import app
from bract.config import build_config
from bract.errors import BractError
from bract.observation import Observation, ObservationStore, Protocol
from bract.rundir import RunDirectory
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
    with pytest.raises(LeakageError, match="2 crossed it") as raised:
        hold([Gate.parse("ssim>0.5")], results, RULE)
    assert "image 1: ssim 0.700" in str(raised.value)
    with pytest.raises(LeakageError, match="1 crossed it"):
        hold([Gate.parse("ssim>0.5@adaptive")], results, RULE)
    hold([Gate.parse("ssim>0.95")], results, RULE)


def test_a_tier_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(BractError, match="Did you mean 'adaptive'"):
        Gate.parse("ssim>0.5@adaptve")


def test_a_gate_whose_tier_will_not_run_is_refused_before_any_attack():
    gate = Gate.parse("ssim>0.5@adaptive")
    with pytest.raises(BractError, match="runs the tier oblivious, and the gate would check noth"):
        check_tiers([gate], ["oblivious"])
    check_tiers([gate, Gate.parse("ssim>0.5")], ["oblivious", "adaptive"])


def test_the_command_refuses_such_a_gate_with_nothing_attacked(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create(build_config({}))
    ObservationStore(run.captures).save(Observation(1, "a", {}, {}, Protocol()))
    arguments = ["audit", str(run.root), "--fail-on", "ssim>0.5@adaptive"]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, BractError)
    assert "the gate would check nothing" in str(done.exception)
    assert not run.audit.exists()


def test_a_gate_that_judged_nothing_does_not_pass_and_says_why():
    gate = Gate.parse("ssim>0.5@adaptive")
    refused = facts("adaptive") | {"refused": "the noise does not fit"}
    unscored = facts("adaptive") | {"images": [{"index": 0, "scores": None}]}
    with pytest.raises(LeakageError) as raised:
        hold([gate], [facts("oblivious", 0.2), refused, refused, unscored], RULE)
    assert str(raised.value) == (
        "--fail-on ssim>0.5@adaptive: 0 images judged; not judged: 2 attacks refused, "
        "1 attacks without the client's truth; first refusal: the noise does not fit; "
        "a gate that judged nothing does not pass"
    )
    with pytest.raises(LeakageError, match="2 images without this score"):
        hold([Gate.parse("stlpips<0.5")], [facts("oblivious", 0.2, 0.3)], RULE)


def test_what_was_not_judged_beside_what_passed_is_counted(capsys):
    refused = facts("adaptive") | {"refused": "the noise does not fit"}
    hold([Gate.parse("ssim>0.5")], [facts("oblivious", 0.2, 0.3), refused], RULE)
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: --fail-on ssim>0.5: 2 images judged; not judged: 1 attacks refused" in said
    hold([Gate.parse("ssim>0.5")], [facts("oblivious", 0.2, 0.3)], RULE)
    assert capsys.readouterr().err == ""
    with pytest.raises(LeakageError, match="1 crossed it; not judged: 1 attacks refused"):
        hold([Gate.parse("ssim>0.5")], [facts("oblivious", 0.2, 0.9), refused], RULE)


def test_a_gate_on_leaked_images_counts_them_by_the_configured_rule():
    results = [facts("oblivious", 0.4, 0.6, 0.7), facts("adaptive", 0.9)]
    with pytest.raises(LeakageError, match="2 crossed it") as raised:
        hold([Gate.parse("leaked>1@oblivious")], results, RULE)
    assert "ig (oblivious), round 1, client-0, image 1: leaked by ssim" in str(raised.value)
    hold([Gate.parse("leaked>2@oblivious")], results, RULE)
    hold([Gate.parse("leaked>0@oblivious")], results, LeakRule(ssim=0.8))
    with pytest.raises(LeakageError, match="a gate that judged nothing does not pass"):
        hold([Gate.parse("leaked>0@colluding")], results, RULE)
