"""Whether uploads may be judged is asked once, and every rendering listens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from reporting import gather

from bract.cli.watch import watch_run
from bract.report import run_outcome, write_report

CHECKS: dict[str, dict[str, Any]] = {
    "misdescribed": {
        "state": "contradicted",
        "cosine": 0.12,
        "reason": "the client's steps, repeated on what it kept, give another (cosine 0.120)",
    },
    "unconfirmed": {
        "state": "open",
        "failing": ["fc.bias does not sum to 0"],
        "reason": "the client kept nothing, and fc.bias does not sum to 0",
    },
    "none-leaked": {
        "state": "confirmed",
        "cosine": 1.0,
        "reason": "the client's steps, repeated on what it kept, give it (cosine 1.000000)",
    },
}

NO_LEAK = re.compile(r"\b0 of (the )?\d|\b[Nn]one of the \d|\b[Nn]o attacker|\b0 were")
"""Words that conclude that nothing leaked."""


def checked_run(make_run: Any, writers: Any, check: dict[str, Any]) -> Path:
    root: Path = make_run(clients=["client-0"], rounds=1, audit=False)
    path = writers.audit(root, 1, "client-0", noise=1.2)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"check": check}))
    answer = {
        "schema": 1,
        "question": "membership",
        "clients": [
            {
                "client": "client-0",
                "members": 20,
                "non_members": 20,
                "chance": 0.8,
                "detectable": {"auc": 0.7},
                "scores": [
                    {
                        "attacker": "loss",
                        "title": "Loss",
                        "auc": 0.5,
                        "auc_low": 0.4,
                        "auc_high": 0.6,
                    }
                ],
            }
        ],
        "checks": [check | {"round": 1, "client": "client-0"}],
    }
    kept = root / "audit" / "questions" / "membership" / "run.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(answer))
    return root


@pytest.mark.parametrize("level", CHECKS)
def test_no_rendering_says_that_an_unjudged_upload_leaked_nothing(
    make_run: Any, writers: Any, parse: Any, capsys: Any, level: str
) -> None:
    root = checked_run(make_run, writers, CHECKS[level])
    page = parse(write_report(root).read_text()).text
    summary = parse((root / "summary.html").read_text()).text
    facts = json.loads((root / "report.json").read_text())
    watch_run(root, redact=False, once=True, as_json=False)
    terminal = capsys.readouterr().err
    spoken = "\n".join(_strings(facts))
    judged = level == "none-leaked"
    for name, text in {"page": page, "summary": summary, "watch": terminal, "json": spoken}.items():
        found = NO_LEAK.findall(text)
        assert bool(found) == judged, (name, found)
        assert ("No verdict" in text or "no verdict" in text) != judged, name
    assert facts["verdict"]["level"] == level
    assert [q["level"] for q in facts["questions"]] == ["none-found" if judged else level]
    rows = [*facts["attacks"], *facts["leakage"], *facts["observations"]]
    rows += [facts["verdict"]["tiers"][0], facts["clients"][0]["strongest"]]
    assert {(row["scored"], row["unjudged"]) for row in rows} == {(3, 0 if judged else 3)}
    assert {image["leaked"] for image in facts["observations"][0]["images"]} == {
        False if judged else None
    }
    assert (page.count("not judged") >= 4) != judged, "attacks, clients, rounds, gallery"
    asked = run_outcome(root).questions
    assert [one.level for one in asked] == [level, "none-found" if judged else level]
    assert asked[0].scored == (3 if judged else 0)


@pytest.mark.parametrize("noise", [1.2, 0.01])
def test_a_verdict_over_uploads_that_nothing_confirms_says_so_first(
    make_run: Any, writers: Any, noise: float
) -> None:
    root = make_run(clients=["client-0"], rounds=1, audit=False)
    path = writers.audit(root, 1, "client-0", noise=noise)
    check = {"state": "open", "doubted": True, "cosine": 0.73, "reason": "the order is unknown"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"check": check}))
    verdict = gather(root)["verdict"]
    if noise > 1:
        assert verdict["level"] == "none-leaked"
        assert verdict["sentence"].startswith("The one upload checked is not shown to be")
        assert "0.730" in verdict["sentence"]
    else:
        assert verdict["level"] == "leaked"
        assert "not shown" in verdict["explanation"]


def test_what_was_kept_and_confirms_nothing_is_not_called_missing(
    make_run: Any, writers: Any
) -> None:
    check = CHECKS["unconfirmed"] | {"cosine": 0.67}
    root = checked_run(make_run, writers, check)
    assert "kept anything" not in gather(root)["verdict"]["sentence"]


def test_what_leaked_of_one_upload_is_counted_among_the_judged_ones(
    make_run: Any, writers: Any
) -> None:
    root = make_run(rounds=1, audit=False)
    writers.audit(root, 1, "client-0", noise=0.01)
    path = writers.audit(root, 1, "client-1", noise=1.2)
    wrong = CHECKS["misdescribed"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"check": wrong}))
    whole, *_ = gather(root)["attacks"]
    assert (whole["scored"], whole["leaked"], whole["unjudged"]) == (6, 3, 3)
    assert whole["leaked_share"]["mean"] == 1.0, "of those that could be judged"
    assert "3 of 3 images leaked, 3 not judged" in write_report(root).read_text()


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for part in value.values() for text in _strings(part)]
    if isinstance(value, list):
        return [text for part in value for text in _strings(part)]
    return [value] if isinstance(value, str) else []


def test_a_verdict_after_less_than_a_second_begins_with_that(make_run: Any, writers: Any) -> None:
    root = make_run(clients=["client-0"], rounds=1, audit=False)
    for seconds, first in ((0.5, True), (30.0, False)):
        writers.audit(root, 1, "client-0", noise=1.2, budget={"seconds": seconds})
        verdict = gather(root)["verdict"]
        assert verdict["level"] == "none-leaked"
        assert verdict["sentence"].startswith("With at most 0.5 s") == first


def test_what_nothing_declares_is_marked_in_what_the_server_saw(make_run: Any) -> None:
    root = make_run(clients=["client-0"], rounds=1)
    (root / "bract.yaml").write_text(
        "input: {mean: [0.3], std: [0.35]}\n"
        "training: {lr: 0.1, momentum: 0.9, batch_size: 8, local_epochs: 1}\n"
        "guessed:\n"
        "  training.lr: 'inferred: it explains 2 uploads'\n"
        "  training.local_epochs: a convention\n"
        "  input.mean: a convention\n"
        "  input.std: a convention\n"
    )
    rows = {row["question"]: row for row in gather(root)["threat_model"]["saw"]}
    seen = rows["Training hyper-parameters"]
    assert "lr 0.1 (inferred)" in seen["detail"] and "local steps 54 (assumed)" in seen["detail"]
    assert "batch size 8;" in seen["detail"] and seen["answer"] == "partly"
    shape = rows["Input normalisation and image shape"]
    assert (shape["answer"], shape["detail"].split(";")[0]) == ("partly", "Assumed")
    assert rows["The defense and its public settings"]["detail"] == "None declared."
