"""Which architectures leak in training mode: depth, width, shortcuts, normalisation, activation.

    OMP_NUM_THREADS=1 python -m experiments.architectures [--split choose] [--images 4] [--json]

A map after Valadi et al. 2025 (arXiv 2508.19819), who find that a model that normalises by its
batch leaks where it is shallow and wide, has shortcuts, and normalises before it convolves. Here it
is drawn at a small scale: residual networks of three stages with 1 or 3 blocks each, on digits of
16 pixels, one an upload, with ReLU and with sigmoids. The map goes one change at a time from the
model that they name as leaking, and ends with all changes at once. The attack is `ig` with the
statistics of the client's batch, from one start, with inferred labels. Beside the map stand
controls, which tell whether the budget suffices: the first model where it normalises by running
statistics, which the server sent, and the first model's twin with sigmoids.

Rules, fixed before a row was scored: beside a guess (the mean image of the candidates, without an
upload) a cell *leaks* where the 95 % interval of the mean difference in PSNR, over images and
networks, is above 3 dB, *does not* where it is below 3 dB, and is *open* otherwise. PSNR counts up
to 40 dB: who has an image exactly has it. Beside the first model of the same activation and
training a change *closes* the leak where the interval of the difference is below 0, *opens* it
where it is above. What batch normalisation takes away (brightness and contrast) lowers PSNR though
the image is there: the correlation with the original stands beside it and decides nothing.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks import IG, Budget, Engine, Reconstruction, reconstruct
from bract.attacks.base import Attacker
from bract.attacks.methods.ig import BN_WEIGHT
from bract.attacks.methods.statistics import Statistics
from bract.captures.observation import Observation
from bract.inputs import Truth
from bract.models.registry import MODELS, activation_layer
from bract.scores.image import score_images
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.crossed import crossed_interval
from experiments.harness.federation import correct
from experiments.harness.images import held_out_images, image_set, training_images
from experiments.harness.result import Row
from experiments.harness.scores import columns, mean, of_score
from experiments.harness.splits import first_seed
from experiments.harness.uploads import fit, gradient_upload, network_for, plain_spec

COLUMNS = (
    *("model", "activation", "mode", "trained", "attack", "psnr", "psnr_low", "psnr_high", "ssim"),
    *("correlation", "found", "over_guess"),
    *("over_guess_low", "over_guess_high", "verdict", "change", "change_low", "change_high"),
    *("effect", "accuracy", "cpu_seconds"),
)
LEAKS_DB = 3.0
SIZE = 16
SPEC = plain_spec((1, SIZE, SIZE))
ITERATIONS = 400
MOST_DB = 40.0
FOUND_SSIM = 0.5
STATES = ("fresh", "trained")
ACTIVATIONS = ("relu", "sigmoid")
MODES = ("train", "eval")
ATTACKS: dict[str, Attacker] = {
    "ig with statistics": IG(bn=BN_WEIGHT),
    "ig": IG(),
    "statistics": Statistics(),
}
_STEPS, _BATCH, _LR = 100, 32, 2e-3


@dataclass(frozen=True)
class Architecture:
    """A residual network of three stages, and what differs from the first of `MAP`.

    Attributes
    ----------
    blocks, width
        Blocks of a stage and channels of the first stage, which every stage doubles.
    shortcut, order
        As of `ResidualNet`.
    """

    change: str = "shallow, wide, shortcuts, normalisation first"
    blocks: int = 1
    width: int = 32
    shortcut: str = "yes"
    order: str = "before"

    @property
    def model(self) -> str:
        """Its name in the registry, with its settings."""
        return (
            f"residual(blocks={self.blocks}, width={self.width}, shortcut={self.shortcut}, "
            f"order={self.order})"
        )


MAP = (
    Architecture(),
    Architecture("deep", blocks=3),
    Architecture("narrow", width=8),
    Architecture("no shortcuts", shortcut="no"),
    Architecture("normalisation last", order="after"),
    Architecture("deep, narrow, no shortcuts, normalisation last", 3, 8, "no", "after"),
)


class _Block(nn.Module):
    def __init__(
        self, inputs: int, outputs: int, stride: int, activation: str, shortcut: bool, before: bool
    ) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs if before else outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.activation1, self.activation2 = (activation_layer(activation) for _ in range(2))
        self.stride, self.more = stride, outputs - inputs
        self.shortcut, self.before = shortcut, before

    def forward(self, x: Tensor) -> Tensor:
        past = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        out: Tensor
        if self.before:
            out = self.conv1(self.activation1(self.norm1(x)))
            out = self.conv2(self.activation2(self.norm2(out)))
            return out + past if self.shortcut else out
        out = self.norm2(self.conv2(self.activation1(self.norm1(self.conv1(x)))))
        out = out + past if self.shortcut else out
        return self._last(out)

    def _last(self, summed: Tensor) -> Tensor:
        last: Tensor = self.activation2(summed)
        return last


class ResidualNet(nn.Module):
    """Three stages of blocks of two 3x3 convolutions, global average pooling, one linear layer.

    With ``order`` ``before`` a block normalises and rectifies before each convolution, and nothing
    follows the sum (He et al. 2016, identity mappings); a normalisation stands before the pooling.
    With ``after`` normalisation follows each convolution, and a rectifier the sum.
    """

    def __init__(
        self, blocks: int, width: int, shortcut: bool, before: bool, classes: int, activation: str
    ) -> None:
        super().__init__()
        self.before = before
        layers: list[nn.Module] = []
        channels = width
        for stage, outputs in enumerate((width, 2 * width, 4 * width)):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                layers.append(_Block(channels, outputs, stride, activation, shortcut, before))
                channels = outputs
        self.conv = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels if before else width)
        self.activation = activation_layer(activation)
        self.blocks = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(B, 1, H, W)`` to logits ``(B, classes)``."""
        features = self.conv(images)
        if self.before:
            features = self.activation(self.norm(self.blocks(features)))
        else:
            features = self.blocks(self.activation(self.norm(features)))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits


