"""Audits that attack several rounds of a client together."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import attacked, captured_run, upload_gradient, with_keys
from refusals import check_named, refused
from safetensors.torch import load_file

from bract import Observation, ObservationStore
from bract.audit.audit import Audit
from bract.audit.captures import Capture, Captures, over_rounds
from bract.audit.observer import CuriousClient
from bract.audit.truth import distinct
from bract.audit.worker import Worker
from bract.client.truth import save_truth
from bract.config import build_config
from bract.config.config import AuditRequest
from bract.disk import write_tensors
from bract.inputs import Truth
from bract.models import create_model
from bract.models.initialise import initialise
from bract.protocol.records import Contribution
from bract.report import write_report
from bract.rundir import RunDirectory
from bract.schema import AuditResult, ClientDeclaration
from bract.schema.metrics import MetricsRow
from bract.strategies.aggregation import aggregate, fedavg_weights
from bract.updates.update import parameters_of

CHOICE = AuditRequest(attacks=["ig"], iterations=20, device="cpu", over_rounds=2)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two clients that each uploaded one digit's gradient in three rounds."""
    settings = {
        "name": "audited",
        "data": {"image_size": 8, "validation": 0.0},
        "model": {"name": "lenet-strided"},
        "training": {"algorithm": "fedsgd", "batch_size": 1},
        "strategy": {"server_lr": 0.5},
    }
    directory, config, model = captured_run(tmp_path / "audited", settings)
    for number in (1, 2, 3):
        updates = []
        for client in (0, 1):
            # The second client's image of the last round is another one.
            at = slice(1, 2) if (number, client) == (3, 1) else slice(0, 1)
            updates.append(
                upload_gradient(directory, config, model, client, number=number, taken=at)
            )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(updates[0][name] + updates[1][name], alpha=0.25)
    return directory


def execute(run: RunDirectory, choice: AuditRequest = CHOICE, *, resume: bool = False) -> list[Any]:
    audit = Audit(run, choice, resume=resume)
    return [result.to_dict() for result in attacked(audit)]


def test_a_clients_rounds_are_attacked_so_many_at_a_time(run: RunDirectory) -> None:
    results = execute(run)
    assert [(r["round"], r["client"], r["rounds"]) for r in results] == [
        (1, "client-0", [1]),
        (1, "client-1", [1]),
        (3, "client-0", [2, 3]),
        (3, "client-1", [2, 3]),
    ]
    folder = run.audit / "ig-over-2-rounds"
    assert (folder / "round-0003--client-0.json").is_file()
    assert not (run.audit / "ig").exists()
    joint = results[2]
    assert joint["settings"]["evidence"]["rounds"] == [2, 3]
    assert "2 rounds" in joint["components"]
    assert joint["signals"]["truth_check"]["cosine"] > 1 - 1e-6
    assert joint["scored"] and len(joint["images"]) == 1
    # Other images in its rounds: every one of them is an original.
    assert results[3]["images"][0]["retrieval"]["choices"] == 2
    assert joint["images"][0]["retrieval"]["choices"] == 1
    assert Audit(run, CHOICE, resume=True).plan() == []
    save_truth(run.truth / "client-0", 2, torch.zeros(1, 1, 8, 8), torch.tensor([1]))
    (again,) = Audit(run, CHOICE, resume=True).plan()
    assert [c.key for c in again.captures] == ["round-0003/client-0"]


def test_the_report_tells_them_from_attacks_on_single_uploads(run: RunDirectory) -> None:
    execute(run, with_keys(CHOICE, clients=["client-0"]))
    execute(run, with_keys(CHOICE, clients=["client-0"], over_rounds=1))
    write_report(run.root)
    facts = json.loads((run.root / "report.json").read_text())
    names = {row["attack_name"] for row in facts["attacks"]}
    assert names == {"IG", "IG over 1 round", "IG over 2 rounds"}
    page = (run.root / "report.html").read_text()
    assert "IG over 2 rounds" in page


