import json
import shutil

import pytest
import torch
from torch.nn import functional as F

from bract.client.truth import save_truth
from bract.config import build_config
from bract.data import client_data, data_spec
from bract.errors import BractError
from bract.models import create_model, initialise
from bract.observation import Observation, ObservationStore, Protocol
from bract.rundir import RunDirectory
from bract.server.audit import Audit, AuditChoice
from bract.server.report import write_report
from bract.update import parameters_of

CHOICE = AuditChoice(attacks=("ig",), iterations=30, device="cpu")


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    """A run of two clients that each uploaded the gradient of two 16-pixel digits."""
    config = build_config(
        {
            "name": "audited",
            "data": {"image_size": 16, "validation": 0.0},
            "model": {"name": "lenet-strided", "activation": "relu"},
            "training": {"algorithm": "fedsgd", "batch_size": 2},
        }
    )
    directory = RunDirectory(tmp_path / "audited")
    directory.create(config)
    directory.update_state(status="finished")
    spec = data_spec(config.data)
    model = create_model("lenet-strided", classes=10, channels=1, image_size=16, activation="relu")
    initialise(model, "default", 0)
    store = ObservationStore(directory.captures)
    for client in (0, 1):
        data = client_data(config, client)
        images, labels = data.images[:2], data.labels[:2]
        loss = F.cross_entropy(model(spec.normalise(images)), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        store.save(
            Observation(
                round=1,
                client=f"client-{client}",
                parameters=parameters_of(model),
                update=dict(zip(names, gradients, strict=True)),
                protocol=Protocol(
                    algorithm="fedsgd",
                    model="lenet-strided",
                    activation="relu",
                    image_shape=spec.image_shape,
                    classes=10,
                    mean=spec.mean,
                    std=spec.std,
                    local_steps=1,
                    batch_size=2,
                    num_examples=2,
                ),
            )
        )
        save_truth(directory.truth / f"client-{client}", 1, images, labels)
    return directory


def execute(run: RunDirectory, choice: AuditChoice = CHOICE, *, resume: bool = False):
    audit = Audit(run, choice, resume=resume)
    return list(audit.execute(audit.plan()))


def test_an_audit_leaves_scores_pictures_and_baselines_for_each_observation(run):
    results = execute(run)
    assert [r["client"] for r in results] == ["client-0", "client-1"]
    for facts in results:
        path = run.audit / "ig" / f"round-0001--{facts['client']}.json"
        assert json.loads(path.read_text()) == facts
        assert path.stat().st_mode & 0o077 == 0
        assert facts["scored"]
        assert len(facts["images"]) == 2
        for image in facts["images"]:
            assert (path.parent / image["reconstruction"]).is_file()
            assert (path.parent / image["original"]).is_file()
            assert set(image["scores"]) == set(image["oracle"])
        assert {"class_mean", "random_image", "prior_only"} == set(facts["baselines"])
        assert facts["label_accuracy"] == 1.0
        assert facts["candidates"] == 100
        assert facts["selection"] == "blind"
        assert facts["device"] == "cpu"


def test_a_gradient_says_more_than_no_gradient(run):
    (facts,) = execute(
        run, AuditChoice(("ig",), clients=frozenset({"client-0"}), iterations=400, device="cpu")
    )
    psnr = sum(image["scores"]["psnr"] for image in facts["images"]) / 2
    assert psnr > facts["baselines"]["prior_only"]["psnr"] + 1
    assert psnr > facts["baselines"]["random_image"]["psnr"]


def test_resume_skips_what_is_done_and_a_fresh_audit_does_not(run):
    execute(run)
    assert Audit(run, CHOICE, resume=True).plan() == []
    (run.audit / "ig" / "round-0001--client-1.json").unlink()
    resumed = Audit(run, CHOICE, resume=True)
    assert [r["client"] for r in resumed.results()] == ["client-0"]
    (left,) = resumed.plan()
    assert (left.attack, [c.client for c in left.captures]) == ("ig", ["client-1"])
    assert sum(len(batch.captures) for batch in Audit(run, CHOICE).plan()) == 2


def test_without_truth_the_reconstructions_are_shown_unscored(run):
    (run.truth / "client-1" / "round-0001.safetensors").unlink()
    scored, unscored = execute(run)
    assert scored["scored"]
    assert not unscored["scored"]
    assert all(image["scores"] is None for image in unscored["images"])
    assert all(image["original"] is None for image in unscored["images"])


def test_what_cannot_be_attacked_is_refused_by_name_and_the_others_go_on(run):
    store = ObservationStore(run.captures)
    good = store.load(run.captures / "round-0001" / "client-0")
    secret = Observation(
        round=1,
        client="client-2",
        parameters=good.parameters,
        update={},
        ciphertexts={"c": torch.zeros(8, dtype=torch.uint8)},
        protocol=good.protocol.updated({"encryption": "paillier"}),
    )
    store.save(secret)
    results = {r["client"]: r for r in execute(run)}
    assert "encrypted (paillier)" in results["client-2"]["refused"]
    assert results["client-0"]["refused"] is None


def test_an_audit_is_reproducible(run):
    first = execute(run)
    second = execute(run)
    for one, two in zip(first, second, strict=True):
        assert one["images"] == two["images"]
        assert one["final_loss"] == two["final_loss"]


def test_choosing_nothing_is_an_error(run):
    with pytest.raises(BractError, match="no capture to attack"):
        Audit(run, AuditChoice(("ig",), rounds=frozenset({9}))).plan()
    with pytest.raises(BractError, match="unknown attack 'igg'"):
        Audit(run, AuditChoice(("igg",)))


def test_captures_of_somebodys_own_app_are_audited_unscored(run, tmp_path):
    theirs = tmp_path / "theirs" / "captures"
    shutil.copytree(run.captures, theirs)
    results = execute(RunDirectory.open(theirs))
    assert [r["scored"] for r in results] == [False, False]
    assert (theirs.parent / "audit" / "ig" / "round-0001--client-0.json").is_file()
    page = write_report(theirs.parent)
    assert "client-1" in page.read_text()
