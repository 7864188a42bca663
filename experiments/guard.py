"""Leaks that a guard at the site stops, what it costs, and what its refusals tell.

    OMP_NUM_THREADS=2 python -m experiments.guard [--part panels|unread|accuracy|refusals] [--json]

``panels``: four clients' first updates of one digit each (or of eight) through fresh networks.
``readable`` counts images that `auto`, adaptive to the defense, reads within ``--strong`` seconds,
as the rule of an audit has it; ``after`` those that it reads in what the guard let leave, and
``after_changed`` those of them in updates that the guard had strengthened.
``unread``: updates of which it reads nothing, after local epochs or below noise; ``false`` counts
those that the guard changed or stopped. ``accuracy``: of a linear model on digits after six rounds
of four clients, with and without a guard, over seeds of the whole federation; ``cost`` is the mean
difference in points with its 95 % t interval, and ``steps_taken`` counts what was sent.
``refusals``: a crafted model asks in each of 100 rounds whether one digit is among a site's 20;
``auc`` is of the number of rounds in which the guard acted, ``bits`` the mutual information of that
number with membership, of at most 1. With 40 candidates, half of them a site's, the same is asked
ten times of each, in turn, and ``confirmed`` counts the members that one site's refusals named.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

import bract.client.app as client_app
from bract.attacks import Budget, Reconstruction, Refusal, reconstruct
from bract.attacks.result import CutOffError
from bract.attacks.solve.cutting import cut_off_after
from bract.captures.observation import Observation
from bract.client.defenses import DefenseChain, ProtectContext, build_defenses
from bract.client.guard import Candidate, Ladder, Passed
from bract.client.guard_attack import Inspection
from bract.client.guard_policy import AS_IT_IS, GuardPolicy, Step
from bract.client.training import planned_steps
from bract.config import build_config, dump_config
from bract.config.audit import Tier
from bract.config.config import TrainingConfig
from bract.inputs import Truth
from bract.process import clock
from bract.process.clock import ProcessorClock
from bract.rundir import RunDirectory
from bract.scores.image import score_images
from bract.server.federation import Federation
from bract.server.loopback import LoopbackGrid
from experiments.guard_refusals import candidates, refusals
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.images import ImageSet, image_set
from experiments.harness.leaks import judged, leaked
from experiments.harness.result import Row
from experiments.harness.scores import interval
from experiments.harness.uploads import (
    fit,
    gradient_upload,
    network_for,
    plain_spec,
    trained_upload,
)

COLUMNS = (
    *("part", "model", "batch", "clients", "images", "readable", "after", "stopped"),
    *("refused", "false", "seconds", "plain", "guarded", "cost", "cost_low", "cost_high"),
    *("rounds", "max_stops", "auc", "bits", "acted", "confirmed"),
)
LADDER: list[Any] = [{"name": "noise", "std": std, "clip": 1.0} for std in (0.01, 0.03, 0.3)]
FINE: list[Any] = [{"name": "noise", "std": 0.01 * 2**k, "clip": 1.0} for k in range(6)]
POLICY = GuardPolicy(ladder=LADDER)
CLIENTS = 4
ROUNDS = 6


@dataclass(frozen=True)
class Setting:
    """One panel: what each of its clients sends.

    Attributes
    ----------
    images
        Digits of a client.
    size
        Pixels of a side.
    training
        Local training of plain SGD; None sends the gradient of all images.
    noise
        Gaussian noise of the run itself, on updates of norm 1 at most; None sends them bare.
    fitted
        Steps that the network was trained before, on other digits.
    """

    model: str
    images: int = 1
    activation: str = "relu"
    size: int = 16
    training: TrainingConfig | None = None
    noise: float | None = None
    fitted: int = 0

    @property
    def chain(self) -> DefenseChain:
        """Return the run's own defenses."""
        noise = {"name": "noise", "std": self.noise, "clip": 1.0}
        return build_defenses([] if self.noise is None else [noise])

    def about(self) -> Row:
        """Return the columns that tell rows apart."""
        training = self.training
        return {
            "model": self.model,
            "activation": self.activation,
            "batch": self.images if training is None else training.batch_size,
            "own_images": self.images,
            "size": self.size,
            "local": None if training is None else planned_steps(training, self.images),
            "noise": self.noise,
            "fitted": self.fitted,
        }


