"""The question from captures and candidates to the page, its gates, and bad input."""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from audited import audited_run, request_of
from refusals import refused
from safetensors.torch import load_file, save_file

from bract.audit.audit import Audit
from bract.audit.questions.membership import candidates
from bract.cli.export import export_run
from bract.cli.gate import Gate
from bract.cli.main import main
from bract.cli.watch import Watched
from bract.client.candidates import keep_candidates
from bract.report import write_report
from bract.report.facts import gather
from bract.report.series import figures_by_round
from bract.rundir import RunDirectory
from bract.schema import AuditResult
from bract.schema.membership import MembershipAnswer
from experiments.membership import Setting, federation

SITE = Setting("test", images=24, held_out=100, rounds=2, epochs=1, size=8, data="digits", seed=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return federation(SITE, tmp_path_factory.mktemp("membership") / "run")[0]


@pytest.fixture(scope="module")
def answer(trained: RunDirectory) -> MembershipAnswer:
    return asked(trained)


def asked(run: RunDirectory, **settings: Any) -> MembershipAnswer:
    chosen = {"questions": ["membership"], "device": "cpu", **settings}
    audit = Audit(run, request_of(run.root, chosen))
    (found,) = audit.execute(audit.plan())
    assert isinstance(found, MembershipAnswer)
    return found


@pytest.mark.thorough
def test_members_of_small_sites_are_recognised(answer: MembershipAnswer) -> None:
    assert [c.client for c in answer.clients] == ["client-0", "client-1", "client-2"]
    assert all(c.found and c.unfair is None and c.rounds == [1, 2] for c in answer.clients)
    assert all((c.members, c.non_members) == (24, 100) for c in answer.clients)
    assert [(c.round, c.client) for c in answer.checks] == [(1, c.client) for c in answer.clients]
    assert all(c.unjudged is None for c in answer.checks), "bract's own clients are as described"
    first = answer.clients[0]
    over = {s.attacker: s for s in first.scores if s.round is None}
    assert {"loss", "fedmia-loss", "rmia", "lira", "gradient-regression", "combined"} <= set(over)
    best = over["gradient-regression"]
    assert best.auc is not None and best.auc > 0.9
    assert [r.true_positives is None for r in best.rates] == [True, False, False]
    assert {s.round for s in first.scores} == {None, 1, 2}


def test_the_share_of_each_class_is_read_from_updates(answer: MembershipAnswer) -> None:
    for client in answer.clients:
        (share,) = client.shares
        assert (share.attribute, share.groups) == ("class", 10)
        assert sum(share.shares) == pytest.approx(1.0) == sum(share.estimated)
        assert share.error == pytest.approx(
            sum(abs(a - b) for a, b in zip(share.shares, share.estimated, strict=True)) / 2
        )
        (redacted,) = client.redact().to_dict()["shares"]
        assert (
            redacted["shares"] == redacted["estimated"] == [] and redacted["error"] == share.error
        )
    assert fmean(s.error - s.prior_error for c in answer.clients for s in c.shares) < 0.0


def test_the_page_says_who_was_in_it_and_shows_no_record(
    trained: RunDirectory, answer: MembershipAnswer
) -> None:
    del answer
    facts = gather(trained.root)
    (question,) = facts.questions
    assert (question.title, question.level) == ("Who was in it", "members-found")
    assert "3 of 3 clients" in question.sentence and "often missed" in question.missed
    looked_at = Counter(row[0] for row in question.table.rows)
    assert looked_at == {"updates (server)": 3 * 10, "global models (any client)": 3 * 7}
    exported = {(figure.name, figure.round) for figure in figures_by_round(facts)}
    assert ("membership/oblivious/client-0/rmia", 2) in exported
    page = write_report(trained.root, redact=True).read_text()
    assert "Who was in it" in page and "often missed" in page
    written = json.loads((trained.root / "report.json").read_text())
    assert str(trained.root) not in json.dumps(written["questions"])


def test_a_gate_holds_the_advantage_at_a_rate(answer: MembershipAnswer) -> None:
    rule: Any = None
    assert Gate.parse("membership>0.05@5%").judge([answer], rule).crossed
    assert str(Gate.parse("membership>0.05@1%")) == "membership>0.05@1%"
    none = Gate.parse("membership>0.05@0.1%").judge([answer], rule)
    assert not none.judged and none.lacking == 6
    assert Gate.parse("membership.auc_low>0.6@oblivious").judge([answer], rule).crossed
    with refused("config-value", "0.1%", "1%", "5%"):
        Gate.parse("membership>0.05@2%")
    with refused("config-value", "membership>0.05@nobody", "nobody"):
        Gate.parse("membership>0.05@nobody")


def test_an_audit_that_names_no_question_asks_what_the_run_allows(
    trained: RunDirectory, tmp_path: Path
) -> None:
    plain = audited_run(tmp_path / "plain", 1)
    assert list(Audit(plain, request_of(plain.root)).questions) == ["reconstruction"]
    both = Audit(trained, request_of(trained.root))
    assert list(both.questions) == ["reconstruction", "membership"]


def test_an_answer_holds_until_captures_or_candidates_change(trained: RunDirectory) -> None:
    request = request_of(trained.root, {"questions": ["membership"], "device": "cpu"})
    assert Audit(trained, request, resume=True).plan() == []
    path = trained.truth / "client-2" / "candidates.safetensors"
    before = path.read_bytes()
    content = load_file(path)
    try:
        save_file({n: v[:-1].clone() for n, v in content.items()}, path)
        assert len(Audit(trained, request, resume=True).plan()) == 1
    finally:
        path.write_bytes(before)


def test_candidates_that_differ_without_a_model_are_refused_as_unfair(tmp_path: Path) -> None:
    run, _ = federation(SITE, tmp_path / "run")
    for client in range(3):
        path = run.truth / f"client-{client}" / "candidates.safetensors"
        content = load_file(path)
        content["images"][content["first_round"] == 0] *= 0.5
        save_file(content, path)
    found = asked(run, rounds=[1])
    assert all(c.unfair and not c.found and c.chance is None for c in found.clients)
    (facts,) = gather(run.root).questions
    assert facts.level == "unfair" and "drawn differently" in facts.sentence
    assert Gate.parse("membership>0@5%").judge([found], None).judged == 0  # type: ignore[arg-type]


def test_one_client_s_bad_candidates_cost_that_client_alone(tmp_path: Path) -> None:
    run, _ = federation(SITE, tmp_path / "run")
    (run.truth / "client-0" / "candidates.safetensors").write_bytes(b"none")
    path = run.truth / "client-1" / "candidates.safetensors"
    content = load_file(path)
    save_file({**content, "images": torch.rand(len(content["labels"]), 1, 9, 9)}, path)
    found = asked(run, rounds=[1])
    assert [c.client for c in found.clients] == ["client-2"]
    assert sum("not readable" in note for note in found.left_out) == 2
    assert any("the capture declares (1, 8, 8)" in note for note in found.left_out)
    for client in range(3):
        (run.truth / f"client-{client}" / "candidates.safetensors").unlink()
    assert "held_out=LOADER" in (asked(run).refused or "")


def test_a_record_of_both_kinds_is_left_out_and_counted(trained: RunDirectory) -> None:
    folder = trained.root.parent / "both"
    images = torch.rand(12, 1, 8, 8)
    labels = torch.arange(12) % 10
    keep_candidates(folder / "client-0", 1, 1, (images[:6], labels[:6]), (images[5:], labels[5:]))
    declaration = Audit(trained, request_of(trained.root)).plan()[0].captures[0].declaration
    found = candidates.load_candidates(folder, "client-0", declaration)
    assert len(found.labels) == 11 and "1 records are members and held out" in found.notes[0]
    keep_candidates(folder / "client-1", 1, 1, (images[:1], labels[:1]), (images[5:], labels[5:]))
    with refused("truth-unusable", 1, 2):
        candidates.load_candidates(folder, "client-1", declaration)


def test_a_record_that_another_client_trained_on_is_no_non_member(trained: RunDirectory) -> None:
    capture = Audit(trained, request_of(trained.root)).plan()[0].captures[0]
    one = candidates.load_candidates(trained.truth, "client-0", capture.declaration)
    other = replace(one, first_round=(one.first_round == 0).long())
    whole, owners = candidates.pool({"a": one, "b": other})
    assert len(whole.labels) == 0 == len(owners)
    whole, owners = candidates.pool({"a": one, "b": one})
    assert owners == ["a"] * len(one.labels) and torch.equal(whole.images, one.images)


def test_the_attacks_results_are_beside_it(trained: RunDirectory) -> None:
    request = request_of(trained.root, {"attacks": ["labels"], "iterations": 1, "rounds": [1]})
    audit = Audit(trained, request)
    kinds = {type(found) for found in audit.execute(audit.plan())}
    assert kinds == {AuditResult, MembershipAnswer}


def test_the_command_line_holds_the_advantage_by_its_exit_code(
    trained: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def code(gate: str) -> int:
        words = ["bract", "audit", str(trained.root), "--question", "membership", "--resume"]
        monkeypatch.setattr(sys, "argv", [*words, "--fail-on", gate])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    assert code("membership>0.05@1%") == 3
    assert "membership" in capsys.readouterr().err
    assert code("membership>0.99@1%") == 0
    assert code("membership>0.05@0.1%") == 3  # too few held out to judge any client
    said = " ".join(capsys.readouterr().err.split())
    assert "of clients with too few held-out records (0.1 % false positives needs 1000)" in said
    assert code("membership>0.05@2%") == 2


def test_watch_and_tensorboard_carry_the_question(
    trained: RunDirectory, answer: MembershipAnswer
) -> None:
    del answer
    watched = Watched(trained, redact=True)
    assert "Who was in it: members-found" in watched.standing().text()
    assert "Who was in it" in watched.page()[0]
    accumulators: Any = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    folder = Path(export_run(trained.root, "tensorboard", None))
    events = accumulators.EventAccumulator(str(next(folder.iterdir())))
    events.Reload()
    found = events.Scalars("membership/oblivious/client-1/gradient-regression")
    assert [event.step for event in found] == [1, 2] and found[0].value > 0.9
