"""Whoever knows the defense sees through real processes what it sees in memory, in every round."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_processes import Command

from bract import ObservationStore
from bract.attacks import Budget, Reconstruction, reconstruct
from bract.attacks.task import evidence_for
from bract.client.defenses import ProtectContext, build_defenses
from bract.client.training import train_locally
from bract.data.views import client_data, data_spec
from bract.models import create_model
from bract.rundir import RunDirectory
from bract.seeds import derive_seed

pytestmark = pytest.mark.processes

GUARDED = """
name: guarded
clients: 2
rounds: 2
model: {name: lenet-strided, activation: relu}
training: {algorithm: fedsgd, lr: 0.1, batch_size: 1}
data: {validation: 0.0, partition: {kind: sizes, sizes: [1, 1]}}
defenses: [adadefense]
"""


def check_profile(root: Path) -> None:
    """Every party's part of a round is in the trace, and nothing else of it is left."""
    events = json.loads((root / "profile.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    did = {(named[event["pid"]], event["name"]) for event in events if event["ph"] == "X"}
    for client in ("client-0", "client-1"):
        for work in ("load data", "train", "defend", "hand answer to SuperNode"):
            assert (f"{client} flwr-clientapp", work) in did
        assert (f"{client} flower-supernode", "take message from SuperLink") in did
        assert (f"{client} flower-superexec", "start flwr-clientapp") in did
    for work in ("send messages", "wait for answers", "judge and keep the global model"):
        assert ("superlink flwr-serverapp", work) in did
    trains = [event for event in events if event["name"] == "train"]
    assert len(trains) == 4
    assert not (root / "profile").exists()


def test_adaptive_figures_through_processes_are_those_in_memory(tmp_path: Path) -> None:
    (tmp_path / "guarded.yaml").write_text(GUARDED)
    code, errors = Command(tmp_path, "run", "guarded.yaml", "--profile").finish()
    assert code == 0, errors
    run = RunDirectory.open(tmp_path / "runs" / "guarded")
    check_profile(run.root)
    config = run.config()
    captured = [o for o in ObservationStore(run.captures) if o.client == "client-1"]
    assert [o.round for o in captured] == [1, 2]
    model = create_model("lenet-strided", classes=10, channels=1, image_size=32, activation="relu")
    data = client_data(config, 1)
    state: dict[str, Any]
    chain, state, computed = build_defenses([{"name": "adadefense"}]), {}, []
    for seen in captured:
        model.load_state_dict(seen.parameters)
        found = train_locally(
            model,
            data.images,
            data.labels,
            config=config.training,
            spec=data_spec(config.data),
            seed=derive_seed(config.seed, "train", 1, seen.round),
            device=torch.device("cpu"),
        )
        sent = chain.protect(found.update, state, ProtectContext(round=seen.round, seed=0))
        computed.append(replace(seen, update=sent))
        for name, value in sent.items():
            torch.testing.assert_close(seen.update[name], value, rtol=1e-4, atol=1e-5)
    budget = Budget(iterations=5)
    for number, (seen, again) in enumerate(zip(captured, computed, strict=True)):
        one = evidence_for(seen, "adaptive", captured[:number])
        two = evidence_for(again, "adaptive", computed[:number])
        assert one.notes["state"] == two.notes["state"] == "replayed from the client's first round"
        assert one.notes["resolved"] == pytest.approx(two.notes["resolved"], abs=0.02)
        cosines = []
        for target, earlier in ((seen, captured[:number]), (again, computed[:number])):
            (result,) = reconstruct(
                target,
                "ig",
                budget=budget,
                tier="adaptive",
                device="cpu",
                history=partial(lambda earlier, _: earlier, earlier),
            )
            assert isinstance(result, Reconstruction)
            cosines.append(result.gradient_cosine)
        assert cosines[0] == pytest.approx(cosines[1], abs=0.01)