@MODELS.register("residual")
def residual(
    *,
    classes: int,
    channels: int,
    image_size: int,
    activation: str = "relu",
    blocks: int = 1,
    width: int = 32,
    shortcut: Literal["yes", "no"] = "yes",
    order: Literal["before", "after"] = "before",
) -> nn.Module:
    """Build a `ResidualNet` for images of one channel."""
    assert channels == 1
    assert image_size >= 8
    return ResidualNet(blocks, width, shortcut == "yes", order == "before", classes, activation)


@dataclass(frozen=True)
class Cell:
    """What a row is of: a model of the map, how it is trained, and who attacks.

    ``mode`` is that of normalisation: ``train`` by the batch, ``eval`` by running statistics.
    """

    architecture: Architecture
    activation: str
    mode: Literal["train", "eval"]
    trained: bool
    attack: str


def main() -> None:
    """Attack every cell of the map; then print the table or JSON."""
    arguments = parser(__doc__, "split", "resume")
    arguments.add_argument("--images", type=int, default=4, help="of a cell, each on its network")
    arguments.add_argument("--iterations", type=int, default=ITERATIONS)
    arguments.add_argument("--state", nargs="+", default=STATES, choices=STATES, help="of models")
    arguments.add_argument("--activation", nargs="+", default=ACTIVATIONS, choices=ACTIVATIONS)
    arguments.add_argument("--attack", nargs="+", default=["ig with statistics"], choices=ATTACKS)
    options = parse(arguments)
    done = Finished(options.resume, "experiments.architectures")
    first: dict[tuple[object, ...], list[float]] = {}
    rows = []
    for cell in _cells(options):
        about = [asdict(cell), repr(ATTACKS[cell.attack]), *_asked(options)]
        row = done.get(about) or done.add(about, _attacked(cell, options))
        key = (cell.activation, cell.mode, cell.trained, cell.attack)
        reference = first.setdefault(key, row["psnr_each"])
        rows.append(note_row(row | compared(row, reference), COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


def _cells(options: argparse.Namespace) -> Iterator[Cell]:
    for state in options.state:
        for activation in options.activation:
            yield Cell(MAP[0], activation, "eval", state == "trained", "ig")
            for architecture in MAP:
                for name in options.attack:
                    yield Cell(architecture, activation, "train", state == "trained", name)


def _asked(options: argparse.Namespace) -> list[object]:
    return [options.split, options.images, options.iterations]


def compared(row: Row, reference: list[float]) -> Row:
    """Return a cell's difference from a guess and from the first model, and the verdicts."""
    known, first = ([min(db, MOST_DB) for db in each] for each in (row["psnr_each"], reference))
    over = [own - guess for own, guess in zip(known, row["guess_each"], strict=True)]
    low, high = crossed_interval(over, range(len(over)), None) or (None, None)
    verdict = "open"
    if low is not None and high is not None:
        verdict = "leaks" if low > LEAKS_DB else "does not" if high < LEAKS_DB else "open"
    apart = [own - other for own, other in zip(known, first, strict=True)]
    below, above = crossed_interval(apart, range(len(apart)), None) or (None, None)
    effect = "open" if row["psnr_each"] is not reference else "reference"
    if below is not None and above is not None:
        effect = "closes" if above < 0.0 else "opens" if below > 0.0 else "open"
    return {
        **{"over_guess": mean(over), "over_guess_low": low, "over_guess_high": high},
        "verdict": verdict,
        **{"change": mean(apart), "change_low": below, "change_high": above},
        "effect": effect,
    }


def _attacked(cell: Cell, options: argparse.Namespace) -> Row:
    images = image_set("digits", options.images, options.split, size=SIZE)
    model, first = cell.architecture.model, first_seed(options.split)
    seen: list[Observation] = []
    accuracies = []
    for number in range(options.images):
        network, accuracy = _network(model, cell.activation, cell.trained, first + number)
        part = slice(number, number + 1)
        seen.append(
            gradient_upload(
                network.train(cell.mode == "train"),
                images.images[part],
                images.labels[part],
                spec=SPEC,
                client=f"client-{number}",
                model=model,
                activation=cell.activation,
                norm_mode=cell.mode,
            )
        )
        accuracies += [] if accuracy is None else [accuracy]
    begun = time.process_time()
    outcomes = reconstruct(
        seen,
        ATTACKS[cell.attack],
        budget=Budget(iterations=options.iterations),
        engine=Engine(device="cpu"),
    )
    spent = time.process_time() - begun
    guess = images.candidates.mean(dim=0, keepdim=True)
    found, guessed, alike = [], [], []
    for number, outcome in enumerate(outcomes):
        if not isinstance(outcome, Reconstruction):
            raise SystemExit(f"{model}: {outcome.reason}")
        part = slice(number, number + 1)
        truth = Truth(images.images[part], images.labels[part])
        found.append(score_images(outcome.images, truth, perceptual=False))
        guessed.append(score_images(guess, truth, perceptual=False))
        both = torch.stack([images.images[number].flatten(), outcome.images.flatten()])
        alike.append(float(torch.corrcoef(both)[0, 1].nan_to_num()))
    numbers = list(range(options.images))
    ssim = of_score(found, "ssim")
    return {
        "model": cell.architecture.change,
        "registered": model,
        "activation": cell.activation,
        "mode": cell.mode,
        "trained": cell.trained,
        "attack": cell.attack,
        "iterations": options.iterations,
        "images": len(found),
        **columns("psnr", of_score(found, "psnr"), numbers, numbers),
        "ssim": mean(ssim),
        "found": sum(value >= FOUND_SSIM for value in ssim),
        "correlation": mean(alike),
        "correlation_each": alike,
        "guess_each": of_score(guessed, "psnr"),
        "accuracy": mean(accuracies),
        "cpu_seconds": spent / len(found),
    }


@cache
def _network(
    model: str, activation: str, trained: bool, seed: int
) -> tuple[nn.Module, float | None]:
    network = network_for(SPEC, model, seed, activation=activation)
    if not trained:
        return network, None
    images, labels = training_images("digits")
    # The last ones are attacked in the split that chooses.
    images, labels = _small(images[:-64]), labels[:-64]
    optimizer = torch.optim.Adam(network.parameters(), lr=_LR)
    fit(network, images, labels, optimizer, steps=_STEPS, batch=_BATCH, seed=seed)
    held, wanted = held_out_images("digits")
    return network, float(correct(network, _small(held), wanted).mean())


def _small(images: Tensor) -> Tensor:
    return F.interpolate(
        images, size=(SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False
    )


if __name__ == "__main__":
    main()
