"""The leak rule on photographs, and on clients whose data differ from the test data.

    python -m experiments.leak_rule_kinds [--runs 20] [--json]

A run has ``uploads`` clients of eight originals each and 100 reference images (36 a class of
digits). Kinds of clients: ``photographs`` crops of all pictures at every client; ``photographs, one
a client`` crops of a picture of its own, of which the references hold none; ``digits, two classes a
client``; ``digits, slanted at a client``, whose references are upright.

``false alarms``: share of runs that name any of eight images an upload that saw no gradient: of
another client (``others``), or of what the attacker may know about this client without a gradient,
other crops of its picture or other people's digits slanted alike (``same kind``). There the
hypothesis of the rule, that originals and references are exchangeable, does not hold. ``power``:
share of the client's own images that count as leaked, spoilt by noise to an SSIM, all of an
upload's, or a single one of the whole run (``one``).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bract.scores.chance import chance_of_any, dissimilarity, views
from bract.scores.hommel import named
from bract.scores.image import pair
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.images import GREY_PICTURES, PHOTOGRAPHS, all_images, picture
from experiments.leak_rule import LEVEL, PER_CLASS, spoil

ORIGINALS = 8
UPLOADS = (1, 10)
SHOWN = (0.5, 0.7, 0.9)
NAMES = tuple(name for split in (*PHOTOGRAPHS.values(), *GREY_PICTURES.values()) for name in split)

_CROP, _SIZE, _REFERENCES, _SLANT = 128, 32, 100, 0.35

Array = NDArray[Any]
Rng = np.random.Generator


@dataclass(frozen=True)
class Drawn:
    """Images with labels; photographs have the label 0."""

    images: Tensor
    labels: Array


@dataclass(frozen=True)
class Client:
    """A client's originals, and images of its kind that are not among them."""

    own: Drawn
    alike: Drawn


@dataclass(frozen=True)
class World:
    """References and clients of a run."""

    references: Drawn
    clients: list[Client]


def crops(names: list[str], count: int, rng: Rng) -> Drawn:
    """Draw crops of pictures, grey."""
    found = []
    for _ in range(count):
        whole = picture(names[int(rng.integers(len(names)))]).mean(dim=0, keepdim=True)
        top, left = (int(rng.integers(side - _CROP)) for side in whole.shape[1:])
        part = whole[None, :, top : top + _CROP, left : left + _CROP]
        found.append(F.interpolate(part, size=(_SIZE, _SIZE), mode="area")[0])
    return Drawn(torch.stack(found), np.zeros(count, int))


def shared_pictures(uploads: int, rng: Rng) -> World:
    """Every client has crops of all pictures."""
    names = list(NAMES)
    clients = [
        Client(crops(names, ORIGINALS, rng), crops(names, ORIGINALS, rng)) for _ in range(uploads)
    ]
    return World(crops(names, _REFERENCES, rng), clients)


def own_pictures(uploads: int, rng: Rng) -> World:
    """Every client has crops of one picture, of which the references hold none."""
    names = list(rng.permutation(NAMES))
    mine, others = names[:uploads], names[uploads:]
    clients = [Client(crops([n], ORIGINALS, rng), crops([n], ORIGINALS, rng)) for n in mine]
    return World(crops(others, _REFERENCES, rng), clients)


@cache
def _digits() -> tuple[Tensor, Array]:
    images, labels = all_images("digits")
    return images, labels.numpy()


def _people(rng: Rng) -> tuple[Drawn, Array]:
    images, labels = _digits()
    order = rng.permutation(len(images))
    kept = np.concatenate([order[labels[order] == c][:PER_CLASS] for c in range(10)])
    return Drawn(images[kept], labels[kept]), order[~np.isin(order, kept)]


def _pick(chosen: Array) -> Drawn:
    images, labels = _digits()
    return Drawn(images[chosen], labels[chosen])


def two_classes(uploads: int, rng: Rng) -> World:
    """Every client has digits of two classes."""
    references, rest = _people(rng)
    labels, clients = _digits()[1], []
    for _ in range(uploads):
        mine = rng.choice(10, 2, replace=False)
        left = rng.permutation(rest[np.isin(labels[rest], mine)])
        clients.append(Client(_pick(left[:ORIGINALS]), _pick(left[ORIGINALS : 2 * ORIGINALS])))
    return World(references, clients)


def slanted(uploads: int, rng: Rng) -> World:
    """Every client's digits are slanted by as much, the references' are not."""
    references, rest = _people(rng)
    clients = []
    for _ in range(uploads):
        left = rng.permutation(rest)
        slant = float(rng.choice([-1.0, 1.0])) * _SLANT
        own, alike = (
            Drawn(_slant(drawn.images, slant), drawn.labels)
            for drawn in (_pick(left[:ORIGINALS]), _pick(left[ORIGINALS : 2 * ORIGINALS]))
        )
        clients.append(Client(own, alike))
    return World(references, clients)


