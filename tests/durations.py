"""Where the time of the tests goes: seconds of each file and of the dearest tests, from one run.

``make durations`` runs the quick tests and writes ``tests/durations.json``, where nothing else
runs. Times are of set-up, call and clean-up, in seconds of a worker.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

RESULT = Path(__file__).with_name("durations.json")
DEAREST = 150


def durations(junit: Path) -> dict[str, object]:
    """Read pytest's JUnit file: seconds in total, of each file, and of the dearest tests."""
    files: dict[str, float] = defaultdict(float)
    tests: dict[str, float] = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        file, seconds = case.get("classname", ""), float(case.get("time", "0"))
        files[file] += seconds
        tests[f"{file}::{case.get('name', '')}"] = seconds
    dearest = sorted(tests.items(), key=lambda row: -row[1])[:DEAREST]
    return {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "tests": len(tests),
        "seconds": round(sum(tests.values()), 1),
        "files": {
            name: round(seconds, 1)
            for name, seconds in sorted(files.items(), key=lambda row: -row[1])
        },
        "dearest": {name: round(seconds, 1) for name, seconds in dearest},
    }


if __name__ == "__main__":
    found = durations(Path(sys.argv[1]))
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{RESULT}: {found['seconds']} s in {found['tests']} tests")
