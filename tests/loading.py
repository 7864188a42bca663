"""Which modules a process loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

COMMAND = """
from bract.cli.main import main
sys.argv = ["bract", "{command}", *sys.argv[1:]]
try: main()
except SystemExit as stop: assert not stop.code, stop.code
"""
"""Code that runs a command of bract on the arguments of `loaded`."""

LOADED = """
import json, sys
{code}
print(json.dumps(sorted(sys.modules)))
"""


def loaded(code: str, root: Path) -> list[str]:
    """Return the modules of a process of its own after it ran some code, with one argument."""
    line = [sys.executable, "-P", "-c", LOADED.replace("{code}", code), str(root)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found
