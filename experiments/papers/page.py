"""The page that a reviewer reads: published figures and ours, pictures included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bract.disk import write_text
from experiments.papers.catalog import PAPERS
from experiments.papers.rules import Figure
from experiments.papers.summary import Standing

_HERE = Path(__file__).parent

NAMES = {
    "ssim": "SSIM",
    "f1": "F1",
    "rouge_l": "ROUGE-L",
    "psnr": "PSNR, dB",
    "mse": "MSE",
    "rmse": "RMSE, 0-255",
    "psnr_printed": "PSNR as printed",
    "lpips_alex": "LPIPS-AlexNet",
    "lpips_vgg": "LPIPS-VGG",
    "label_accuracy": "labels found",
    "recognisable": "SSIM of 0.5 or more",
    "residual": "gradient residual",
    "attack_loss": "attack's loss",
    "accuracy": "test accuracy",
    "accuracy_random_key": "accuracy, random key",
    "lock_share": "share of parameters in the lock",
    "weight0": "weight of client 0",
    "reidentified1": "named right, top-1",
    "reidentified3": "named right, top-3",
    "reidentified5": "named right, top-5",
}
"""Metrics as the page and the README call them; others stand as they are."""


def write_page(standings: Sequence[Standing], path: Path) -> Path:
    """Write the page, one file that needs nothing else; return its path.

    Raises
    ------
    WriteFailedError
        If it cannot be written.
    """
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"shown": shown, "number": number, "metric": metric_name}
    page = environment.get_template("papers.html.j2").render(
        papers={
            title: [one for one in standings if one.experiment.paper == key]
            for key, title in PAPERS.items()
        },
        counts=count(standings),
        css=(_HERE / "papers.css").read_text(encoding="utf-8"),
    )
    return write_text(path, page)


def count(standings: Sequence[Standing]) -> dict[str, int]:
    """Count experiments by state, those with something to run first."""
    states = (*("reproduced", "not reproduced", "undecided", "not run", "needs", "nothing to run"),)
    found = {state: sum(one.state == state for one in standings) for state in states}
    return {state: number for state, number in found.items() if number}


def stand_ins(standings: Sequence[Standing]) -> dict[str, int]:
    """Count those among the decided ones whose model, data or task stands for the paper's."""
    return count([one for one in standings if one.stand_in])


def metric_name(metric: str) -> str:
    """Return what a metric is called in words."""
    return NAMES.get(metric, metric.replace("_", " "))


def number(value: float | None) -> str:
    """Put a printed figure as text; what the paper marks as failed is a cross."""
    if value is None:
        return "\u00d7"
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.4g}"


def shown(figure: Figure | None) -> str:
    """Put a figure with its interval as text."""
    if figure is None:
        return "-"
    text = number(figure.mean)
    if figure.low is None or figure.high is None:
        return text
    return f"{text} ({number(figure.low)} to {number(figure.high)})"