ONE_STEP = TrainingConfig(lr=0.1, batch_size=8, local_steps=1)
EPOCHS = TrainingConfig(lr=0.05, batch_size=16, local_epochs=5)
PANELS = (
    Setting("linear"),
    Setting("mlp"),
    Setting("lenet-strided"),
    Setting("lenet", activation="sigmoid"),
    Setting("mlp", images=8),
    Setting("linear", images=8, training=ONE_STEP),
    Setting("resnet20", size=32),
    Setting("resnet20", images=8, size=32),
)
UNREAD = (
    Setting("resnet20", images=64, size=32, training=EPOCHS, fitted=60),
    Setting("lenet", images=64, training=EPOCHS, fitted=200),
    Setting("mlp", images=64, training=EPOCHS, fitted=200),
    Setting("lenet-strided", noise=0.1),
    Setting("mlp", images=8, noise=0.3),
)
TRAINED: tuple[tuple[int, list[Any], int], ...] = (
    (1, [{"name": "batch", "size": 64}, *LADDER], 8),
    (1, LADDER, 4),
    (1, FINE, 4),
    (20, LADDER, 4),
)
"""Local steps of eight images, the ladder, and how many seeds."""


def main() -> None:
    """Measure the parts that are asked for; then print the table or JSON."""
    arguments = parser(__doc__, "threads", "resume")
    arguments.add_argument("--part", choices=("panels", "unread", "accuracy", "refusals"))
    arguments.add_argument("--only", type=int, nargs="+", help="panels by number, from 0")
    arguments.add_argument("--strong", type=float, default=10.0, help="seconds of the attacker")
    options = parse(arguments)
    finished = Finished(options.resume, "bract.client", "experiments.guard")
    rows: list[Row] = []
    for part, settings in (("panels", PANELS), ("unread", UNREAD)):
        if options.part in (None, part):
            for number, one in enumerate(settings):
                if options.only and number not in options.only:
                    continue
                about = (part, one.about(), options.strong)
                measure = partial(panel, part, one, options.strong)
                rows.append(note_row(finished.row(about, measure), COLUMNS))
    if options.part in (None, "accuracy"):
        for steps, ladder, seeds in TRAINED:
            measure = partial(accuracy, steps, ladder, seeds, finished)
            rows.append(note_row(finished.row((steps, ladder, "all"), measure), COLUMNS))
    if options.part in (None, "refusals"):
        rows += [note_row(refusals(most), COLUMNS) for most in (None, 10, 2)]
        rows += [note_row(candidates(most), COLUMNS) for most in (None, 10, 2)]
    emit(rows, COLUMNS, as_json=options.json)


@dataclass
class Site:
    """One client's update, its images, and its guard."""

    seen: Observation
    truth: Truth
    images: ImageSet
    seed: int

    def guarded(
        self, policy: GuardPolicy, level: int = 0
    ) -> tuple[Observation | None, Passed | None, float]:
        """Return what the guard lets leave, its step, and the seconds of its clock."""
        known = self.images
        assert known.references is not None and known.reference_labels is not None
        inspect = Inspection(
            policy,
            self.seen,
            Truth(
                torch.cat([known.images, known.references]),
                torch.cat([known.labels, known.reference_labels]),
            ),
            self.seen.declaration.defenses,
            seed=self.seed,
        )

        def make(step: Step) -> Candidate:
            made = step.chain.protect(self.seen.update, {}) if len(step.chain) else self.seen.update
            return Candidate(
                made,
                self.seen.returned_buffers,
                self.truth.images,
                self.truth.labels,
                self.seen.declaration.batch_size or len(self.truth.images),
            )

        taken = ProcessorClock()
        passed = Ladder(policy, inspect, make, lambda: taken, sleep=lambda _: None).passed(level)
        seconds = taken()
        if passed is None:
            return None, None, seconds
        before = self.seen.declaration.defenses
        chain = [*before, *passed.step.chain.public()]
        declaration = self.seen.declaration.updated({"defenses": chain})
        left = replace(self.seen, update=passed.candidate.update, declaration=declaration)
        return left, passed, seconds

    def read_by(self, seen: Observation, seconds: float) -> int:
        """Return how many images a strong attacker reads."""
        tier: Tier = "adaptive" if seen.declaration.defenses else "oblivious"
        budget = Budget(seconds=seconds)
        try:
            with clock.timed_by(ProcessorClock()), cut_off_after(1.5 * seconds):
                made: Sequence[Reconstruction | Refusal] = reconstruct(
                    seen, "auto", budget=budget, seed=self.seed + 1, tier=tier, device="cpu"
                )
        except CutOffError as cut:
            made = cut.found
        read = 0
        for found in made:
            if isinstance(found, Reconstruction):
                scored = score_images(found.images, self.truth, perceptual=False)
                parts = judged("digits", self.images, found.images, self.truth, scored)
                read = max(read, sum(leaked([parts])[0]))
        return read


