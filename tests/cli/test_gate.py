import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import refusals
from audited import audited_run
from golden import check_words
from typer.testing import CliRunner

from bract import Observation, ObservationStore
from bract.cli.gate import Gate, check_attacked, check_tiers, hold
from bract.cli.main import app, main
from bract.config import build_config
from bract.errors import BractError, LeakageError, NothingAttackedError
from bract.rundir import RunDirectory
from bract.schema import Answer, AuditResult, ClientDeclaration
from bract.schema.audit import ImageResult, Retrieval, Scores
from bract.scores import LeakRule

RULE = LeakRule()


def result(tier: Any, *ssims: Any, **changes: Any) -> Any:
    found = Retrieval(chance=1e-6, least=1e-9, nearest=True, references=36, choices=8)
    images = [
        ImageResult(index=i, scores=Scores(ssim=v, psnr=20.0), retrieval=found)
        for i, v in enumerate(ssims)
    ]
    facts = {"attack": "ig", "tier": tier, "round": 1, "client": "client-0", "images": images}
    return AuditResult(**(facts | {"scored": True} | changes))


def crossed(case: str, gate: str, results: list[Any]) -> None:
    """Hold results against a gate that they cross, or that has nothing to judge."""
    with refusals.refused("gate-crossed", kind=LeakageError) as raised:
        hold([Gate.parse(gate)], results, RULE)
    check_words("gates", case, str(raised.value), room="cli")


def test_a_gate_reads_metric_threshold_and_tier() -> None:
    assert Gate.parse("ssim>0.5@adaptive") == Gate("ssim", ">", 0.5, "adaptive")
    assert Gate.parse("lpips_vgg <= 0.2") == Gate("lpips_vgg", "<=", 0.2, None)


@pytest.mark.parametrize("text", ["ssim", "leak>1", "ssim=0.5", "ssim>high", "ssim>0.5@", ""])
def test_another_form_is_refused_with_an_example(text: Any) -> None:
    with refusals.refused("usage", "ssim>0.5@adaptive"):
        Gate.parse(text)


def test_every_image_across_the_threshold_is_named() -> None:
    results = [result("oblivious", 0.2, 0.7), result("adaptive", 0.9)]
    crossed("two images of two tiers", "ssim>0.5", results)
    crossed("one tier alone", "ssim>0.5@adaptive", results)
    hold([Gate.parse("ssim>0.95")], results, RULE)


def test_a_tier_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with refusals.refused("unknown-name", "adaptive"):
        Gate.parse("ssim>0.5@adaptve")


def test_a_gate_whose_tier_will_not_run_is_refused_before_any_attack() -> None:
    gate = Gate.parse("ssim>0.5@adaptive")
    with refusals.refused("usage", "oblivious"):
        check_tiers([gate], ["oblivious"])
    check_tiers([gate, Gate.parse("ssim>0.5")], ["oblivious", "adaptive"])


def test_the_command_refuses_such_a_gate_with_nothing_attacked(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(build_config({}))
    ObservationStore(run.captures).save(Observation(1, "a", {}, {}, ClientDeclaration()))
    arguments = ["audit", str(run.root), "--fail-on", "ssim>0.5@adaptive"]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, BractError)
    assert "the gate would check nothing" in str(done.exception)
    assert not run.audit.exists()


def test_a_gate_that_judged_nothing_does_not_pass_and_says_why() -> None:
    refused = result("adaptive", refused="the noise does not fit")
    unscored = result("adaptive", images=[ImageResult(index=0)])
    results = [result("oblivious", 0.2), refused, refused, unscored]
    crossed("nothing judged", "ssim>0.5@adaptive", results)
    crossed("images without the score", "stlpips<0.5", [result("oblivious", 0.2, 0.3)])


def test_what_was_not_judged_beside_what_passed_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused = result("adaptive", refused="the noise does not fit")
    hold([Gate.parse("ssim>0.5")], [result("oblivious", 0.2, 0.3), refused], RULE)
    said = " ".join(capsys.readouterr().err.split())
    check_words("gates", "judged beside a refusal", said, room="cli")
    hold([Gate.parse("ssim>0.5")], [result("oblivious", 0.2, 0.3)], RULE)
    assert capsys.readouterr().err == ""
    crossed("crossed beside a refusal", "ssim>0.5", [result("oblivious", 0.2, 0.9), refused])


def test_a_gate_on_leaked_images_counts_them_by_the_configured_rule() -> None:
    results = [result("oblivious", 0.4, 0.6, 0.7), result("adaptive", 0.9)]
    crossed("more leaked than allowed", "leaked>1@oblivious", results)
    hold([Gate.parse("leaked>2@oblivious")], results, RULE)
    hold([Gate.parse("leaked>0@oblivious")], results, LeakRule(ssim=0.8))
    crossed("a tier that did not run", "leaked>0@colluding", results)


def test_a_gate_on_leaked_images_counts_what_was_attacked_in_every_tier_for_its_rate() -> None:
    near = Retrieval(chance=0.01, least=1e-9, nearest=True, references=36, choices=8)
    far = near.model_copy(update={"chance": 0.9})
    one = ImageResult(index=0, scores=Scores(ssim=0.7), retrieval=near)
    others = [ImageResult(index=i, scores=Scores(ssim=0.7), retrieval=far) for i in range(9)]
    gate = Gate.parse("leaked>0@adaptive")
    crossed("one image leaked", "leaked>0@adaptive", [result("adaptive", images=[one])])
    hold([gate], [result("adaptive", images=[one]), result("oblivious", images=others)], RULE)


