"""How much of a known epsilon canaries measure, how often too much, and what they cost.

    OMP_NUM_THREADS=1 python -m experiments.epsilon [--part gaussian] [--runs 200] [--json]

``part`` ``gaussian``: the Gaussian mechanism at epsilon 1, 4 and 8 (delta 1e-5, exact calibration),
simulated: canaries of full sensitivity in directions of their own, each included by a fair coin.
``share`` is the mean of the bound over epsilon and ``above`` counts the runs in which the bound is
above epsilon, for the bound that holds for any mechanism (``one-run``), for that of noise claimed
to be Gaussian, and for ``either``; the two share an error of 5 %, as in an audit. ``one-shot`` is
an estimate. ``cost``: federations on digits that include
records as canaries or none, by the product's own code; accuracy is on the test split.
"""

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from bract.audit.audit import Audit
from bract.audit.questions.epsilon.bound import best_bound, gaussian_bound, one_shot_estimate
from bract.audit.questions.epsilon.gaussian import gaussian_epsilon
from bract.audit.questions.epsilon.question import CLAIMED, LEVEL
from bract.captures.observation import ObservationStore
from bract.client.canaries import open_canaries
from bract.client.policy import SitePolicy
from bract.config import FederationConfig, build_config
from bract.config.config import AuditRequest
from bract.rundir import RunDirectory
from bract.schema.epsilon import EpsilonAnswer
from bract.strategies.aggregation import aggregate, fedavg_weights
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.federation import Clients
from experiments.harness.result import Row
from experiments.harness.scores import mean
from experiments.membership import accuracy_of, observed

DELTA = 1e-5
Kind = Literal["mislabelled", "random", "crafted"]
COLUMNS = (
    *("name", "epsilon", "canaries", "runs", "bound", "share", "share_least", "above"),
    *("accuracy", "right", "low", "high", "cpu_seconds"),
)
CLIENTS = 3
ROUNDS = 10


def main() -> None:
    """Run a part; then print the table or JSON."""
    arguments = parser(__doc__, "threads")
    arguments.add_argument("--part", choices=("gaussian", "cost"), default="gaussian")
    arguments.add_argument("--runs", type=int, default=200)
    options = parse(arguments)
    rows = []
    if options.part == "gaussian":
        for epsilon in (1.0, 4.0, 8.0):
            for canaries in (10_000, 1_000, 100):
                rows += [
                    note_row(row, COLUMNS) for row in simulated(epsilon, canaries, options.runs)
                ]
    else:
        plan: list[tuple[Kind, int]] = [
            ("mislabelled", 0),
            ("mislabelled", 20),
            ("mislabelled", 80),
            ("random", 80),
            ("crafted", 80),
        ]
        rows = [note_row(cost(kind, count), COLUMNS) for kind, count in plan]
    emit(rows, COLUMNS, as_json=options.json)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the distance in standard deviations for which `gaussian_epsilon` is ``epsilon``.

    Infinite where no distance has so large an epsilon: for a ``delta`` of 1, or an infinite one.
    """
    if delta >= 1.0 or not epsilon < 1e300:
        return math.inf
    low, high = 0.0, 1.0
    while gaussian_epsilon(high, delta) < epsilon:
        high *= 2.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_epsilon(middle, delta) < epsilon else (low, middle)
    return high


def simulated(epsilon: float, canaries: int, runs: int) -> list[Row]:
    """Audit the mechanism so many times; one row a bound."""
    generator = np.random.default_rng(20231112)
    begun = time.process_time()
    mu = gaussian_mu(epsilon, DELTA)
    names = ("one-run", "claimed Gaussian", "either", "one-shot")
    found: dict[str, list[float]] = {name: [] for name in names}
    tail, claimed_tail = (1.0 - CLAIMED) * (1.0 - LEVEL), CLAIMED * (1.0 - LEVEL)
    for _ in range(runs):
        included = generator.random(canaries) < 0.5
        scores = generator.normal(size=canaries) + np.where(included, mu / 2, -mu / 2)
        free = best_bound([scores], included, DELTA, 1.0 - tail).epsilon
        claimed = gaussian_bound(scores, included, DELTA, claimed_tail)
        estimate = one_shot_estimate(scores[included], scores[~included], DELTA)
        for name, value in zip(names, (free, claimed, max(free, claimed), estimate), strict=True):
            found[name].append(value)
    return [
        {
            "name": "gaussian",
            "epsilon": epsilon,
            "delta": DELTA,
            "canaries": canaries,
            "runs": len(values),
            "bound": name,
            "share": mean([value / epsilon for value in values]),
            "share_least": min(values) / epsilon,
            "above": sum(value > epsilon for value in values),
            "cpu_seconds": time.process_time() - begun,
        }
        for name, values in found.items()
    ]


def cost(kind: Kind, count: int, seeds: Sequence[int] = (0, 1)) -> Row:
    """Train federations with so many canaries a client, and measure epsilon by them."""
    begun = time.process_time()
    accuracy: list[float] = []
    answers: list[EpsilonAnswer] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            run, reached = trained(_config(kind, count, seed), Path(folder) / "run")
            accuracy.append(reached)
            if not count:
                continue
            audit = Audit(run, AuditRequest(questions=["epsilon"], device="cpu", seed=seed))
            (answer,) = audit.execute(audit.plan())
            assert isinstance(answer, EpsilonAnswer)
            answers.append(answer)
    clients = [client for answer in answers for client in answer.clients]
    return {
        "name": "cost",
        "kind": kind if count else "none",
        "canaries": count,
        "runs": len(seeds),
        "clients": len(clients),
        "rounds": ROUNDS,
        "accuracy": mean(accuracy),
        "right": sum(c.right for c in clients),
        "guesses": sum(c.guesses for c in clients),
        "low": mean([c.low for c in clients if c.low is not None]),
        "high": None,
        "cpu_seconds": time.process_time() - begun,
    }


def _config(kind: str, count: int, seed: int) -> FederationConfig:
    return build_config(
        {
            "name": "canaries",
            "seed": seed,
            "clients": CLIENTS,
            "rounds": ROUNDS,
            "data": {"image_size": 16, "validation": 0.25},
            "model": {"name": "lenet-strided", "activation": "relu"},
            "training": {"batch_size": 8, "lr": 0.05},
            "canaries": {"count": count, "kind": kind},
        }
    )


def trained(config: FederationConfig, root: Path) -> tuple[RunDirectory, float]:
    """Train a federation whose clients include canaries; return its accuracy."""
    run = RunDirectory(root)
    run.create(config)
    run.update_state(status="finished")
    clients, store = Clients(config), ObservationStore(run.captures)
    for i, data in enumerate(clients.data):
        found = open_canaries(
            config.canaries,
            SitePolicy(canaries=config.canaries.count),
            run.truth / f"client-{i}",
            data,
            clients.spec,
            run=1,
            rounds=config.rounds,
            model=clients.models()[0],
        )
        if found is not None:
            clients.data[i] = found.extend(data)
    names = [name for name, _ in clients.model().named_parameters()]
    for _ in range(config.rounds):
        sent = dict(clients.arrays)
        clients.number += 1
        answers = [clients.answer(i) for i in range(config.clients)]
        for answer in answers:
            store.save(observed(clients, sent, names, answer))
        clients.arrays = aggregate(
            clients.arrays, answers, fedavg_weights(answers, "examples"), server_lr=1.0
        )
    return run, accuracy_of(clients)


if __name__ == "__main__":
    main()
