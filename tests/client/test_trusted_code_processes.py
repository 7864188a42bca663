"""Real clients, a server that names code, and nothing on their side that lists it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from bract.cli.launch.launcher import Launch, LocalFederation
from bract.config import build_config
from bract.errors import RunFailedError
from bract.rundir import RunDirectory

pytestmark = pytest.mark.processes

TASK = """
import os
from torch import nn

with open({log!r}, "a") as log:
    log.write(os.environ.get("BRACT_CLIENT_APP", "server") + "\\n")

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


class Unlisted(LocalFederation):
    """A federation whose clients list no code of their own."""

    def _node_config(self, client: int, keys: Sequence[Path]) -> dict[str, str | int]:
        node = super()._node_config(client, keys)
        assert node.pop("models") == "named_by_the_server:net"
        return node


@pytest.mark.parametrize("kind", [Unlisted, LocalFederation])
def test_a_client_imports_what_the_launcher_lists_and_nothing_else(
    kind: type[LocalFederation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "imported"
    (tmp_path / "named_by_the_server.py").write_text(TASK.format(log=str(log)))
    earlier = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), earlier])))
    config = build_config(
        {
            "name": "unlisted",
            "clients": 1,
            "rounds": 1,
            "data": {"image_size": 8},
            "model": {"name": "named_by_the_server:net"},
            "training": {"local_steps": 1},
        }
    )
    run = RunDirectory(tmp_path / "run")
    run.create(config)
    with kind(config, run, Launch()) as federation:
        if kind is LocalFederation:
            federation.train(lambda row: None)
        else:
            with pytest.raises(RunFailedError, match="is code that would be imported"):
                federation.train(lambda row: None)
    imported = log.read_text().split()
    assert imported.count("server") >= 1
    assert ("bract.client.app:app" in imported) == (kind is LocalFederation)
