"""Membership in the global models alone, by who looks."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from audited import request_of
from refusals import refused
from safetensors.torch import load_file, save_file

from bract import Audit
from bract.audit import global_models
from bract.cli import gate
from bract.cli import main as command_line
from bract.errors import BractError
from bract.report import facts
from bract.rundir import RunDirectory
from bract.schema import membership
from experiments.membership import Setting, federation

SITE = Setting(*("test", "lenet-strided", 30, 40, 3, 4), size=8, data="digits", seed=3, final=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return federation(SITE, tmp_path_factory.mktemp("models") / "run")[0]


@pytest.fixture(scope="module")
def answer(trained: RunDirectory) -> membership.MembershipAnswer:
    return asked(trained)


def asked(run: RunDirectory, **settings: Any) -> membership.MembershipAnswer:
    request = request_of(run.root, {"questions": ["membership"], "device": "cpu"})
    audit = Audit(run, request.model_copy(update=settings))
    (found,) = audit.execute(audit.plan())
    assert isinstance(found, membership.MembershipAnswer)
    return found


@pytest.mark.thorough
def test_what_a_client_and_the_public_recognise_is_apart_from_the_server(
    answer: membership.MembershipAnswer,
) -> None:
    assert {c.observer for c in answer.clients} == {"server"}
    assert [(c.observer, c.client, c.rounds) for c in answer.models] == [
        *(("client", f"client-{i}", [1, 2, 3]) for i in range(3)),
        *(("public", f"client-{i}", [3]) for i in range(3)),
    ]
    by_client = {s.attacker for s in answer.models[0].scores if s.round is None}
    by_public = {s.attacker for s in answer.models[-1].scores if s.round is None}
    assert {"gradient-regression", "loss-drop", "lira", "rmia", "loss"} <= by_client
    assert by_public == {
        *("loss", "lira", "rmia", "lira-shadow", "rmia-shadow", "calibrated-shadow", "stacked")
    }
    assert answer.shadows == 16 and all(c.found for c in answer.models if c.observer == "client")
    assert answer.tier == "oblivious"


@pytest.mark.thorough
def test_groups_of_a_class_are_judged_and_named_at_the_site_alone(
    answer: membership.MembershipAnswer,
) -> None:
    groups = [g for c in answer.models for g in c.groups]
    assert groups and all(min(g.members, g.non_members) >= 5 for g in groups)
    assert not any(c.groups for c in answer.clients)
    for shown in answer.redact().to_dict()["models"]:
        assert all(g["attribute"] == "" and g["members"] == 0 for g in shown["groups"])


@pytest.mark.thorough
def test_the_page_and_a_gate_keep_updates_and_models_apart(
    trained: RunDirectory, answer: membership.MembershipAnswer
) -> None:
    (question,) = facts.gather(trained.root).questions
    assert {str(row[0]) for row in question.table.rows} == {
        *("updates (server)", "global models (any client)", "final model (anyone)")
    }
    assert question.level == "members-found" and "final model" in question.sentence
    judge: Any = gate.Gate.parse("membership.model_auc_low>0.99").judge
    assert judge([answer], None).judged == 6
    whole: Any = gate.Gate.parse("membership.auc_low>0.99").judge
    assert whole([answer], None).judged == 9


@pytest.mark.thorough
def test_the_final_model_may_be_a_file_and_an_answer_depends_on_it(
    trained: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = load_file(trained.models / "final.safetensors")
    path = tmp_path / "model.pt"
    torch.save(state, path)
    request = request_of(trained.root, {"questions": ["membership"], "device": "cpu"})
    assert Audit(trained, request, resume=True).plan() == []
    named = request.model_copy(update={"final": path})
    assert len(Audit(trained, named, resume=True).plan()) == 1
    found = asked(trained, final=path, rounds=[1])
    assert {c.observer for c in found.models} == {"client", "public"}
    name = next(iter(state))
    save_file({n: v for n, v in state.items() if n != name}, tmp_path / "other.safetensors")
    broken = asked(trained, final=tmp_path / "other.safetensors", rounds=[1])
    assert {c.observer for c in broken.models} == {"client"} and broken.clients
    assert any(name in note and "missing" in note for note in broken.left_out)
    path.write_bytes(b"nothing")
    assert any(str(path) in note for note in asked(trained, final=path).left_out)
    words = ["bract", "audit", str(trained.root), "--final", str(tmp_path / "none.pt")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2


def test_a_model_that_cannot_be_read_is_named_with_the_remedy_of_its_place(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.models.mkdir(parents=True)
    captures: Any = SimpleNamespace(index=[], of_round=lambda number: [])
    models = global_models.GlobalModels(run, captures)
    elsewhere = tmp_path / "named.safetensors"
    for path in (elsewhere, run.models / "final.safetensors"):
        path.write_bytes(b"no safetensors")
    with pytest.raises(BractError) as named:
        models.final(elsewhere)
    assert str(elsewhere) in str(named.value) and "--final" in str(named.value)
    assert "models/" not in str(named.value)
    with pytest.raises(BractError) as kept:
        models.files(1)
    assert "final.safetensors" in str(kept.value) and "models/" in str(kept.value)


def test_a_run_without_a_final_model_says_how_to_name_it(tmp_path: Path) -> None:
    run, _ = federation(Setting(**{**vars(SITE), "final": False, "rounds": 1}), tmp_path / "run")
    found = asked(run)
    assert found.models == [] and found.clients
    assert any("--final FILE" in note for note in found.left_out)


def test_a_damaged_or_hollow_file_of_a_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "final.pt"
    torch.save({"w": torch.zeros(3, 4)}, path)
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for place in torch.randint(len(whole), (3,), generator=generator).tolist():
            damaged[place] ^= 1 << (place % 8)
        path.write_bytes(bytes(damaged))
        try:
            global_models.read_model(path)
        except BractError as error:
            assert error.code == "file-unreadable"
    for hollow in (torch.zeros(1).expand(10**13), torch.eye(3).to_sparse()):
        torch.save({"w": hollow}, path)
        with refused("file-unreadable", path, "w"):
            global_models.read_model(path)
