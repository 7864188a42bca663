import gc
import json
import re
import shutil
import signal
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import audited_run, request_of, with_keys
from observing import one_step, ticking
from refusals import check_named, refused
from reporting import gather
from safetensors.torch import load_file
from torch.nn import functional as F

from bract import Observation, ObservationStore
from bract.attacks import Budget, Reconstruction, reconstruct
from bract.attacks.methods.baselines import prior_only
from bract.attacks.problem.case import open_case
from bract.attacks.result import Trial
from bract.attacks.solve import descent
from bract.attacks.solve.checkpoints import write_atomically
from bract.audit.audit import Audit
from bract.audit.questions.reconstruction import baselines
from bract.audit.questions.reconstruction import plan as batches
from bract.audit.questions.reconstruction import score as judging
from bract.audit.questions.reconstruction.score import Attempt, Judge
from bract.cli import audit_requests
from bract.cli.audit import describe
from bract.cli.console import print_json
from bract.client.truth import save_truth
from bract.config import build_config
from bract.config.config import AuditRequest
from bract.data.views import test_data as load_test_data
from bract.inputs import Truth
from bract.report import write_report
from bract.rundir import RunDirectory
from bract.schema import AuditResult
from bract.schema.audit import Signals
from bract.scores import image, mse, score_images
from bract.seeds import derive_seed
from bract.updates.rounding import rounded

__all__ = ["ticking"]

