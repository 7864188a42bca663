"""How often the leak rule cries wolf, and what it misses: simulated audits of digits.

    python -m experiments.leak_rule [--runs 100] [--originals 8] [--json]

A run draws 36 reference images a class, as many as the test split has, and clients from the other
digits; clients share no images. Every upload yields up to eight reconstructions, the most
that an audit looks for by default, which are matched to all of the client's originals.

Rows of ``false alarms`` bring back what saw no gradient: other people's images, those blurred,
blends of two, class means of the client's own labels, samples of a smooth prior; ``rate`` is the
share of runs that name any image, before it has to be visible. Rows of ``power`` bring back the
client's own images, with noise or blur down to an SSIM; ``rate`` is the share of images that count
as leaked, where every image was brought back (``all``), or a single one of the whole audit among
other people's images (``one``).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from torch import Tensor

from bract.scores.chance import chance_of_any, dissimilarity, views
from bract.scores.hommel import named
from bract.scores.image import pair, ssim
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.images import all_images

ORIGINALS = (1, 8, 64, 700)
UPLOADS = (1, 10, 100)
SEARCHED = 8
PER_CLASS = 36
WITHOUT = ("other people", "blurred", "blends", "class means", "prior")
SHOWN = (0.5, 0.6, 0.7, 0.8, 0.9)
LEVEL = 0.95

Array = NDArray[Any]


class Digits:
    """All digits with their views, and copies of some that noise or blur has spoilt."""

    def __init__(self, spoilt: int) -> None:
        self.images, labels = all_images("digits")
        self.labels = labels.numpy()
        self.views = views(self.images)
        self.chosen = np.random.default_rng(0).permutation(len(self.images))[:spoilt]
        self.spoilt = {
            (how, level): torch.stack([spoil(self.images[i], how, level) for i in self.chosen])
            for how in ("noise", "blur")
            for level in SHOWN
        }


def spoil(image: Tensor, how: str, level: float) -> Tensor:
    """Add noise or blur until the SSIM has come down to a level."""
    grain = torch.randn(image.shape, generator=torch.Generator().manual_seed(1))

    def spoilt(amount: float) -> Tensor:
        if how == "noise":
            return (image + amount * grain).clamp(0.0, 1.0)
        return torch.from_numpy(gaussian_filter(image.numpy(), (0, amount, amount)))

    low, high = 0.0, 2.0 if how == "noise" else 10.0
    for _ in range(16):
        middle = (low + high) / 2
        over = float(ssim(spoilt(middle)[None], image[None])[0]) >= level
        low, high = (middle, high) if over else (low, middle)
    return spoilt(low)


class People:
    """The references and the clients of one simulated run."""

    def __init__(self, digits: Digits, rng: np.random.Generator) -> None:
        self.digits, self.rng = digits, rng
        order = rng.permutation(len(digits.images))
        # What is spoilt must be some client's own, and so no reference.
        order = np.concatenate([order[~np.isin(order, digits.chosen)], digits.chosen])
        mine = [order[digits.labels[order] == label][:PER_CLASS] for label in range(10)]
        self.reference_views = digits.views[:, np.concatenate(mine)]
        self.means = torch.stack([digits.images[found].mean(dim=0) for found in mine])
        self.mean_views = views(self.means)
        rest = order[~np.isin(order, np.concatenate(mine))]
        free = rest[~np.isin(rest, digits.chosen)]
        half = len(rest) - 705
        self.others = free[:half]
        self.clients = np.concatenate([free[half:], digits.chosen])

    def client(self, originals: int, own: Array | None = None) -> Array:
        """Draw a client's images, with some that it must have."""
        own = np.empty(0, dtype=int) if own is None else own
        left = self.clients[~np.isin(self.clients, own)]
        return np.concatenate([own, self.rng.permutation(left)[: originals - len(own)]])

    def without_gradient(self, kind: str, truth: Array) -> Tensor:
        """Make as many images as an upload brings back, without looking at it."""
        images, count = self.digits.images, min(len(truth), SEARCHED)
        if kind == "class means":
            return self.means[self.digits.labels[self.rng.choice(truth, count)]]
        if kind == "prior":
            grain = gaussian_filter(self.rng.random((count, 1, 32, 32)), (0, 0, 4, 4))
            return torch.from_numpy((5 * (grain - 0.5) + 0.5).clip(0.0, 1.0)).float()
        drawn = images[self.rng.choice(self.others, count, replace=False)]
        if kind == "blends":
            return (drawn + images[self.rng.choice(self.others, count)]) / 2
        if kind == "blurred":
            return torch.from_numpy(gaussian_filter(drawn.numpy(), (0, 0, 2.5, 2.5)))
        return drawn

    def judge(self, images: Tensor, truth: Array) -> tuple[Array, Array, Array]:
        """Return each pair's chance, whether its original is nearest, and which it is."""
        order, kept = pair(images, self.digits.images[truth])
        originals, images = truth[kept.numpy()], images[order]
        labels = self.digits.labels[originals]
        counts = Counter(self.digits.labels[truth].tolist())
        own = dissimilarity(images, self.digits.views[:, originals]).diagonal()
        apart = dissimilarity(images, self.reference_views).reshape(len(images), 10, PER_CLASS)
        mean = dissimilarity(images, self.mean_views)
        chances = chance_of_any(own, {c: apart[:, c] for c in counts}, counts, int(labels[0]))
        at = np.arange(len(images))
        nearest = own < np.minimum(apart[at, labels].min(axis=1), mean[at, labels])
        by_image = np.argsort(order.numpy())
        return chances[by_image], nearest[by_image], originals[by_image]


