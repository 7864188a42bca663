"""What a defense costs in accuracy, on the models that are attacked: digits, 3 clients.

    python -m experiments.defended_accuracy [--model lenet] [--defense pruning] [--seeds 8] \\
        [--resume FILE] [--json]

Models and activations are those of the leakage rows (sigmoid), and ReLU as well;
`operating_points` has the defenses. `SETTINGS` says how each model is trained: chosen without a
defense on a quarter of each client's training digits (``--choose`` judges on it), then the same for
every defense. Accuracy is that of the global model on all 360 held-out digits, mean over the last
10 rounds; FedKL's is the mean over the clients' own keys, and ``random_key`` what a server gets
that draws key and lock layers itself.

A seed decides split, first model and order of the examples, for every defense alike, so ``points``
is paired: the mean over seeds of the difference to ``none``. ``points_ci95`` is half of its 95 %
t-interval over seeds, for these 360 digits; ``points_images_ci95`` half of the interval of the same
mean over digits. ``sees_a_point`` tells whether the first is below one point, ``at_chance`` how
many seeds ended below 20 %. ``norm`` and ``cosine`` are those of the true update and of what leaves
to it, in the first round and over the later ones: means over clients, rounds and seeds.
"""

import json
import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bract.client.defenses import build_defenses
from bract.config import FederationConfig, build_config
from bract.data.views import test_data
from bract.models.keylock import key_locks, with_random_key
from experiments.harness.command import Finished, emit, note, parse, parser
from experiments.harness.federation import Clients, correct
from experiments.harness.operating_points import POINTS
from experiments.harness.result import Row
from experiments.harness.scores import interval

CODE = ("bract.client", "bract.strategies", "experiments.harness.federation")
"""Code that accuracy follows from, in addition to `ATTACKED`."""

JUDGED = 10
CHOSEN_ON = 0.25
RANDOM_KEYS = 5
AT_CHANCE = 0.2

ADAM = {"optimizer": "adam", "batch_size": 16, "local_steps": 5}
SGD = {"optimizer": "sgd", "batch_size": 16, "local_steps": 5}
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("lenet-strided", "sigmoid"): {"rounds": 100, "training": {**ADAM, "lr": 0.005}},
    ("lenet", "sigmoid"): {"rounds": 100, "training": {**ADAM, "lr": 0.005}},
    ("lenet-strided-bn", "sigmoid"): {
        "rounds": 60,
        "training": {**SGD, "lr": 0.05, "momentum": 0.9},
    },
    ("lenet-bn", "sigmoid"): {"rounds": 60, "training": {**SGD, "lr": 0.05, "momentum": 0.9}},
    ("lenet-strided", "relu"): {"rounds": 40, "training": {**ADAM, "lr": 0.003}},
    ("lenet", "relu"): {"rounds": 40, "training": {**ADAM, "lr": 0.003}},
    ("lenet-strided-bn", "relu"): {
        "rounds": 40,
        "training": {**SGD, "lr": 0.05, "momentum": 0.9},
    },
    ("lenet-bn", "relu"): {"rounds": 40, "training": {**SGD, "lr": 0.05, "momentum": 0.9}},
}
"""Rounds and local training of each model and activation."""

SEEDS = {
    ("lenet-strided", "sigmoid"): 4,
    ("lenet-strided-bn", "sigmoid"): 4,
    ("lenet-strided", "relu"): 4,
}
"""The committed rows: how many seeds of each model and activation."""

DEFENSES = tuple(name for name in POINTS if name != "soteria")
"""What is trained unless asked otherwise: Soteria takes a backward pass for every feature."""

COLUMNS = (
    "model",
    "activation",
    "defense",
    "rounds",
    "seeds",
    "accuracy",
    "accuracy_ci95",
    "at_chance",
    "points",
    "points_ci95",
    "points_images_ci95",
    "sees_a_point",
    "norm_first",
    "cosine_first",
    "norm_later",
    "cosine_later",
    "random_key",
)


@dataclass(frozen=True)
class Setting:
    """One federation."""

    model: str
    activation: str
    defense: str
    seed: int

    def config(self, *, choose: bool = False) -> FederationConfig:
        """Return what runs; with ``choose`` a quarter of each client's digits is set apart."""
        return build_config(
            {
                "seed": self.seed,
                "model": {"name": self.model, "activation": self.activation},
                "defenses": POINTS[self.defense],
                "data": {"validation": CHOSEN_ON} if choose else {},
                **SETTINGS[self.model, self.activation],
            }
        )


def run(setting: Setting, *, choose: bool = False) -> Row:
    """Train one federation and judge its last rounds."""
    clients = Clients(setting.config(choose=choose))
    images, labels = judged_on(clients, choose=choose)
    inputs = clients.spec.normalise(images)
    hits = torch.zeros(len(labels))
    for number in range(1, clients.config.rounds + 1):
        clients.round()
        if number > clients.config.rounds - JUDGED:
            models = clients.models()
            for model in models:
                hits += correct(model, inputs, labels) / (JUDGED * len(models))
    strange = [
        float(correct(with_random_key(model, draw), inputs, labels).mean())
        for model in (clients.models() if key_locks(clients.model()) else ())
        for draw in map(torch.Generator().manual_seed, range(RANDOM_KEYS))
    ]
    count = len(clients.data)
    return {
        "accuracy": float(hits.mean()),
        "hits": [round(float(hit), 4) for hit in hits],
        "random_key": statistics.fmean(strange) if strange else None,
        "norm_first": statistics.fmean(clients.norms[:count]),
        "norm_later": statistics.fmean(clients.norms[count:]),
        "cosine_first": statistics.fmean(clients.cosines[:count]),
        "cosine_later": statistics.fmean(clients.cosines[count:]),
    }


