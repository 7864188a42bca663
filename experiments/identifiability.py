"""How far attacks exceed the estimate of what an upload reveals.

    python -m experiments.identifiability --split choose --uploads 5 --json
    python -m experiments.identifiability --split score --uploads 10 --json

Each upload is the noisy gradient of one image (`bract.defenses.noise`, clipped), of four models
under five deviations of it; images (half digits, half faces) are crossed with eight networks.
``estimate`` is `bract.attacks.problem.identifiability`, with labels inferred from the upload, and
``guess`` that of the prior's mean. ``ig`` and ``grnn`` are attackers who know the noise, its
deviation and its clipping (the Bayes adversary), given one start and no label; ``reached`` is the
better of the two by PSNR, an oracle's choice, and ``excess`` how far it lies above the estimate.
Thresholds on the estimate are chosen in the split ``choose``; the split ``score`` has other images
and networks, and is scored once.
"""

import argparse
import time
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from bract.attacks import Budget, Refusal, attack, reconstruct
from bract.attacks.problem.case import open_case
from bract.attacks.problem.identifiability import identifiability
from bract.attacks.solve.labels import infer_labels
from bract.captures.observation import Observation
from bract.client.defenses import ProtectContext, build_defenses
from bract.config.config import TrainingConfig
from bract.inputs import Truth
from bract.scores.image import score_images
from experiments.harness.bayes_reading import bayes_evidence, bayesian
from experiments.harness.command import Finished, emit, note, parser
from experiments.harness.images import image_set
from experiments.harness.result import Row
from experiments.harness.uploads import network_for, plain_spec, trained_upload

COLUMNS = ("model", "init", "std", "data", "network", "estimate", "guess", "reached", "excess")
DEVIATIONS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ATTACKS = ("ig", "grnn")
NETWORKS = {"choose": 3000, "score": 2000}
"""Seed of each split's first network."""

_NETWORKS = 8
_KINDS = ("digits", "faces")


@dataclass(frozen=True)
class Setting:
    """One model under one deviation of the noise."""

    model: str
    init: str
    activation: str
    std: float


MODELS = (
    ("lenet-strided", "default", "sigmoid"),
    ("lenet-strided", "uniform", "sigmoid"),
    ("lenet", "uniform", "relu"),
    ("lenet-strided", "default", "relu"),
)


@dataclass(frozen=True)
class Upload:
    """What a server captured of one client, and the truth."""

    captured: Observation
    data: str
    network: int
    image: Tensor
    label: Tensor


def settings() -> list[Setting]:
    """Return every model under every deviation."""
    return [Setting(*model, std) for model in MODELS for std in DEVIATIONS]


def uploads(setting: Setting, count: int, split: str) -> list[Upload]:
    """Run one client an image; where the next cell begins, images meet other networks."""
    sets = {kind: image_set(kind, (count + 1) // 2, split) for kind in _KINDS}
    shift = settings().index(setting)
    found = []
    for client in range(count):
        data = _KINDS[client % 2]
        network = (3 * client + shift) % _NETWORKS
        image = sets[data].images[[client // 2]]
        label = sets[data].labels[[client // 2]]
        spec = plain_spec(image.shape[1:])
        chain = build_defenses([{"name": "noise", "std": setting.std}])
        sent = trained_upload(
            network_for(
                spec,
                setting.model,
                NETWORKS[split] + network,
                activation=setting.activation,
                init=setting.init,
                chain=chain,
            ),
            image,
            label,
            training=TrainingConfig(algorithm="fedsgd", batch_size=1, lr=0.1),
            spec=spec,
            chain=chain,
            state={},
            context=ProtectContext(round=1, seed=NETWORKS[split] + 100 * shift + client),
            seed=0,
            client=f"client-{client}",
            model=setting.model,
            activation=setting.activation,
        )
        found.append(Upload(sent.captured, data, network, image, label))
    return found


def run(setting: Setting, options: argparse.Namespace) -> Row:
    """Estimate and attack the uploads of one setting."""
    given = uploads(setting, options.uploads, options.split)
    rows = [_estimated(setting, upload) for upload in given]
    for name in ATTACKS:
        begun = time.process_time()
        outcomes = reconstruct(
            [upload.captured for upload in given],
            bayesian(attack(name)),
            budget=Budget(iterations=options.iterations),
            seed=options.seed,
        )
        spent = (time.process_time() - begun) / len(given)
        for row, upload, outcome in zip(rows, given, outcomes, strict=True):
            row[f"{name}_seconds"] = spent
            row[name] = row[f"{name}_ssim"] = None
            if isinstance(outcome, Refusal):
                continue
            truth = Truth(upload.image, upload.label)
            scored = score_images(outcome.images, truth, perceptual=False).rows[0]
            row[name], row[f"{name}_ssim"] = scored.psnr, scored.ssim
    for row in rows:
        reached = [row[name] for name in ATTACKS if row[name] is not None]
        row["reached"] = max(reached, default=None)
        row["excess"] = row["reached"] - row["estimate"] if reached else None
    return {"uploads": rows}


def _estimated(setting: Setting, upload: Upload) -> Row:
    begun = time.process_time()
    case = open_case(upload.captured, tier="adaptive", max_images=1, view=bayes_evidence)
    labels = infer_labels(case).labels
    found = identifiability(case, labels=labels)
    return {
        **asdict(setting),
        "data": upload.data,
        "network": upload.network,
        "label_right": bool((labels == upload.label).all()),
        "estimate": found.psnr,
        "guess": found.prior_psnr,
        "seconds": time.process_time() - begun,
    }


def main() -> None:
    """Measure every setting."""
    options_parser = parser(__doc__, "split", "seed", "threads", "resume")
    options_parser.add_argument("--uploads", type=int, default=10, help="of a model and deviation")
    options_parser.add_argument("--iterations", type=int, default=250)
    options_parser.add_argument("--model", action="append")
    options_parser.add_argument("--std", action="append", type=float)
    options_parser.add_argument("--only-finished", action="store_true")
    options_parser.add_argument("--keep-older", action="store_true")
    options = options_parser.parse_args()
    torch.set_num_threads(options.threads)
    done = Finished(options.resume, "experiments.identifiability", keep_older=options.keep_older)
    rows: list[Row] = []
    for setting in settings():
        if options.model and setting.model not in options.model:
            continue
        if options.std and setting.std not in options.std:
            continue
        about = [asdict(setting), options.uploads, options.split, options.seed, options.iterations]
        if options.only_finished and done.get(about) is None:
            continue
        found = done.row(about, partial(run, setting, options))
        rows += [{**row, "split": options.split, "code": found["code"]} for row in found["uploads"]]
        excess = [row["excess"] for row in found["uploads"] if row["excess"] is not None]
        note(f"{setting}: {min(excess):+.1f} to {max(excess):+.1f} dB above the estimate")
    emit(rows, COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