CHOICE = AuditRequest(attacks=["ig"], iterations=3, device="cpu")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two clients that each uploaded the gradient of two 16-pixel digits."""
    return audited_run(tmp_path / "audited", 2, clients=3)


def execute(run: RunDirectory, choice: AuditRequest = CHOICE, *, resume: bool = False) -> Any:
    audit = Audit(run, choice, resume=resume)
    return [result.to_dict() for result in audit.execute(audit.plan())]


def test_the_truth_may_lie_where_the_server_has_no_eye(run: Any, tmp_path: Path) -> None:
    shutil.move(run.truth, tmp_path / "elsewhere")
    assert not any(facts["scored"] for facts in execute(run))
    elsewhere = with_keys(CHOICE, truth=tmp_path / "elsewhere")
    assert all(facts["scored"] for facts in execute(run, elsewhere))
    with refused("truth-lacking", "client-0", "client-1"):
        execute(run, with_keys(CHOICE, truth=tmp_path))


def test_an_audit_leaves_scores_pictures_and_baselines_for_each_observation(run: Any) -> None:
    results = execute(run)
    assert [r["client"] for r in results] == ["client-0", "client-1"]
    for facts in results:
        path = run.audit / "ig" / f"round-0001--{facts['client']}.json"
        written = json.loads(path.read_text())
        assert written.pop("made") and written == {k: v for k, v in facts.items() if k != "made"}
        assert path.stat().st_mode & 0o077 == 0
        assert facts["scored"]
        assert len(facts["images"]) == 2
        for row in facts["images"]:
            assert (path.parent / row["reconstruction"]).is_file()
            assert (path.parent / row["original"]).is_file()
            assert set(row["scores"]) == set(row["oracle"])
        names = {"class_mean", "random_image", "prior_only"}
        assert names == set(facts["baselines"])
        for name in names:
            each = [image["baselines"][name]["ssim"] for image in facts["images"]]
            assert sum(each) / 2 == pytest.approx(facts["baselines"][name]["ssim"])
        assert facts["signals"]["truth_check"]["cosine"] > 1 - 1e-6
        assert facts["label_accuracy"] == 1.0
        assert facts["candidates"] == 100
        assert facts["selection"] == "blind"
        assert facts["device"] == "cpu"


def test_a_gradient_says_more_than_no_gradient(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "PRIOR_ITERATIONS", 100)  # where it has settled
    (facts,) = execute(run, with_keys(CHOICE, clients=["client-0"], iterations=200))
    psnr = sum(image["scores"]["psnr"] for image in facts["images"]) / 2
    assert psnr > facts["baselines"]["prior_only"]["psnr"] + 1
    assert psnr > facts["baselines"]["random_image"]["psnr"]


def test_resume_skips_what_is_done_and_a_fresh_audit_does_not(run: Any) -> None:
    execute(run)
    assert Audit(run, CHOICE, resume=True).plan() == []
    (run.audit / "ig" / "round-0001--client-1.json").unlink()
    resumed = Audit(run, CHOICE, resume=True)
    assert [r.client for r in resumed.results()] == ["client-0"]
    (left,) = resumed.plan()
    assert (left.attack, [c.client for c in left.captures]) == ("ig", ["client-1"])
    assert sum(len(batch.captures) for batch in Audit(run, CHOICE).plan()) == 2


def test_without_truth_the_reconstructions_are_shown_unscored(run: Any) -> None:
    (run.truth / "client-1" / "round-0001.safetensors").unlink()
    scored, unscored = execute(run)
    assert scored["scored"]
    assert not unscored["scored"]
    assert all(image["scores"] is None for image in unscored["images"])
    assert all(image["original"] is None for image in unscored["images"])


def test_what_cannot_be_attacked_is_refused_by_name_and_the_others_go_on(run: Any) -> None:
    store = ObservationStore(run.captures)
    good = store.load(run.captures / "round-0001" / "client-0")
    secret = Observation(
        round=1,
        client="client-2",
        parameters=good.parameters,
        update={},
        ciphertexts={"c": torch.zeros(8, dtype=torch.uint8)},
        declaration=good.declaration.updated({"encryption": "paillier"}),
    )
    store.save(secret)
    results = {r["client"]: r for r in execute(run)}
    assert "encrypted (paillier)" in results["client-2"]["refused"]
    assert results["client-0"]["refused"] is None


def test_an_audit_is_reproducible(run: Any) -> None:
    first = execute(run)
    second = execute(run)
    for one, two in zip(first, second, strict=True):
        assert one["images"] == two["images"]
        assert one["final_loss"] == two["final_loss"]


def test_choosing_nothing_is_an_error(run: Any) -> None:
    with refused("captures-none"):
        Audit(run, AuditRequest(attacks=["ig"], rounds=[9])).plan()
    with refused("unknown-name", "igg"):
        Audit(run, AuditRequest(attacks=["igg"]))


def left_by(run: Any, attack: Any = "ig") -> Any:
    return sorted(path.name for path in (run.audit / attack).glob("*"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rounds": [9]}, ("captures-none", "1")),
        ({"clients": ["client-0", "cleint-1"]}, ("unknown-name", "client-0", "client-1")),
        ({"clients": ["aggregate"]}, ("unknown-name", "--tier")),
        ({"device": "cuda:99"}, ("device-missing", "CUDA")),
        ({"truth": Path("nowhere")}, ("truth-lacking", "client-0", "client-1")),
        ({"tier": "colluding", "key": "nowhere.pem"}, ("captures-none",)),
    ],
)
def test_a_choice_that_cannot_be_attacked_costs_no_earlier_result(
    run: Any, options: Any, said: tuple[str, ...]
) -> None:
    execute(run, with_keys(CHOICE, iterations=3))
    before = left_by(run)
    assert len(before) == 10
    with refused(*said):
        execute(run, with_keys(CHOICE, **options))
    assert left_by(run) == before


def test_results_of_who_was_not_chosen_stay_and_stale_repeats_go(run: Any) -> None:
    few = with_keys(CHOICE, iterations=3)
    execute(run, with_keys(few, repeats=2))
    before = left_by(run)
    others = [name for name in before if "client-1" in name]
    audit = Audit(run, with_keys(few, clients=["client-0"]))
    batches = audit.plan()
    assert left_by(run) == before
    list(audit.execute(batches))
    after = left_by(run)
    assert [name for name in after if "client-1" in name] == others
    assert [name for name in after if "client-0" in name] == [
        name for name in before if "client-0" in name and "repeat" not in name
    ]


def test_resume_repeats_what_was_refused_or_had_other_settings(run: Any) -> None:
    few = with_keys(CHOICE, iterations=3)
    execute(run, few)
    assert Audit(run, few, resume=True).plan() == []
    for other in (
        {"iterations": 4},
        {"seed": 9},
        {"restarts": 2},
        {"max_images": 1},
        {"iterations": None, "seconds": 0.5},
    ):
        plan = Audit(run, with_keys(few, **other), resume=True).plan()
        assert sum(len(batch.captures) for batch in plan) == 2, other
    execute(run, with_keys(few, iterations=4), resume=True)
    facts = Audit(run, few, resume=True).results()
    assert [r.budget.iterations for r in facts] == [4, 4]
    path = run.audit / "ig" / "round-0001--client-1.json"
    path.write_text(
        json.dumps(facts[1].to_dict() | {"refused": "a reason of the past", "images": []})
    )
    (again,) = execute(run, with_keys(few, iterations=4), resume=True)
    assert (again["client"], again["refused"]) == ("client-1", None)


def due(run: Any, choice: Any, caplog: Any) -> Any:
    """Clients that a resumed audit attacks again, and what it says of the results that go."""
    caplog.clear()
    audit = Audit(run, choice, resume=True)
    batches = audit.plan()
    if batches:
        audit.questions["reconstruction"].begin(resume=True)
    said = [r.getMessage() for r in caplog.records if "attacked again" in r.getMessage()]
    return sorted(c.client for batch in batches for c in batch.captures), " | ".join(said)


BOTH = ["client-0", "client-1"]
FEW = with_keys(CHOICE, iterations=3)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("package_versions", lambda: {"bract": "9.9", "torch": "0.1"}, "bract was .*, is 9.9; tor"),
        ("audit_code", lambda: "other", "the attacks' or the scorer's code changed"),
    ],
)
def test_resume_attacks_again_after_an_upgrade_and_says_what_changed(
    run: Any, caplog: Any, monkeypatch: Any, name: Any, value: Any, said: Any
) -> None:
    execute(run, FEW)
    assert due(run, FEW, caplog) == ([], "")
    monkeypatch.setattr(f"bract.audit.basis.{name}", value)
    clients, logged = due(run, FEW, caplog)
    assert clients == BOTH
    assert re.search(f"2 earlier results are attacked again: {said}", logged)


def test_resume_attacks_again_what_was_captured_anew_and_nothing_else(
    run: Any, caplog: Any
) -> None:
    execute(run, FEW)
    store = ObservationStore(run.captures)
    seen = store.load(run.captures / "round-0001" / "client-1")
    store.save(replace(seen, update={n: 2 * v for n, v in seen.update.items()}))
    assert due(run, FEW, caplog)[0] == ["client-1"]
    execute(run, FEW, resume=True)
    pruned = seen.declaration.updated({"defenses": [{"name": "pruning", "ratio": 0.5}]})
    store.save(replace(store.load(run.captures / "round-0001" / "client-1"), declaration=pruned))
    clients, logged = due(run, FEW, caplog)
    assert clients == ["client-1"]
    assert "1 earlier results are attacked again: what the capture declares changed" in logged


def test_resume_scores_again_on_another_truth_and_keeps_scores_whose_truth_has_gone(
    run: Any, caplog: Any
) -> None:
    execute(run, FEW)
    path = run.truth / "client-0" / "round-0001.safetensors"
    kept = load_file(path)
    save_truth(path.parent, 1, kept["images"].flip(3), kept["labels"])
    assert due(run, FEW, caplog) == (
        ["client-0"],
        "1 earlier results are attacked again: the truth changed",
    )
    execute(run, FEW, resume=True)
    path.unlink()
    assert due(run, FEW, caplog) == ([], "")


def test_resume_heeds_other_weak_seeds_where_the_tier_tries_them(run: Any, caplog: Any) -> None:
    adaptive = with_keys(FEW, tier="adaptive", weak_seeds=5)
    for choice in (FEW, adaptive):
        execute(run, choice)
    assert due(run, with_keys(FEW, weak_seeds=9), caplog) == ([], "")
    assert due(run, adaptive, caplog) == ([], "")
    clients, logged = due(run, with_keys(adaptive, weak_seeds=9), caplog)
    assert clients == BOTH
    check_named(logged, "audit.weak_seeds", 5, 9)


def test_an_adaptive_result_depends_on_the_clients_earlier_captures(run: Any, caplog: Any) -> None:
    first = with_keys(FEW, tier="adaptive", rounds=[1])
    second = with_keys(first, rounds=[2])
    store = ObservationStore(run.captures)
    seen = store.load(run.captures / "round-0001" / "client-0")
    store.save(replace(seen, round=2))
    execute(run, first)
    execute(run, second)
    assert due(run, second, caplog) == ([], "")
    store.save(replace(seen, update={n: 2 * v for n, v in seen.update.items()}))
    clients, logged = due(run, second, caplog)
    assert clients == ["client-0"]
    assert "the client's earlier captures changed" in logged


def test_resume_scores_what_was_unscored_where_the_truth_is_there_by_now(
    run: Any, tmp_path: Path
) -> None:
    few = with_keys(CHOICE, iterations=3)
    shutil.move(run.truth, tmp_path / "elsewhere")
    assert [r["scored"] for r in execute(run, few)] == [False, False]
    assert Audit(run, few, resume=True).plan() == []
    again = execute(run, with_keys(few, truth=tmp_path / "elsewhere"), resume=True)
    assert [r["scored"] for r in again] == [2, 2]


def test_baselines_are_about_the_original_that_an_image_was_matched_with(run: Any) -> None:
    """One of two images comes back, and it is the second: the baselines are about that one too."""
    observation = ObservationStore(run.captures).load(run.captures / "round-0001" / "client-0")
    kept = load_file(run.truth / "client-0" / "round-0001.safetensors")
    assert kept["labels"][0] != kept["labels"][1]
    second, other = kept["images"][1:], kept["images"][:1]
    hot = F.one_hot(kept["labels"][1:], 10).float()
    picks = [
        Trial(images=images, label_probabilities=hot, loss=1.0, attack="ig")
        for images in (second, 0.5 * other + 0.5 * second)
    ]
    result = Reconstruction(
        attack="ig",
        observation=observation.key,
        tier="oblivious",
        seed=0,
        trials=tuple(picks),
    )
    data = run.config().data
    judge = Judge(data, 0, "cpu", max_images=1)
    run.audit.mkdir()
    judged = judge.judge(
        Attempt(open_case(observation, tier="oblivious", max_images=1), result),
        Truth(kept["images"], kept["labels"]),
        run.audit / "one.json",
    )
    image = judged.images[0].to_dict()
    assert image["true_label"] == kept["labels"][1] and image["scores"]["mse"] == 0.0
    images, labels = load_test_data(data)
    mean = images[labels == kept["labels"][1]].mean(0, keepdim=True)
    assert image["baselines"]["class_mean"]["mse"] == pytest.approx(float(mse(mean, second)))
    for name in ("random_image", "prior_only"):
        assert image["baselines"][name]["mse"] > 0.0
    assert image["oracle"]["mse"] == 0.0
    assert image["oracle"]["rank"] is None


def strict(text: Any) -> Any:
    def refuse(constant: Any) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_leave_strict_json(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = float("nan")
    monkeypatch.setattr(image, "ssim", lambda images, _: torch.full((len(images),), nan))
    monkeypatch.setattr(judging, "signals", lambda *_, **__: Signals(scale=float("inf"), norm=nan))
    results = execute(run, with_keys(CHOICE, iterations=3))
    for facts in results:
        path = run.audit / "ig" / f"round-0001--{facts['client']}.json"
        assert strict(path.read_text()) | {"made": None} == facts
        assert facts["images"][0]["scores"]["ssim"] is None
        assert facts["signals"]["scale"] is None and facts["signals"]["norm"] is None
    assert "none of them with finite scores" in describe(AuditResult(**results[0]))
    print_json([{"loss": float("inf"), "pair": (nan, 1)}])
    assert strict(capsys.readouterr().out) == [{"loss": None, "pair": [None, 1]}]


def test_a_reconstruction_without_a_finite_loss_has_a_strict_summary() -> None:
    hot = torch.full((1, 10), 0.1)
    nan = float("nan")
    found = Reconstruction(
        attack="ig",
        observation="round-0001/a",
        tier="oblivious",
        seed=0,
        trials=(
            Trial(
                images=torch.zeros(1, 1, 8, 8),
                label_probabilities=hot,
                loss=nan,
                cosine=nan,
                loss_curve=[(0, nan), (1, float("inf")), (2, 0.5)],
            ),
        ),
        settings={"trials": [{"residual": -float("inf")}], "evidence": (nan, 1)},
    )
    facts = found.record().to_dict()
    assert strict(json.dumps(facts)) == facts
    assert facts["failed"] and facts["final_loss"] is None and facts["trials"][0]["loss"] is None
    assert facts["loss_curve"] == [[0, None], [1, None], [2, 0.5]]
    assert facts["settings"] == {"trials": [{"residual": None}], "evidence": [None, 1]}


def test_captures_of_somebodys_own_app_are_audited_unscored(run: Any, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs" / "captures"
    shutil.copytree(run.captures, theirs)
    results = execute(RunDirectory.open(theirs))
    assert [r["scored"] for r in results] == [0, 0]
    assert (theirs.parent / "audit" / "ig" / "round-0001--client-0.json").is_file()
    page = write_report(theirs.parent)
    assert "client-1" in page.read_text()


STEPS = 40
KILLED = f"""
import os, signal, sys
from bract.attacks.solve import descent
from bract.attacks.solve.checkpoints import write_atomically
from bract.cli.main import main

