"""Pictures of a report come out of its run directory."""

from pathlib import Path

import pytest
from PIL import Image

from bract.report.page.pictures import picture


@pytest.mark.parametrize("name", ["../outside.png", "audit/../../outside.png", "\0", "x" * 5000])
def test_an_audit_s_picture_is_read_from_the_run_directory_alone(tmp_path: Path, name: str) -> None:
    """The name stands in a JSON file that may come from somebody else."""
    root = tmp_path / "run"
    (root / "audit").mkdir(parents=True)
    for path in (tmp_path / "outside.png", root / "audit" / "own.png"):
        Image.new("L", (8, 8)).save(path)
    assert picture(root, "audit/own.png", redact=False).state == "shown"
    assert picture(root, name, redact=False).state == "broken"
    assert picture(root, str(tmp_path / "outside.png"), redact=False).state == "broken"
