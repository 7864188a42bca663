"""Measure how much a guard's refusals tell a server that crafts its models."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import torch
from torch import Tensor

from bract.inputs import Truth
from bract.scores.image import score_images
from experiments.harness.images import image_set
from experiments.harness.result import Row
from experiments.harness.uploads import gradient_upload, network_for, plain_spec

ASKED, LIMIT = 100, 0.9
CANDIDATES, TIMES = 40, 10
"""Digits that a server asks a site about, half of them the site's, and how often each."""


def refusals(most: int | None) -> Row:
    """Return what a guard's actions over 100 rounds tell of one digit's membership.

    In each round the server sends a model of which one unit alone passes anything, and only the
    asked digit, and asks for the gradient of a batch of two that is drawn from 20 digits, the asked
    one among them or not. The guard acts by the closed form alone, at a limit of SSIM 0.9, without
    a ladder, so that 100 rounds take seconds.
    """
    trials: list[tuple[bool, int]] = []
    for trial, member in itertools.product(range(20), (False, True)):
        trials.append((member, _acted(trial, member, most)))
    return {
        "part": "refusals",
        "model": "linear",
        "batch": 2,
        "clients": len(trials),
        "rounds": ASKED,
        "max_stops": most,
        "auc": _area(trials),
        "bits": _information(trials),
        "acted": sum(n for _, n in trials) / len(trials),
    }


def candidates(most: int | None) -> Row:
    """Return what a guard's actions tell of 40 digits, each asked about ten times in turn.

    The guard and the crafted models are those of `refusals`; five sites hold 20 of the digits.
    """
    trials: list[tuple[bool, int]] = []
    confirmed: list[int] = []
    for site in range(5):
        pool = image_set("digits", 100, "score", size=16)
        generator = torch.Generator().manual_seed(site)
        asked = torch.randperm(100, generator=generator)[:CANDIDATES].tolist()
        own = asked[: CANDIDATES // 2]
        counts = Counter[int]()
        for digit in asked * TIMES:
            if most is not None and counts.total() >= most:
                break  # the site answers nothing more, whatever is asked
            chosen = [own[i] for i in torch.randperm(len(own), generator=generator)[:2].tolist()]
            images, labels = pool.images[chosen], pool.labels[chosen]
            counts[digit] += _is_read(images, labels, pool.images[digit])
        trials += [(digit in own, counts[digit]) for digit in asked]
        confirmed.append(sum(counts[digit] > 0 for digit in own))
    return {
        "part": "candidates",
        "model": "mlp",
        "batch": 2,
        "clients": len(confirmed),
        "images": CANDIDATES,
        "rounds": CANDIDATES * TIMES,
        "max_stops": most,
        "auc": _area(trials),
        "acted": sum(n for _, n in trials) / len(confirmed),
        "confirmed": sum(confirmed) / len(confirmed),
    }


def _area(trials: list[tuple[bool, int]]) -> float:
    """Return the area under the curve of counts of members against those of others."""
    inside = [n for member, n in trials if member]
    outside = [n for member, n in trials if not member]
    wins = sum((a > b) + 0.5 * (a == b) for a in inside for b in outside)
    return wins / (len(inside) * len(outside))


def _acted(trial: int, member: bool, most: int | None) -> int:
    """Return how many of 100 answers the server sees changed or refused, one trial."""
    pool = image_set("digits", 100, "score", size=16)
    target = trial
    generator = torch.Generator().manual_seed(trial)
    others = [i for i in range(100) if i != target][: 20 - member]
    own = [target] * member + others
    acted = 0
    for _ in range(ASKED):
        if most is not None and acted >= most:
            break  # the site answers nothing more, whatever is asked
        chosen = [own[i] for i in torch.randperm(len(own), generator=generator)[:2].tolist()]
        images, labels = pool.images[chosen], pool.labels[chosen]
        acted += _is_read(images, labels, pool.images[target])
    return acted


def _is_read(images: Tensor, labels: Tensor, asked: Tensor) -> bool:
    """Return whether a guard acts: one unit, open to one image alone, shows the image exactly."""
    spec = plain_spec(images.shape[1:])
    network = network_for(spec, "mlp", 0, activation="relu")
    first = next(module for module in network.modules() if isinstance(module, torch.nn.Linear))
    with torch.no_grad():
        direction = (asked - 0.5).flatten()
        first.weight.zero_()
        first.weight[0] = direction
        # Of all digits the asked one alone passes the bias.
        first.bias.fill_(-1e3)
        first.bias[0] = -0.99 * float(direction @ asked.flatten())
    seen = gradient_upload(network, images, labels, spec=spec, model="mlp", activation="relu")
    weight, bias = list(seen.update.values())[:2]
    image = (weight[0] / bias[0]).nan_to_num().clamp(0.0, 1.0).reshape(images.shape[1:])
    scored = score_images(image[None], Truth(images, labels), perceptual=False)
    return any((row.ssim or 0.0) >= LIMIT for row in scored.rows)


def _information(trials: list[tuple[bool, int]]) -> float:
    """Return the mutual information of membership and count in bits, as observed."""
    total = len(trials)
    joint = Counter(trials)
    members = Counter(member for member, _ in trials)
    counts = Counter(count for _, count in trials)
    return sum(
        n / total * math.log2(n * total / (members[member] * counts[count]))
        for (member, count), n in joint.items()
    )
