"""DefenseMod in somebody's own Flower app, over real processes."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bract.cli.launch.launcher import Launch, LocalFederation
from bract.config import build_config
from bract.protocol.observation import ObservationStore
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


class QuickstartFederation(LocalFederation):
    """Real SuperLink and SuperNodes, with the app above instead of bract's."""

    def _write_app(self) -> None:
        package = self.processes.folder / "app" / "quickstart"
        package.mkdir(parents=True)
        (self.processes.folder / "app" / "pyproject.toml").write_text(MANIFEST)
        (package / "__init__.py").write_text("")
        (package / "task.py").write_text(TASK)
        (package / "client_app.py").write_text(CLIENT)
        store = str((self.run.root / "captures").absolute())
        (package / "server_app.py").write_text(SERVER.replace("{store!r}", repr(store)))

    def finish(self) -> Any:
        self.run_id = self._submit()
        deadline = time.monotonic() + 150
        while not self._flower_status().startswith("finished"):
            assert time.monotonic() < deadline, "the run did not end"
            self.processes.check_alive()
            time.sleep(0.5)
        return self._flower_status()


def test_the_mod_defends_an_app_that_knows_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A site runs what its operator installed; what the bundle brings is for the server.
    installed = tmp_path / "installed" / "quickstart"
    installed.mkdir(parents=True)
    for name, text in (("__init__", ""), ("task", TASK), ("client_app", CLIENT)):
        (installed / f"{name}.py").write_text(text)
    earlier = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(installed.parent), earlier]))
    )
    config = build_config({"clients": 2, "name": "quickstart"})
    run = RunDirectory(tmp_path / "run")
    run.create(config)
    launch = Launch(client_app="quickstart.client_app:app")
    with QuickstartFederation(config, run, launch) as federation:
        status = federation.finish()
    assert status == "finished:completed", (run.logs / "superlink.log").read_text()[-3000:]
    observations = list(ObservationStore(run.captures))
    assert [o.round for o in observations] == [1, 1, 2, 2]
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
