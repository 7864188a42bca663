"""FedLeak's two parts, each alone and together, against IG on the same gradients.

    OMP_NUM_THREADS=1 python -m experiments.fedleak [--split choose] [--images 8] [--json]

The setting is FedLeak's: nothing but the update and the declaration is given, labels are inferred,
the client normalises by its batch, networks are fresh and trained, batches are of one and of four.
Uploads are those of `experiments.peers`. Every attack starts from the same noise and evaluates the
loss as often: where gradient regularisation evaluates twice a step, it takes half the steps.

Rules, fixed before any row was scored: a part *gains* where the 95 % interval of its mean
difference in PSNR from IG, paired by image and with images and networks crossed, is above zero,
*loses* where it is below, and is *open* otherwise. An open row tells how large a gain it could have
missed: the upper end. Share and weight are the defaults of `FedLeak`, which were tuned on nothing.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

from bract.attacks import IG, Budget, Engine, Reconstruction, reconstruct
from bract.attacks.base import Attacker
from bract.attacks.methods.fedleak import FedLeak
from experiments import peers
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import columns, gain_over, mean, of_score

COLUMNS = (
    *("model", "data", "batch", "evaluations", "attack", "images", "psnr", "psnr_low"),
    *("psnr_high", "ssim", "gain", "gain_low", "gain_high", "verdict", "label_accuracy"),
    "cpu_seconds",
)
ATTACKS: dict[str, Attacker] = {
    "ig": IG(),
    "partial matching": FedLeak(flatness=0.0),
    "gradient regularisation": FedLeak(share=1.0),
    "fedleak": FedLeak(),
}
SETTINGS = (
    peers.Setting("lenet-strided", "relu", iterations=400),
    peers.Setting("lenet", "relu", iterations=400),
    peers.Setting("resnet20", "relu", iterations=200),
    peers.Setting("resnet20", "relu", data="digits", trained=True, iterations=200),
)
"""``iterations`` are evaluations here."""

BATCHES = (1, 4)
_GRID = [(1.0, 0.0), (0.3, 0.0), (0.1, 0.0), (1.0, 0.3), (1.0, 0.7), (0.3, 0.3)]


def main() -> None:
    """Attack every setting's uploads; then print the table or JSON."""
    arguments = parser(__doc__, "split", "resume")
    arguments.add_argument("--images", type=int, default=8, help="of a row")
    arguments.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    names = [setting.name for setting in SETTINGS]
    arguments.add_argument("--model", nargs="+", default=names, choices=names)
    arguments.add_argument("--grid", action="store_true", help="a grid of share and flatness")
    options = parse(arguments)
    done = Finished(options.resume, "experiments.fedleak", "experiments.peers")
    rows = [
        note_row(row, COLUMNS)
        for batch in options.batch
        for setting in SETTINGS
        if setting.name in options.model
        for row in rows_of(replace(setting, batch=batch), options, done)
    ]
    emit(rows, COLUMNS, as_json=options.json)


def rows_of(setting: peers.Setting, options: argparse.Namespace, done: Finished) -> Iterator[Row]:
    """Run every attack on the uploads of a setting; IG comes first."""
    given = peers.uploads(setting, options.images // setting.batch, options.split)
    attacks = ATTACKS
    if options.grid:
        grid = {f"share {s}, flatness {f}": FedLeak(share=s, flatness=f) for s, f in _GRID}
        attacks = {"ig": IG(), **grid}
    reference: list[float] = []
    for name, using in attacks.items():
        about = [repr(setting), len(given), options.split, repr(using)]
        row = done.get(about) or done.add(about, attacked(setting, given, name, using))
        reference = reference or row["psnr_each"]
        yield row | gain_over(reference, row)


def attacked(setting: peers.Setting, given: list[peers.Upload], name: str, using: Attacker) -> Row:
    """Attack the uploads of a setting with as many evaluations as it has iterations."""
    twice = isinstance(using, FedLeak) and using.flatness > 0.0
    begun = time.process_time()
    outcomes = reconstruct(
        [upload.seen for upload in given],
        using,
        budget=Budget(iterations=setting.iterations // (1 + twice)),
        engine=Engine(device="cpu"),
    )
    spent = time.process_time() - begun
    scored = []
    for outcome, upload in zip(outcomes, given, strict=True):
        if not isinstance(outcome, Reconstruction):
            raise SystemExit(f"{setting}: {outcome.reason}")
        scored.append(peers.score(outcome.images, outcome.labels, upload))
    each = [u for u, s in zip(given, scored, strict=True) for _ in s.rows]
    sources, networks = [u.source for u in each], [u.number for u in each]
    return {
        "model": setting.name,
        "data": setting.data,
        "batch": setting.batch,
        "evaluations": setting.iterations,
        "attack": name,
        "images": len(each),
        **columns("psnr", of_score(scored, "psnr"), sources, networks),
        "sources_each": sources,
        "networks_each": networks,
        "ssim": mean(of_score(scored, "ssim")),
        "accuracy": mean([u.accuracy for u in given if u.accuracy is not None]),
        "label_accuracy": mean([s.label_accuracy or 0.0 for s in scored]),
        "cpu_seconds": spent / len(each),
    }


if __name__ == "__main__":
    main()
