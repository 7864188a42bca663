"""Reconstructions from a client that trained for several epochs on shuffled batches.

    OMP_NUM_THREADS=1 python -m experiments.local_training [--iterations 800] [--json]
    OMP_NUM_THREADS=1 python -m experiments.local_training --optimizers [--json]

Each client has other images and another fresh network, trains with SGD, plain but for one row with
momentum and one with Adam (`train_locally`, as clients do: shuffled anew every epoch), and uploads
the difference. No attack is given order or
labels. ``classes`` 62 gives MNIST's digits labels drawn at random from as many classes as FEMNIST
has, so that labels repeat as often as there; a fresh network has seen neither. ``above``: the share
of images whose SSIM exceeds 0.5, after matching; ``images`` over all clients, intervals over
clients. Baselines see no gradient: the mean of other images of the true class, and of all other
images. ``--split choose``, on which settings were chosen, has other images and other networks.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bract.attacks import Budget, Reconstruction, Refusal, reconstruct
from bract.captures.observation import Observation
from bract.client.defenses import ProtectContext, build_defenses
from bract.config.config import TrainingConfig
from bract.scores.image import match, psnr, ssim
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.images import ImageSet, image_set
from experiments.harness.result import Row
from experiments.harness.scores import interval, mean
from experiments.harness.splits import first_seed
from experiments.harness.uploads import network_for, plain_spec, trained_upload

COLUMNS = (
    *("attack", "model", "activation", "data", "classes", "images_each", "batch_size", "epochs"),
    *("optimizer", "momentum", "simulated"),
    *("lr", "clients", "iterations", "psnr", "ssim", "above", "above_low", "above_high"),
    *("class_mean_above", "mean_above", "labels_right", "cpu_seconds"),
)
RECOGNISABLE = 0.5
FEW_ITERATIONS = 150
LONG_EPOCHS = 32
"""More steps than are unrolled, for clients of one batch."""
LARGER_RATES = (0.02, 0.05, 0.1)
ALL_ROWS = 400
"""Iterations at which every row is run; with more the first one alone."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row."""

    attack: str = "coarse-to-fine"
    model: str = "lenet-strided"
    activation: str = "relu"
    data: str = "mnist"
    classes: int = 62
    images_each: int = 50
    batch_size: int = 5
    epochs: int = 5
    lr: float = 0.004
    optimizer: str = "sgd"
    momentum: float = 0.0
    simulated: bool = True
    iterations: int | None = ALL_ROWS


def standard_plan(iterations: int) -> Iterator[Setting]:
    """Every combination that the documentation speaks of."""
    yield Setting(iterations=iterations)
    if iterations == ALL_ROWS:
        yield Setting(iterations=iterations, classes=10)
        yield Setting(iterations=iterations, attack="ig")
        for rate in LARGER_RATES:
            yield Setting(iterations=iterations, lr=rate)
        yield Setting(iterations=iterations, images_each=51)
        yield Setting(iterations=iterations, momentum=0.9, lr=0.0004)
        yield Setting(iterations=iterations, optimizer="adam", lr=0.0003)


OPTIMIZERS = (("sgd", 0.0, 0.01), ("sgd", 0.9, 0.001), ("adam", 0.0, 0.0003))
"""Name, momentum and learning rate."""


def optimizer_plan() -> Iterator[Setting]:
    """Local steps by optimizer, with and without its simulation where that differs."""
    few = Setting(attack="ig", data="digits", classes=10, images_each=4, batch_size=4)
    few = replace(few, iterations=FEW_ITERATIONS)
    for optimizer, momentum, lr in OPTIMIZERS:
        for epochs in (1, 4, LONG_EPOCHS):
            setting = replace(few, optimizer=optimizer, momentum=momentum, lr=lr, epochs=epochs)
            yield setting
            if optimizer != "sgd" or (momentum and epochs == LONG_EPOCHS):
                yield replace(setting, simulated=False)


