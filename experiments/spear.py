"""Share of batches that `spear` returns exactly, by batch, width, depth, data and training.

    OMP_NUM_THREADS=1 python -m experiments.spear [--batches 4] [--json]

Perceptrons with ReLU on 32-pixel images: MNIST's test split, crops of colour photographs; with
weights drawn anew for every batch, or trained for 100 steps on MNIST's training split. Each row
attacks as many batches through as many networks, one gradient each, no prior; scores are over all
images, those of a refused batch left out and its refusal counted. ``exact``: the share of batches
of which every image is above 60 dB. Neither images nor networks chose any setting: those were
chosen on scikit-learn's digits and on noise. CPU seconds are the process' own, on one thread, a
batch, refused ones included; how many turns of the search go where was chosen on MNIST's
training split.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bract.attacks import Budget, Reconstruction, Refusal, reconstruct
from bract.audit.questions.reconstruction.scores.image import at_cap, match, psnr
from bract.data.views import DataSpec
from bract.models import MODELS
from bract.models.fully_connected import perceptron
from bract.models.initialise import initialise
from bract.protocol.observation import Observation
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.images import image_set, training_images
from experiments.harness.result import Row
from experiments.harness.scores import mean
from experiments.harness.uploads import fit, gradient_upload

COLUMNS = (
    *("data", "network", "width", "depth", "batch", "batches", "exact", "refused", "images"),
    *("psnr", "psnr_least", "at_cap", "labels_right", "residual_most", "zeros", "cpu_seconds"),
)
EXACT = 60.0
TRAINING_STEPS = 100
FIRST_NETWORK = 500


@dataclass(frozen=True)
class Setting:
    """One row."""

    data: str
    width: int
    depth: int
    batch: int
    network: str = "fresh"


def standard_plan() -> Iterator[Setting]:
    """Every combination that the documentation speaks of."""
    for data in ("mnist", "photos"):
        for width in (200, 400):
            for batch in (1, 2, 4, 8, 16, 20, 24):
                yield Setting(data, width, 2, batch)
    for depth in (1, 3):
        yield Setting("mnist", 400, depth, 16)
    for width in (200, 400, 1000):
        for batch in (4, 8, 16):
            yield Setting("mnist", width, 2, batch, "trained")


def main() -> None:
    """Attack every setting's batches; then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--batches", type=int, default=4)
    arguments.add_argument("--iterations", type=int, default=60)
    options = parse(arguments)
    rows = []
    for setting in standard_plan():
        rows.append(note_row(row(setting, options.batches, options.iterations), COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


def row(setting: Setting, batches: int, iterations: int) -> Row:
    """Attack as many batches as asked for, each through a network of its own."""
    pool = image_set(setting.data, batches * 24, "score")
    scores: list[float] = []
    exact, refused, right, zeros, spent = 0, 0, 0, [], 0.0
    residuals = []
    for number in range(batches):
        part = slice(number * 24, number * 24 + setting.batch)
        images, labels = pool.images[part], pool.labels[part]
        model = network(setting, images.shape[1], FIRST_NETWORK + number)
        seen, share = observation(setting, model, images, labels, number)
        zeros.append(share)
        begun = time.process_time()
        (found,) = reconstruct(
            seen, "spear", budget=Budget(iterations=iterations), seed=number, device="cpu"
        )
        spent += time.process_time() - begun
        if isinstance(found, Refusal):
            refused += 1
            continue
        assert isinstance(found, Reconstruction) and found.gradient_residual is not None
        pairs = match(found.images, images)
        each = psnr(found.images[pairs], images).tolist()
        scores += each
        exact += min(each) > EXACT
        right += int((found.labels[pairs] == labels).sum())
        residuals.append(found.gradient_residual)
    return {
        **vars(setting),
        "batches": batches,
        "iterations": iterations,
        "threshold": EXACT,
        "training_steps": TRAINING_STEPS if setting.network == "trained" else 0,
        "exact": exact / batches,
        "refused": refused,
        "images": len(scores),
        "psnr": mean(scores),
        "psnr_least": min(scores, default=None),
        "at_cap": at_cap(scores),
        "labels_right": right,
        "residual_most": max(residuals, default=None),
        "zeros": mean(zeros),
        "cpu_seconds": spent / batches,
    }


def network(setting: Setting, channels: int, seed: int) -> nn.Module:
    """Return a perceptron with PyTorch's first weights, trained on digits where that is asked."""
    hidden = (setting.width,) * setting.depth
    model = perceptron(hidden, classes=10, channels=channels, image_size=32, activation="relu")
    initialise(model, "default", seed)
    if setting.network == "trained":
        images, labels = training_images("mnist")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fit(
            model,
            spec_of(channels).normalise(images),
            labels,
            optimizer,
            steps=TRAINING_STEPS,
            batch=32,
            seed=seed,
        )
    return model


def spec_of(channels: int) -> DataSpec:
    """Describe the images: less 0.5, over 0.5."""
    return DataSpec((channels, 32, 32), 10, (0.5,) * channels, (0.5,) * channels)


def observation(
    setting: Setting, model: nn.Module, images: Tensor, labels: Tensor, number: int
) -> tuple[Observation, float]:
    """Return what a server captures of a batch's gradient, and the share of L that is zero."""
    name = f"perceptron-{setting.width}-{setting.depth}"
    if name not in MODELS:
        hidden = (setting.width,) * setting.depth
        MODELS.register(name)(lambda **sizes: perceptron(hidden, **sizes))
    spec = spec_of(images.shape[1])
    seen = gradient_upload(
        model, images, labels, spec=spec, client=f"batch-{number}", model=name, activation="relu"
    )
    assert isinstance(model, nn.Sequential)
    before = model[1](model[0](spec.normalise(images)))
    return seen, float((before <= 0).float().mean())


if __name__ == "__main__":
    main()
