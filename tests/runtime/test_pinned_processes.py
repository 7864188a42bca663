"""Runs of strangers, submitted to the SuperLink of real SuperNodes: none of their code runs."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from refusals import check_named

from bract.cli.launch.launcher import Launch, LocalFederation
from bract.config import build_config
from bract.rundir import RunDirectory
from bract.runtime import shim

pytestmark = pytest.mark.processes

MANIFEST = """
[project]
name = "stranger"
version = "1.0.0"
description = "An app that no site installed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "stranger"

[tool.flwr.app.components]
serverapp = "hers.server_app:app"
clientapp = "{app}"

[tool.flwr.app.config]
"""

MARKS = """
import json, sys, uuid
from pathlib import Path

Path({folder!r}, uuid.uuid4().hex).write_text(json.dumps([sys.argv[0], __file__]))
"""

CLIENT = """
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg, context):
    stolen = [Path(str(context.node_config[key])).exists() for key in ("truth-dir", "state-dir")]
    Path({folder!r}, "stolen").write_text(json.dumps([stolen, dict(context.node_config)]))
"""

SERVER = """
import json, time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    record = RecordDict({{"config": ConfigRecord({{"x": 1}})}})
    asked = [Message(record, message_type="train", dst_node_id=node) for node in nodes]
    replies = grid.send_and_receive(asked, timeout=240)
    found = [[reply.error.code, reply.error.reason] for reply in replies if reply.has_error()]
    Path({answers!r}).write_text(json.dumps([len(list(replies)), found]))
"""


class Strangers(LocalFederation):
    """A federation to which a stranger submits a run of his own app."""

    app = ""
    shadows = ()

    def start_clients_afresh(self) -> None:
        """Have imported nothing at the client when the bundle arrives."""
        inherited = self.processes.environment

        def environment(name: Any) -> Any:
            found = inherited(name)
            if name.startswith("client-"):
                del found[shim.SOCKET]
            return found

        self.processes.environment = environment  # type: ignore[method-assign]

    def _write_app(self) -> None:
        bundle = self.processes.folder / "app"
        self.marks = self.run.root / "marks"
        self.marks.mkdir()
        answers = self.run.root / "answers.json"
        marks = MARKS.format(folder=str(self.marks))
        (bundle / "hers").mkdir(parents=True)
        (bundle / "pyproject.toml").write_text(MANIFEST.format(app=self.app))
        (bundle / "hers" / "__init__.py").write_text("")
        (bundle / "hers" / "server_app.py").write_text(SERVER.format(answers=str(answers)))
        client = marks + CLIENT.format(folder=str(self.marks))
        for file in ("hers/client_app.py", *self.shadows):
            place = bundle / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(client if place.name != "__init__.py" else marks)

    def answers(self) -> Any:
        """Wait for the run; how many replies came, and the code and reason of each error."""
        self.run_id = self._submit()
        deadline = time.monotonic() + 400
        while not self._flower_status().startswith("finished"):
            assert time.monotonic() < deadline, "the run did not end"
            self.processes.check_alive()
        return json.loads((self.run.root / "answers.json").read_text())

    def ran(self) -> Any:
        """Commands of the processes that executed a file of the bundle."""
        assert not (self.marks / "stolen").exists()
        return [json.loads(file.read_text()) for file in self.marks.iterdir()]


def submit(tmp_path: Path, app: Any, shadows: Any = ()) -> Any:
    config = build_config({"clients": 1, "name": "site"})
    run = RunDirectory(tmp_path / "site")
    run.create(config)
    federation = Strangers(config, run, Launch())
    federation.app, federation.shadows = app, shadows
    if shadows:
        federation.start_clients_afresh()
    with federation:
        answers = federation.answers()
        log = (run.logs / "client-0.log").read_text()
    return answers, federation.ran(), log


def test_a_foreign_app_is_refused_by_name_and_does_not_run(tmp_path: Path) -> None:
    (count, errors), ran, log = submit(tmp_path, "hers.client_app:app")
    assert count == 1
    ((code, reason),) = errors
    assert code == 7
    check_named(reason, "bract.client.app:app")
    assert "'hers.client_app:app'" in reason
    assert ran == []
    assert "hers.client_app:app" not in log.replace(reason, "")


def test_a_bundle_that_shadows_installed_modules_is_not_imported_at_the_site(
    tmp_path: Path,
) -> None:
    shadows = (
        *("bract/__init__.py", "bract/client/__init__.py", "bract/client/app.py"),
        *("torch/__init__.py", "flwr/clientapp/client_app.py"),
    )
    (count, errors), ran, _ = submit(tmp_path, "bract.client.app:app", shadows)
    # The installed app answered, and does not understand the message.
    assert count == 1
    ((code, _),) = errors
    assert code == 2
    assert [command for command, _ in ran if "clientapp" in command or "supernode" in command] == []
