"""Whether defenses of 2025 and 2026 hide images, and what the federation still learns.

    OMP_NUM_THREADS=1 python -m experiments.censor [--part leak] [--defense censor] [--json]

CENSOR (Zhang et al., NDSS 2025), and the truncated SVD that SVDefense (Luo et al., NDSS 2026) is
built on. ``leak``: one gradient of one digit, fresh strided LeNets, the attack ``ig``: undefended,
from an oblivious attacker, from the adaptive one, and from the adaptive one that is given the
label. ``leaked`` images are by the audit's own rule; ``low`` and ``high`` are the ends of the share
(95 %, Clopper and Pearson). ``accuracy``: three clients on digits, the global model on held-out
digits after so many rounds, with half of the 95 % t-interval over seeds, and the mean cosine
between what is sent and the update.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bract.attacks import ADAPTIVE, Budget, attack
from bract.audit.questions.membership.score import share_limits
from bract.audit.questions.reconstruction.scores.image import score_images
from bract.client.defenses import ProtectContext, build_defenses
from bract.config import build_config
from bract.config.config import TrainingConfig
from bract.inputs import Truth
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.federation import Clients
from experiments.harness.images import image_set
from experiments.harness.leaks import judged, leaked
from experiments.harness.result import Row
from experiments.harness.scores import interval
from experiments.harness.splits import first_seed
from experiments.harness.uploads import network_for, plain_spec, trained_upload
from experiments.membership import accuracy_of

COLUMNS = (
    *("name", "defense", "attacker", "images", "leaked", "low", "high", "psnr", "ssim", "labels"),
    *("rounds", "accuracy", "accuracy_ci95", "cosine", "runs", "cpu_seconds"),
)
SIDE = 16
Chain = list[dict[str, Any]]

LEAK: dict[str, Chain] = {
    "none": [],
    "censor": [{"name": "censor", "trials": 20, "step": 0.1}],
    "truncated-svd, energy 0.9": [{"name": "truncated-svd", "energy": 0.9}],
    "truncated-svd, energy 0.5": [{"name": "truncated-svd", "energy": 0.5}],
}
ACCURACY: dict[str, Chain] = {
    "none": [],
    "censor": [{"name": "censor", "trials": 20}],
    "censor, 100 trials": [{"name": "censor", "trials": 100}],
    "truncated-svd, energy 0.9": [{"name": "truncated-svd", "energy": 0.9}],
    "truncated-svd, energy 0.5": [{"name": "truncated-svd", "energy": 0.5}],
}
"""The defenses of each part; updates of weights need no step of CENSOR."""


ATTACKERS = ("oblivious", "adaptive", "adaptive, label known")


def main() -> None:
    """Run a part; then print the table or JSON."""
    arguments = parser(__doc__, "threads", "split")
    arguments.add_argument("--part", choices=("leak", "accuracy"), default="leak")
    arguments.add_argument("--defense", default="", help="how the names of defenses begin")
    arguments.add_argument("--images", type=int, default=16)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--rounds", type=int, default=100)
    arguments.add_argument("--iterations", type=int, default=500)
    options = parse(arguments)
    rows: list[Row] = []
    if options.part == "leak":
        for defense, chain in LEAK.items():
            if chain and not defense.startswith(options.defense):
                continue
            for attacker in ATTACKERS if chain else ATTACKERS[:1]:
                if attacker == ATTACKERS[-1] and rows[-1]["labels"] == 1.0:
                    continue  # the adaptive attacker had every label
                row = leak(
                    defense, chain, attacker, options.images, options.split, options.iterations
                )
                rows.append(note_row(row, COLUMNS))
    else:
        for defense, chain in ACCURACY.items():
            if chain and not defense.startswith(options.defense):
                continue
            rows.append(note_row(accuracy(defense, chain, options.seeds, options.rounds), COLUMNS))
    emit(rows, COLUMNS, as_json=options.json)


@contextmanager
def label_known(name: str, labels: Tensor) -> Iterator[None]:
    """Give the adaptive attacker of a defense the label."""
    own = ADAPTIVE[name]
    ADAPTIVE.register(name, force=True)(
        lambda seen, known: replace(own(seen, known), labels=labels)
    )
    try:
        yield
    finally:
        ADAPTIVE.register(name, force=True)(own)


def leak(defense: str, chain: Chain, attacker: str, count: int, split: str, iterations: int) -> Row:
    """Attack so many uploads of one digit each."""
    images = image_set("digits", count, split, size=SIDE)
    spec = plain_spec((1, SIDE, SIDE))
    begun, results, psnr, ssim, labels = time.process_time(), [], [], [], []
    for number in range(count):
        seed = first_seed(split) + number
        truth = Truth(images.images[[number]], images.labels[[number]])
        observation = trained_upload(
            network_for(spec, "lenet-strided", seed, activation="relu"),
            truth.images,
            truth.labels,
            training=TrainingConfig(algorithm="fedsgd", batch_size=1),
            spec=spec,
            chain=build_defenses(chain),
            state={},
            context=ProtectContext(round=1, seed=2**70 + number),
            seed=seed,
            client="client-0",
            model="lenet-strided",
            activation="relu",
        ).captured
        label_is_known = attacker.endswith("known")
        with label_known(chain[0]["name"], truth.labels) if label_is_known else nullcontext():
            found = attack("ig")(
                observation,
                budget=Budget(iterations=iterations, restarts=2),
                seed=seed,
                tier="oblivious" if attacker == "oblivious" else "adaptive",
            )
        scored = score_images(found.images, truth, recovered=found.labels, perceptual=False)
        psnr.append(float(scored.rows[0].psnr or 0.0))
        ssim.append(float(scored.rows[0].ssim or 0.0))
        labels.append(float(bool(torch.equal(found.labels, truth.labels))))
        results.append(judged("digits", images, found.images, truth, scored))
    flags, _ = leaked(results)
    low, high = share_limits(sum(flags), count, 0.05)
    return {
        "name": "leak",
        "defense": defense,
        "attacker": attacker,
        "images": count,
        "leaked": sum(flags),
        "low": round(low, 3),
        "high": round(high, 3),
        "psnr": round(fmean(psnr), 2),
        "ssim": round(fmean(ssim), 3),
        "labels": round(fmean(labels), 3),
        "runs": count,
        "cpu_seconds": round(time.process_time() - begun, 1),
    }


def accuracy(defense: str, chain: Chain, seeds: int, rounds: int) -> Row:
    """Train federations with or without the defense."""
    begun, reached, cosines = time.process_time(), [], []
    for seed in range(seeds):
        config = build_config(
            {
                "seed": seed,
                "rounds": rounds,
                "data": {"image_size": SIDE},
                "model": {"name": "lenet-strided", "activation": "relu"},
                "training": {"batch_size": 16, "local_steps": 5, "lr": 0.1},
                "defenses": chain,
            }
        )
        clients = Clients(config)
        for _ in range(rounds):
            clients.round()
        reached.append(accuracy_of(clients))
        cosines += clients.cosines
    _, half = interval(reached)
    return {
        "name": "accuracy",
        "defense": defense,
        "rounds": rounds,
        "accuracy": round(fmean(reached), 4),
        "accuracy_ci95": None if half is None else round(half, 4),
        "cosine": round(fmean(cosines), 4),
        "runs": seeds,
        "cpu_seconds": round(time.process_time() - begun, 1),
    }


if __name__ == "__main__":
    main()
