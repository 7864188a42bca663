"""An attack or a question of another package that fails costs itself, in one line with its name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import check_named
from torch.nn.functional import cross_entropy

from bract import Observation, ObservationStore
from bract.attacks import ATTACKS, Outcome, Problem, Refusal, attack, reconstruct
from bract.audit.audit import Audit
from bract.audit.questions import QUESTIONS
from bract.config.audit import AuditRequest
from bract.errors import BractError
from bract.inputs import INPUTS, kept_examples
from bract.installed import blaming, package_of
from bract.models import create_model
from bract.registry import Registry
from bract.report.facts import gather
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration
from bract.updates.update import parameters_of

MODULE = """
from dataclasses import dataclass
from typing import ClassVar, Literal
import torch
from pydantic import Field
from bract.attacks import Attack, Outcome, hard_labels
from bract.audit.questions import Decision, Question
from bract.inputs.image import Image
from bract.schema import Answer


@dataclass(frozen=True, kw_only=True)
class Simple(Attack):
    name: ClassVar[str] = "theirs-simple"
    def solve(self, problem, run):
        images = torch.full((problem.trials, *problem.image_shape), 0.5)
        losses = torch.ones(problem.trials)
        return Outcome(images=images, labels=hard_labels(problem), losses=losses)


@dataclass(frozen=True, kw_only=True)
class Typo(Attack):
    name: ClassVar[str] = "theirs-typo"
    def solve(self, problem, run):
        return problem.picture_shape


@dataclass(frozen=True, kw_only=True)
class Wrong(Attack):
    name: ClassVar[str] = "theirs-wrong"
    def solve(self, problem, run):
        return Outcome(images=torch.zeros(1, 2), labels=hard_labels(problem), losses=torch.ones(1))


class Picture(Image):
    name = "theirs-picture"
    def examples(self, batch):
        return batch["picture"].float()
    def save(self, example, beside, index, role):
        raise OSError("no such colour")


@dataclass(frozen=True, kw_only=True)
class Pictured(Simple):
    name: ClassVar[str] = "theirs-pictured"
    inputs: ClassVar[tuple[str, ...]] = ("image", "theirs-picture")


class NoAnswer(Answer):
    kind = "theirs-answer"
    schema_version: Literal[1] = Field(default=1, alias="schema")
    question: str = "theirs-question"


