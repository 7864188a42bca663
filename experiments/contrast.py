"""Whether contrast or content decides if batch statistics give an image back.

    OMP_NUM_THREADS=1 python -m experiments.contrast [--split choose] [--images 8] [--json]

Crops of the grey and colour pictures, as images of one channel and 32 pixels, are moved to a mean
of a half and to a standard deviation of 0.05 or 0.15, so that each is attacked at both contrasts,
through the same fresh ResNet-20 with ReLU. ``statistics`` runs from one start. A score is the gain
in PSNR over the flat image of the true brightness; an image of the right contrast that has nothing
to do with the original is 3 dB below it, whatever the contrast. ``correlation`` is that of the
pixels with the original's, ``error`` the loss left, total variation included.

Rules, fixed before a row was scored: contrast *matters* for a kind of picture where the 95 %
interval of the paired difference in gain, over pictures and networks, is above or below zero, and
is *open* otherwise: its ends tell how large an effect was missed.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks import Budget, Engine, Reconstruction, reconstruct
from bract.attacks.methods.statistics import Statistics
from experiments.harness.clients import NETWORKS
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.crossed import crossed_interval
from experiments.harness.images import image_set
from experiments.harness.result import Row
from experiments.harness.scores import mean
from experiments.harness.splits import first_seed
from experiments.harness.uploads import gradient_upload, network_for, plain_spec

COLUMNS = (
    *("pictures", "contrast", "images", "gain", "gain_low", "gain_high", "correlation"),
    *("highest_correlation", "error", "flat_psnr", "difference", "difference_low"),
    *("difference_high", "verdict"),
)
PICTURES = ("grey", "photos")
CONTRASTS = (0.15, 0.05)
SPEC = plain_spec((1, 32, 32))


@dataclass(frozen=True)
class Originals:
    """Images ``(N, 1, 32, 32)`` of one contrast, and the number of each one's picture."""

    images: Tensor
    sources: tuple[int, ...]


def originals(pictures: str, contrast: float, count: int, split: str) -> Originals:
    """Return crops at a mean of a half and a standard deviation of ``contrast``."""
    found = image_set(pictures, count, split)
    grey = found.images.mean(dim=1, keepdim=True)
    apart = grey - grey.mean(dim=(1, 2, 3), keepdim=True)
    scale = contrast / apart.square().mean(dim=(1, 2, 3), keepdim=True).sqrt().clamp_min(1e-6)
    return Originals((0.5 + scale * apart).clamp(0.0, 1.0), found.sources)


def attacked(pictures: str, contrast: float, options: argparse.Namespace) -> Row:
    """Attack the uploads of one kind of picture at one contrast."""
    given = originals(pictures, contrast, options.images, options.split)
    numbers = [i % NETWORKS for i in range(options.images)]
    seen = []
    for i, number in enumerate(numbers):
        network = network_for(
            SPEC, "resnet20", first_seed(options.split) + number, activation="relu"
        )
        seen.append(
            gradient_upload(
                network.train(),
                given.images[i : i + 1],
                torch.tensor([i % 10]),
                spec=SPEC,
                client=f"client-{i}",
                model="resnet20",
                activation="relu",
            )
        )
    outcomes = reconstruct(
        seen,
        Statistics(),
        budget=Budget(iterations=options.iterations),
        engine=Engine(device="cpu"),
    )
    gains, correlations, flats, errors = [], [], [], []
    for outcome, truth in zip(outcomes, given.images, strict=True):
        if not isinstance(outcome, Reconstruction):
            raise SystemExit(f"{pictures}: {outcome.reason}")
        gain, flat, correlation = against_flat(outcome.images.reshape(truth.shape), truth)
        gains.append(gain)
        flats.append(flat)
        correlations.append(correlation)
        errors.append(outcome.trials[outcome.chosen].loss)
    low, high = crossed_interval(gains, given.sources, numbers) or (None, None)
    return {
        "pictures": pictures,
        "contrast": contrast,
        "images": options.images,
        "iterations": options.iterations,
        "gain": mean(gains),
        "gain_low": low,
        "gain_high": high,
        "gain_each": gains,
        "correlation": mean(correlations),
        "highest_correlation": max(correlations),
        "correlation_each": correlations,
        "flat_psnr": mean(flats),
        "error": mean(errors),
        "sources_each": list(given.sources),
        "networks_each": numbers,
    }


def against_flat(found: Tensor, truth: Tensor) -> tuple[float, float, float]:
    """Return the gain over a flat image in dB, that image's PSNR, and the pixels' correlation."""
    found, truth = found.double(), truth.double()
    apart, made = truth - truth.mean(), found - found.mean()
    flat = -10.0 * apart.square().mean().log10()
    psnr = -10.0 * (found - truth).square().mean().log10()
    correlation = (apart * made).sum() / (apart.norm() * made.norm()).clamp_min(1e-12)
    return float(psnr - flat), float(flat), float(correlation)


def compared(row: Row, reference: Row) -> Row:
    """Return what the first contrast's row changes for the same pictures, and the verdict."""
    if row["contrast"] == reference["contrast"]:
        return {"difference": 0.0, "verdict": "reference"}
    apart = [a - b for a, b in zip(row["gain_each"], reference["gain_each"], strict=True)]
    found = crossed_interval(apart, row["sources_each"], row["networks_each"])
    low, high = found or (None, None)
    matters = low is not None and high is not None and (low > 0.0 or high < 0.0)
    return {
        "difference": mean(apart),
        "difference_low": low,
        "difference_high": high,
        "verdict": "matters" if matters else "open",
    }


def main() -> None:
    """Attack both kinds of pictures at both contrasts; then print the table or JSON."""
    arguments = parser(__doc__, "split", "resume")
    arguments.add_argument("--images", type=int, default=8, help="of a row")
    arguments.add_argument("--iterations", type=int, default=200)
    options = parse(arguments)
    done = Finished(options.resume, "experiments.contrast")
    rows = []
    for pictures in PICTURES:
        reference: Row | None = None
        for contrast in CONTRASTS:
            about = [pictures, contrast, options.images, options.iterations, options.split]
            row = done.get(about) or done.add(about, attacked(pictures, contrast, options))
            reference = reference or row
            rows.append(note_row(row | compared(row, reference), COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