descent._CHECKPOINT_SECONDS = 0.0
write = descent.write_atomically

def write_and_die(path, content):
    write(path, content)
    if content["step"] == {STEPS // 2}:
        os.kill(os.getpid(), signal.SIGKILL)

descent.write_atomically = write_and_die
sys.argv = ["bract", "audit", *sys.argv[1:]]
main()
"""


class KilledError(BaseException):
    """Ends an audit, as a signal would, where no code of its own catches it."""


def goes_on(run: Any) -> None:
    """Check that an audit that was ended after half of its steps goes on from there."""
    choice = AuditRequest(attacks=["grnn"], iterations=STEPS, device="cpu")
    unfinished = run.audit / "grnn" / "unfinished"
    assert unfinished.stat().st_mode & 0o077 == 0
    (part,) = unfinished.rglob("*.part")
    done = torch.load(part, weights_only=True)["step"]
    assert done == STEPS // 2
    resumed = Audit(run, choice, resume=True)
    seen: list[float] = []
    results = [
        result.to_dict()
        for result in resumed.execute(
            resumed.plan(), lambda progress: seen.append(progress.fraction)
        )
    ]
    assert seen[0] >= done / STEPS, seen[:8]
    assert not unfinished.exists()
    whole = execute(run, choice)
    for one, other in zip(results, whole, strict=True):
        assert one["final_loss"] == pytest.approx(other["final_loss"], rel=0.2)


def test_an_audit_that_ends_early_goes_on_in_the_middle_of_its_attack(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = write_atomically

    def write_and_end(path: Path, content: Any) -> None:
        write(path, content)
        if content["step"] == STEPS // 2:
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(descent, "_CHECKPOINT_SECONDS", 0.0)
        patched.setattr(descent, "write_atomically", write_and_end)
        with pytest.raises(KilledError):
            execute(run, AuditRequest(attacks=["grnn"], iterations=STEPS, device="cpu"))
    goes_on(run)


@pytest.mark.processes
def test_an_audit_that_is_killed_goes_on_in_the_middle_of_its_attack(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of this process register models of the experiments; the killed one has none.
    monkeypatch.setattr("bract.audit.basis._foreign", lambda models: [])
    arguments = [str(run.root), "--attack", "grnn", "--budget", str(STEPS), "--device", "cpu"]
    audit = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert audit.returncode == -signal.SIGKILL, audit.stderr
    goes_on(run)


def test_baselines_do_not_go_by_which_upload_was_scored_first(run: Any) -> None:
    choice = with_keys(CHOICE, iterations=2, batch=1)
    found = []
    for order in (1, -1):
        audit = Audit(run, choice)
        results = audit.execute(audit.plan()[::order])
        found.append({r.client: r.to_dict()["baselines"] for r in results})
    assert found[0]["client-0"].keys() >= {"prior_only", "random_image"}
    assert found[0] == found[1]


def test_tiers_that_share_baselines_find_what_each_alone_finds(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(attack: Any) -> Any:
        made.append(attack.name)
        return prior_only(attack)

    monkeypatch.setattr(baselines, "prior_only", counted)
    few = with_keys(CHOICE, iterations=2, batch=1)

    def found(like: Audit | None, **keys: Any) -> tuple[Audit, list[Any]]:
        audit = Audit(run, with_keys(few, **keys), like=like)
        results = [r.to_dict() for r in audit.execute(audit.plan())]
        return audit, [(r["client"], r["baselines"], r["images"]) for r in results]

    first, _ = found(None)
    _, alone = found(None, tier="adaptive")
    assert len(made) == 2
    _, shared = found(first, tier="adaptive")
    assert len(made) == 2, "the baselines are made once"
    assert shared == alone
    found(first, tier="adaptive", seed=1)
    assert len(made) == 3, "of another seed they are others"


def test_an_estimate_may_be_left_out_and_is_made_when_it_is_asked_for_again(run: Any) -> None:
    few = with_keys(CHOICE, iterations=2)
    without = execute(run, with_keys(few, estimate=False), resume=True)
    assert all(r["signals"].get("estimate") is None for r in without)
    assert execute(run, with_keys(few, estimate=False), resume=True) == []
    again = execute(run, few, resume=True)
    assert [r["images"] for r in again] == [r["images"] for r in without]
    assert all(r["signals"]["estimate"] is not None for r in again)


@pytest.mark.usefixtures("ticking")
def test_a_budget_is_iterations_or_a_time(run: Any) -> None:
    assert audit_requests.parse_budget("2000") == {"iterations": 2000}
    assert (
        audit_requests.parse_budget("90s")
        == audit_requests.parse_budget(" 1.5 m ")
        == {"total_seconds": 90.0}
    )
    assert audit_requests.parse_budget("1h", each=True) == {"seconds": 3600.0}
    for text in ("", "0", "0s", "-5", "1.5", "soon", "5d"):
        with refused("usage", "--budget"):
            audit_requests.parse_budget(text)
    choice = request_of(
        run.root,
        {"attacks": ["ig"], **audit_requests.parse_budget("9s", each=True), "device": "cpu"},
    )
    assert (choice.iterations, choice.seconds) == (None, 9.0)
    results = execute(run, choice)
    assert [r["budget"]["iterations"] for r in results] == [None, None]
    assert [r["budget"]["seconds"] for r in results] == [9.0, 9.0]
    assert all(0 < trial["iterations"] < 10 for r in results for trial in r["trials"])
    assert "9 s an upload" in write_report(run.root).read_text()


def test_a_result_says_that_the_update_was_stored_rounded(run: Any) -> None:
    store = ObservationStore(run.captures)
    plain, other = list(store)
    update, loss = rounded(other.update, "bfloat16")
    store.save(replace(other, update=update, rounded=loss))
    before, after = execute(run)
    assert not any("rounded" in note for note in before["notes"])
    (note,) = [note for note in after["notes"] if "rounded" in note]
    assert "to bfloat16 (capture.dtype), by less than 1e-02 of their norm" in note
    assert after["signals"]["truth_check"]["cosine"] > 0.999
    assert plain.rounded is None


def test_a_run_whose_captures_are_elsewhere_says_how_to_get_them(tmp_path: Path) -> None:
    config = build_config({"name": "study", "capture": {"store": "s3://bucket/runs/"}})
    directory = RunDirectory(tmp_path / "study")
    directory.create(config)
    with refused("captures-none", "s3://bucket/runs/study", "study"):
        Audit(directory, CHOICE)


def test_the_same_figures_in_memory_from_disk_and_through_the_audit(run: Any) -> None:
    """One observation, three ways: bit for bit the same images and figures."""
    folder = run.captures / "round-0001" / "client-0"
    read = ObservationStore(run.captures).load(folder)
    kept = {
        group: {name: value.clone() for name, value in getattr(read, group).items()}
        for group in ("parameters", "update", "buffers")
    }
    in_memory = Observation(
        round=1,
        client="client-0",
        declaration=read.declaration,
        rounded=None,
        computed=False,
        **kept,
    )
    seed = derive_seed(0, "audit", "ig")
    budget = Budget(iterations=30, restarts=2)
    one, two = (
        reconstruct(o, "ig", budget=budget, seed=seed, device="cpu")[0] for o in (in_memory, read)
    )
    assert isinstance(two, Reconstruction)
    assert isinstance(one, Reconstruction)
    assert torch.equal(one.images, two.images)
    assert one.loss_curve == two.loss_curve and one.final_loss == two.final_loss
    (facts,) = execute(
        run,
        AuditRequest(attacks=["ig"], clients=["client-0"], iterations=30, restarts=2, device="cpu"),
    )
    assert facts["seed"] == seed
    assert facts["final_loss"] == one.final_loss
    assert facts["gradient_cosine"] == one.gradient_cosine
    assert [t["loss"] for t in facts["trials"]] == [t.loss for t in one.trials]
    truth = load_file(run.truth / "client-0" / "round-0001.safetensors")
    expected = score_images(one.images, Truth(truth["images"], truth["labels"])).rows
    for name in ("mse", "psnr", "ssim"):
        found = [image["scores"][name] for image in facts["images"]]
        assert found == [getattr(row, name) for row in expected]


def test_auto_is_audited_like_an_attack_and_names_what_it_chose(run: Any) -> None:
    choice = AuditRequest(attacks=["auto"], clients=["client-0"], iterations=20, device="cpu")
    (facts,) = execute(run, choice)
    assert facts["attack"] == "auto"
    assert facts["chosen_attack"] in {"best", "ig"}
    assert facts["method"] == facts["trials"][facts["chosen"]]["method"]
    assert facts["budget"]["iterations"] == 20
    (found,) = gather(run.root)["observations"]
    assert found["method_name"] in {"GRNN", "IG"}
    statistics = gather(run.root)["verdict"]["statistics"]
    assert f"settling blind on {found['method_name']})" in statistics
    assert Audit(run, choice, resume=True).plan() == []


def test_repeats_have_seeds_and_files_of_their_own_and_count_as_attempts(run: Any) -> None:
    choice = AuditRequest(
        attacks=["ig"], clients=["client-0"], iterations=5, repeats=2, device="cpu"
    )
    first, second = execute(run, choice)
    assert (first["repeat"], second["repeat"]) == (0, 1)
    assert first["seed"] != second["seed"] and first["final_loss"] != second["final_loss"]
    assert (run.audit / "ig" / "round-0001--client-0--repeat-1.json").is_file()
    facts = gather(run.root)
    assert [o["repeat"] for o in facts["observations"]] == [0, 1]
    row = facts["attacks"][0]
    assert (row["repeats"], row["uploads"], row["scored"]) == (2, 1, 4)
    assert "4 attempts at images" in facts["verdict"]["sentence"]
    (run.audit / "ig" / "round-0001--client-0--repeat-1.json").unlink()
    (left,) = Audit(run, choice, resume=True).plan()
    assert left.repeat == 1


def test_no_more_observations_are_in_memory_than_run_together(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Whoever keeps log records keeps what they name.
    caplog.set_level("INFO", "bract")
    store = ObservationStore(run.captures)
    template = store.load(run.captures / "round-0001" / "client-0")
    for number in (2, 3):
        store.save(replace(template, round=number))
    load, alive, most = ObservationStore.load, [], []

    def counting(self: Any, folder: Any) -> Any:
        found = load(self, folder)
        alive.append(folder)
        weakref.finalize(found, alive.remove, folder)
        return found

    monkeypatch.setattr(ObservationStore, "load", counting)
    monkeypatch.setitem(batches.MOST, "cpu", 4)
    choice = AuditRequest(attacks=["labels"], device="cpu")
    audit = Audit(run, choice)
    assert [len(batch.captures) for batch in audit.plan()] == [4] and not alive
    monkeypatch.setitem(batches.MOST, "cpu", 2)
    planned = audit.plan()
    assert [len(batch.captures) for batch in planned] == [2, 2]
    gc.collect()
    gc.disable()
    try:
        for _ in audit.execute(planned):
            most.append(len(alive))
    finally:
        gc.enable()
    assert max(most) == 2


def test_a_broken_capture_is_refused_by_name_when_it_is_reached(run: Any) -> None:
    (run.captures / "round-0001" / "client-1" / "update.safetensors").write_bytes(b"short")
    results = {r["client"]: r for r in execute(run)}
    assert "half-written or corrupted" in results["client-1"]["refused"]
    assert results["client-0"]["refused"] is None


def test_statistics_that_no_training_leaves_are_named_in_the_result(tmp_path: Path) -> None:
    config = build_config(
        {"name": "lied", "data": {"image_size": 16}, "model": {"name": "lenet-strided-bn"}}
    )
    directory = RunDirectory(tmp_path / "lied")
    directory.create(config)
    images, labels = load_test_data(config.data)
    seen = one_step(images[:1], labels[:1])
    name = next(n for n in seen.returned_buffers if n.endswith("running_var"))
    lie = seen.returned_buffers | {name: -seen.returned_buffers[name]}
    store = ObservationStore(directory.captures)
    store.save(replace(seen, returned_buffers=lie))
    store.save(replace(seen, client="client-1"))
    found = {r["client"]: r for r in execute(directory, with_keys(CHOICE, iterations=2))}
    (note,) = [n for n in found["client-0"]["notes"] if "left out" in n]
    assert f"returned in round 1 were left out, since no training leaves them: {name}" in note
    assert not [n for n in found["client-1"]["notes"] if "left out" in n]