class Asking(Question):
    name = "theirs-question"
    title = "Theirs"
    answer = NoAnswer
    def ask(self, batch, progress=None):
        yield NoAnswer()
        raise KeyError("no such field")
    @classmethod
    def decide(cls, answers):
        return Decision("decided", "Nothing.", 1 / 0)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package with two attacks that fail, one that does not, and a question that fails."""
    info = tmp_path / "theirs-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 2.0\n")
    attacks = {"theirs-simple": "Simple", "theirs-typo": "Typo", "theirs-wrong": "Wrong"}
    attacks["theirs-pictured"] = "Pictured"
    lines = "".join(f"{name} = theirs_faulty:{kind}\n" for name, kind in attacks.items())
    questions = "[bract.questions]\ntheirs-question = theirs_faulty:Asking\n"
    inputs = "[bract.inputs]\ntheirs-picture = theirs_faulty:Picture\n"
    (info / "entry_points.txt").write_text(f"[bract.attacks]\n{lines}{questions}{inputs}")
    (tmp_path / "theirs_faulty.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    registries: tuple[Registry[Any], ...] = (ATTACKS, QUESTIONS, INPUTS)
    for registry in registries:
        for name in ("_entries", "_packages", "_refused"):
            monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
        monkeypatch.setattr(registry, "_loaded", False)
    yield "theirs 2.0"
    sys.modules.pop("theirs_faulty", None)


def seen(client: str = "client-0") -> Observation:
    torch.manual_seed(0)
    model = create_model("lenet-strided", classes=10, channels=1, image_size=8)
    loss = cross_entropy(model(torch.rand(1, 1, 8, 8)), torch.tensor([3]))
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return Observation(
        round=1,
        client=client,
        parameters=parameters_of(model),
        update=dict(zip(names, gradients, strict=True)),
        declaration=ClientDeclaration(
            algorithm="fedsgd", model="lenet-strided", image_shape=(1, 8, 8), classes=10,
            batch_size=1, mean=(0.0,), std=(1.0,),
        ),
    )  # fmt: skip


def test_an_outcome_of_three_tensors_is_enough(package: str) -> None:
    (found,) = reconstruct(seen(), "theirs-simple", device="cpu")
    assert not isinstance(found, Refusal), found.reason
    assert found.labels.tolist() == [3] and found.final_loss == 1.0 and found.loss_curve == []


def test_a_mistake_in_an_attack_is_one_line_with_its_package(package: str) -> None:
    (found,) = reconstruct(seen(), "theirs-typo", device="cpu")
    assert isinstance(found, Refusal) and "\n" not in found.reason
    check_named(found.reason, "2.0", "AttributeError")
    assert "picture_shape" in found.reason and "theirs_faulty.py, line " in found.reason


def test_an_outcome_that_does_not_fit_is_named_with_what_is_expected(package: str) -> None:
    (found,) = reconstruct(seen(), "theirs-wrong", device="cpu")
    assert isinstance(found, Refusal)
    check_named(found.reason, 1, 2, 8)


@pytest.mark.thorough
def test_a_faulty_attack_and_a_faulty_question_cost_themselves_in_an_audit(
    package: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path / "run")
    ObservationStore(run.captures).save(seen())
    request = AuditRequest(
        questions=["theirs-question", "reconstruction"],
        attacks=["theirs-typo", "theirs-simple"],
        device="cpu",
    )
    audit = Audit(run, request)
    with caplog.at_level(logging.ERROR):
        list(audit.execute(audit.plan()))
    assert any("Asking of package theirs 2.0 failed: KeyError" in m for m in caplog.messages)
    refused = {result.attack: result.refused for result in audit.results()}
    assert refused["theirs-simple"] is None
    assert "Typo of package theirs 2.0" in (refused["theirs-typo"] or "")
    (asked,) = gather(run.root).questions
    assert asked.level == "failed"
    assert "Asking of package theirs 2.0 failed: ZeroDivisionError" in asked.sentence


@pytest.mark.thorough
def test_a_faulty_input_costs_its_own_uploads_in_an_audit(package: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    store = ObservationStore(run.captures)
    store.save(seen())
    theirs = seen("client-1")
    changed = theirs.declaration.updated({"input": "theirs-picture"})
    store.save(replace(theirs, declaration=changed))
    audit = Audit(run, AuditRequest(attacks=["theirs-pictured"], device="cpu"))
    list(audit.execute(audit.plan()))
    refused = {result.client: result.refused for result in audit.results()}
    assert refused["client-0"] is None
    reason = refused["client-1"] or ""
    check_named(reason, "2.0", "OSError")
    assert "\n" not in reason


def test_a_faulty_input_stops_no_training_whose_examples_are_kept(
    package: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch = (torch.rand(2, 1, 8, 8), torch.tensor([1, 2]))
    with caplog.at_level(logging.WARNING):
        found = kept_examples(batch)
    assert found is not None and torch.equal(found[0], batch[0])
    # Whichever input is asked first, the faulty one is no reason to stop.
    assert kept_examples({"nothing": 1}) is None
    assert any("Picture of package theirs 2.0 failed: KeyError" in m for m in caplog.messages)
    assert all("\n" not in message for message in caplog.messages)


def test_a_fault_of_bract_s_own_is_not_blamed_on_a_package() -> None:
    assert package_of(Problem) is None
    with pytest.raises(KeyError), blaming(type(attack("ig"))):
        raise KeyError("ours")


def test_what_an_entry_refuses_itself_passes_as_it_is(package: str) -> None:
    own = BractError("my reason", code="usage")
    with pytest.raises(BractError) as error, blaming(ATTACKS["theirs-typo"]):
        raise own
    assert error.value is own


def test_the_required_fields_of_an_outcome_are_three() -> None:
    with pytest.raises(TypeError, match="labels"):
        Outcome(images=torch.zeros(1, 1, 1, 8, 8))  # type: ignore[call-arg]