def site(setting: Setting, client: int) -> Site:
    """Return one client with a network of its own."""
    count = setting.images
    images = image_set("digits", CLIENTS * count, "score", size=setting.size)
    mine = slice(client * count, (client + 1) * count)
    truth = Truth(images.images[mine], images.labels[mine])
    spec = plain_spec(images.images.shape[1:])
    network = network_for(spec, setting.model, client, activation=setting.activation)
    if setting.fitted:
        fit(
            network,
            images.candidates,
            images.candidate_labels,
            torch.optim.SGD(network.parameters(), lr=0.05),
            steps=setting.fitted,
            batch=16,
            seed=client,
        )
    named = {"model": setting.model, "activation": setting.activation}
    if setting.training is not None:
        sent = trained_upload(
            network,
            truth.images,
            truth.labels,
            training=setting.training,
            spec=spec,
            chain=setting.chain,
            state={},
            context=ProtectContext(round=1, seed=client),
            seed=client,
            client=f"client-{client}",
            **named,
        )
        return Site(replace(sent.captured, returned_buffers=sent.buffers), truth, images, client)
    seen = gradient_upload(network, truth.images, truth.labels, spec=spec, **named)
    if len(setting.chain):
        seen = replace(
            seen,
            update=setting.chain.protect(seen.update, {}, ProtectContext(round=1, seed=client)),
            declaration=seen.declaration.updated({"defenses": setting.chain.public()}),
        )
    return Site(seen, truth, images, client)


def panel(part: str, setting: Setting, strong: float) -> Row:
    """Return what a guard stops of four clients' updates, and of those that nothing reads."""
    before = after = strengthened = 0
    stopped = refused = unread = false = 0
    seconds: list[float] = []
    taken: Counter[str] = Counter()
    for client in range(CLIENTS):
        one = site(setting, client)
        bare = one.read_by(one.seen, strong)
        left, passed, took = one.guarded(POLICY)
        changed = passed is None or passed.level > 0
        seconds.append(took)
        before += bare
        still = 0 if left is None else one.read_by(left, strong)
        after += still
        strengthened += still if changed else 0
        stopped += changed
        refused += left is None
        unread += not bare
        false += changed and not bare
        taken["refused" if passed is None else passed.step.name] += 1
    return {
        "part": part,
        **setting.about(),
        "clients": CLIENTS,
        "images": CLIENTS * setting.images,
        "readable": before,
        "after": after,
        "after_changed": strengthened,
        "stopped": stopped,
        "refused": refused,
        "unread": unread,
        "false": false,
        "steps_taken": dict(taken),
        "strong_seconds": strong,
        "seconds": max(seconds),
    }


def accuracy(steps: int, ladder: list[Any], seeds: int, finished: Finished) -> Row:
    """Return the test accuracy of a federation with and without a guard, and what it did."""

    def one(seed: int) -> Row:
        plain, _ = _trained(steps, None, seed)
        guarded, taken = _trained(steps, {"ladder": ladder}, seed)
        return {"plain": plain, "guarded": guarded, "taken": dict(taken)}

    found = [finished.row((steps, ladder, s), partial(one, s)) for s in range(seeds)]
    costs = [100.0 * (row["plain"] - row["guarded"]) for row in found]
    cost, half = interval(costs)
    taken = sum((Counter(row["taken"]) for row in found), Counter[str]())
    return {
        "part": "accuracy",
        "model": "linear",
        "batch": 8,
        "steps": steps,
        "ladder": [str(each) for each in ladder],
        "clients": 4,
        "rounds": ROUNDS,
        "seeds": seeds,
        "plain": sum(row["plain"] for row in found) / seeds,
        "guarded": sum(row["guarded"] for row in found) / seeds,
        "cost": cost,
        "cost_low": None if half is None else cost - half,
        "cost_high": None if half is None else cost + half,
        "cost_each": costs,
        "acted": sum(count for name, count in taken.items() if name != AS_IT_IS.name),
        "steps_taken": dict(taken),
    }


def _trained(steps: int, guard: Any, seed: int) -> tuple[float, Counter[str]]:
    config = build_config(
        {
            "clients": 4,
            "rounds": ROUNDS,
            "seed": seed,
            "data": {"image_size": 16, "validation": 0.2},
            "model": {"name": "linear"},
            "training": {"lr": 0.1, "batch_size": 8, "local_steps": steps},
            "capture": {"enabled": False},
            "strategy": {"tolerate_failures": True},
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
    sent = Counter(json.loads(line)["sent"] for line in logs.splitlines())
    return float(found[-1] or 0.0), sent


if __name__ == "__main__":
    main()
