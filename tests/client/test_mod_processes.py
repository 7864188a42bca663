"""DefenseMod in somebody's own Flower app, over real processes."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bract import Observation, ObservationStore
from bract.captures.stores import runs_in
from bract.cli.launch.launcher import Launch, LocalFederation
from bract.config import build_config
from bract.rundir import RunDirectory

pytestmark = pytest.mark.processes

MANIFEST = """
[project]
name = "quickstart"
version = "1.0.0"
description = "An app that knows nothing of bract but the two lines"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "someone"

[tool.flwr.app.components]
serverapp = "quickstart.server_app:app"
clientapp = "quickstart.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 2
bract-defense = "on"
"""

TASK = """
import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )
"""

CLIENT = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from bract.client.mod import DefenseMod
from quickstart.task import net

app = ClientApp(mods=[DefenseMod("adadefense", alpha=0.25)])


@app.train()
def train(msg, context):
    model = net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(context.node_config["partition-id"])
    images, labels = torch.rand(16, 1, 8, 8), torch.randint(10, (16,))
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": 16, "train_loss": 1.0}),
    }
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg, context):
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 16})}), reply_to=msg)
"""

SERVER = """
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from bract.server.hook import HonestButCurious
from quickstart.task import net

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = HonestButCurious(FedAvg(min_available_nodes=2), store={store!r})
    strategy.start(
        grid,
        ArrayRecord(net().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
        timeout=120,
    )
"""


LOCKED = {
    "client_app": CLIENT.replace('DefenseMod("adadefense", alpha=0.25)', 'DefenseMod("fedkl")'),
    "task": TASK.replace("return nn.Sequential(", "return keylock(nn.Sequential(")
    .replace("nn.Linear(144, 10)\n    )", "nn.Linear(144, 10)\n    ))")
    .replace("import torch\n", "import torch\nfrom bract.defenses import keylock\n", 1),
}
"""The two lines of a stranger's app that lock its model."""


ENCRYPTED = {
    "client_app": CLIENT.replace(
        "app = ClientApp(", "app = EncryptedClientApp(clients=2, "
    ).replace(
        "from flwr.clientapp import ClientApp", "from bract.client import EncryptedClientApp"
    ),
    "server_app": SERVER.replace(
        "FedAvg(min_available_nodes=2)", "Encrypted(FedAvg(min_available_nodes=2), clients=2)"
    ).replace("from quickstart", "from bract.strategies import Encrypted\nfrom quickstart"),
}
"""The two lines of such an app, one a side, by which it encrypts."""


class QuickstartFederation(LocalFederation):
    """Real SuperLink and SuperNodes, with the app above instead of bract's."""

    files: Mapping[str, str]

    def _write_app(self) -> None:
        package = self.processes.folder / "app" / "quickstart"
        package.mkdir(parents=True)
        (self.processes.folder / "app" / "pyproject.toml").write_text(MANIFEST)
        for name, text in self.files.items():
            (package / f"{name}.py").write_text(text)
        store = str((self.run.root / "captures").absolute())
        server = self.files["server_app"].replace("{store!r}", repr(store))
        (package / "server_app.py").write_text(server)

    def finish(self) -> Any:
        self.run_id = self._submit()
        deadline = time.monotonic() + 150
        while not self._flower_status().startswith("finished"):
            assert time.monotonic() < deadline, "the run did not end"
            self.processes.check_alive()
            time.sleep(0.5)
        return self._flower_status()


GUARDED = """
import torch
from bract import DefenseMod
from bract.client import Guard
from bract.config import DataConfig
from bract.data.views import test_data
from bract.models import create_model
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


def examples(msg, context):
    images, labels = test_data(DataConfig(name="digits", image_size=8))
    mine = slice(1) if context.node_config["partition-id"] == 0 else slice(1, 257)
    return images[mine], labels[mine]


guard = Guard(
    "linear", examples, classes=10, lr=0.1, local_steps=1, limit={"psnr": 30.0}, seconds=8.0
)
app = ClientApp(mods=[DefenseMod([], guard=guard)])


@app.train()
def train(msg, context):
    model = create_model("linear", classes=10, channels=1, image_size=8)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    images, labels = examples(msg, context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(images)}),
    }
    return Message(RecordDict(content), reply_to=msg)
"""

LINEAR = """
from bract.models import create_model


def net():
    return create_model("linear", classes=10, channels=1, image_size=8)
"""