def test_rounds_may_hold_parts_of_the_images(run: RunDirectory) -> None:
    choice = with_keys(CHOICE, attacks=("multi-round",), clients=["client-1"])
    (last,) = [r for r in execute(run, choice) if r["round"] == 3]
    assigned = last["settings"]["assigned"]
    assert [len(row) for row in assigned] == [1, 1]
    assert last["scored"] and last["signals"] is None
    assert last["images"][0]["retrieval"]["choices"] == 2


def spoil(run: RunDirectory, number: int) -> None:
    """Leave client-0's upload of a round such that no attack opens it."""
    store = ObservationStore(run.captures)
    seen = store.load(run.captures / f"round-{number:04d}" / "client-0")
    shutil.rmtree(run.captures / f"round-{number:04d}" / "client-0")
    store.save(replace(seen, update={n: v * float("nan") for n, v in seen.update.items()}))


@pytest.mark.parametrize(("spoilt", "left"), [(2, 3), (3, 2)])
def test_a_result_tells_the_rounds_that_were_matched(
    run: RunDirectory, spoilt: int, left: int
) -> None:
    spoil(run, spoilt)
    # Nothing of the round that is left out is held against what the other one gave.
    save_truth(run.truth / "client-0", spoilt, torch.zeros(1, 1, 8, 8), torch.tensor([1]))
    choice = with_keys(CHOICE, clients=["client-0"])
    last = execute(run, choice)[-1]
    assert (last["round"], last["rounds"], last["refused"]) == (3, [left], None)
    assert f"over rounds: round {spoilt}, which could not be opened" in " ".join(last["notes"])
    assert last["images"][0]["retrieval"]["choices"] == 1
    assert last["signals"]["truth_check"]["cosine"] > 1 - 1e-6
    assert Audit(run, choice, resume=True).plan() == []


