"""How often the leak rule's chance of an image is as small as a level, without a gradient.

    python -m experiments.leak_chance [--data mnist] [--size 32] [--references 100] [--json]

Reconstructions made without a gradient are compared with images of a class they do not come from,
under references of that class, `--draws` times a class. `ratio` is the share of pairs whose chance
is at most the level, over the level: at most 1 where the chance is what it says. Levels go down to
what decides in an audit of hundreds of images. References of MNIST are test images and originals
training images, as in an audit; digits are dealt out to both anew in every draw.

Reconstructions: other people's images of the class, these blurred, thresholded or as negatives,
blends of two; the mean of twenty, blurred as well; the mean of the references, and references
themselves; the two of twenty that most images are near to; images of other classes; a smooth prior;
an even grey.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torch.nn import functional as F

from bract.scores.chance import chance, dissimilarity, views
from experiments.harness import mnist_package
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.images import all_images

LEVELS = (5e-2, 1e-2, 1e-3, 1e-4, 1e-5)
PUBLIC = 20
"""Public images of a class, from which reconstructions are made; none is an original."""

MNIST_IMAGES = (20_000, 5_000)
"""Images drawn of MNIST's training and test split."""

Array = NDArray[Any]


class Images:
    """Originals and references of a data set, ``(N, 1, size, size)``, with their views.

    ``test`` holds the references apart; None where every draw deals images out anew.
    """

    def __init__(self, data: str, size: int, rng: np.random.Generator) -> None:
        self.test: tuple[Tensor, Array, Array] | None = None
        if data == "mnist":
            self.images, self.labels = _drawn("train", MNIST_IMAGES[0], size, rng)
            images, labels = _drawn("test", MNIST_IMAGES[1], size, rng)
            self.test = (images, labels, views(images))
        else:
            self.images, found = all_images(data, size)
            self.labels = found.numpy()
        self.views = views(self.images)

    def deal(
        self, label: int, references: int, rng: np.random.Generator
    ) -> tuple[Array, Array, Tensor, Array]:
        """Return numbers of public images and of originals, the references and their views."""
        mine = rng.permutation(np.flatnonzero(self.labels == label))
        public, rest = mine[:PUBLIC], mine[PUBLIC:]
        if self.test is None:
            drawn, rest = rest[:references], rest[references:]
            return public, rest, self.images[drawn], self.views[:, drawn]
        images, labels, seen = self.test
        drawn = rng.permutation(np.flatnonzero(labels == label))[:references]
        return public, rest, images[drawn], seen[:, drawn]


def _drawn(split: Any, count: int, size: int, rng: np.random.Generator) -> tuple[Tensor, Array]:
    images, labels = mnist_package.read(split)
    picks = rng.permutation(len(images))[:count]
    fitted = F.interpolate(images[picks], size=(size, size), mode="bilinear", antialias=True)
    return fitted.clamp(0.0, 1.0), labels[picks].numpy()


def reconstructions(
    images: Images, label: int, public: Array, references: Tensor, rng: np.random.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Yield what can be made without a gradient."""
    others = images.images[public]
    size = others.shape[-1]

    def blurred(given: Tensor, share: float) -> Tensor:
        sigma = (0.0, 0.0, share * size, share * size)
        return torch.from_numpy(gaussian_filter(given.numpy(), sigma))

    mean = others.mean(dim=0, keepdim=True)
    apart = np.sort(dissimilarity(others, images.views[:, public]), axis=1)
    strangers = rng.permutation(np.flatnonzero(images.labels != label))[:6]
    grain = gaussian_filter(rng.random((4, 1, size, size)), (0, 0, size / 8, size / 8))
    yield "other people", others[:8]
    yield "blurred", blurred(others[:8], 2.5 / 32)
    yield "blends", (others[:4] + others[4:8]) / 2
    yield "thresholded", (others[8:12] > 0.5).float()
    yield "negatives", 1.0 - others[:2]
    yield "mean of 20", mean
    yield "blurred mean", blurred(mean, 3 / 32)
    yield "mean of references", references.mean(dim=0, keepdim=True)
    yield "references", references[:2]
    yield "most typical", others[np.argsort(apart[:, 1:6].mean(axis=1))[:2]]
    yield "other classes", images.images[strangers]
    yield "prior", torch.from_numpy((5 * (grain - 0.5) + 0.5).clip(0.0, 1.0)).float()
    yield "grey", torch.full((1, 1, size, size), 0.3)


def measure(data: str, size: int, references: int, draws: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of reconstruction."""
    rng = np.random.default_rng(0)
    images = Images(data, size, rng)
    pairs: defaultdict[str, int] = defaultdict(int)
    within: defaultdict[str, Array] = defaultdict(lambda: np.zeros(len(LEVELS), dtype=int))
    for _ in range(draws):
        for label in range(10):
            public, originals, shown, seen = images.deal(label, references, rng)
            for kind, made in reconstructions(images, label, public, shown, rng):
                own = dissimilarity(made, images.views[:, originals])
                apart = np.repeat(dissimilarity(made, seen), own.shape[1], axis=0)
                found = chance(own.reshape(-1), apart)
                pairs[kind] += len(found)
                within[kind] += [int((found <= level).sum()) for level in LEVELS]
    about = {"data": data, "size": size, "references": references, "draws": draws}
    for kind, count in pairs.items():
        ratios = {
            f"ratio_{level:g}": float(hits / count / level)
            for level, hits in zip(LEVELS, within[kind], strict=True)
        }
        yield {**about, "images": kind, "pairs": count, "within": within[kind].tolist(), **ratios}


def main() -> None:
    """Measure the settings and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--data", choices=("digits", "mnist"), action="append")
    arguments.add_argument("--size", type=int, action="append")
    arguments.add_argument("--references", type=int, action="append")
    arguments.add_argument("--draws", type=int, default=6)
    options = parse(arguments)
    done = []
    for data in options.data or ("digits", "mnist"):
        for size in options.size or (32,):
            for references in options.references or ((36,) if data == "digits" else (100,)):
                for row in measure(data, size, references, options.draws):
                    done.append(row)
                    note(" ".join(f"{value}" for value in row.values()))
    columns = ("data", "size", "references", "images", "pairs")
    emit(done, (*columns, *(f"ratio_{level:g}" for level in LEVELS)), as_json=options.json)


if __name__ == "__main__":
    main()
