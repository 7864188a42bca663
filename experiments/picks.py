"""Compare what the default audit picks with the best single attack.

    OMP_NUM_THREADS=1 python -m experiments.picks [--situation NAME] [--split choose] [--json]

Every row is a situation that an operator meets, on fresh networks. `auto` attacks each upload blind
with one start; so does, by itself and with the same iterations, every single attack that is made
for the situation, `best` among them. ``gap`` is by how many dB the single attack of the highest
mean PSNR, which takes the truth to know, is above the pick's; means are over the row's uploads, and
an original without a reconstruction counts as a grey image. ``picked`` counts `auto`'s choices.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch

from bract import Observation
from bract.attacks import Budget, Engine, reconstruct_over_rounds
from bract.config.audit import Tier
from bract.errors import BractError
from bract.inputs import Truth
from bract.scores.image import score_images
from experiments import frozen_backbone, local_training, over_rounds
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.images import image_set
from experiments.harness.result import Row
from experiments.harness.splits import first_seed
from experiments.harness.uploads import gradient_upload, network_for, plain_spec

ITERATIONS = 300
UPLOADS = 3
COLUMNS = (
    *("situation", "uploads", "picked", "psnr", "single", "single_psnr", "gap", "cpu_seconds"),
)

Made = tuple[list[Observation], Truth, Tier]
"""Uploads by round, what is scored against, and the tier of the attacker."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Uploads of one kind, and the attacks that are made for them."""

    name: str
    singles: tuple[str, ...]
    make: Callable[[int, str], Made]


def gradients(model: str, activation: str, batch: int, number: int, split: str) -> Made:
    """Return one batch's gradient through a fresh network, of digits."""
    pool = image_set("digits", batch * UPLOADS, split, size=16)
    part = slice(number * batch, (number + 1) * batch)
    truth = Truth(pool.images[part], pool.labels[part])
    seed = first_seed(split) + number
    spec = plain_spec(truth.images.shape[1:])
    network = network_for(spec, model, seed, activation=activation)
    seen = gradient_upload(network, truth.images, truth.labels, model=model, activation=activation)
    return [seen], truth, "oblivious"


def head(batch: int, number: int, split: str) -> Made:
    """Return the gradient of a head alone, behind a frozen backbone, of colour photographs."""
    images = frozen_backbone.in_colour(image_set("photos", batch * UPLOADS, split))
    part = slice(number * batch, (number + 1) * batch)
    truth = Truth(images.images[part], images.labels[part])
    setting = frozen_backbone.Setting("lenet-strided", "relu")
    seen = frozen_backbone.upload(setting, truth, first_seed(split) + number, f"client-{number}")
    return [seen], truth, "oblivious"


def epochs(number: int, split: str) -> Made:
    """Return the update of five epochs of 51 images, labels and order unknown."""
    setting = local_training.Setting(images_each=51)
    pool = image_set(setting.data, setting.images_each * UPLOADS, split)
    images, labels = local_training.client_images(setting, pool, number)
    seen = local_training.observation(setting, images, labels, first_seed(split) + number)
    return [local_training.known_of(setting, seen)], Truth(images, labels), "oblivious"


def rounds(row: over_rounds.Row, count: int, number: int, split: str) -> Made:
    """Return one client's uploads of several rounds."""
    held = over_rounds.federation(row, number, split)
    truth = held.truth(range(1), slice(0, count))
    return over_rounds.seen_by(row, held)[:count], truth, row.tier


