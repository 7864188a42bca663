"""An audit imports nothing that its attack does not use: a user waits for it at the first row."""

from __future__ import annotations

from pathlib import Path

import pack
import pytest
from loading import COMMAND, loaded

from bract.rundir import RunDirectory


@pytest.mark.processes
def test_an_attack_in_closed_form_loads_no_compiler_no_statistics_and_no_page(
    tmp_path: Path,
) -> None:
    run = pack.copied(RunDirectory(tmp_path / "run"), "mlp-100-b1")
    found = loaded(COMMAND.format(command="audit"), run.root)
    assert list(run.root.glob("audit/*/*.json"))
    unused = {"torch._dynamo", "torchvision", "scipy.stats", "sklearn", "jinja2", "flwr"}
    assert not unused & set(found)
