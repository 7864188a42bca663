"""What the update of a head gives away where the backbone is frozen: Maui against IG.

    OMP_NUM_THREADS=1 python -m experiments.frozen_backbone [--split choose] [--images 8] [--json]

Clients train a head of linear layers (the classifier) on a backbone that the server knows, and
upload one gradient of it, undefended; batch normalisation takes the sent statistics. Backbones are
fresh, or trained on digits that nothing is scored on. Labels are unknown, one start, equal
iterations, the blind pick. ``explained`` counts uploads of which the attack reports an image at
all: Maui refuses where it cannot read the features. ``leaked`` are images that the audit's rule
counts, of ``decided`` (`experiments.harness.leaks`); ``guess_psnr`` is the mean of other images of
the same class, without the update. Intervals are over images and networks, crossed. Settings were
chosen with ``--split choose``. CPU seconds are the process's own, an image.
"""

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bract.attacks import Budget, Engine, Reconstruction, reconstruct
from bract.captures.observation import Observation
from bract.inputs import Truth
from bract.models import MODELS
from bract.models.frozen import with_frozen_backbone
from bract.scores.image import score_images
from experiments import peers
from experiments.harness.command import Finished, emit, note, note_row, parse, parser
from experiments.harness.images import ImageSet, image_set
from experiments.harness.leaks import judged, leaked
from experiments.harness.result import Row
from experiments.harness.scores import columns, mean, of_score, without_gradient
from experiments.harness.splits import first_seed
from experiments.harness.uploads import gradient_upload

COLUMNS = (
    *("model", "data", "batch", "iterations", "attack", "images", "explained", "psnr"),
    *("psnr_low", "psnr_high", "ssim", "leaked", "decided", "guess_psnr", "cpu_seconds"),
)
ATTACKS = ("maui", "ig")
BATCHES = (1, 4)
ITERATIONS = 300
HEAD = "classifier"
_NETWORKS = 4


@dataclass(frozen=True)
class Setting:
    """Backbone and images of a row."""

    model: str
    activation: str
    data: str = "photos"
    trained: bool = False

    @property
    def name(self) -> str:
        """The model in words."""
        return f"{self.model}, {self.activation}, {'trained' if self.trained else 'fresh'}"


SETTINGS = (
    Setting("resnet20", "relu"),
    Setting("resnet20", "relu", data="digits", trained=True),
    Setting("lenet-strided", "sigmoid"),
    Setting("lenet-strided", "relu"),
    Setting("lenet", "relu"),
    Setting("lenet", "relu", data="digits", trained=True),
)


def main() -> None:
    """Attack every setting's uploads; then print the table or JSON."""
    arguments = parser(__doc__, "split", "resume")
    arguments.add_argument("--images", type=int, default=8, help="of a row")
    arguments.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    arguments.add_argument("--attack", nargs="+", default=list(ATTACKS))
    arguments.add_argument("--iterations", type=int, default=ITERATIONS)
    options = parse(arguments)
    done = Finished(options.resume, "experiments.frozen_backbone", "experiments.peers")
    rows = [
        note_row(row, COLUMNS)
        for batch in options.batch
        for setting in SETTINGS
        for row in rows_of(setting, batch, options, done)
    ]
    emit(rows, COLUMNS, as_json=options.json)


def rows_of(
    setting: Setting, batch: int, options: argparse.Namespace, done: Finished
) -> Iterator[Row]:
    """Run every attack on the uploads of a setting."""
    images = in_colour(image_set(setting.data, options.images, options.split))
    for name in options.attack:
        about = [repr(setting), batch, options.images, options.split, options.iterations, name]
        yield done.get(about) or done.add(about, row(setting, batch, images, name, options))


def in_colour(images: ImageSet) -> ImageSet:
    """Return the images with three channels."""

    def widened(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.expand(-1, peers.CHANNELS, -1, -1).contiguous()

    made, candidates = widened(images.images), widened(images.candidates)
    assert made is not None and candidates is not None
    return replace(
        images, images=made, candidates=candidates, references=widened(images.references)
    )


def row(
    setting: Setting, batch: int, images: ImageSet, name: str, options: argparse.Namespace
) -> Row:
    """Attack the images of a setting, ``batch`` an upload."""
    scored, decisions, sources, networks = [], [], [], []
    spent, explained = 0.0, 0
    for start in range(0, len(images.images), batch):
        part, number = slice(start, start + batch), start // batch
        seed = first_seed(options.split) + (number + number // _NETWORKS) % _NETWORKS
        truth = Truth(images.images[part], images.labels[part])
        seen = upload(setting, truth, seed, f"client-{number}")
        begun = time.process_time()
        (found,) = reconstruct(
            [seen], name, budget=Budget(iterations=options.iterations), engine=Engine(device="cpu")
        )
        spent += time.process_time() - begun
        if isinstance(found, Reconstruction):
            explained += 1
            made, labels = found.images, found.labels
        else:
            note(found.reason)
            # What is refused stays in the mean, as the guess that needs no update.
            made, labels = torch.full_like(truth.images, 0.5), truth.labels
        one = score_images(made, truth, recovered=labels, perceptual=False)
        scored.append(one)
        decisions.append(judged(setting.data, images, made, truth, one))
        sources += [images.sources[start] if batch == 1 else number] * len(one.rows)
        networks += [seed] * len(one.rows)
    which, open_ = leaked(decisions)
    guess = dict(without_gradient(images, 0))["class mean"]
    psnr = of_score(scored, "psnr")
    return {
        **{"model": setting.name, "data": setting.data, "batch": batch},
        **{"iterations": options.iterations, "attack": name, "images": len(psnr)},
        "explained": explained,
        **columns("psnr", psnr, sources, networks),
        "ssim": mean(of_score(scored, "ssim")),
        "leaked": sum(which),
        "decided": len(which) - open_,
        "guess_psnr": mean(of_score(guess, "psnr")),
        "cpu_seconds": spent / len(psnr),
    }


def upload(setting: Setting, truth: Truth, seed: int, client: str) -> Observation:
    """Return what a client of one batch uploads that trains the head alone."""
    network, _ = peers.network_of(setting.model, setting.activation, setting.trained, seed)
    frozen = with_frozen_backbone(copy.deepcopy(network).eval(), [HEAD])
    MODELS._entries["benchmarked"] = lambda **_: frozen
    return gradient_upload(
        frozen,
        truth.images,
        truth.labels,
        spec=peers.SPEC,
        client=client,
        model="benchmarked",
        activation=setting.activation,
        norm_mode="eval",
    )


if __name__ == "__main__":
    main()
