import logging
from pathlib import Path
from typing import Any

import pytest
import refusals

from bract import Observation, ObservationStore
from bract.audit.audit import Audit
from bract.audit.captures import Capture, Captures
from bract.audit.truth import load_truth
from bract.audit.uncaptured import read_missed
from bract.cli.audit_requests import audit_requests
from bract.config.config import AuditRequest
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration

REFERENCE = "made_up_for_this_test.task:net"


def store(root: Any, **models: Any) -> Any:
    """Captures of clients, each with its declared model."""
    for client, model in models.items():
        ObservationStore(root / "captures").save(
            Observation(1, client, {}, {}, ClientDeclaration(model=model))
        )
    return RunDirectory.open(root)


def test_a_model_of_somebodys_code_is_not_loaded_unless_it_was_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = store(tmp_path, a="os:abort", b="lenet")
    captures = Captures(run.captures)
    foreign, known = captures.index
    assert captures.is_foreign(foreign)
    assert not captures.is_foreign(known)
    mean = Capture(1, "aggregate", foreign.declaration, members=("a",))
    for capture in (foreign, mean):
        with refusals.refused("code-untrusted", "--model", "os:abort"):
            captures.check_model(capture)
    with refusals.refused("code-untrusted", "--model", "os:abort"):
        captures.load(foreign)
    assert captures.load(known).declaration.model == "lenet"
    with caplog.at_level(logging.WARNING):
        captures.check_models(captures.index)
    assert "round-0001/a" in caplog.text
    trusting = Captures(run.captures, models=["os:abort"])
    assert trusting.load(foreign).declaration.model == "os:abort"


def test_an_audit_of_captures_from_elsewhere_runs_none_of_their_code(tmp_path: Path) -> None:
    run = store(tmp_path, a="os:abort")
    choice = AuditRequest(attacks=["ig"], iterations=1, device="cpu")
    with refusals.refused("code-untrusted", "os:abort") as caught:
        Audit(run, choice)
    command = str(caught.value)
    assert str(tmp_path) in command
    # A configuration that lies beside the captures came from the same hands.
    (tmp_path / "config.yaml").write_text("model: {name: 'os:abort'}\n")
    with refusals.refused("code-untrusted", "--model", "os:abort"):
        Audit(run, choice)


def test_one_capture_of_a_foreign_model_is_refused_and_the_others_are_attacked(
    tmp_path: Path,
) -> None:
    run = store(tmp_path, a=REFERENCE, b="lenet")
    audit = Audit(run, AuditRequest(attacks=["ig"], iterations=1, device="cpu"))
    refused = {found.client: found.refused or "" for found in audit.execute(audit.plan())}
    assert f"--model {REFERENCE}" in refused["a"]
    assert "--model" not in refused["b"]


def test_the_command_line_names_the_models_that_may_be_imported(tmp_path: Path) -> None:
    store(tmp_path, a=REFERENCE)
    (choice,) = audit_requests(tmp_path, {"attacks": ["ig"]}, models=[REFERENCE])
    Audit(RunDirectory.open(tmp_path), choice)
    (other,) = audit_requests(tmp_path, {"attacks": ["ig"]}, models=["x:y"])
    with refusals.refused("unknown-name", "--model", "x:y"):
        Audit(RunDirectory.open(tmp_path), other)


def test_a_capture_that_lies_under_another_name_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = store(tmp_path, a="lenet", b="lenet")
    (run.captures / "round-0001" / "a").rename(run.captures / "round-0001" / "c")
    assert [c.client for c in Captures(run.captures).index] == ["b"]
    refusals.check_named(caplog.text, "round-0001/a")


def test_no_client_name_reads_truth_outside_of_its_folder(tmp_path: Path) -> None:
    for name in ("..", "../elsewhere", "", "/etc"):
        with refusals.refused("config-value", "allowed"):
            load_truth(tmp_path, Capture(1, name, ClientDeclaration()))
        with refusals.refused("config-value", "allowed"):
            load_truth(tmp_path, Capture(1, "aggregate", ClientDeclaration(), members=("a", name)))


def test_missed_captures_are_read_up_to_a_line_that_was_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = '{"schema": 1, "round": 2, "node_id": "7", "reason": "no space"}'
    (tmp_path / "missed.jsonl").write_text(f"{good}\n{good[:20]}\n{good}")
    assert [(m.round, m.node_id) for m in read_missed(tmp_path)] == [(2, "7")] * 2
    assert "missed.jsonl: line 2" in caplog.text
    assert read_missed(tmp_path / "nowhere") == []
