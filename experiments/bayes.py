"""What the likelihood of an upload adds for an attacker who knows the defense.

    python -m experiments.bayes [--init uniform] [--defense "noise 1e-3"] [--split choose] [--json]

Each image belongs to a client of its own, which sends the gradient of that one image through the
real defense; the clients take turns over four networks, of which none chose a setting. Attackers:
``ignoring`` takes the upload at face value; ``discounting`` knows the defense without its
likelihood (tensors weighed by their share of signal, the clipping factor left open; of a pruned
update the survivors alone); ``bayes`` maximises log p(upload | image) + log p(image), or holds
dropped coordinates below the smallest survivor; ``prior`` has nothing to match (``--prior``). All
of them read the label from what they match. Where a defense has no density to weigh (soteria,
precode) the two that know it are the same, and stand in one row, ``informed``. Scores are means
over images of the blind pick, one start, with 95 % t intervals over images; ``gain`` is the paired
difference of ``bayes`` to ``discounting`` in dB. ``nats`` is the mean over images of ``-log p`` of
the upload at a grey image of the right label less that at the true image: what the upload can tell
the two apart by, for any attacker.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bract.attacks import Budget, Engine, Problem, Refusal, attack, reconstruct
from bract.attacks.base import Attacker
from bract.attacks.methods.baselines import prior_only
from bract.attacks.problem.case import open_case
from bract.captures.observation import Observation
from bract.client.defenses import ProtectContext, build_defenses
from bract.config.config import TrainingConfig
from bract.inputs import Truth
from bract.scores.image import score_images
from experiments.harness.bayes_reading import bayes_evidence, bayesian, before_bayes
from experiments.harness.command import Finished, emit, note, parser
from experiments.harness.images import ImageSet, image_set
from experiments.harness.result import Row
from experiments.harness.scores import columns, ends, mean, of_score
from experiments.harness.uploads import network_for, plain_spec, trained_upload

NETWORKS = {"choose": (0,), "score": (1, 2, 3, 4)}
"""Seeds of the networks of each split; what chose the prior is network 0."""

_DEVIATIONS = ("1e-4", "1e-3", "1e-2", "1e-1")

DEFENSES: dict[str, list[dict[str, Any]]] = {
    **{f"noise {s}": [{"name": "noise", "std": float(s)}] for s in _DEVIATIONS},
    "laplace 1e-3": [{"name": "noise", "kind": "laplace", "std": 1e-3}],
    **{f"pruning {r}": [{"name": "pruning", "ratio": r}] for r in (0.7, 0.9, 0.99)},
    "pruning 0.9, noise 1e-3": [
        {"name": "pruning", "ratio": 0.9},
        {"name": "noise", "std": 1e-3},
    ],
    "soteria": [{"name": "soteria"}],
    "precode": [{"name": "precode"}],
}
EXACT = ("soteria", "precode")
CHAINS = tuple(name for name, chain in DEFENSES.items() if len(chain) > 1)

Using = Callable[[Attacker], Attacker]

ATTACKERS: dict[str, Using] = {
    "ignoring": lambda using: using,
    "discounting": before_bayes,
    "informed": bayesian,
    "bayes": bayesian,
    "prior": prior_only,
}

COLUMNS = (
    *("init", "defense", "attack", "attacker", "nats"),
    *("psnr", "psnr_low", "psnr_high", "gain", "gain_low", "gain_high"),
    *("ssim", "ssim_low", "ssim_high", "label_accuracy", "refused", "seconds_per_image"),
)


@dataclass(frozen=True)
class Setting:
    """One row."""

    init: str
    defense: str
    attack: str
    attacker: str
    iterations: int
    model: str = "lenet-strided"


@dataclass(frozen=True)
class Upload:
    """What a server captured of one client, and the truth."""

    captured: Observation
    image: Tensor
    label: Tensor


def plan(options: argparse.Namespace) -> list[Setting]:
    """Return the rows that the options ask for."""
    rows = []
    for init in options.init or ("default", "uniform"):
        for defense in options.defense or DEFENSES:
            for name in options.attack or ("ig", "grnn"):
                for attacker in ("ignoring", *knowing(defense)):
                    rows.append(Setting(init, defense, name, attacker, options.iterations))
        for name in (options.attack or ("ig", "grnn")) if options.prior else ():
            rows.append(Setting(init, "noise 1e-3", name, "prior", options.iterations))
    return rows


def knowing(defense: str) -> tuple[str, ...]:
    """Return the attackers who know a defense: those of a density, or of a chain, differ."""
    if defense in EXACT:
        return ("informed",)
    return ("bayes",) if defense in CHAINS else ("discounting", "bayes")


def uploads(setting: Setting, images: ImageSet, networks: Sequence[int]) -> list[Upload]:
    """Run one client an image, on the networks of these seeds in turn."""
    return [
        upload(setting, images, client, networks[client % len(networks)])
        for client in range(len(images.images))
    ]


def upload(setting: Setting, images: ImageSet, client: int, seed: int) -> Upload:
    """Compute one client's gradient and protect it."""
    image, label = images.images[[client]], images.labels[[client]]
    spec = plain_spec(image.shape[1:])
    chain = build_defenses(DEFENSES[setting.defense])
    sent = trained_upload(
        network_for(spec, setting.model, seed, init=setting.init, chain=chain),
        image,
        label,
        training=TrainingConfig(algorithm="fedsgd", batch_size=1, lr=0.1),
        spec=spec,
        chain=chain,
        state={},
        context=ProtectContext(round=1, seed=1000 + client),
        seed=0,
        client=f"client-{client}",
        model=setting.model,
    )
    return Upload(sent.captured, image, label)