def judged_on(clients: Clients, *, choose: bool) -> tuple[Tensor, Tensor]:
    """Return the held-out digits, or what the clients set apart of their training digits."""
    if not choose:
        return test_data(clients.config.data)
    return (
        torch.cat([data.validation_images for data in clients.data]),
        torch.cat([data.validation_labels for data in clients.data]),
    )


def summary(found: Sequence[Row], undefended: Sequence[Row]) -> Row:
    """Return the figures of one row from its seeds and the same seeds without a defense."""
    accuracy, spread = interval([one["accuracy"] for one in found])
    pairs = list(zip(found, undefended, strict=True))
    each = [100.0 * (own["accuracy"] - base["accuracy"]) for own, base in pairs]
    differences = torch.stack(
        [torch.tensor(own["hits"]) - torch.tensor(base["hits"]) for own, base in pairs]
    )
    points, half = interval(each)
    over_images = interval(differences.mean(dim=0).tolist())[1]
    strange = [one["random_key"] for one in found if one["random_key"] is not None]
    return {
        "accuracy": accuracy,
        "accuracy_ci95": spread,
        "at_chance": sum(one["accuracy"] < AT_CHANCE for one in found),
        "accuracy_each": [one["accuracy"] for one in found],
        "points": points,
        "points_ci95": half,
        "points_each": each,
        "points_images_ci95": None if over_images is None else 100.0 * over_images,
        "sees_a_point": half is not None and half < 1.0,
        **{
            name: statistics.fmean(one[name] for one in found)
            for name in ("norm_first", "cosine_first", "norm_later", "cosine_later")
        },
        "random_key": statistics.fmean(strange) if strange else None,
    }


def rows_of(done: dict[Setting, Row]) -> list[Row]:
    """Return one row a model, activation and defense, over the seeds that ``none`` has too."""
    rows = []
    kinds = dict.fromkeys((setting.model, setting.activation) for setting in done)
    for model, activation in kinds:
        for defense in POINTS:
            seeds = [
                s.seed
                for s in done
                if s == Setting(model, activation, defense, s.seed)
                and Setting(model, activation, "none", s.seed) in done
            ]
            if not seeds:
                continue
            found = [done[Setting(model, activation, defense, seed)] for seed in seeds]
            undefended = [done[Setting(model, activation, "none", seed)] for seed in seeds]
            rows.append(
                {
                    "model": model,
                    "activation": activation,
                    "defense": defense,
                    "defenses": POINTS[defense],
                    **SETTINGS[model, activation],
                    "judged_rounds": JUDGED,
                    "seeds": len(seeds),
                    **summary(found, undefended),
                }
            )
    return rows


def plan(seeds: Mapping[tuple[str, str], int], defenses: Iterable[str]) -> list[Setting]:
    """Return every federation, all defenses of one seed before the next seed."""
    return [
        Setting(model, activation, defense, seed)
        for (model, activation), count in seeds.items()
        for seed in range(count)
        for defense in dict.fromkeys(["none", *defenses])
        if belongs(defense, model)
    ]


def belongs(defense: str, model: str) -> bool:
    """Tell whether a row is meant: FedKL's with a normalisation that it locks, the others' without.

    ``none`` is in both, so that FedKL is compared with the same model.
    """
    return defense == "none" or ("fedkl" in defense) == model.endswith("-bn")


def main() -> None:
    """Train what was asked for and is not done yet; print a row for all that is done."""
    options = parser(__doc__, "resume")
    models, activations = zip(*SETTINGS, strict=True)
    options.add_argument("--model", nargs="+", choices=sorted(set(models)))
    options.add_argument("--activation", nargs="+", choices=sorted(set(activations)))
    options.add_argument("--defense", nargs="+", choices=tuple(POINTS), default=list(DEFENSES))
    options.add_argument("--seeds", type=int, help="default: those of the committed rows")
    options.add_argument("--choose", action="store_true", help="judge on training digits")
    arguments = parse(options)
    logging.getLogger("bract").setLevel(logging.ERROR)
    finished = Finished(arguments.resume, *CODE)
    done = read(finished, choose=arguments.choose)
    counts = {
        kind: SEEDS.get(kind, 0) if arguments.seeds is None else arguments.seeds
        for kind in SETTINGS
        if kind[0] in (arguments.model or models)
        and kind[1] in (arguments.activation or activations)
    }
    for setting in plan(counts, arguments.defense):
        if setting in done:
            continue
        key = key_of(setting, choose=arguments.choose)
        done[setting] = finished.add(key, run(setting, choose=arguments.choose))
        note(f"{setting}: {done[setting]['accuracy']:.4f}")
    emit(rows_of(done), COLUMNS, as_json=arguments.json)


def key_of(setting: Setting, *, choose: bool) -> Row:
    """Return all that a finished run depends on."""
    return {
        "setting": asdict(setting),
        "config": setting.config(choose=choose).model_dump(mode="json"),
        "declared": build_defenses(POINTS[setting.defense]).public(),
        "judged": [JUDGED, choose],
    }


def read(finished: Finished, *, choose: bool = False) -> dict[Setting, Row]:
    """Return the finished runs that were made under today's settings."""
    done = {}
    for key in finished.rows:
        setting = Setting(**json.loads(key)["setting"])
        if setting.defense in POINTS:
            row = finished.get(key_of(setting, choose=choose))
            if row is not None:
                done[setting] = row
    return done


if __name__ == "__main__":
    main()
