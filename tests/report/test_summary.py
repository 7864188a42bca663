"""The page for a data protection officer: its sections, its words, and one sheet of paper."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM
from refusals import refused

from bract.cli.printing import print_to_pdf
from bract.report import facts, read, write_report
from bract.report.words import left, threats
from bract.report.words.summary import BEYOND, TO_COMPLETE, summary
from bract.schema import Report, account
from bract.schema.report import QuestionFacts

HEADINGS = [
    "Whose data",
    "What was trained, and when",
    "What an operator of the server could learn",
    "With what effort",
    "What was tried",
    "What was not tried",
    "How large a leak could have been missed",
    "What to change, and when to examine again",
]


def sections(report: Report) -> dict[str, str]:
    found = summary(report).sections
    return {s.heading: " ".join([*s.sentences, *s.items]) for s in found}


def page_of(root: Path) -> str:
    write_report(root)
    return (root / "summary.html").read_text()


def test_it_answers_what_an_assessment_asks(make_run: Any) -> None:
    found = sections(facts.gather(make_run()))
    assert list(found) == HEADINGS
    assert "3 clients" in found["Whose data"] and "1,293 images" in found["Whose data"]
    trained = found["What was trained, and when"]
    assert "Model lenet on digits; 3 rounds, from 2026-02-25 06:13:20 UTC" in trained
    assert "No protection of the uploads is declared." in trained
    learned = found["What an operator of the server could learn"]
    assert re.search(
        r"Of 27 images that could be judged, counted anew in each round, [1-9] were reconstructed",
        learned,
    )
    assert "12 s of" in found[HEADINGS[3]]
    tried = "IG, by an attacker who takes the uploads as they are: 9 uploads of 3 clients"
    assert found["What was tried"].strip() == tried
    assert "search in a generator trained on public images" in found["What was not tried"]
    assert "(GGL" not in found["What was not tried"], "names of attacks are for the report"
    assert "Switch on a protection" in found[HEADINGS[7]]


@pytest.mark.parametrize("run", ["leaked", "none", "unscored", "refused", "bare"])
def test_its_words_are_for_readers_of_the_law(
    make_run: Any, writers: Any, parse: Any, run: str
) -> None:
    root = make_run(rounds=1, audit=run == "leaked")
    if run == "none":
        writers.audit(root, 1, "client-0", noise=1.2)
    if run == "unscored":
        writers.audit(root, 1, "client-0", truth=False)
    if run == "refused":
        writers.audit(root, 1, "client-0", images=0, scored=False, refused="encrypted")
    page = parse(page_of(root))
    assert not re.search(r"SSIM|PSNR|oracle|\bsafe|anonym|oblivious|cosine", page.text, re.I)
    assert "all the means reasonably likely to be used" in page.text
    assert "Art. 35(7)" in page.text and "recital 26" in page.text and "28/2024" in page.text
    assert all(line in page.text for line in TO_COMPLETE)
    assert page.images == [] and "script" not in page.tags


def test_a_result_without_a_leak_names_the_leak_that_agrees_with_it(
    make_run: Any, writers: Any
) -> None:
    root = make_run(rounds=1, audit=False)
    for name in ("client-0", "client-1", "client-2"):
        writers.audit(root, 1, name, noise=1.2)
    missed = sections(facts.gather(root))["How large a leak could have been missed"]
    # Clopper and Pearson's upper end for 0 of 3, at 95 %.
    assert f"0 % to {100 * (1 - 0.025 ** (1 / 3)):.0f} % of the images" in missed
    (root / "audit" / "ig" / "round-0001--client-1.json").unlink()
    (root / "audit" / "ig" / "round-0001--client-2.json").unlink()
    assert "nothing follows for other clients" in sections(facts.gather(root))[HEADINGS[6]]


def test_another_question_adds_its_sentences(make_run: Any) -> None:
    root = make_run()
    report = facts.gather(root)
    untried = BEYOND[threats.ANY_MEMBERSHIP]
    assert untried in sections(report)["What was not tried"]
    asked = QuestionFacts(
        question="membership",
        title="Who was in the data",
        level="found",
        sentence="3 of 10 members were found.",
        effort="It takes 20 models.",
        missed="An advantage below 4 % could have been missed.",
    )
    model = threats.threat_model(read.read_run(root), report.observations, None, [asked])
    found = sections(report.model_copy(update={"questions": [asked], "threat_model": model}))
    assert "Who was in the data: 3 of 10 members were found." in found[HEADINGS[2]]
    assert "20 models" in found[HEADINGS[3]] and "below 4 %" in found[HEADINGS[6]]
    assert untried not in found["What was not tried"]


def test_it_is_the_same_for_a_redacted_report(make_run: Any) -> None:
    report = facts.gather(make_run())
    assert summary(report.redact()) == summary(report)


def test_names_from_other_parties_are_text(make_run: Any, writers: Any) -> None:
    root = make_run(rounds=1)
    path = root / "run.json"
    name = "<img src=x onerror=alert(1)>"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"name": name}))
    page = page_of(root)
    assert name not in page and "&lt;img" in page


def test_without_a_browser_the_error_names_the_way(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_run(rounds=1)
    write_report(root)
    monkeypatch.setenv("PATH", "")
    with refused("package-missing", "summary.html"):
        print_to_pdf(root / "summary.html")
    assert not (root / "summary.pdf").exists()


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_it_is_printed_on_one_sheet(make_run: Any) -> None:
    root = make_run(clients=[f"university-hospital-of-somewhere-{i}" for i in range(9)], images=1)
    write_report(root)
    printed = print_to_pdf(root / "summary.html")
    assert printed == root / "summary.pdf" and printed.stat().st_mode & 0o777 == 0o600
    assert len(re.findall(rb"/Type\s*/Page[^s]", printed.read_bytes())) <= 2  # both sides


@pytest.mark.parametrize(
    ("name", "is_measured"),
    [
        *((name, True) for name in ("num-examples", "train_loss", "val-accuracy", "best_epoch")),
        *((name, True) for name in ("epsilon", "lr", "train_seconds", "loss_epoch_#", "acc_top#")),
        *((name, True) for name in ("trainLoss", "val_acc", "eval_accuracy", "loss", "epochs")),
        *((name, True) for name in ("f#", "val_f#_score", "F#Score", "r#", "acc#", "acc@#")),
        *((name, True) for name in ("mIoU", "rocAUC", "partition-id", "learning_rate", "l#_norm")),
        *((name, True) for name in ("local_steps", "epsilon_spent", "trained_loss", "seconds")),
        *((name, True) for name in ("random_key_accuracy", "defense_seconds", "test_loss")),
        *(
            (name, False)
            for name in ("last_target", "y", "argmax_true", "age", "acc_#", "positive")
        ),
        *((name, False) for name in ("num_samples_melanoma", "samples_cat", "accuracy_melanoma")),
        *((name, False) for name in ("loss_label", "batch_label", "time_of_death", "lossCat")),
        *((name, False) for name in ("acc_#_epoch_#", "loss#", "f", "n", "max", "loss_♂")),
        *((name, False) for name in ("loss_黑色素瘤", "accuracy_é", "of", "")),
    ],
)
def test_a_single_number_is_no_label_where_its_name_tells_a_measurement(
    name: str, is_measured: bool
) -> None:
    row = account.LeftRow(
        message="train",
        record="metrics",
        name=name,
        kind="number",
        amount="1 number",
        clients=1,
        replies=1,
    )
    found = left.could_hold_labels(account.LeftFacts(recorded="all", rows=[row]))
    assert found == ([] if is_measured else [name])


def test_several_numbers_of_a_metric_are_no_measurement_of_it() -> None:
    """Eight numbers ``acc0`` to ``acc7`` are of classes."""
    row = account.LeftRow(
        message="train", record="metrics", name="acc#", kind="number", amount="8 times 1 number",
        clients=1, replies=1,
    )  # fmt: skip
    assert left.could_hold_labels(account.LeftFacts(recorded="all", rows=[row])) == ["acc#"]
    steps = row.model_copy(update={"name": "acc_epoch#"})
    assert left.could_hold_labels(account.LeftFacts(recorded="all", rows=[steps])) == []


def test_a_flagged_count_names_the_clients_it_is_of() -> None:
    count = account.LeftRow(
        message="train", record="metrics", name="num-examples", kind="number",
        amount="1 whole number", clients=3, replies=15, reasons=["a count below 10"],
        flagged=["client-2"],
    )  # fmt: skip
    one = count.model_copy(update={"clients": 1, "replies": 5})
    of_some, of_all = left.shown_rows(account.LeftFacts(recorded="all", rows=[count, one]))
    assert of_some.reasons == ["A count below 10 (client-2)"]
    assert of_all.reasons == ["A count below 10"]


def test_a_question_without_an_answer_counts_as_not_tried(make_run: Any) -> None:
    asked = QuestionFacts(question="membership", title="Who", level="unknown", sentence="None.")
    root = make_run()
    report = facts.gather(root)
    model = threats.threat_model(read.read_run(root), report.observations, None, [asked])
    found = sections(report.model_copy(update={"questions": [asked], "threat_model": model}))
    assert "Who" not in found["What was tried"]
    assert BEYOND[threats.ANY_MEMBERSHIP] in found["What was not tried"]
