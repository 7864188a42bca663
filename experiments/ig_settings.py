"""Whether IG's settings can be chosen blind, one upload at a time.

    python -m experiments.ig_settings --json

IG runs with each of several settings on the uploads of `peers.uploads` (``--split choose``: images
and networks that score nothing), one start, labels read. Each row says what an attacker gets who
keeps the default, who takes for each upload the setting whose images match best (*cosine*), who
weighs that match against a prior of natural images (*prior*: half the number of pixels times the
logarithm of the distance, plus `NaturalImages` in nats, which is the posterior of a residual of
unknown size), and what the truth would have chosen (*oracle*): means of PSNR over uploads, and of
the differences from the default with their 95 % t intervals. All settings run the same number of
iterations: a choice costs as many attacks as there are settings.
"""

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bract.attacks import IG, Budget, Engine, Reconstruction, reconstruct
from bract.attacks.problem.objectives import LayerWeighting
from bract.attacks.solve.regularizers import NaturalImages
from experiments import peers
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.scores import interval

COLUMNS = (
    *("model", "iterations", "uploads", "settings"),
    *("default", "linear", "cosine", "prior", "oracle"),
)
TV = (0.0, 1e-6, 1e-4, 1e-2)
WEIGHTING: tuple[LayerWeighting, ...] = ("equal", "linear")
RUNS = (
    ("lenet-strided", 300),
    ("lenet", 300),
    ("lenet-strided", 1200),
    ("lenet", 1200),
    ("resnet20", 100),
)


@dataclass(frozen=True)
class Tried:
    """One setting on one upload."""

    tv: float
    weighting: str
    psnr: float
    distance: float
    nats: float

    @property
    def posterior(self) -> float:
        """Nats of a residual of unknown size, and of the prior."""
        return self.nats + 0.5 * PIXELS * math.log(max(self.distance, 1e-30))


PIXELS = peers.CHANNELS * peers.SIZE**2


def tried(setting: peers.Setting, count: int, split: str) -> list[list[Tried]]:
    """Run every setting on every upload; one list an upload."""
    given = peers.uploads(setting, count, split)
    found: list[list[Tried]] = [[] for _ in given]
    for tv, weighting in itertools.product(TV, WEIGHTING):
        outcomes = reconstruct(
            [upload.seen for upload in given],
            IG(tv=tv, weighting=weighting),
            budget=Budget(iterations=setting.iterations),
            engine=Engine(),
        )
        for own, outcome, upload in zip(found, outcomes, given, strict=True):
            if not isinstance(outcome, Reconstruction) or outcome.pick.cosine is None:
                raise SystemExit(f"{setting}: {outcome}")
            (row,) = peers.score(outcome.images, outcome.labels, upload).rows
            nats = NaturalImages()(None, outcome.images[None])  # type: ignore[arg-type]
            distance = 1.0 - outcome.pick.cosine
            own.append(Tried(tv, weighting, float(row.psnr or 0.0), distance, float(nats)))
        note(f"{setting.name}: tv {tv:g}, {weighting}")
    return found


def rows_of(model: str, iterations: int, count: int, split: str) -> Iterator[dict[str, Any]]:
    """Compare the choices on one model."""
    setting = next(s for s in peers.SETTINGS if s.model == model and not s.trained)
    found = tried(replace(setting, iterations=iterations), count, split)
    default = 1e-6 if model.startswith("lenet") else 1e-4

    def of(weighting: str) -> list[float]:
        return [t.psnr for own in found for t in own if (t.tv, t.weighting) == (default, weighting)]

    choices = {
        "default": of("equal"),
        "linear": of("linear"),
        "cosine": [min(own, key=lambda t: t.distance).psnr for own in found],
        "prior": [min(own, key=lambda t: t.posterior).psnr for own in found],
        "oracle": [max(t.psnr for t in own) for own in found],
    }
    gains = {
        f"{name}_gain": interval([x - y for x, y in zip(own, choices["default"], strict=True)])
        for name, own in choices.items()
        if name != "default"
    }
    yield {
        "model": setting.name,
        "iterations": iterations,
        "uploads": count,
        "settings": len(TV) * len(WEIGHTING),
        **{name: statistics.fmean(own) for name, own in choices.items()},
        **gains,
        "each": [[vars(t) for t in own] for own in found],
    }


def main() -> None:
    """Run all models or some."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--model", action="append")
    options_parser.add_argument("--images", type=int, default=4)
    options_parser.add_argument("--iterations", type=int, help="instead of each run's own")
    options_parser.add_argument("--split", default="choose")
    options = parse(options_parser)
    rows = [
        row
        for model, iterations in RUNS
        if not options.model or model in options.model
        if not options.iterations or iterations == options.iterations
        for row in rows_of(model, iterations, options.images, options.split)
    ]
    emit(rows, COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
