"""Images behind max pooling: `best`, which solves for the places, against GRNN alone.

    OMP_NUM_THREADS=1 python -m experiments.pooled_places [--images 4] [--split choose] [--json]

One image's gradient through a fresh sigmoid LeNet with max pooling, a network an image, equal
iterations and one start; ``copied`` images of one channel are copied into three. ``before`` is the
PSNR of `grnn` in dB, which `best` ran on such models before `pooled-places`; ``psnr`` that of
`best`, with a 95 % t interval over images and networks; ``proven`` is the number of images whose
inner places of max pooling were proven without the truth, so that `pooled-places` made it.
Images and networks of ``--split score`` chose no setting.
"""

import time
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from torch import Tensor

from bract.attacks import Budget, attack
from bract.attacks.methods.pooled_places.pooled_places import PooledPlaces
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.images import image_set
from experiments.harness.result import Row
from experiments.harness.scores import columns
from experiments.harness.splits import first_seed
from experiments.harness.uploads import gradient_upload, network_for, plain_spec

ITERATIONS = 600
COLUMNS = (
    *("data", "images", "before", "before_low", "before_high", "psnr", "psnr_low", "psnr_high"),
    *("proven", "before_seconds", "seconds"),
)


@dataclass(frozen=True)
class Setting:
    """A row: an image set, and whether its one channel is copied into three."""

    data: str
    copied: bool = False

    @property
    def name(self) -> str:
        """The images in words."""
        return f"{self.data} in three channels" if self.copied else self.data


SETTINGS = (
    Setting("digits"),
    Setting("digits", copied=True),
    Setting("grey", copied=True),
    Setting("photos"),
    Setting("clothes"),
    Setting("clothes", copied=True),
)


@dataclass(frozen=True)
class Found:
    """An attack on an image: PSNR in dB, CPU seconds, and the method that made it."""

    psnr: float
    seconds: float
    method: str


def main() -> None:
    """Attack every setting's images; then print the table or JSON."""
    arguments = parser(__doc__, "split", "resume")
    arguments.add_argument("--images", type=int, default=4, help="of a row")
    arguments.add_argument("--settings", type=int, help="rows, from the first on")
    arguments.add_argument("--data", action="append", help="an image set; by default each")
    options = parse(arguments)
    done = Finished(options.resume, "experiments.pooled_places")
    rows = []
    for setting in SETTINGS[: options.settings]:
        if options.data and setting.data not in options.data:
            continue
        made = partial(row, setting, options.images, options.split)
        found = done.row([vars(setting), options.images, options.split, ITERATIONS], made)
        rows.append(note_row(found, COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


def row(setting: Setting, count: int, split: str) -> Row:
    """Attack images of a setting, each through a network of its own."""
    given = image_set(setting.data, count, split)
    channels = 3 if setting.copied else given.images.shape[1]
    truth = given.images.expand(-1, channels, -1, -1).contiguous()
    pairs = [
        attacked(truth[[n]], given.labels[[n]], first_seed(split) + n, ITERATIONS)
        for n in range(count)
    ]
    before, after = zip(*pairs, strict=True)
    sources = list(given.sources[:count])
    return {
        "data": setting.name,
        "split": split,
        "iterations": ITERATIONS,
        "images": count,
        **columns("before", [one.psnr for one in before], sources, range(count)),
        **columns("psnr", [one.psnr for one in after], sources, range(count)),
        "proven": sum(one.method == PooledPlaces.name for one in after),
        "before_seconds": fmean(one.seconds for one in before),
        "seconds": fmean(one.seconds for one in after),
    }


def attacked(image: Tensor, label: Tensor, seed: int, iterations: int) -> tuple[Found, Found]:
    """Return what `grnn` and `best` make of an image's gradient."""
    network = network_for(plain_spec(image.shape[1:]), "lenet", seed, activation="sigmoid")
    seen = gradient_upload(network, image, label, model="lenet", activation="sigmoid")
    found = []
    for name in ("grnn", "best"):
        begun = time.process_time()
        result = attack(name)(seen, budget=Budget(iterations=iterations))
        apart = (result.images.double() - image.double()).square().mean()
        psnr = float(-10.0 * apart.clamp_min(1e-10).log10())
        method = result.trials[result.chosen].method
        found.append(Found(psnr, time.process_time() - begun, method))
    first, second = found
    return first, second


if __name__ == "__main__":
    main()
