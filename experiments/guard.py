"""Leaks that a guard at the site stops, what it costs, and what its refusals tell.

    OMP_NUM_THREADS=2 python -m experiments.guard [--part panels|accuracy|refusals] [--json]

``panels``: four clients' first updates of one digit each (in the last row of eight) through fresh
networks. ``readable`` counts images that `auto`, adaptive to the defense, reads within ``--strong``
seconds, as the rule of an audit has it; ``after`` those that it reads in what the guard let leave;
``false`` updates that the guard changed or stopped though it read nothing of them undefended.
``accuracy``: of a linear model on digits after six rounds of four clients, with and without a
guard; ``acted`` counts the updates that it changed. ``refusals``: a crafted model asks in each of
100 rounds whether one digit is among a site's 20; ``auc`` is of the number of rounds in which the
guard acted, ``bits`` the mutual information of that number with membership, of at most 1.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

import bract.client.app as client_app
from bract.attacks import Budget, Reconstruction, reconstruct
from bract.client.guard import Candidate, Ladder
from bract.client.guard_attack import Inspection
from bract.client.guard_policy import GuardPolicy, Step
from bract.config import build_config, dump_config
from bract.inputs import Truth
from bract.protocol.observation import Observation
from bract.rundir import RunDirectory
from bract.scores.image import score_images
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.images import ImageSet, image_set
from experiments.harness.leaks import judged, leaked
from experiments.harness.result import Row
from experiments.harness.uploads import gradient_upload, network_for, plain_spec

COLUMNS = (
    *("part", "model", "batch", "clients", "images", "readable", "after", "stopped"),
    *("refused", "false", "seconds", "plain", "guarded", "rounds", "auc", "bits", "acted"),
)
SIZE = 16
LADDER: list[Any] = [{"name": "noise", "std": std, "clip": 1.0} for std in (0.03, 0.3)]
POLICY = GuardPolicy(ladder=LADDER)
NETWORKS = (
    ("linear", "relu", 1),
    ("mlp", "relu", 1),
    ("lenet-strided", "relu", 1),
    ("lenet", "sigmoid", 1),
    ("mlp", "relu", 8),
)
CLIENTS = 4
ROUNDS = 6
TRAINED: tuple[tuple[int, list[Any]], ...] = (
    (20, LADDER),
    (1, LADDER),
    (1, [{"name": "batch", "size": 64}, *LADDER]),
)
"""Local steps of eight images, and the ladder."""

ASKED, LIMIT = 100, 0.9


def main() -> None:
    """Measure the parts that are asked for; then print the table or JSON."""
    arguments = parser(__doc__, "threads")
    arguments.add_argument("--part", choices=("panels", "accuracy", "refusals"))
    arguments.add_argument("--strong", type=float, default=10.0, help="seconds of the attacker")
    options = parse(arguments)
    rows: list[Row] = []
    if options.part in (None, "panels"):
        rows += [note_row(panel(*each, options.strong), COLUMNS) for each in NETWORKS]
    if options.part in (None, "accuracy"):
        rows += [note_row(accuracy(*each), COLUMNS) for each in TRAINED]
    if options.part in (None, "refusals"):
        rows += [note_row(refusals(most), COLUMNS) for most in (None, 10)]
    emit(rows, COLUMNS, as_json=options.json)


@dataclass
class Site:
    """One client's update, its images, and its guard."""

    seen: Observation
    truth: Truth
    images: ImageSet
    seed: int

    def guarded(self, policy: GuardPolicy, level: int = 0) -> tuple[Observation | None, int, float]:
        """Return what the guard lets leave, the step, and the seconds of its attacks."""
        known = self.images
        assert known.references is not None and known.reference_labels is not None
        inspect = Inspection(
            policy,
            self.seen,
            Truth(
                torch.cat([known.images, known.references]),
                torch.cat([known.labels, known.reference_labels]),
            ),
            [],
            seed=self.seed,
        )
        batch = len(self.truth.images)

        def make(step: Step) -> Candidate:
            made = step.chain.protect(self.seen.update, {}) if len(step.chain) else self.seen.update
            return Candidate(made, {}, self.truth.images, self.truth.labels, batch)

        begun = time.perf_counter()
        passed = Ladder(policy, inspect, make, sleep=lambda _: None).passed(level)
        seconds = time.perf_counter() - begun
        if passed is None:
            return None, len(policy.steps), seconds
        step = policy.steps[passed.level]
        declaration = self.seen.declaration.updated({"defenses": step.chain.public()})
        left = replace(self.seen, update=passed.candidate.update, declaration=declaration)
        return left, passed.level, seconds

    def read_by(self, seen: Observation, seconds: float) -> list[bool]:
        """Return which images a strong attacker reads."""
        tier = "adaptive" if seen.declaration.defenses else "oblivious"
        (found,) = reconstruct(
            seen,
            "auto",
            budget=Budget(seconds=seconds),
            seed=self.seed + 1,
            tier=tier,  # type: ignore[arg-type]
            device="cpu",
        )
        if not isinstance(found, Reconstruction):
            return [False] * len(self.truth.images)
        scored = score_images(found.images, self.truth, perceptual=False)
        parts = judged("digits", self.images, found.images, self.truth, scored)
        return leaked([parts])[0]