def main() -> None:
    """Attack every setting's clients; then print the table or JSON."""
    arguments = parser(__doc__, "split", "resume")
    arguments.add_argument("--optimizers", action="store_true", help="few digits, by optimizer")
    arguments.add_argument("--clients", type=int, default=4)
    arguments.add_argument("--iterations", type=int, default=ALL_ROWS)
    options = parse(arguments)
    plan = optimizer_plan() if options.optimizers else standard_plan(options.iterations)
    done = Finished(options.resume, "experiments.local_training")
    rows = []
    for setting in plan:
        about = [vars(setting), options.split, options.clients]
        rows.append(note_row(done.row(about, partial(row, setting, options)), COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


def row(setting: Setting, options: argparse.Namespace) -> Row:
    """Attack as many clients as asked for, one after another."""
    pool = image_set(setting.data, setting.images_each * options.clients, options.split)
    found: dict[str, list[float]] = {}
    each: list[float] = []
    for number in range(options.clients):
        images, labels = client_images(setting, pool, number)
        seed = first_seed(options.split) + number
        seen = known_of(setting, observation(setting, images, labels, seed))
        begun = time.process_time()
        (result,) = reconstruct(
            [seen],
            setting.attack,
            budget=Budget(iterations=setting.iterations, max_images=len(images)),
            seed=number,
        )
        spent = time.process_time() - begun
        if isinstance(result, Refusal):
            raise SystemExit(f"{setting}: {result.reason}")
        scores = client_scores(setting, result, pool, images, labels) | {"cpu_seconds": spent}
        for name, value in scores.items():
            found.setdefault(name, []).append(value)
        each.append(scores["above"])
    centre, half = interval(each)
    return {
        **vars(setting),
        "clients": options.clients,
        "split": options.split,
        "images": options.clients * setting.images_each,
        **{name: mean(values) for name, values in found.items()},
        "above_each": each,
        "above_low": None if half is None else max(0.0, centre - half),
        "above_high": None if half is None else min(1.0, centre + half),
    }


def client_images(setting: Setting, pool: ImageSet, number: int) -> tuple[Tensor, Tensor]:
    """Return one client's images and labels; labels are drawn where there are more classes."""
    part = slice(number * setting.images_each, (number + 1) * setting.images_each)
    images, labels = pool.images[part], pool.labels[part]
    if setting.classes > pool.classes:
        generator = torch.Generator().manual_seed(number)
        labels = torch.randint(setting.classes, (len(images),), generator=generator)
    return images, labels


def observation(setting: Setting, images: Tensor, labels: Tensor, seed: int) -> Observation:
    """Train as a client does and return what the server captures."""
    spec = plain_spec(images.shape[1:], setting.classes)
    return trained_upload(
        network_for(spec, setting.model, seed, activation=setting.activation),
        images,
        labels,
        training=TrainingConfig(
            batch_size=setting.batch_size,
            local_epochs=setting.epochs,
            lr=setting.lr,
            optimizer="adam" if setting.optimizer == "adam" else "sgd",
            momentum=setting.momentum,
        ),
        spec=spec,
        chain=build_defenses([]),
        state={},
        context=ProtectContext(round=1),
        seed=seed,
        client=f"client-{seed}",
        model=setting.model,
        activation=setting.activation,
    ).captured


def known_of(setting: Setting, seen: Observation) -> Observation:
    """Return the capture as this attacker takes it: without the optimizer, if it is unknown."""
    if setting.simulated:
        return seen
    changed = {"momentum": 0.0} if setting.momentum else {"optimizer": "unknown"}
    return replace(seen, declaration=seen.declaration.updated(changed))


def client_scores(
    setting: Setting, result: Reconstruction, pool: ImageSet, images: Tensor, labels: Tensor
) -> dict[str, float]:
    """Score the blind pick and the baselines; labels count as often as both have them."""
    pairs = match(result.images, images)
    similar = ssim(result.images[pairs], images)
    counts = [torch.bincount(found, minlength=setting.classes) for found in (result.labels, labels)]
    scores = {
        "psnr": float(psnr(result.images[pairs], images).mean()),
        "ssim": float(similar.mean()),
        "above": float((similar > RECOGNISABLE).double().mean()),
        "labels_right": float(torch.minimum(*counts).sum()) / len(labels),
    }
    guess = pool.candidates.mean(dim=0).expand_as(images)
    scores["mean_above"] = float((ssim(guess, images) > RECOGNISABLE).double().mean())
    if setting.classes == pool.classes:
        kinds = [pool.candidates[pool.candidate_labels == k].mean(dim=0) for k in labels.tolist()]
        guess = torch.stack(kinds)
        scores["class_mean_above"] = float((ssim(guess, images) > RECOGNISABLE).double().mean())
    return scores


if __name__ == "__main__":
    main()