def _slant(images: Tensor, by: float) -> Tensor:
    shear = torch.tensor([[1.0, by, 0.0], [0.0, 1.0, 0.0]]).expand(len(images), 2, 3)
    grid = F.affine_grid(shear, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False).clamp(0.0, 1.0)


KINDS: dict[str, Callable[[int, Rng], World]] = {
    "photographs": shared_pictures,
    "photographs, one a client": own_pictures,
    "digits, two classes a client": two_classes,
    "digits, slanted at a client": slanted,
}


def judge(images: Tensor, own: Drawn, references: Drawn) -> tuple[Array, Array, Array]:
    """Return each image's chance, whether its original is nearest, and which it is."""
    order, kept = pair(images, own.images)
    matched, labels = images[order], own.labels[kept.numpy()]
    near = dissimilarity(matched, views(own.images[kept])).diagonal()
    pools = {
        int(c): references.images[torch.from_numpy(references.labels == c)] for c in set(own.labels)
    }
    apart = {c: dissimilarity(matched, views(pool)) for c, pool in pools.items()}
    middle = {c: views(pool.mean(dim=0)[None]) for c, pool in pools.items()}
    means = {c: dissimilarity(matched, mean)[:, 0] for c, mean in middle.items()}
    counts = Counter(int(c) for c in own.labels)
    chances, nearest = np.empty(len(images)), np.empty(len(images), bool)
    for at, label in enumerate(int(c) for c in labels):
        rows = {c: apart[c][[at]] for c in apart}
        chances[at] = chance_of_any(near[[at]], rows, counts, label)[0]
        nearest[at] = near[at] < min(apart[label][at].min(), means[label][at])
    back = np.argsort(order.numpy())
    return chances[back], nearest[back], kept.numpy()[back]


def false_alarm(world: World, other: Client, known: bool) -> float:
    """Return 1 where images without a gradient are named."""
    chances = [
        judge((client if known else other).alike.images, client.own, world.references)[0]
        for client in world.clients
    ]
    return float(any(named(np.concatenate(chances).tolist(), 1.0 - LEVEL)))


def power(world: World, level: float, every: bool) -> float:
    """Return the share of the spoilt originals that count as leaked."""
    chances, right = [], []
    for number, client in enumerate(world.clients):
        images = client.alike.images.clone()
        true = ORIGINALS if every else int(number == 0)
        for index in range(true):
            images[index] = spoil(client.own.images[index], "noise", level)
        chance_of, nearest, matched = judge(images, client.own, world.references)
        chances.append(chance_of)
        own = np.zeros(ORIGINALS, bool)
        own[:true] = nearest[:true] & (matched[:true] == np.arange(true))
        right.append(own)
    leaked = np.array(named(np.concatenate(chances).tolist(), 1.0 - LEVEL))
    wanted = len(world.clients) * ORIGINALS if every else 1
    return float((leaked & np.concatenate(right)).sum() / wanted)


def worlds(kind: str, uploads: int, runs: int) -> Iterator[tuple[World, Client]]:
    """Draw runs, each with a client that takes no part."""
    for number in range(runs):
        rng = np.random.default_rng([number, uploads, *kind.encode()])
        drawn = KINDS[kind](uploads + 1, rng)
        yield World(drawn.references, drawn.clients[:-1]), drawn.clients[-1]


def rows(kind: str, uploads: int, runs: int) -> Iterator[dict[str, Any]]:
    """Yield what one kind of clients gives in audits of one size."""
    facts = {"kind": kind, "uploads": uploads, "originals": ORIGINALS}
    for name, known in (("others", False), ("same kind", True)):
        rate = np.mean([false_alarm(*drawn, known) for drawn in worlds(kind, uploads, runs)])
        about = {"measured": "false alarms", "images": name, "runs": runs}
        yield facts | about | {"rate": float(rate)}
    few = max(3, runs // (3 if uploads == 1 else 10))
    for level in SHOWN:
        for leaked in ("all", "one"):
            rate = np.mean(
                [power(world, level, leaked == "all") for world, _ in worlds(kind, uploads, few)]
            )
            about = {"measured": "power", "ssim": level, "leaked": leaked, "runs": few}
            yield facts | about | {"rate": float(rate)}


def main() -> None:
    """Simulate every kind of client."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=20)
    options = parse(arguments)
    done: list[dict[str, Any]] = []
    for kind in KINDS:
        for uploads in UPLOADS:
            done += list(rows(kind, uploads, options.runs))
            note(f"{kind}, {uploads} uploads: {done[-1]}")
    columns = ("kind", "uploads", "measured", "images", "ssim", "leaked", "runs", "rate")
    emit(done, columns, as_json=options.json)


if __name__ == "__main__":
    main()
