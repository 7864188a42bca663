"""Whether CENSOR (Zhang et al., NDSS 2025) hides images, and what the federation still learns.

    OMP_NUM_THREADS=1 python -m experiments.censor [--part leak] [--seeds 3] [--json]

``leak``: one gradient of one digit, fresh strided LeNets, the attack ``ig``: undefended, from an
oblivious attacker, from the adaptive one, and from the adaptive one that is given the label.
``leaked`` images are by the audit's own rule. ``accuracy``: three clients on digits, the global
model on held-out digits after so many rounds, and the mean cosine between what is sent and the
update.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from bract.attacks import ADAPTIVE, Budget, attack
from bract.attacks.adaptive.censor import match_norms_and_orthogonality
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
from experiments.harness.splits import first_seed
from experiments.harness.uploads import network_for, plain_spec, trained_upload
from experiments.membership import accuracy_of

COLUMNS = (
    *("name", "defense", "attacker", "images", "leaked", "high", "psnr", "ssim", "labels"),
    *("rounds", "accuracy", "cosine", "runs", "cpu_seconds"),
)
SIDE = 16
TRIALS = 20


def main() -> None:
    """Run a part; then print the table or JSON."""
    arguments = parser(__doc__, "threads", "split")
    arguments.add_argument("--part", choices=("leak", "accuracy"), default="leak")
    arguments.add_argument("--images", type=int, default=8)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--iterations", type=int, default=500)
    options = parse(arguments)
    if options.part == "leak":
        ways = (
            ("none", "oblivious"),
            ("censor", "oblivious"),
            ("censor", "adaptive"),
            ("censor", "adaptive, label known"),
        )
        rows = [leak(*way, options.images, options.split, options.iterations) for way in ways]
    else:
        rows = [accuracy(name, options.seeds, options.rounds) for name in ("none", "censor")]
    emit([note_row(row, COLUMNS) for row in rows], COLUMNS, as_json=options.json)


def leak(defense: str, attacker: str, count: int, split: str, iterations: int) -> Row:
    """Attack so many uploads of one digit each."""
    images = image_set("digits", count, split, size=SIDE)
    spec = plain_spec((1, SIDE, SIDE))
    chain: list[dict[str, Any]] = [{"name": "censor", "trials": TRIALS, "step": 0.1}]
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
            chain=build_defenses(chain if defense == "censor" else []),
            state={},
            context=ProtectContext(round=1, seed=2**70 + number),
            seed=seed,
            client="client-0",
            model="lenet-strided",
            activation="relu",
        ).captured
        known = truth.labels

        def with_labels(seen: Any, about: Any, known: Any = known) -> Any:
            return replace(match_norms_and_orthogonality(seen, about), labels=known)

        told = attacker.endswith("known")
        ADAPTIVE.register("censor", force=True)(
            with_labels if told else match_norms_and_orthogonality
        )
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
    return {
        "name": "leak",
        "defense": defense,
        "attacker": attacker,
        "images": count,
        "leaked": sum(flags),
        "high": round(share_limits(sum(flags), count, 0.05)[1], 3),
        "psnr": round(fmean(psnr), 2),
        "ssim": round(fmean(ssim), 3),
        "labels": round(fmean(labels), 3),
        "runs": count,
        "cpu_seconds": round(time.process_time() - begun, 1),
    }


def accuracy(defense: str, seeds: int, rounds: int) -> Row:
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
                "defenses": [{"name": "censor", "trials": TRIALS}] if defense == "censor" else [],
            }
        )
        clients = Clients(config)
        for _ in range(rounds):
            clients.round()
        reached.append(accuracy_of(clients))
        cosines += clients.cosines
    return {
        "name": "accuracy",
        "defense": defense,
        "rounds": rounds,
        "accuracy": round(fmean(reached), 4),
        "cosine": round(fmean(cosines), 4),
        "runs": seeds,
        "cpu_seconds": round(time.process_time() - begun, 1),
    }


if __name__ == "__main__":
    main()