def test_an_earlier_round_that_cannot_be_read_is_left_out(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run.captures / "round-0002" / "client-0"
    cut_short(next(path for path in folder.iterdir() if path.suffix == ".safetensors"))
    last = execute(run, with_keys(CHOICE, clients=["client-0"]))[-1]
    assert (last["rounds"], last["refused"]) == ([3], None)
    check_named(caplog.text, "round-0002/client-0")


def test_a_worker_may_leave_rounds_out_and_not_add_any(run: RunDirectory) -> None:
    spoil(run, 2)
    choice = with_keys(CHOICE, clients=["client-0"])
    worker = Worker(run.root, run.root / ".workers", torch.get_num_threads())
    key = "round-0003/client-0"
    files = worker.attack(choice, "ig", 0, [key])
    audit = Audit(run, choice)
    (found,) = audit.accept(audit.batch("ig", 0, [key]), files)
    assert isinstance(found, AuditResult) and found.rounds == [3]
    name = "round-0003--client-0.json"
    described = json.loads(files[name])
    for rounds in ([], [1, 3], [3, 2]):
        files[name] = json.dumps(described | {"rounds": rounds}).encode()
        with refused("worker-failed", "round-0003--client-0.json"):
            audit.accept(audit.batch("ig", 0, [key]), files)


def test_a_curious_client_attacks_the_others_by_the_global_models(run: RunDirectory) -> None:
    choice = with_keys(CHOICE, attacks=("gauss-newton",), observer="client-1", over_rounds=1)
    results = execute(run, choice)
    # After round 3 no model was kept.
    assert [(r["round"], r["members"]) for r in results] == [(1, ["client-0"]), (2, ["client-0"])]
    assert all(r["observer"] == "client-1" and r["scored"] for r in results)
    # What is left of client-0's update is rounded, so the image comes back to that.
    assert min(r["images"][0]["scores"]["psnr"] for r in results) > 30.0
    assert (run.audit / "gauss-newton-seen-by-client-1" / "round-0001--aggregate.json").is_file()
    assert Audit(run, choice, resume=True).plan() == []
    together = execute(run, with_keys(choice, over_rounds=2))
    assert [r["rounds"] for r in together] == [[1, 2]]
    write_report(run.root)
    names = {
        row["attack_name"] for row in json.loads((run.root / "report.json").read_text())["attacks"]
    }
    assert "Gauss-Newton by client-1, on the others' aggregate" in names
    assert "Gauss-Newton by client-1, on the others' aggregate over 2 rounds" in names


def test_an_observer_that_cannot_look_is_refused(run: RunDirectory) -> None:
    with refused("unknown-name", "client-0"):
        execute(run, with_keys(CHOICE, observer="client-7"))
    with refused("usage", "audit.observer", "--tier"):
        execute(run, with_keys(CHOICE, observer="client-1", tier="adaptive"))


def test_groups_count_from_the_last_round() -> None:
    declared = ClientDeclaration()
    captures = [Capture(r, c, declared) for r in (1, 2, 3, 5) for c in ("a", "b")]
    captures.append(Capture(5, "aggregate", declared, members=("a", "b")))
    found = over_rounds(captures, 3)
    assert [(c.client, [one.round for one in c.rounds]) for c in found] == [
        ("a", [2, 3, 5]),
        ("a", [1]),
        ("b", [2, 3, 5]),
        ("b", [1]),
        ("aggregate", [5]),
    ]


def test_truths_of_rounds_hold_every_image_once() -> None:
    images = torch.rand(3, 1, 8, 8)
    labels = torch.tensor([3, 1, 2])
    found = distinct([Truth(images[1:], labels[1:]), Truth(images[:2], labels[:2])])
    assert torch.equal(found.images, images[[1, 2, 0]])
    assert found.labels.tolist() == [1, 2, 3]


def tell_weights(run: RunDirectory, first: float | None, second: float | None) -> None:
    run.metrics_path.unlink(missing_ok=True)
    rows = {
        "client-0": {"num_examples": 1, "weight": first},
        "client-1": {"num_examples": 1, "weight": second},
    }
    for number in (1, 2, 3):
        run.append_metrics(MetricsRow.model_validate({"round": number, "clients": rows}))


def test_weights_that_are_none_are_refused(run: RunDirectory) -> None:
    choice = with_keys(CHOICE, observer="client-1", over_rounds=1, rounds=[1])
    for first, second in ((-1.0, 2.0), (0.5, -0.5), (0.5, 5.0), (0.2, 0.2)):
        tell_weights(run, first, second)
        (found,) = execute(run, choice)
        check_named(found["refused"], "client-0", f"{first:g}", "client-1", f"{second:g}")
    tell_weights(run, None, None)
    assert execute(run, choice)[0]["refused"] is None


def test_other_weights_are_attacked_again(run: RunDirectory) -> None:
    choice = with_keys(CHOICE, observer="client-1", over_rounds=1, rounds=[1])
    tell_weights(run, 0.5, 0.5)
    execute(run, choice)
    assert Audit(run, choice, resume=True).plan() == []
    tell_weights(run, 0.4, 0.6)
    assert len(Audit(run, choice, resume=True).plan()) == 1


def test_an_observer_that_is_alone_is_told_so(run: RunDirectory) -> None:
    for folder in run.captures.glob("round-*/client-0"):
        shutil.rmtree(folder)
    with refused("config-conflict", "audit.observer", "client-1"):
        execute(run, with_keys(CHOICE, observer="client-1"))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def keep_last_model(run: RunDirectory, name: str) -> Path:
    sent = ObservationStore(run.captures).load(run.captures / "round-0003" / "client-0")
    return write_tensors(run.models / name, sent.parameters, about={"round": "3"})


def test_a_kept_model_that_cannot_be_read_is_named(run: RunDirectory) -> None:
    choice = with_keys(CHOICE, attacks=("gauss-newton",), observer="client-1", over_rounds=1)
    last = keep_last_model(run, "last.safetensors")
    assert {c.round for batch in Audit(run, choice).plan() for c in batch.captures} == {1, 2, 3}
    cut_short(last)
    with refused("file-unreadable", "models/last.safetensors"):
        Audit(run, choice)
    keep_last_model(run, "whole.safetensors")
    assert {c.round for batch in Audit(run, choice).plan() for c in batch.captures} == {1, 2, 3}


def test_a_kept_model_of_no_round_is_named(run: RunDirectory) -> None:
    last = keep_last_model(run, "last.safetensors")
    write_tensors(last, load_file(last), about={"round": "third"})
    with refused("file-unreadable", "models/last.safetensors", "third"):
        Audit(run, with_keys(CHOICE, observer="client-1", over_rounds=1))
    write_tensors(last, load_file(last))
    plan = Audit(run, with_keys(CHOICE, observer="client-1", over_rounds=1)).plan()
    assert {c.round for batch in plan for c in batch.captures} == {1, 2}


def three_clients(folder: Path, share: float) -> tuple[RunDirectory, dict[str, Any]]:
    """Two rounds of three clients, the first of which claims 80 of 100 examples."""
    config = build_config(
        {
            "name": "limited",
            "clients": 3,
            "data": {"image_size": 8},
            "model": {"name": "lenet-strided"},
            "training": {"algorithm": "fedsgd"},
            "strategy": {"server_lr": 0.5, "max_share": share},
        }
    )
    directory = RunDirectory(folder)
    directory.create(config)
    examples = {"client-0": 80, "client-1": 10, "client-2": 10}
    generator = torch.Generator().manual_seed(0)
    model = create_model("lenet-strided", classes=10, channels=1, image_size=8)
    sent = parameters_of(initialise(model, "default", 0))
    updates = {
        client: {n: torch.randn(v.shape, generator=generator) for n, v in sent.items()}
        for client in examples
    }
    contributions = [Contribution(i, c, updates[c], examples[c]) for i, c in enumerate(examples)]
    weights = fedavg_weights(contributions, "examples", share)
    store = ObservationStore(directory.captures)
    for number in (1, 2):
        for client, count in examples.items():
            declared = ClientDeclaration(
                algorithm="fedsgd", model="lenet-strided", num_examples=count, batch_size=count
            )
            store.save(
                Observation(
                    round=number,
                    client=client,
                    parameters=sent,
                    update=updates[client],
                    declaration=declared,
                )
            )
        sent = aggregate(sent, contributions, weights, 0.5)
    return directory, updates


@pytest.mark.parametrize("share", [0.5, 0.75, 1.0])
def test_an_observer_knows_how_much_one_client_may_weigh(tmp_path: Path, share: float) -> None:
    run, updates = three_clients(tmp_path / "limited", share)
    observer = CuriousClient(run, Captures.of_run(run), "client-1")
    (capture,) = observer.captures()
    # What is cut off client-0 goes to the others: 1 - share over two, of equal claims.
    first, other = {0.5: (0.5, 0.25), 0.75: (0.75, 0.125), 1.0: (0.8, 0.1)}[share]
    found = observer.open(capture).update
    for name, value in found.items():
        wanted = first * updates["client-0"][name] + other * updates["client-2"][name]
        assert torch.allclose(value, wanted / (first + other), atol=1e-5)


def test_another_limit_on_a_clients_weight_is_attacked_again(tmp_path: Path) -> None:
    described = set()
    for share in (0.5, 1.0):
        run, _ = three_clients(tmp_path / f"limited-{share}", share)
        described.add(CuriousClient(run, Captures.of_run(run), "client-1").described(1))
    assert len(described) == 2


def test_the_clients_of_another_app_are_taken_at_their_word(tmp_path: Path) -> None:
    run, updates = three_clients(tmp_path / "limited", 1.0)
    run.config_path.unlink()
    observer = CuriousClient(run, Captures.of_run(run), "client-1")
    (capture,) = observer.captures()
    found = observer.open(capture).update
    for name, value in found.items():
        # Flower's FedAvg, of which nothing says another learning rate than 1.
        wanted = 0.5 * (0.8 * updates["client-0"][name] + 0.1 * updates["client-2"][name])
        wanted -= 0.5 * 0.1 * updates["client-1"][name]
        assert torch.allclose(value, wanted / 0.9, atol=1e-5)
