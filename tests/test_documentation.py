"""The examples of the documentation run as they stand."""

import ast
import logging
import re
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from bract.server.loopback import LoopbackGrid

DOCS = Path(__file__).parent.parent / "docs"


def code_of(page, name):
    """Run the block that follows a file's name, as a module."""
    text = (DOCS / page).read_text()
    found = re.search(rf"`{re.escape(name)}`.*?\n\n```python\n(.*?)```", text, re.DOTALL)
    assert found, f"{page} has no {name}"
    module = {"__name__": name.removesuffix(".py")}
    exec(compile(found[1], f"{page}:{name}", "exec"), module)
    return module


def test_fedboosting_works_in_somebody_s_own_apps(capsys):
    logging.getLogger("flwr").setLevel(logging.ERROR)
    client = code_of("fedboosting.md", "client_app.py")["app"]
    server = code_of("fedboosting.md", "server_app.py")["app"]
    nodes = [{"partition-id": i, "num-partitions": 3} for i in range(3)]
    grid = LoopbackGrid(client, nodes)
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    kinds = [message.metadata.message_type for message in grid.log]
    assert kinds == (["train"] * 3 + ["evaluate.fused"] * 3) * 3
    found = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    assert sum(found["weights"]) == pytest.approx(1.0)
    assert all(score > 0.5 for row in found["V"] for score in row)
    assert all(score > 0.5 for score in found["T"])
