"""The facts of a run directory, whole and in pieces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import yaml
from golden import check_words
from refusals import refused
from reporting import gather

from bract import ObservationStore
from bract.report import facts as report_facts
from bract.report import release, write_report
from bract.report.page.render import render_summary
from bract.schema.capture import MISSED, OBSERVATION_SCHEMA, REMOVED, MissedCapture, RemovedRound
from bract.schema.report import REPORT_SCHEMA


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_whole_run_gives_every_fact(make_run: Any) -> None:
    facts = gather(make_run())
    assert facts["schema"] == REPORT_SCHEMA == 5
    assert facts["run"]["name"] == "digits-demo"
    assert facts["run"]["rounds_done"] == facts["run"]["rounds_planned"] == 3
    assert facts["run"]["started"] == "2026-02-25T06:13:20+00:00"
    assert facts["run"]["audit_seconds"] == pytest.approx(9 * 12.3)
    assert facts["run"]["training_seconds"] == pytest.approx(0.4 + 3 * 3.1)
    assert facts["config"]["rounds"] == 3
    assert len(facts["config_sha256"]) == 64
    assert [r["round"] for r in facts["rounds"]] == [0, 1, 2, 3]

    assert len(facts["observations"]) == 9
    assert facts["captures"] == 9
    assert facts["skipped"] == facts["refused"] == facts["failures"] == []


def test_the_worst_client_and_round_are_found(make_run: Any) -> None:
    facts = gather(make_run())
    worst = facts["observations"][facts["worst"]]
    assert (worst["client"], worst["round"]) == ("client-2", 1)
    assert worst["leaked"] == sum(image["leaked"] for image in worst["images"]) > 0
    row = next(c for c in facts["clients"] if c["client"] == "client-2")
    assert row["worst_round"] == 1
    assert row["examples"] == 432


def test_what_leaked_is_counted_the_same_everywhere(make_run: Any) -> None:
    facts = gather(make_run())
    leaked = sum(image["leaked"] for o in facts["observations"] for image in o["images"])
    total = next(row for row in facts["attacks"] if row["client"] is None)
    parts = [row for row in facts["attacks"] if row["client"] is not None]
    assert total["leaked"] == leaked == sum(row["leaked"] for row in parts)
    assert total["scored"] == 27 == sum(row["scored"] for row in parts)
    assert sum(row["leaked"] for row in facts["leakage"]) == leaked
    assert facts["verdict"]["headline"]["leaked"] == leaked


def test_pictures_are_named_from_the_run_directory(make_run: Any) -> None:
    root = make_run()
    for observation in gather(root)["observations"]:
        for image in observation["images"]:
            assert (root / image["reconstruction"]).is_file()
            assert (root / image["original"]).is_file()


def test_a_picture_outside_its_folder_is_left_out(make_run: Any) -> None:
    root = make_run(rounds=1)
    path = root / "audit" / "ig" / "round-0001--client-0.json"
    content = json.loads(path.read_text())
    content["images"][0]["original"] = "../../config.yaml"
    content["images"][1]["original"] = str(root / "run.json")
    path.write_text(json.dumps(content))
    images = gather(root)["observations"][0]["images"]
    assert images[0]["original"] is images[1]["original"] is None
    assert images[2]["original"] is not None


def test_a_run_nobody_attacked_has_facts_but_no_scores(make_run: Any) -> None:
    facts = gather(make_run(audit=False))
    assert facts["verdict"]["level"] == "not-attacked"
    check_words("verdicts", "not attacked", facts["verdict"]["sentence"])
    assert facts["worst"] is None and facts["attacks"] == [] and facts["leakage"] == []
    assert [c["strongest"] for c in facts["clients"]] == [None, None, None]


def test_without_the_truth_what_fits_its_upload_is_told(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1, audit=False)
    proof = {"error": 2e-4, "residual": 3e-7, "rounding": 4e-6}
    writers.audit(root, 1, "client-0", images=1, truth=False, certificate=proof)
    writers.audit(root, 1, "client-1", images=2, truth=False)
    facts = gather(root)
    verdict = facts["verdict"]
    assert verdict["level"] == "unscored"
    shown = [o["certificate"] for o in facts["observations"]]
    assert shown == [proof, None]
    words = " ".join([verdict["sentence"], verdict["explanation"], verdict["statistics"]])
    check_words("verdicts", "exact for the upload, without the originals", words)
    assert "1 exact for the upload" in verdict["tiers"][0]["sentence"]
    page = write_report(root).read_text()
    assert page.count("fits exactly</span>") >= 1


def test_without_the_truth_nothing_is_scored(make_run: Any) -> None:
    facts = gather(make_run(truth=False))
    assert facts["verdict"]["level"] == "unscored"
    shown = facts["observations"][facts["worst"]]
    assert (shown["client"], shown["round"]) == ("client-2", 1)
    assert shown["gradient_cosine"] == max(o["gradient_cosine"] for o in facts["observations"])
    assert all(i["scores"] is None for o in facts["observations"] for i in o["images"])
    assert all(i["leaked"] is None for o in facts["observations"] for i in o["images"])
    assert facts["attacks"][0]["ssim"]["mean"] is None


@pytest.mark.parametrize("part", ["run.json", "config.yaml", "metrics.jsonl"])
def test_a_missing_file_leaves_the_other_facts(make_run: Any, part: str) -> None:
    root = make_run()
    (root / part).unlink()
    facts = gather(root)
    assert facts["run"]["name"] == "digits-demo"
    assert len(facts["observations"]) == 9


def test_half_written_files_are_named_and_left_out(make_run: Any) -> None:
    root = make_run()
    with (root / "metrics.jsonl").open("a") as stream:
        stream.write('{"round": 4, "seco')
    (root / "audit" / "ig" / "round-0002--client-1.json").write_text('{"schema": 5, "round"')
    (root / "captures" / "round-0003" / "client-0" / "observation.json").unlink()
    edit(root / "audit" / "ig" / "round-0003--client-1.json", tier="omniscient")
    facts = gather(root)
    reasons = {s["file"]: s["reason"] for s in facts["skipped"]}
    assert set(reasons) == {
        "metrics.jsonl",
        "audit/ig/round-0002--client-1.json",
        "audit/ig/round-0003--client-1.json",
        "captures/round-0003/client-0/observation.json",
    }
    assert "line 5" in reasons["metrics.jsonl"]
    assert "tier" in reasons["audit/ig/round-0003--client-1.json"]
    assert len(facts["observations"]) == 7 and facts["captures"] == 8
    assert [r["round"] for r in facts["rounds"]] == [0, 1, 2, 3]


def test_a_result_that_cannot_be_read_is_told_before_any_verdict_but_a_leak(make_run: Any) -> None:
    """A damaged line of the metrics is not: no verdict rests on it."""
    root = make_run(clients=["client-0"], rounds=1)
    whole = gather(root)["verdict"]["sentence"]
    with (root / "metrics.jsonl").open("a") as stream:
        stream.write('{"round": 4, "seco')
    assert gather(root)["verdict"]["sentence"] == whole
    for result in (root / "audit").glob("*/*.json"):
        result.write_text('{"schema": 5, "round"')
    facts = gather(root)
    check_words("verdicts", "results that cannot be read", facts["verdict"]["sentence"])
    unread = facts["threat_model"]["unread"]
    assert unread.startswith("what 1 file of the run held")
    assert unread in facts["threat_model"]["not_tried"]
    sheet, _ = release.write_release(root, [], [])
    assert f"Not examined: {unread}." in sheet.open_points and unread in sheet.not_covered


def test_a_configuration_that_cannot_be_read_is_told_since_it_holds_the_rule(make_run: Any) -> None:
    root = make_run(clients=["client-0"], rounds=1)
    (root / "config.yaml").write_text("audit: [")
    assert gather(root)["threat_model"]["unread"].endswith("(config.yaml)")


def test_the_summary_of_unscored_results_tells_of_those_that_cannot_be_read(make_run: Any) -> None:
    """The name of an attack keeps its letters."""
    root = make_run(rounds=1, truth=False)
    next((root / "audit").glob("*/*.json")).write_text("{")
    report = report_facts.gather(root)
    assert report.verdict.level == "unscored"
    start = "1 file of the run could not be read; of the rest: "
    assert report.verdict.sentence.startswith(f"{start}IG ")
    assert start in str(render_summary(report))


def test_a_line_that_is_being_written_is_no_damage(make_run: Any) -> None:
    root = make_run(clients=["client-0"], rounds=1)
    line = RemovedRound(round=1, captures=3, size=9, time=1.0).model_dump_json(by_alias=True)
    path = root / "captures" / REMOVED
    path.write_text(line[:5])
    rest = Timer(0.02, lambda: path.write_text(f"{line}\n"))
    rest.start()
    assert gather(root)["skipped"] == []
    rest.join()


@pytest.mark.parametrize("name", ["left", "claims", "missed", "removed"])
def test_a_damaged_list_beside_the_captures_is_told(make_run: Any, name: str) -> None:
    root = make_run(clients=["client-0"], rounds=1)
    path = root / "captures" / f"{name}.jsonl"
    path.write_text("{}\n[")
    facts = gather(root)
    assert [one["file"] for one in facts["skipped"]] == [f"captures/{name}.jsonl"] * 2
    assert facts["threat_model"]["unread"].endswith(f"(captures/{name}.jsonl)")
    path.unlink()
    path.mkdir()
    assert gather(root)["skipped"][0]["reason"] == "Is a directory"


def test_replies_that_were_not_captured_are_listed(make_run: Any) -> None:
    root = make_run()
    why = "client-1: cannot be written: No space left on device"
    lines = [MissedCapture(round=r, node_id="7", reason=why) for r in (2, 3, 3)]
    (root / "captures" / MISSED).write_text(
        "".join(f"{line.model_dump_json(by_alias=True)}\n" for line in lines)
    )
    check_words("notes", "replies not captured", "\n".join(gather(root)["notes"]))


def test_what_the_operator_chose_not_to_capture_or_keep_is_said(make_run: Any) -> None:
    root = make_run(rounds=4)
    assert not any("capture" in note for note in gather(root)["notes"])
    edited = yaml.safe_load((root / "config.yaml").read_text())
    edited["capture"] |= {"every": 3, "fraction": 0.25, "clients": ["client-0"], "keep_rounds": 1}
    (root / "config.yaml").write_text(yaml.safe_dump(edited))
    lines = [RemovedRound(round=r, captures=3, size=9, time=1.0) for r in (1, 2, 3)]
    (root / "captures" / REMOVED).write_text(
        "".join(f"{line.model_dump_json(by_alias=True)}\n" for line in lines)
    )
    for number in (1, 2):  # the third was captured again by a resumed run
        shutil.rmtree(root / "captures" / f"round-000{number}")
    check_words("notes", "sampled and removed captures", "\n".join(gather(root)["notes"]))


def test_a_report_says_where_captures_are_that_are_not_here(make_run: Any) -> None:
    root = make_run(rounds=1)
    edited = yaml.safe_load((root / "config.yaml").read_text())
    edited["capture"]["store"] = "s3://bucket/x"
    (root / "config.yaml").write_text(yaml.safe_dump(edited))
    assert not any("bract fetch" in note for note in gather(root)["notes"])
    shutil.rmtree(root / "captures")
    (note,) = [n for n in gather(root)["notes"] if "bract fetch" in n]
    assert "s3://bucket/x/digits-demo" in note


def test_no_captured_round_is_removed_while_a_report_reads(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run(rounds=1, audit=False)
    describe = ObservationStore.describe

    def meanwhile(self: ObservationStore, folder: Path) -> Any:
        assert ObservationStore(root / "captures").retire(keep=0, before=9) == []
        return describe(self, folder)

    monkeypatch.setattr(ObservationStore, "describe", meanwhile)
    assert gather(root)["captures"] == 3


def test_many_missed_rounds_are_a_short_note(make_run: Any) -> None:
    root = make_run()
    lines = [MissedCapture(round=r, node_id="7", reason="full") for r in (2, *range(5, 90), 99)]
    (root / "captures" / MISSED).write_text(
        "".join(f"{line.model_dump_json(by_alias=True)}\n" for line in lines)
    )
    check_words("notes", "many replies not captured", "\n".join(gather(root)["notes"]))


def test_a_round_run_again_counts_once_with_its_later_figures(make_run: Any) -> None:
    root = make_run()
    with (root / "metrics.jsonl").open("a") as stream:
        row = {"schema": 3, "round": 2, "global": {"loss": 1.0, "accuracy": 0.5}}
        stream.write(json.dumps(row) + "\n")
    rounds = gather(root)["rounds"]
    assert [r["round"] for r in rounds] == [0, 1, 2, 3]
    assert rounds[2]["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("run.json", 2),
        ("audit/ig/round-0001--client-0.json", 5),
        (
            "captures/round-0001/client-0/observation.json",
            f"6 and {OBSERVATION_SCHEMA}",
        ),
    ],
)
def test_another_schema_is_refused_with_the_version_found_and_wanted(
    make_run: Any, name: str, wanted: object
) -> None:
    root = make_run(rounds=1)
    edit(root / name, schema=0)
    with refused("schema-version", name, "schema", 0, wanted):
        gather(root)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with refused("file-missing", tmp_path):
        gather(tmp_path / "nowhere")
    with refused("file-missing", tmp_path):
        gather(tmp_path)


def test_refusals_and_failures_keep_their_reasons(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1)
    writers.audit(
        root, 2, "client-1", images=0, refused="the update is encrypted (paillier)", scored=False
    )
    with (root / "metrics.jsonl").open("a") as stream:
        failure = {"client": "client-1", "reason": "out of memory on cuda:0"}
        stream.write(json.dumps({"schema": 3, "round": 2, "failures": [failure]}) + "\n")
    facts = gather(root)
    assert facts["refused"] == [
        {
            "attack_name": "IG",
            "tier": "oblivious",
            "round": 2,
            "client": "client-1",
            "refused": "the update is encrypted (paillier)",
        }
    ]
    assert facts["failures"] == [
        {"round": 2, "client": "client-1", "reason": "out of memory on cuda:0"}
    ]
    row = next(c for c in facts["clients"] if c["client"] == "client-1")
    assert (row["refused"], row["failures"], row["attacked"]) == (1, 1, 1)


def test_facts_are_strict_json_whatever_the_scores(make_run: Any) -> None:
    root = make_run(rounds=1)
    path = root / "audit" / "ig" / "round-0001--client-0.json"
    content = json.loads(path.read_text())
    content["images"][0]["scores"].update(psnr=float("inf"), ssim=float("nan"))
    path.write_text(json.dumps(content))
    facts = gather(root)
    scores = facts["observations"][0]["images"][0]["scores"]
    assert scores["psnr"] == 100.0 and scores["ssim"] is None
    json.dumps(facts, allow_nan=False)
    check_words("notes", "a score that is not finite", "\n".join(facts["notes"]))
    assert facts["attacks"][0]["scored"] == 9