def federate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    encryption: str = "none",
    **changed: Any,
) -> tuple[RunDirectory, list[Observation]]:
    """Run the app for two rounds; return what was left, of ``rounds``."""
    rounds = changed.pop("rounds", (1, 1, 2, 2))
    files = {"__init__": "", "task": TASK, "client_app": CLIENT, "server_app": SERVER, **changed}
    # A site runs what its operator installed; what the bundle brings is for the server.
    installed = tmp_path / "installed" / "quickstart"
    installed.mkdir(parents=True)
    for name, text in files.items():
        (installed / f"{name}.py").write_text(text)
    earlier = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(installed.parent), earlier]))
    )
    config = build_config({"clients": 2, "name": "quickstart", "encryption": encryption})
    run = RunDirectory(tmp_path / "run")
    run.create(config)
    federation = QuickstartFederation(config, run, Launch(client_app="quickstart.client_app:app"))
    federation.files = files
    with federation:
        status = federation.finish()
    said = "".join(f"{p.name}: {p.read_text()[-3000:]}\n" for p in run.logs.glob("*.log"))
    assert status == "finished:completed", said
    (captured,) = runs_in(run.captures)
    observations = list(ObservationStore(captured))
    assert tuple(o.round for o in observations) == rounds
    return run, observations


def test_the_mod_defends_an_app_that_knows_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, observations = federate(tmp_path, monkeypatch)
    for observation in observations:
        (declared,) = observation.declaration.defenses
        assert declared["name"] == "adadefense"
        assert int(observation.returned_buffers["1.num_batches_tracked"]) == observation.round
        # A first defended update is +-alpha in nearly every coordinate; a plain step of 0.1 is far
        # less.
        sizes = torch.cat([v.flatten() for v in observation.update.values()]).abs()
        if observation.round == 1:
            assert float(((sizes - 0.25).abs() < 0.01).float().mean()) > 0.9
    # Each message ran in a process of its own: the moments came out of the state on disk.
    files = sorted((run.root / "state").rglob("*.safetensors"))
    assert len(files) == 2
    assert [int(load_file(f)["adadefense.round"]) for f in files] == [2, 2]
    assert all(f.stat().st_mode & 0o777 == 0o600 for f in files)


def test_two_lines_lock_the_model_of_such_an_app_and_the_lock_stays_at_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, observations = federate(tmp_path, monkeypatch, **LOCKED)
    for observation in observations:
        (declared,) = observation.declaration.defenses
        assert declared["name"] == "fedkl"
        # Scale and shift of the locked layer are made from the key and never travel.
        assert set(observation.update) == {"0.weight", "0.bias", "4.weight", "4.bias"}
        assert set(observation.parameters) == set(observation.update)
    files = sorted((run.root / "state").rglob("*.safetensors"))
    assert len(files) == 2
    assert all(f.stat().st_mode & 0o777 == 0o600 for f in files)
    keys = [{n: v for n, v in load_file(f).items() if n.startswith("fedkl.")} for f in files]
    assert keys[0] and all(not torch.equal(keys[0][n], keys[1][n]) for n in keys[0] if "key" in n)


def test_two_lines_encrypt_what_such_an_app_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, observations = federate(tmp_path, monkeypatch, encryption="paillier", **ENCRYPTED)
    for observation in observations:
        assert observation.ciphertexts and not observation.update
        assert not observation.returned_buffers
        assert observation.declaration.encryption == "paillier"
        (declared,) = observation.declaration.defenses
        assert declared["name"] == "adadefense"
    kept = [load_file(path) for path in sorted(run.root.rglob("*-final.safetensors"))]
    assert len(kept) == 2 and set(kept[0]) == set(observations[0].parameters) | {
        name for name in kept[0] if name.startswith("1.")
    }
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    assert int(kept[0]["1.num_batches_tracked"]) == 2


def test_a_guard_in_processes_stops_one_site_and_lets_the_other_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SERVER.replace(
        "FedAvg(min_available_nodes=2)", "FedAvg(min_available_nodes=2, fraction_evaluate=0.0)"
    )
    run, observations = federate(
        tmp_path,
        monkeypatch,
        rounds=(1, 2),
        task=LINEAR,
        client_app=GUARDED,
        server_app=server,
    )
    assert {o.declaration.num_examples for o in observations} == {256}
    logs = sorted((run.root / "state").rglob("*-guard.jsonl"))
    sent = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    assert sorted([line["sent"] for line in lines] for lines in sent) == [
        ["as it is", "as it is"],
        ["nothing", "nothing"],
    ]
    assert {log.stat().st_mode & 0o777 for log in logs} == {0o600}
    assert {log.parent.stat().st_mode & 0o077 for log in logs} == {0}
    # What the guard found stays at the site: no file of the server's names an attack.
    stored = [path.read_bytes() for path in run.captures.rglob("*") if path.is_file()]
    assert stored and not any(b"psnr" in text or b"analytic" in text for text in stored)
