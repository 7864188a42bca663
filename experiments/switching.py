"""IG where the model normalises by running statistics: total variation, and units that may switch.

    OMP_NUM_THREADS=1 python -m experiments.switching [--split choose] [--images 8] [--json]

A model with batch normalisation whose statistics are frozen, as in fine-tuning, or without any,
treats its images apart. ``ig`` is run with its default weight of total variation for the model,
with a hundredfold one (0.01 behind a ResNet), and with that and a second derivative of ReLUs
(`SwitchingUnits`). Uploads are those of `experiments.peers`, one image each. Labels are inferred,
one start, blind, equal iterations.

Rules, fixed before a row was scored: a setting *gains* where the 95 % interval of its mean
difference in PSNR from the one before it, paired by image and with images and networks crossed, is
above zero, *loses* where it is below, and is *open* otherwise. Weight and width were chosen on the
split ``choose``, on fresh networks and photographs.
"""

import argparse
import time
from collections.abc import Iterator

from bract.attacks import IG, Budget, Engine, Reconstruction, reconstruct
from experiments import peers
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import columns, gain_over, mean, of_score

COLUMNS = (
    *("model", "data", "iterations", "attack", "images", "psnr", "psnr_low", "psnr_high", "ssim"),
    *("gain", "gain_low", "gain_high", "verdict", "accuracy", "cpu_seconds"),
)
TV, WIDTH = 0.01, 0.1
ATTACKS = {
    "ig": IG(),
    "ig, total variation 0.01": IG(tv=TV),
    "ig, total variation 0.01, units may switch": IG(tv=TV, switching=WIDTH),
}
SETTINGS = (
    peers.Setting("resnet20", "relu", iterations=300, mode="eval"),
    peers.Setting("resnet20", "relu", data="digits", trained=True, iterations=300, mode="eval"),
    peers.Setting("lenet-strided", "relu", iterations=600, mode="eval"),
)


def main() -> None:
    """Attack every setting's uploads; then print the table or JSON."""
    arguments = parser(__doc__, "split", "resume")
    arguments.add_argument("--images", type=int, default=8, help="of a row")
    options = parse(arguments)
    done = Finished(options.resume, "experiments.switching", "experiments.peers")
    rows = [
        note_row(row, COLUMNS) for setting in SETTINGS for row in rows_of(setting, options, done)
    ]
    emit(rows, COLUMNS, as_json=options.json)


def rows_of(setting: peers.Setting, options: argparse.Namespace, done: Finished) -> Iterator[Row]:
    """Run every setting of `IG` on the same uploads, each compared with the one before it."""
    given = peers.uploads(setting, options.images, options.split)
    reference: list[float] = []
    for name, using in ATTACKS.items():
        about = [repr(setting), len(given), options.split, repr(using)]
        row = done.get(about) or done.add(about, attacked(setting, given, name, using))
        yield row | gain_over(reference or row["psnr_each"], row)
        reference = row["psnr_each"]


def attacked(setting: peers.Setting, given: list[peers.Upload], name: str, using: IG) -> Row:
    """Attack the uploads of a setting."""
    begun = time.process_time()
    outcomes = reconstruct(
        [upload.seen for upload in given],
        using,
        budget=Budget(iterations=setting.iterations),
        engine=Engine(device="cpu"),
    )
    spent = time.process_time() - begun
    scored = []
    for outcome, upload in zip(outcomes, given, strict=True):
        if not isinstance(outcome, Reconstruction):
            raise SystemExit(f"{setting}: {outcome.reason}")
        scored.append(peers.score(outcome.images, outcome.labels, upload))
    sources, networks = [u.source for u in given], [u.number for u in given]
    return {
        "model": setting.name,
        "data": setting.data,
        "iterations": setting.iterations,
        "attack": name,
        "images": len(given),
        **columns("psnr", of_score(scored, "psnr"), sources, networks),
        "sources_each": sources,
        "networks_each": networks,
        "ssim": mean(of_score(scored, "ssim")),
        "accuracy": mean([u.accuracy for u in given if u.accuracy is not None]),
        "cpu_seconds": spent / len(given),
    }


if __name__ == "__main__":
    main()
