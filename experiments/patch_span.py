"""Activations off a convolution's gradient, then the image: `patch-span` beside what searches.

    OMP_NUM_THREADS=1 python -m experiments.patch_span [--split choose] [--images 8] [--json]

One image an upload or four, ReLU, labels inferred, one start, blind, equal iterations; uploads are
those of `experiments.peers`, whose rows have breaching's recipes on the same images. ``patch-span``
runs with the batch statistics that returned buffers give and without them, beside ``statistics``,
which has them alone, and ``ig``. An upload that an attack refuses is scored with a grey image.
*Read* counts uploads where the linear system found a space that holds the true activations of all
of its images, to a squared sine of 1e-3; it is measured with the truth and decides nothing.

Rules, fixed before a row was scored: an attack *gains* where the 95 % interval of its mean
difference in PSNR from ``ig``, paired by image and with images and networks crossed, is above zero,
*loses* where it is below, and is *open* otherwise. An image counts as *found* at an SSIM of a half
or more. Nothing was chosen on these images.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from bract.attacks import Budget, Engine, Reconstruction, reconstruct
from bract.attacks.methods.patch_span.activations import entering, read_activations
from bract.attacks.problem.case import open_case
from bract.errors import BractError
from experiments import peers
from experiments.fedleak import gain_over
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import columns, mean, of_score

COLUMNS = (
    *(
        "model",
        "data",
        "mode",
        "batch",
        "attack",
        "images",
        "read",
        "psnr",
        "psnr_low",
        "psnr_high",
    ),
    *("ssim", "found", "gain", "gain_low", "gain_high", "verdict", "accuracy", "cpu_seconds"),
)
ITERATIONS = 300
FOUND, READ = 0.5, 1e-3
ALONE = "patch-span, no statistics"
ATTACKS = ("ig", "statistics", ALONE, "patch-span")
SETTINGS = (
    peers.Setting("resnet20", "relu"),
    peers.Setting("resnet18", "relu", batch=4),
    peers.Setting("resnet20", "relu", data="digits", trained=True),
    peers.Setting("resnet20", "relu", data="mnist", trained=True),
)


def main() -> None:
    """Attack every setting's uploads; then print the table or JSON."""
    arguments = parser(__doc__, "split", "resume")
    arguments.add_argument("--images", type=int, default=8, help="of a row")
    options = parse(arguments)
    done = Finished(options.resume, "experiments.patch_span", "experiments.peers")
    rows = [
        note_row(row, COLUMNS) for setting in SETTINGS for row in rows_of(setting, options, done)
    ]
    emit(rows, COLUMNS, as_json=options.json)


def rows_of(setting: peers.Setting, options: argparse.Namespace, done: Finished) -> Iterator[Row]:
    """Run every attack on the same uploads, each compared with the first."""
    given = peers.uploads(setting, options.images // setting.batch, options.split)
    reference: list[float] = []
    for name in ATTACKS:
        about = [repr(setting), len(given), options.split, name]
        row = done.get(about) or done.add(about, attacked(setting, given, name))
        reference = reference or row["psnr_each"]
        yield row | gain_over(reference, row)


def attacked(setting: peers.Setting, given: list[peers.Upload], name: str) -> Row:
    """Attack the uploads of a setting."""
    seen = [upload.seen for upload in given]
    if name == ALONE:
        seen = [replace(observation, returned_buffers={}) for observation in seen]
    begun = time.process_time()
    outcomes = reconstruct(
        seen,
        name.partition(",")[0],
        budget=Budget(iterations=ITERATIONS, max_images=setting.batch),
        engine=Engine(device="cpu"),
    )
    spent = time.process_time() - begun
    scored = []
    for outcome, upload in zip(outcomes, given, strict=True):
        if isinstance(outcome, Reconstruction):
            scored.append(peers.score(outcome.images, outcome.labels, upload))
        else:
            grey = torch.full_like(upload.truth, 0.5)
            scored.append(peers.score(grey, torch.zeros_like(upload.labels), upload))
    each = [u for u, s in zip(given, scored, strict=True) for _ in s.rows]
    sources, networks = [u.source for u in each], [u.number for u in each]
    similar = of_score(scored, "ssim")
    return {
        "model": setting.name,
        "data": setting.data,
        "mode": setting.mode,
        "batch": setting.batch,
        "iterations": ITERATIONS,
        "attack": name,
        "images": len(each),
        "read": sum(map(_read, given)) if name.startswith("patch-span") else None,
        **columns("psnr", of_score(scored, "psnr"), sources, networks),
        "sources_each": sources,
        "networks_each": networks,
        "ssim": mean(similar),
        "ssim_each": similar,
        "found": sum(value >= FOUND for value in similar),
        "accuracy": mean([u.accuracy for u in given if u.accuracy is not None]),
        "cpu_seconds": spent / len(each),
    }


def _read(upload: peers.Upload) -> bool:
    case = open_case(upload.seen, tier="oblivious", max_images=len(upload.truth), unroll=16)
    try:
        read = read_activations(case)
    except BractError:
        return False
    state = case.target_model.captured(case.observation)
    inputs = case.target_model.normalise(upload.truth)
    true, _ = entering(case.target_model, state, inputs, read.layer.name)
    return all(float(read.distance(maps.double())) < READ for maps in true)


if __name__ == "__main__":
    main()