def false_alarm(kind: str, originals: int, uploads: int, people: People) -> float:
    """Return 1 where a run without any gradient names an image."""
    chances = []
    for _ in range(uploads):
        truth = people.client(originals)
        chances.append(people.judge(people.without_gradient(kind, truth), truth)[0])
    return float(any(named(np.concatenate(chances).tolist(), 1.0 - LEVEL)))


def found(
    how: str, level: float, originals: int, uploads: int, every: bool, people: People
) -> float:
    """Return the share of spoilt images that count as leaked."""
    digits = people.digits
    chances, right = [], []
    for upload in range(uploads):
        count = min(originals, SEARCHED)
        true = count if every else int(upload == 0)
        picks = people.rng.choice(len(digits.chosen), true, replace=False)
        truth = people.client(originals, digits.chosen[picks])
        images = people.without_gradient("other people", truth)
        images[:true] = digits.spoilt[how, level][picks]
        chance_of, nearest, matched = people.judge(images, truth)
        chances.append(chance_of)
        own = np.zeros(count, dtype=bool)
        own[:true] = nearest[:true] & (matched[:true] == digits.chosen[picks])
        right.append(own)
    leaked = np.array(named(np.concatenate(chances).tolist(), 1.0 - LEVEL))
    wanted = uploads * min(originals, SEARCHED) if every else 1
    return float((leaked & np.concatenate(right)).sum() / wanted)


def rows(digits: Digits, originals: int, uploads: int, runs: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of clients of one size, in audits of one number of uploads."""
    sizes = {"originals": originals, "uploads": uploads}

    def measured(facts: dict[str, Any], once: Callable[[People], float], times: int) -> Any:
        setting = [originals, uploads, *str(facts).encode()]
        each = [once(People(digits, np.random.default_rng([i, *setting]))) for i in range(times)]
        return facts | {"runs": times, "rate": float(np.mean(each))}

    for kind in WITHOUT:
        facts = {"measured": "false alarms", "images": kind, **sizes}
        times = runs * {1: 10, 10: 4}.get(uploads, 1)
        yield measured(facts, partial(false_alarm, kind, originals, uploads), times)
    for how, level in digits.spoilt:
        for every in (True, False):
            facts = {"measured": "power", "images": how, "ssim": level, **sizes}
            facts["leaked"] = "all" if every else "one"
            times = max(5, runs // (5 * uploads)) if every else runs if uploads < 100 else runs // 5
            yield measured(facts, partial(found, how, level, originals, uploads, every), times)


def main() -> None:
    """Simulate every setting and print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=100, help="of 100 uploads; more of fewer")
    arguments.add_argument("--spoilt", type=int, default=100)
    arguments.add_argument("--originals", type=int, action="append", choices=ORIGINALS)
    options = parse(arguments)
    digits = Digits(options.spoilt)
    done = []
    for originals in options.originals or ORIGINALS:
        for uploads in UPLOADS:
            for row in rows(digits, originals, uploads, options.runs):
                done.append(row)
                note(" ".join(f"{value}" for value in row.values()))
    columns = ("measured", "images", "ssim", "leaked", "originals", "uploads", "runs", "rate")
    emit(done, columns, as_json=options.json)


if __name__ == "__main__":
    main()
