"""Pictures of experiments, drawn without a screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def canvas(rows: int, columns: int, width: float, height: float, **more: Any) -> tuple[Any, Any]:
    """Return a figure of ``width`` by ``height`` inches and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), **more)


def save(figure: Any, path: Path, *, dpi: int) -> None:
    """Write a figure as PNG, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