def nats(given: Upload) -> float | None:
    """Return what the upload tells the true image from a grey one by; None without a density."""
    observation = given.captured
    names = tuple(entry["name"] for entry in observation.declaration.defenses)
    if "noise" not in names:
        return None
    case = open_case(observation, tier="adaptive", max_images=1, view=bayes_evidence)
    if case.evidence.likelihood is None:
        return None
    problem = Problem.stack([(case, 0)], seed=0, device=torch.device("cpu"), dtype=torch.float64)
    rows = torch.nn.functional.one_hot(given.label, 10)[None].double()

    def distance(image: Tensor) -> float:
        assert problem.likelihood is not None
        sent = problem.simulate(image[None].double(), rows, {})
        return float(problem.distance(problem.likelihood, sent).detach())

    return distance(torch.full_like(given.image, 0.5)) - distance(given.image)


def run(setting: Setting, options: argparse.Namespace) -> Row:
    """Attack one row's uploads and score the reconstructions."""
    images = image_set("digits", options.images, options.split)
    networks = NETWORKS[options.split]
    captured = uploads(setting, images, networks)
    begun = time.perf_counter()
    outcomes = reconstruct(
        [u.captured for u in captured],
        ATTACKERS[setting.attacker](attack(setting.attack)),
        budget=Budget(iterations=setting.iterations),
        seed=options.seed,
        engine=Engine(device=options.device),
    )
    seconds = time.perf_counter() - begun
    of = [n for n, outcome in enumerate(outcomes) if not isinstance(outcome, Refusal)]
    scored = [
        score_images(
            outcome.images,
            Truth(known.image, known.label),
            recovered=outcome.labels,
            perceptual=False,
        )
        for outcome, known in zip(outcomes, captured, strict=True)
        if not isinstance(outcome, Refusal)
    ]
    drawn = (of, [networks[n % len(networks)] for n in of])
    bits = [value for given in captured if (value := nats(given)) is not None]
    return {
        **asdict(setting),
        "split": options.split,
        "networks": list(networks),
        "images": len(captured),
        "nats": mean(bits),
        **columns("psnr", of_score(scored, "psnr"), *drawn),
        **columns("ssim", of_score(scored, "ssim"), *drawn),
        "sources_each": drawn[0],
        "networks_each": drawn[1],
        "label_accuracy": mean([s.label_accuracy for s in scored if s.label_accuracy is not None]),
        "refused": sum(isinstance(o, Refusal) for o in outcomes),
        "reason": next((o.reason for o in outcomes if isinstance(o, Refusal)), None),
        "seconds_per_image": seconds / len(captured),
    }


def compare(rows: list[Row]) -> None:
    """Add the paired gain of the likelihood over discounting, with its interval."""
    before = {_key(r): r for r in rows if r["attacker"] == "discounting"}
    for row in rows:
        other = before.get(_key(row))
        if row["attacker"] != "bayes" or other is None:
            continue
        pairs = zip(row["psnr_each"], other["psnr_each"], strict=True)
        each = [a - b for a, b in pairs]
        row |= {"gain": mean(each), **ends("gain", each, row["sources_each"], row["networks_each"])}


def _key(row: Row) -> tuple[Any, ...]:
    return (row["init"], row["defense"], row["attack"])


def main() -> None:
    """Run the plan."""
    options_parser = parser(__doc__, "split", "seed", "device", "resume")
    add = options_parser.add_argument
    add("--init", action="append", choices=("default", "uniform"))
    add("--defense", action="append", choices=tuple(DEFENSES))
    add("--attack", action="append", help="default: ig and grnn")
    add("--images", type=int, default=8)
    add("--iterations", type=int, default=300)
    add("--prior", action="store_true", help="also what the prior makes alone")
    options = options_parser.parse_args()
    rows = []
    done = Finished(options.resume, "experiments.bayes")
    for setting in plan(options):
        about = [asdict(setting), options.images, options.split, options.seed]
        row = done.row([*about, NETWORKS[options.split]], partial(run, setting, options))
        rows.append(row)
        note(
            f"{setting.init} {setting.defense} {setting.attack} {setting.attacker}: "
            f"{row['psnr'] or 0.0:.2f} dB, SSIM {row['ssim'] or 0.0:.3f}, labels "
            f"{row['label_accuracy']}, nats {row['nats']}, {row['seconds_per_image']:.1f} s/image"
        )
    compare(rows)
    emit(rows, COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
