"""Summary, report and release sheet say the same of a run: each fact is computed once."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from bract.cli import release as release_command
from bract.cli import report as report_command
from bract.errors import LeakageError
from bract.report import depends, facts, read
from bract.report import left as left_rows
from bract.report.words import left, reach, summary
from bract.schema import Report
from bract.schema import left as records

Texts = dict[str, str]

PAGES = ("summary", "report", "release")


@pytest.fixture
def pages(parse: Any) -> Callable[..., Texts]:
    """Return ``write(root, months=None)``: the text of each page of a run, in plain spaces."""

    def write(root: Path, months: int | None = None) -> Texts:
        report_command.report_run(root, redact=None, as_json=False, months=months)
        with pytest.raises(LeakageError):
            release_command.release_run(root, files=[], limits=["leaked>0"], months=months)
        return {name: _plain(parse((root / f"{name}.html").read_text()).text) for name in PAGES}

    return write


def lacking(text: str, *words: str) -> list[str]:
    """Return which of some words a page lacks."""
    return [one for one in words if _plain(one) not in text]


def _plain(text: str) -> str:
    return " ".join(text.replace("\u00a0", " ").split())


@pytest.fixture
def crossed(make_run: Any, writers: Any) -> Path:
    """Two attacks: IG is stronger over all clients, GRNN on client-2 alone."""
    root: Path = make_run(rounds=2, audit=False)
    for number in (1, 2):
        writers.audit(root, number, "client-0", noise=0.06, first=0)
        writers.audit(root, number, "client-1", noise=0.06 if number == 1 else 1.2, first=20)
        writers.audit(root, number, "client-2", noise=1.2, first=40)
        writers.audit(root, number, "client-2", attack="grnn", noise=0.02, first=40)
        writers.audit(root, number, "client-0", attack="grnn", noise=1.2, first=0)
        writers.audit(root, number, "client-1", attack="grnn", noise=1.2, first=20)
    return root


def test_every_page_shows_the_average_the_worst_and_the_baseline(crossed: Path, pages: Any) -> None:
    report = facts.gather(crossed)
    lines = reach.reach_lines(report.reach, left.openly(report.left))
    assert [row.scope for row in report.reach] == ["all", "client", "upload", "record"]
    note = reach.reach_note(report.reach, report.verdict.thresholds.level)
    for name, text in pages(crossed).items():
        rows = [f"{one.of} {one.leaked} {one.score} {one.guess} {one.by}" for one in lines]
        assert lacking(text, *rows, note) == [], name


def test_each_row_of_reach_has_the_guess_of_its_own_examples(crossed: Path) -> None:
    path = crossed / "audit" / "grnn" / "round-0001--client-2.json"
    content = json.loads(path.read_text())
    for image in content["images"]:
        image["baselines"] = {"class_mean": {"ssim": 0.31}, "prior_only": {"ssim": 0.05}}
    path.write_text(json.dumps(content))
    report = facts.gather(crossed)
    rows = {row.scope: row for row in report.reach}
    client = next(a for a in report.attacks if (a.client, a.attack_name) == ("client-2", "GRNN"))
    upload = next(
        o for o in report.observations if (o.client, o.round, o.attack) == ("client-2", 1, "grnn")
    )
    upload_best = max((b.ssim or 0.0, name) for name, b in upload.baselines.items())
    assert (rows["client"].guess, rows["client"].guess_score) == client.best_baseline
    assert (rows["upload"].guess_score, rows["upload"].guess) == upload_best
    assert (rows["record"].guess, rows["record"].guess_score) == ("class_mean", 0.31)


def test_the_headline_is_of_the_worst_upload_of_any_attack(crossed: Path, pages: Any) -> None:
    report = facts.gather(crossed)
    rows = {row.scope: row for row in report.reach}
    assert rows["all"].attack_name == "IG" and rows["upload"].attack_name == "GRNN"
    assert (rows["client"].client, rows["upload"].client) == ("client-2", "client-2")
    worst = report.observations[report.worst or 0]
    upload = rows["upload"]
    assert (worst.client, worst.round) == (upload.client, upload.round)
    expected = f"{upload.scored} images attacked of client-2 in round {upload.round}"
    for name, text in pages(crossed).items():
        assert expected in text, name
    assert "by IG" in report.verdict.explanation


def test_a_client_s_row_is_of_one_attack(crossed: Path) -> None:
    path = crossed / "audit" / "grnn" / "round-0002--client-0.json"
    content = json.loads(path.read_text())
    content["images"][0]["scores"]["ssim"] = 0.999
    path.write_text(json.dumps(content))
    report = facts.gather(crossed)
    for client in report.clients:
        strongest = client.strongest
        assert strongest is not None
        its = [
            o
            for o in report.observations
            if o.row_key == strongest.row_key and o.client == client.client
        ]
        assert client.best_ssim == strongest.ssim.best
        assert client.worst_round in {o.round for o in its}
    assert {c.client: c.strongest.attack_name for c in report.clients if c.strongest} == {
        "client-0": "IG", "client-1": "IG", "client-2": "GRNN",
    }  # fmt: skip


def test_a_round_counts_each_upload_once_and_names_the_attacks(crossed: Path, pages: Any) -> None:
    report = facts.gather(crossed)
    assert [(r.round, r.uploads, r.images, r.scored) for r in report.by_round] == [
        (1, 3, 9, 9), (2, 3, 9, 9),
    ]  # fmt: skip
    first = report.by_round[0]
    worst = {
        client: max(o.leaked for o in report.observations if (o.round, o.client) == (1, client))
        for client in ("client-0", "client-1", "client-2")
    }
    assert first.leaked == sum(worst.values())
    assert set(first.attacks) == {"IG, oblivious", "GRNN, oblivious"}
    text = pages(crossed)["report"]
    assert lacking(text, f"{first.leaked} of 9 images leaked, {reach.by_round(first)}") == []


def test_pages_agree_on_clients_rounds_and_uploads(make_run: Any, pages: Any) -> None:
    root = make_run()
    (root / "audit" / "ig" / "round-0003--client-1.json").unlink()
    report = facts.gather(root)
    assert (report.captures, report.attacked) == (9, 8)
    text = pages(root)
    assert lacking(text["summary"], "1 of 9 stored uploads", "8 uploads of 3 clients") == []
    assert lacking(text["release"], "1 of 9 stored uploads") == []
    assert lacking(text["report"], "1 of the 9 captured uploads") == []
    for name in ("summary", "report"):
        assert lacking(text[name], "3 clients", "3 rounds") == []


def test_the_summary_and_the_report_leave_the_same_things_untried(
    make_run: Any, pages: Any
) -> None:
    root = make_run()
    report = facts.gather(root)
    named = [*report.threat_model.not_tried, *report.threat_model.out_of_scope]
    text = pages(root)
    for line, words in summary.BEYOND.items():
        assert (words in text["summary"]) == (line in named) == (words in text["release"])
    sheet = json.loads((root / "release.json").read_text())
    assert sheet["not_covered"] == summary.not_tried(report)
    assert lacking(text["release"], f"{len(sheet['not_covered'])} matters not examined") == []
    for page in ("summary", "release"):
        assert lacking(text[page], *sheet["changes"]) == [] != sheet["changes"]


def test_without_a_claim_pages_say_so_and_name_the_measured_unit(make_run: Any, pages: Any) -> None:
    text = pages(make_run())
    for name in ("summary", "report"):
        unit = "one image in one upload (reconstruction)"
        assert lacking(text[name], "No claim was made", unit) == []


@pytest.mark.parametrize(
    ("encryption", "expected"),
    [("none", "can read every update"), ("paillier", "receives the updates encrypted")],
)
def test_the_summary_names_who_receives_what(
    make_run: Any, writers: Any, parse: Any, encryption: str, expected: str
) -> None:
    root = make_run(rounds=1, audit=False)
    for name in ("client-0", "client-1", "client-2"):
        writers.capture(root, 1, name, encryption=encryption)
    report_command.report_run(root, redact=None, as_json=False)
    text = _plain(parse((root / "summary.html").read_text()).text)
    assert (
        lacking(text, f"the operator of the server, who {expected}.", "Each client receives") == []
    )


def test_the_smallest_count_is_the_least_that_any_client_declared(
    make_run: Any, pages: Any
) -> None:
    root = make_run()
    for path in (root / "captures").glob("*/client-1/observation.json"):
        content = json.loads(path.read_text())
        content["declaration"]["num_examples"] = 7
        path.write_text(json.dumps(content))
    said = (
        "The smallest count of people or examples that left a site is 7 (num-examples of client-1)."
    )
    text = pages(root)
    assert said in text["summary"] and said in text["report"]


def _left(name: str, value: str | None) -> records.LeftReply:
    flag = records.Flag(rule=left_rows.SMALL_COUNT, reason="a count")
    thing = records.LeftThing(
        source="metrics", record="metrics", name=name, kind="number", dtype="int", value=value,
        flags=(flag,),
    )  # fmt: skip
    return records.LeftReply(node_id="1", client="client-2", message="query", things=(thing,))


@pytest.mark.parametrize(
    ("value", "expected"), [("3", 3), ("[0, 12, 5]", 5), (None, None), ("[0]", None)]
)
def test_a_small_count_has_its_value_where_it_was_written_down(
    make_run: Any, value: str | None, expected: int | None
) -> None:
    files = read.read_run(make_run())
    assert (found := left_rows.smallest_count(files)) is not None and found.value == 430
    files.left = [_left("patients", value)]
    found = left_rows.smallest_count(files)
    assert found is not None
    assert (found.client, found.name, found.value) == ("client-2", "patients", expected)
    said = left.smallest(left_rows.left_facts(files))
    assert (str(expected) if expected else "not written down") in said and "client-2" in said


def _things(root: Path, **rules: str) -> None:
    """Write that one reply held things of these names, each flagged by one rule."""
    things = tuple(
        records.LeftThing(
            source="metrics", record="metrics", name=name, kind="numbers", dtype="int",
            shape=(3,), flags=(records.Flag(rule=rule, reason="a reason"),),
        )
        for name, rule in rules.items()
    )  # fmt: skip
    reply = records.LeftReply(node_id="1", client="client-2", message="query", things=things)
    (root / "captures" / "left.jsonl").write_text(reply.model_dump_json(by_alias=True) + "\n")


@pytest.mark.parametrize("noise", [1.2, 0.02])
def test_what_was_sent_openly_leads_every_page(
    make_run: Any, writers: Any, pages: Any, noise: float
) -> None:
    root = make_run(rounds=1, audit=False)
    writers.audit(root, 1, "client-0", noise=noise)
    _things(root, ages="values", few="small-count", ward="names")
    report = facts.gather(root)
    sent = "Sent openly, for the server to read without any attack: ages; ward."
    verdict = report.verdict.sentence
    leaked = report.verdict.level == "leaked"
    assert leaked == (noise < 1)
    words = f"{verdict} {sent}" if leaked else f"{sent} {verdict}"
    stop = "Stop sending ages; ward, or write down why each must leave a site."
    found = pages(root)
    for name, text in found.items():
        assert lacking(text, words) == [], name
    assert lacking(found["summary"], stop, "It can read ages; ward as they were sent.") == []
    assert report.verdict.next_steps[0].text == stop and stop in found["report"]


def test_a_count_alone_is_not_called_sent_openly(make_run: Any, pages: Any) -> None:
    root = make_run()
    _things(root, few="small-count")
    assert facts.gather(root).verdict.next_steps[0].section != "left"
    assert not [name for name, text in pages(root).items() if "Sent openly" in text]


def test_examples_that_no_attack_looked_for_are_not_tried(make_run: Any, pages: Any) -> None:
    root = make_run()
    looked = max(len(o.images) for o in facts.gather(root).observations)
    rest = f"the other images of larger uploads: at most {looked} were looked for in each"
    for name, text in pages(root).items():
        assert lacking(text, rest) == [], name
    for path in (root / "captures").glob("*/*/observation.json"):
        content = json.loads(path.read_text())
        content["declaration"]["num_examples"] = looked
        path.write_text(json.dumps(content))
    for name, text in pages(root).items():
        assert rest not in text, name


def test_labels_are_those_of_the_attack_that_names_most(crossed: Path, pages: Any) -> None:
    for path in (crossed / "audit" / "grnn").glob("*.json"):
        content = json.loads(path.read_text())
        content["label_accuracy"] = 1.0 if "client-1" in path.name else 0.9
        path.write_text(json.dumps(content))
    for path in (crossed / "audit" / "ig").glob("*.json"):
        content = json.loads(path.read_text())
        content["label_accuracy"] = 0.25
        path.write_text(json.dumps(content))
    said = "were named correctly, by GRNN; at client-1 100 %, by GRNN."
    assert lacking(pages(crossed)["summary"], said) == []


def test_the_next_examination_is_due_a_year_after_the_oldest_result(
    make_run: Any, pages: Any
) -> None:
    root = make_run()
    for number, path in enumerate(sorted((root / "audit" / "ig").glob("*.json"))):
        content = json.loads(path.read_text())
        made = "2026-03-31T10:00:00+00:00" if number == 4 else "2026-04-10T10:00:00+00:00"
        path.write_text(json.dumps(content | {"made": made}))
    for months, due in ((None, "2027-03-31"), (6, "2026-09-30")):
        for name, text in pages(root, months).items():
            said = (f"Examine again by {due}", "makes these findings stale earlier")
            assert lacking(text, *said) == [], name


def test_a_result_without_a_date_counts_from_the_training(make_run: Any) -> None:
    found = facts.gather(make_run()).examine
    assert (found.examined, found.due, found.overdue) == ("2026-02-25", "2027-02-25", False)


def test_nothing_examined_has_no_next_examination(make_run: Any) -> None:
    report = facts.gather(make_run(audit=False))
    assert report.examine.due is None and report.reach == [] and report.by_round == []
    assert reach.examined_again(report.examine).startswith("Nothing was examined")


@pytest.mark.parametrize(
    ("day", "months", "expected"),
    [
        (date(2026, 11, 29), 12, date(2027, 11, 29)),
        (date(2026, 8, 31), 6, date(2027, 2, 28)),
        (date(2024, 2, 29), 12, date(2025, 2, 28)),
        (date(2026, 12, 1), 1, date(2027, 1, 1)),
        (date(2026, 1, 31), 120, date(2036, 1, 31)),
    ],
)
def test_months_are_counted_by_the_calendar(day: date, months: int, expected: date) -> None:
    assert depends.later(day, months) == expected


def test_a_release_after_that_day_is_not_ready(
    make_run: Any, writers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = make_run()
    writers.membership(root)
    out = tmp_path / "model.bin"
    out.write_bytes(b"weights")
    assert release_command.release_run(root, files=[out], limits=["leaked>999"]).is_file()
    monkeypatch.setattr(depends, "today", lambda: date(2027, 2, 26))
    with pytest.raises(LeakageError):
        release_command.release_run(root, files=[out], limits=["leaked>999"])
    sheet = json.loads((root / "release.json").read_text())
    assert sheet["examine"]["overdue"] and len(sheet["open_points"]) == 1
    assert lacking(sheet["open_points"][0], "That day has passed.") == []


def test_the_configuration_sets_the_months(make_run: Any) -> None:
    root = make_run()
    path = root / "config.yaml"
    path.write_text(path.read_text().replace("examine_again_months: 12", "examine_again_months: 3"))
    assert facts.gather(root).examine.due == "2026-05-25"


def test_a_tier_without_a_limit_has_not_passed(make_run: Any, parse: Any) -> None:
    root = make_run()
    with pytest.raises(LeakageError):
        release_command.release_run(root, files=[], limits=["leaked>0@adaptive"])
    sheet = json.loads((root / "release.json").read_text())
    tier = next(row for row in sheet["tiers"] if row["tier"] == "oblivious")
    assert tier["tried"] and not tier["limited"] and not tier["passed"]
    assert lacking(" ".join(sheet["open_points"]), "no limit is about it") == []
    assert "no limit" in parse((root / "release.html").read_text()).text


def test_a_report_that_is_read_again_is_the_same(crossed: Path) -> None:
    report = facts.gather(crossed)
    again = Report.parse_text(report.to_text().encode(), source="report.json")
    assert again == report and again.redact().reach == report.reach