def test_a_gate_that_could_decide_nothing_for_want_of_references_does_not_pass() -> None:
    images = [ImageResult(index=0, scores=Scores(ssim=0.1))]
    crossed("too few references", "leaked>0", [result("oblivious", images=images)])


RUN = Path("runs/mine")


def test_an_audit_of_which_nothing_was_attacked_fails_with_the_first_reason() -> None:
    refused = result("oblivious", refused="the update is not finite", images=[])
    other = result("adaptive", refused="unknown defense", images=[])
    with refusals.refused("nothing-attacked", kind=NothingAttackedError) as raised:
        check_attacked([refused, other], RUN)
    check_words("gates", "nothing attacked", str(raised.value), room="cli")
    check_attacked([refused, other, result("surrogate", 0.2)], RUN)
    check_attacked([], RUN)


def test_refusals_that_were_to_be_shown_fail_nothing() -> None:
    sealed = result("oblivious", refused="ciphertexts", encryption="paillier", images=[])
    check_attacked([sealed], RUN)
    opened = result("colluding", refused="no key opens it", encryption="paillier", images=[])
    with refusals.refused("nothing-attacked", kind=NothingAttackedError):
        check_attacked([sealed, opened], RUN)


def test_the_command_exits_with_4_where_every_upload_is_refused_and_so_does_its_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = audited_run(tmp_path / "run", uploads=2)
    monkeypatch.chdir(tmp_path)

    def code(*options: str) -> int:
        words = ["bract", "audit", "run", "--attack", "ig", "--budget", "2", *options]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    spoil(run, "client-0")
    assert code() == 0
    spoil(run, "client-1")
    for options in ((), ("--resume",)):
        assert code(*options) == 4
        said = " ".join(capsys.readouterr().err.split())
        assert "error: nothing was attacked: 2 of 2 attacks refused; first refusal: ig" in said
        kept = [json.loads(path.read_text()) for path in (run.audit / "ig").glob("*.json")]
        assert len(kept) == 2 and all(one["refused"] for one in kept)
    assert code("--fail-on", "ssim>0.5", "--resume") == 3


def spoil(run: RunDirectory, client: str) -> None:
    """Leave an upload such that no attack opens it."""
    store = ObservationStore(run.captures)
    seen = store.load(run.captures / "round-0001" / client)
    store.save(replace(seen, update={n: v * float("nan") for n, v in seen.update.items()}))


def test_no_gate_passes_on_an_upload_that_is_not_as_described() -> None:
    wrong = {"state": "contradicted", "cosine": 0.1, "reason": "another (cosine 0.100)"}
    unsure = {"state": "open", "failing": ["a sum"], "reason": "a sum is not 0"}
    for check in (wrong, unsure):
        found = [result("oblivious", 0.2, check=check)]
        with refusals.refused(
            "declaration-wrong", "client-0", check["reason"], kind=NothingAttackedError
        ):
            hold([Gate.parse("ssim>0.5")], found, RULE)
        hold([], found, RULE)
        with refusals.refused("gate-crossed", kind=LeakageError):
            hold([Gate.parse("ssim>0.1")], found, RULE)
    hold([Gate.parse("ssim>0.5")], [result("oblivious", 0.2, check={"state": "open"})], RULE)


WRONG = {"state": "contradicted", "reason": "the steps give another update"}


@pytest.mark.parametrize("gate", ["leaked>0", "ssim>0.99", "membership>0.5"])
def test_no_gate_passes_where_an_upload_is_not_as_described(gate: str) -> None:
    weak = Retrieval(chance=0.9, least=1e-9, nearest=False, references=36, choices=8)
    image = ImageResult(index=0, scores=Scores(ssim=0.1, psnr=9.0), retrieval=weak)
    attacked = result("oblivious", images=[image], scored=1, check=WRONG)
    with refusals.refused("declaration-wrong", kind=NothingAttackedError):
        hold([Gate.parse(gate)], [attacked], RULE)


def test_a_gate_of_another_question_listens_to_the_checks_of_its_own_answers() -> None:
    check = WRONG | {"round": 1, "client": "client-0"}
    content = {"question": "epsilon", "refused": "no canaries", "checks": [check]}
    answer = Answer.model_validate(content)
    with refusals.refused("declaration-wrong", kind=NothingAttackedError):
        hold([Gate.parse("epsilon.low>3")], [answer], RULE)


def test_a_limit_takes_a_rate_and_a_tier() -> None:
    gate = Gate.parse("membership>0.05@1%@adaptive")
    assert (gate.tier, gate.at, str(gate)) == ("adaptive", "1%", "membership>0.05@1%@adaptive")
    assert Gate.parse("membership>0.05@adaptive@1%") == gate
    for text in ("ssim>0.5@adaptive@oblivious", "membership>0.05@1%@5%"):
        with refusals.refused("usage", text):
            Gate.parse(text)