def site(model: str, activation: str, batch: int, client: int) -> Site:
    """Return one client with a fresh network of its own."""
    images = image_set("digits", CLIENTS * batch, "score", size=SIZE)
    mine = slice(client * batch, (client + 1) * batch)
    spec = plain_spec(images.images.shape[1:])
    network = network_for(spec, model, client, activation=activation)
    truth = Truth(images.images[mine], images.labels[mine])
    seen = gradient_upload(
        network, truth.images, truth.labels, spec=spec, model=model, activation=activation
    )
    return Site(seen, truth, images, client)


def panel(model: str, activation: str, batch: int, strong: float) -> Row:
    """Return what a guard stops of four clients' first updates."""
    before: list[bool] = []
    after: list[bool] = []
    stopped = refused = false = 0
    seconds: list[float] = []
    for client in range(CLIENTS):
        one = site(model, activation, batch, client)
        bare = one.read_by(one.seen, strong)
        left, level, took = one.guarded(POLICY)
        seconds.append(took)
        before += bare
        after += [False] * batch if left is None else one.read_by(left, strong)
        stopped += level > 0
        refused += left is None
        false += level > 0 and not any(bare)
    return {
        "part": "panels",
        "model": model,
        "activation": activation,
        "batch": batch,
        "clients": CLIENTS,
        "images": len(before),
        "readable": sum(before),
        "after": sum(after),
        "stopped": stopped,
        "refused": refused,
        "false": false,
        "strong_seconds": strong,
        "seconds": max(seconds),
    }


def accuracy(steps: int, ladder: list[Any]) -> Row:
    """Return the test accuracy of a federation with and without a guard, and what it did."""
    plain, _ = _trained(steps, None)
    guarded, acted = _trained(steps, {"ladder": ladder})
    return {
        "part": "accuracy",
        "model": "linear",
        "batch": 8,
        "steps": steps,
        "ladder": [str(each) for each in ladder],
        "clients": 4,
        "rounds": ROUNDS,
        "plain": plain,
        "guarded": guarded,
        "acted": acted,
    }


def _trained(steps: int, guard: Any) -> tuple[float, int]:
    config = build_config(
        {
            "clients": 4,
            "rounds": ROUNDS,
            "seed": 3,
            "data": {"image_size": SIZE, "validation": 0.2},
            "model": {"name": "linear"},
            "training": {"lr": 0.1, "batch_size": 8, "local_steps": steps},
            "capture": {"enabled": False},
        }
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = folder / "policy.yaml"
        policy.write_text(yaml.safe_dump({} if guard is None else {"guard": guard}))
        run = RunDirectory(folder / "run")
        run.create(config)
        nodes: list[dict[str, Any]] = [
            {"partition-id": i, "policy": str(policy), "state-dir": str(folder / f"state-{i}")}
            for i in range(4)
        ]
        grid = LoopbackGrid(client_app.app, nodes, {"federation": dump_config(config)})
        Federation(config, run).train(grid)
        found = [m.evaluation.accuracy for m in run.metrics() if m.evaluation is not None]
        logs = "".join(path.read_text() for path in folder.glob("state-*/*-guard.jsonl"))
    sent = [json.loads(line)["sent"] for line in logs.splitlines()]
    return float(found[-1] or 0.0), sum(each != "as it is" for each in sent)


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
    inside = [n for member, n in trials if member]
    outside = [n for member, n in trials if not member]
    wins = sum((a > b) + 0.5 * (a == b) for a in inside for b in outside)
    return {
        "part": "refusals",
        "model": "linear",
        "batch": 2,
        "clients": len(trials),
        "rounds": ASKED,
        "max_stops": most,
        "auc": wins / (len(inside) * len(outside)),
        "bits": _information(trials),
        "acted": sum(n for _, n in trials) / len(trials),
    }


def _acted(trial: int, member: bool, most: int | None) -> int:
    """Return how many of 100 answers the server sees changed or refused, one trial."""
    pool = image_set("digits", 100, "score", size=SIZE)
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


if __name__ == "__main__":
    main()