SITUATIONS = (
    Situation(
        name="one image, smooth network",
        singles=("best", "gauss-newton", "grnn", "ig"),
        make=partial(gradients, "lenet-strided", "sigmoid", 1),
    ),
    Situation(
        name="one image, ReLU",
        singles=("best", "grnn", "ig", "r-gap"),
        make=partial(gradients, "lenet-strided", "relu", 1),
    ),
    Situation(
        name="four images, ReLU",
        singles=("best", "gradinversion", "grnn", "ig"),
        make=partial(gradients, "lenet-strided", "relu", 4),
    ),
    Situation(
        name="one image, fresh ResNet-20 in training mode",
        singles=("best", "ig", "patch-span", "statistics"),
        make=partial(gradients, "resnet20", "relu", 1),
    ),
    Situation(
        name="one image, head of a frozen backbone",
        singles=("ig", "maui"),
        make=partial(head, 1),
    ),
    Situation(
        name="four images, head of a frozen backbone",
        singles=("ig", "maui"),
        make=partial(head, 4),
    ),
    Situation(
        name="51 images, five local epochs",
        singles=("coarse-to-fine", "ig"),
        make=epochs,
    ),
    Situation(
        name="one image, noise of 1e-3, known",
        singles=("best", "grnn", "ig"),
        make=partial(rounds, over_rounds.Row("noise", activation="sigmoid", defense="noise"), 1),
    ),
    Situation(
        name="three rounds of the same four images",
        singles=("best", "ig", "multi-round"),
        make=partial(rounds, over_rounds.Row("same", batch=4), 3),
    ),
    Situation(
        name="three rounds of four out of eight images",
        singles=("best", "ig", "multi-round"),
        make=partial(rounds, over_rounds.Row("parts", batch=4, held=8), 3),
    ),
)


def main() -> None:
    """Attack every situation's uploads; then print the table or JSON."""
    arguments = parser(__doc__, "split", "resume")
    arguments.add_argument("--situation", nargs="+", default=[s.name for s in SITUATIONS])
    arguments.add_argument("--iterations", type=int, default=ITERATIONS)
    options = parse(arguments)
    done = Finished(options.resume, "experiments.picks")
    rows = []
    for situation in SITUATIONS:
        if situation.name in options.situation:
            about = [situation.name, situation.singles, options.split, options.iterations]
            made = partial(row, situation, options.split, options.iterations)
            rows.append(note_row(done.row(about, made), COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


def row(situation: Situation, split: str, iterations: int) -> Row:
    """Attack a situation's uploads by `auto`, and by each single attack."""
    found: dict[str, list[float]] = {}
    picked: Counter[str] = Counter()
    spent = 0.0
    for number in range(UPLOADS):
        seen, truth, tier = situation.make(number, split)
        for name in ("auto", *situation.singles):
            begun = time.process_time()
            quality, by = scored(seen, truth, tier, name, iterations)
            found.setdefault(name, []).append(quality)
            if name == "auto":
                spent += time.process_time() - begun
                picked[by] += 1
    means = {name: fmean(values) for name, values in found.items()}
    single = max(situation.singles, key=means.__getitem__)
    return {
        "situation": situation.name,
        "split": split,
        "iterations": iterations,
        "uploads": UPLOADS,
        "picked": ", ".join(f"{name} {count}" for name, count in picked.most_common()),
        "psnr": means["auto"],
        "single": single,
        "single_psnr": means[single],
        "gap": means[single] - means["auto"],
        "each": found,
        "cpu_seconds": spent / UPLOADS,
    }


def scored(
    seen: list[Observation], truth: Truth, tier: Tier, name: str, iterations: int
) -> tuple[float, str]:
    """Return the mean PSNR of an attack's blind pick in dB, and which attack made it."""
    try:
        result = reconstruct_over_rounds(
            seen,
            name,
            budget=Budget(iterations=iterations),
            tier=tier,
            engine=Engine(device="cpu"),
        )
    except BractError:
        return over_grey(truth), "none"
    missing = max(0, len(truth.images) - len(result.images))
    images = torch.cat([result.images, torch.full_like(truth.images[:missing], 0.5)])
    rows = score_images(images, truth, perceptual=False).rows
    return fmean(float(one.psnr or 0.0) for one in rows), result.pick.attack


def over_grey(truth: Truth) -> float:
    """Return the mean PSNR of grey images."""
    rows = score_images(torch.full_like(truth.images, 0.5), truth, perceptual=False).rows
    return fmean(float(one.psnr or 0.0) for one in rows)


if __name__ == "__main__":
    main()
