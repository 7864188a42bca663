"""What an attack came down to: from the attack through the audit's files to the report's card."""

from pathlib import Path
from typing import Any

import pytest
import torch
from observing import observed as observe

from bract import Observation, ObservationStore
from bract.attacks import ATTACKS, IG, Budget, Reconstruction, Refusal, reconstruct
from bract.attacks.problem.case import open_case
from bract.attacks.task import AttackTask
from bract.audit.audit import Audit
from bract.audit.questions.reconstruction.score import Attempt, Judge
from bract.client.training import train_locally
from bract.config import build_config
from bract.config.config import AuditRequest
from bract.data.views import client_data, data_spec
from bract.models import create_model
from bract.models.initialise import initialise
from bract.report.facts import gather
from bract.rundir import RunDirectory
from bract.schema import ClientDeclaration
from bract.schema.audit import StepCounts
from bract.updates.update import buffers_of, parameters_of
from bract_priors.prior_training import PriorSettings, train_prior

MODEL = "lenet-strided-bn"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """One step of a model with batch normalisation whose buffers came back.

    No generator makes images of 24 pixels and the model has kinks, so `best` takes IG.
    """
    config = build_config(
        {
            "name": "statistics",
            "data": {"image_size": 24, "validation": 0.0},
            "model": {"name": MODEL, "activation": "relu"},
            "training": {"local_steps": 1, "batch_size": 2},
        }
    )
    directory = RunDirectory(tmp_path / "statistics")
    directory.create(config)
    directory.update_state(status="finished")
    spec, data = data_spec(config.data), client_data(config, 0)
    model = create_model(MODEL, classes=10, channels=1, image_size=24, activation="relu")
    initialise(model, "default", 0)
    sent, buffers = parameters_of(model), buffers_of(model)
    result = train_locally(
        model.train(),
        data.images[:2],
        data.labels[:2],
        config=config.training,
        spec=spec,
        seed=0,
        device=torch.device("cpu"),
    )
    declaration = ClientDeclaration(
        algorithm="fedavg",
        model=MODEL,
        activation="relu",
        image_shape=spec.image_shape,
        classes=10,
        mean=spec.mean,
        std=spec.std,
        lr=config.training.lr,
        local_steps=1,
        batch_size=2,
        num_examples=2,
    )
    ObservationStore(directory.captures).save(
        Observation(
            round=1,
            client="client-0",
            parameters=sent,
            buffers=buffers,
            update=result.update,
            declaration=declaration,
            returned_buffers=result.buffers,
        )
    )
    return directory


def audited(run: Any, attack: Any) -> Any:
    audit = Audit(run, AuditRequest(attacks=[attack], iterations=2, device="cpu"))
    (result,) = audit.execute(audit.plan())
    return result, " ".join(gather(run.root).threat_model.not_tried)


def test_batch_statistics_that_best_matched_are_on_the_card(run: Any) -> None:
    result, not_tried = audited(run, "best")
    assert result.chosen_attack == "best" and result.method == "ig"
    assert {"pixels", "batch statistics", "labels analytic"} <= set(result.components)
    assert "GradInversion" not in not_tried and "(DLG, iDLG, IG)" not in not_tried
    assert "(GRNN" in not_tried and "GGL" in not_tried


def test_batch_statistics_that_nothing_matched_are_called_not_tried(run: Any) -> None:
    result, not_tried = audited(run, "ig")
    assert "batch statistics" not in result.components
    assert "GradInversion" in not_tried


@pytest.mark.thorough
def test_every_attack_names_its_components() -> None:
    dense = observe(torch.rand(1, 1, 8, 8), torch.tensor([1]))
    reconstructing = 0
    for name in ATTACKS:
        public = None
        kind: Any = ATTACKS[name].generator
        if kind is not None:
            grey = torch.linspace(0, 1, 16).view(16, 1, 1, 1).expand(16, 1, 8, 8)
            settings = PriorSettings(kind=kind, width=2, epochs=1)
            public = train_prior(grey, None, settings, source="grey")
        budget = Budget(iterations=1)
        (result,) = reconstruct(dense, name, budget=budget, device="cpu", public=public)
        if isinstance(result, Refusal):
            continue  # by models without the layer, the statistics or the input that it needs
        reconstructing += 1
        for trial in result.trials:
            assert trial.components, name
            assert trial.attack in ATTACKS and trial.method in ATTACKS
    assert reconstructing >= 14


def test_the_diagnosis_counts_the_steps_that_the_attack_unrolled(tmp_path: Path) -> None:
    images, labels = torch.rand(2, 1, 8, 8), torch.tensor([1, 2])
    seen = observe(images, labels, steps=20, batch_size=1, lr=0.01)
    case = open_case(seen, tier="oblivious", max_images=2)
    judge = Judge(build_config({"name": "a"}).data, 0, "cpu", max_images=2)
    for unroll, simulated in ((20, 20), (16, 1)):
        (result,) = IG(unroll=unroll).run([case], AttackTask(budget=Budget(iterations=1)))
        assert isinstance(result, Reconstruction)
        judged = judge.judge(Attempt(case, result), None, tmp_path / "one.json")
        assert judged.signals is not None
        assert judged.signals.steps == StepCounts(declared=20, simulated=simulated)
