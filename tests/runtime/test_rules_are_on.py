"""What a process of Flower holds by when bract has started it."""

import os
import subprocess
import sys
import tempfile

import pytest

from bract.runtime.parts_on_disk import FOLDER

pytestmark = pytest.mark.processes

CASES = {
    "flwr-serverapp": (
        "import flwr.superlink.grid.http_grid as found",
        "found.inflate_object_from_contents.__qualname__",
        "Answers.read",
    ),
    "flower-superlink": (
        "import flwr.supercore.object_store.in_memory_object_store as found",
        "found.InMemoryObjectStore.get_object_tree.__module__",
        "bract.runtime.trees",
    ),
    "flower-superlink, parts": (
        "import flwr.supercore.object_store.in_memory_object_store as found",
        "found.InMemoryObjectStore.put.__module__",
        "bract.runtime.parts_on_disk",
    ),
}


@pytest.mark.parametrize("command", CASES)
def test_a_command_runs_under_its_rules(command: str) -> None:
    bring, shown, expected = CASES[command]
    code = f"""
import bract.runtime.flower as flower
flower.entry_point = lambda name: lambda: None
flower.run({command.partition(",")[0]!r})
{bring}
print({shown})
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {FOLDER: tempfile.gettempdir()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == expected
