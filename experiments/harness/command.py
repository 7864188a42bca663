"""What every experiment prints and leaves: a table or JSON, and a picture."""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    *("bract", "flwr", "torch", "scikit-learn", "numpy", "matplotlib", "pillow"),
    *("gmpy2", "phe", "tenseal", "sf-heu"),
)


def parser(doc: str, name: str, *, picture: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options that all experiments share."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--json", action="store_true", help="print JSON alone on stdout")
    if picture:
        made.add_argument(
            "--picture",
            type=Path,
            default=Path(__file__).parents[1] / "results" / f"{name}-cpu.png",
            help="where to write the picture",
        )
    return made


def emit(
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str],
    *,
    as_json: bool,
    versions: Mapping[str, str] | None = None,
) -> None:
    """Print rows as a table of ``columns``, or all of them as JSON.

    ``versions`` are those that no installed package tells.
    """
    if as_json:
        content = {
            "device": device(),
            "command": shlex.join(
                ["python", "-m", f"experiments.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
            ),
            "versions": {"python": platform.python_version(), **_versions(), **(versions or {})},
            "rows": rows,
        }
        print(json.dumps(content, indent=1))
        return
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    for line in [list(columns), *cells]:
        print("  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)))


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and half width of the 95 % t interval; None from a single value."""
    from scipy.stats import t

    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    spread = statistics.stdev(values) / len(values) ** 0.5
    return mean, float(t.ppf(0.975, len(values) - 1)) * spread


def note(text: str) -> None:
    """Say on stderr what is running."""
    print(text, file=sys.stderr, flush=True)


def device() -> str:
    """Return the processor's name and number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "-" if value is None else str(value)
