"""What a generator trained on public images adds: GGL, GIAS and a learned inverter, compared with
IG, `best`, and the prior alone.

    OMP_NUM_THREADS=1 python -m experiments.prior [--split choose] [--resume FILE] [--json]
    OMP_NUM_THREADS=1 python -m experiments.prior --data photos --epochs 40 [--json]
    OMP_NUM_THREADS=1 python -m experiments.prior --kind flow [--data photos] [--json]

The generator (`bract prior train`) is trained on the first 10,000 images of
MNIST's training split, at 32 pixels. Attacked are 8 single images of the test split, written by
other people, through networks of 4 seeds (`experiments.harness.clients`); every attack gets the
same uploads. Settings were chosen on ``--split choose``: the end of the training split, which the
generator has not seen, and networks of other seeds. ``reading``: ``plain`` is the update without a
defense, ``ignored`` the defended one, of which the attacker does not know that it is, ``known`` the
defended one with the defense known (the adaptive tier; for GGL and GIAS the surrogate one).
``prior sample`` draws an image of the right class from the generator, ``prior nearest`` is the one
of 256 such that is nearest to the original, which no attacker can pick. ``--data photos``: crops of
photographs, the generator's from other pictures than those that are attacked. ``--kind flow``: a
flow beside the generator, trained on the same images; the attack of that name compared with GIAS
and IG on the same uploads, image by image (``over_gias``, ``over_ig`` in dB), through the strided
LeNet and, of digits, through ResNet-20 in training mode after some steps. CPU seconds are the
process' own on one thread, an image.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bract.attacks import ATTACKS, Budget, Reconstruction, attack, reconstruct
from bract.config.audit import Tier
from bract.scores.image import psnr, ssim
from bract_priors.prior_facts import PriorKind
from bract_priors.prior_training import PriorSettings, train_prior
from bract_priors.trained_prior import TrainedPrior
from experiments.harness.clients import Situation, Upload, trained_accuracy, uploads
from experiments.harness.command import Finished, emit, note, note_row, parse, parser
from experiments.harness.images import public_photographs, training_images
from experiments.harness.operating_points import POINTS
from experiments.harness.result import Row
from experiments.harness.scores import columns, mean

COLUMNS = (
    *("activation", "defense", "round", "reading", "attack", "images", "iterations", "psnr"),
    *("psnr_low", "psnr_high", "ssim", "recognisable", "above_nearest", "refused", "cpu_seconds"),
)
FLOW_COLUMNS = (
    *("model", "batch", *COLUMNS[1:10], "over_gias", "over_gias_low", "over_gias_high"),
    *("over_ig", "over_ig_low", "over_ig_high", "refused", "cpu_seconds"),
)
ITERATIONS = {"ig": 400, "best": 200, "ggl": 150, "gias": 400, "learned-inverter": 400, "flow": 400}
NEAREST_OF = 256
FLOW_EPOCHS = {"mnist": 20, "photos": 60}
PHOTOGRAPH_CROPS = 3000


@dataclass(frozen=True)
class Setting:
    """One upload of each of 8 clients, and how it is read."""

    activation: str
    defense: str
    reading: str
    round: int = 1
    batch: int = 1
    data: str = "mnist"
    model: str = "lenet-strided"
    kind: PriorKind = "autoencoder"
    trained_steps: int = 0
    uploads: int | None = None

    @property
    def attacks(self) -> tuple[str, ...]:
        """Return what is run: a learned inverter only where the documentation speaks of it."""
        if self.kind == "flow":
            return ("ig", "gias", "flow")
        if self.batch > 1:
            return ("gias",)
        if self.data == "photos":
            return ("ig", "ggl", "gias")
        known = ("noise 0.01", "adadefense, eps outside")
        inverted = self.activation == "relu" and (self.reading == "plain" or self.defense in known)
        others = () if inverted else ("learned-inverter",)
        return tuple(name for name in ITERATIONS if name not in (*others, "flow"))


def plan() -> Iterator[Setting]:
    """Every setting that the documentation speaks of."""
    for activation in ("relu", "sigmoid"):
        yield Setting(activation, "none", "plain")
        yield Setting(activation, "adadefense", "ignored")
        yield Setting(activation, "adadefense", "known")
        yield Setting(activation, "noise 0.01", "known")
        yield Setting(activation, "pruning", "known")
    for number in (1, 3):
        yield Setting("relu", "adadefense, eps outside", "known", number)
    yield Setting("relu", "none", "plain", batch=4)


def photograph_plan() -> Iterator[Setting]:
    """Photographs undefended, and under the defenses that leave an image to a prior."""
    yield Setting("relu", "none", "plain", data="photos")
    yield Setting("relu", "noise 0.01", "known", data="photos")
    yield Setting("relu", "pruning", "known", data="photos")


def flow_plan(data: str) -> Iterator[Setting]:
    """Return where a flow is compared: without a defense, under three, in a batch, after
    training.
    """
    single = partial(Setting, "relu", kind="flow", data=data)
    yield single("none", "plain")
    for defense in ("noise 0.01", "clipping", "pruning"):
        yield single(defense, "known")
    yield single("none", "plain", batch=4, uploads=4)
    if data == "mnist":
        yield single("none", "plain", model="resnet20", trained_steps=60, uploads=4)


PLANS = {"mnist": plan, "photos": photograph_plan}


def main() -> None:
    """Train or read the generator, attack every setting; then print the table or JSON."""
    arguments = parser(__doc__, "split", "resume")
    arguments.add_argument("--images", type=int, default=8)
    arguments.add_argument("--data", choices=tuple(PLANS), default="mnist")
    arguments.add_argument("--epochs", type=int, default=25)
    arguments.add_argument("--kind", choices=get_args(PriorKind), default="autoencoder")
    arguments.add_argument("--prior", type=Path, help="a generator that was trained before")
    arguments.add_argument("--flow", type=Path, help="a flow that was trained before")
    arguments.add_argument("--only", help="settings whose words hold this")
    options = parse(arguments)
    priors: dict[str, TrainedPrior] = {}
    priors["autoencoder"] = given_or_trained(options.prior, options, "autoencoder")
    if options.kind == "flow":
        priors["flow"] = given_or_trained(options.flow, options, "flow")
    done = Finished(options.resume, "experiments.prior")
    rows: list[Row] = []
    plans = flow_plan(options.data) if options.kind == "flow" else PLANS[options.data]()
    for setting in plans:
        if not options.only or options.only in str(setting):
            rows += measured(setting, priors, options, done)
    emit(rows, FLOW_COLUMNS if options.kind == "flow" else COLUMNS, as_json=options.json)


def wanted(setting: Setting) -> tuple[str, ...]:
    """Attacks of a setting, less what takes too long."""
    slow = setting.activation == "sigmoid" and setting.reading != "plain"
    # The second order of `best` takes 20 CPU seconds an image there.
    return tuple(name for name in setting.attacks if name != "best" or not slow)


def given_or_trained(
    path: Path | None, options: argparse.Namespace, kind: PriorKind
) -> TrainedPrior:
    """Return the generator of a file, or train one."""
    begun = time.process_time()
    prior = TrainedPrior.load(path) if path else trained(options.data, options.epochs, kind)
    spent = time.process_time() - begun
    held = prior.facts.held_out_psnr
    note(f"{prior.text}: held-out images at {held:.1f} dB, {spent:.0f} CPU seconds")
    return prior


def trained(data: str, epochs: int, kind: PriorKind) -> TrainedPrior:
    """Train the generator on images that are not attacked."""
    settings = PriorSettings(kind=kind, epochs=FLOW_EPOCHS[data] if kind == "flow" else epochs)
    if data == "photos":
        crops = public_photographs(PHOTOGRAPH_CROPS)
        source = "crops of photographs of scikit-learn and scikit-image"
        return train_prior(crops, None, replace(settings, latent=64), source=source)
    images, labels = training_images("mnist")
    source = "mnist, first 10,000 of train"
    return train_prior(images, labels, settings, source=source, classes=10)


def measured(
    setting: Setting,
    priors: Mapping[str, TrainedPrior],
    options: argparse.Namespace,
    done: Finished,
) -> Iterator[Row]:
    """Attack one setting's uploads with every attack, and score what needs no gradient."""
    prior = priors[setting.kind]
    about = {
        **vars(setting),
        "prior_images": prior.facts.images,
        "prior_epochs": prior.facts.epochs,
        "prior_held_out_psnr": prior.facts.held_out_psnr,
    }

    @cache
    def uploaded() -> Uploaded:
        return uploaded_by(setting, prior, options.split, options.images)

    rows: dict[str, Row] = {}
    measures: dict[str, Callable[[], Row]] = {
        "prior sample": lambda: uploaded().scores(uploaded().first) | {"refused": 0},
        "prior nearest": lambda: uploaded().scores(uploaded().nearest) | {"refused": 0},
        **{name: partial(attacked, name, setting, uploaded, priors) for name in wanted(setting)},
    }
    if "flow" in measures:
        measures["flow"] = lambda: compared(
            attacked("flow", setting, uploaded, priors), rows, uploaded()
        )
    for name, measure in measures.items():
        rows[name] = done.row([about, name, options.split, options.images], measure)
        columns_of = FLOW_COLUMNS if setting.kind == "flow" else COLUMNS
        yield note_row(about | {"attack": name} | rows[name], columns_of)


def compared(row: Row, others: Mapping[str, Row], uploaded: "Uploaded") -> Row:
    """Return a row with its difference to GIAS and IG, image by image."""
    images, networks = ([getattr(u, of) for u in uploaded.each] for of in ("source", "network"))
    for name in ("gias", "ig"):
        other = others[name]["psnr_each"]
        if len(other) != len(row["psnr_each"]) or row["refused"]:
            continue
        apart = [mine - its for mine, its in zip(row["psnr_each"], other, strict=True)]
        row |= columns(f"over_{name}", apart, images, networks)
    return row


@dataclass(frozen=True)
class Uploaded:
    """What the clients of a setting sent, and what the generator makes without it.

    Attributes
    ----------
    truth, first, nearest
        Originals, samples of the right class, and the nearest such ones, ``(N, 1, 32, 32)``.
    floor
        PSNR of the nearest samples.
    accuracy
        Mean of the networks on held-out images; None of fresh ones.
    """

    held: Sequence[Upload]
    truth: Tensor
    first: Tensor
    nearest: Tensor
    floor: list[float]
    accuracy: float | None = None

    @property
    def each(self) -> list[Upload]:
        """The upload of each image."""
        return [upload for upload in self.held for _ in upload.labels]

    def scores(self, made: Iterable[Tensor | None]) -> Row:
        """Score images against the originals; those of refused uploads are left out."""
        triples = zip(made, self.truth, self.floor, self.each, strict=True)
        rows = [(m, t, f, u) for m, t, f, u in triples if m is not None]
        pairs, of = [row[:3] for row in rows], [row[3] for row in rows]
        if not pairs:
            return {"images": 0, "psnr": None, "ssim": None}
        images = torch.stack([m for m, _, _ in pairs])
        originals = torch.stack([t for _, t, _ in pairs])
        decibels, alike = psnr(images, originals).tolist(), ssim(images, originals).tolist()
        return {
            "images": len(pairs),
            **columns("psnr", decibels, [u.source for u in of], [u.network for u in of]),
            "ssim": mean(alike),
            "recognisable": sum(value >= 0.5 for value in alike) / len(pairs),
            "above_nearest": sum(d > f for d, (_, _, f) in zip(decibels, pairs, strict=True)),
        }


def uploaded_by(setting: Setting, prior: TrainedPrior, split: str, images: int) -> Uploaded:
    """Run the clients of a setting."""
    situation = Situation(
        data=setting.data,
        model=setting.model,
        trained=bool(setting.trained_steps),
        trained_steps=setting.trained_steps,
        defenses=tuple(POINTS[setting.defense]),
        activation=setting.activation,
        round=setting.round,
        batch=setting.batch,
        uploads=setting.uploads or images // setting.batch,
    )
    held = uploads(situation, split=split, secret=17)
    truth = torch.cat([upload.truth for upload in held])
    if bool(prior.trained_on(truth).any()):
        raise SystemExit("an attacked image is among those the generator was trained on")
    drawn = [one for upload in held for one in samples(prior, upload)]
    nearest = torch.stack(
        [
            one[int((one - t).square().flatten(1).mean(1).argmin())]
            for one, t in zip(drawn, truth, strict=True)
        ]
    )
    first = torch.stack([one[0] for one in drawn])
    accuracy = trained_accuracy(situation, split)
    return Uploaded(held, truth, first, nearest, psnr(nearest, truth).tolist(), accuracy)


def samples(prior: TrainedPrior, upload: Upload) -> list[Tensor]:
    """Return, for each image of an upload, images of its class from the generator alone."""
    return [
        prior.sample([label] * NEAREST_OF, seed=upload.network + 1000 * number)
        for number, label in enumerate(upload.labels.tolist())
    ]


def attacked(
    name: str,
    setting: Setting,
    uploaded: Callable[[], Uploaded],
    priors: Mapping[str, TrainedPrior],
) -> Row:
    """Run one attack on all uploads as one batch."""
    held, truth = uploaded().held, uploaded().truth
    seen = [seen_by(setting, upload) for upload in held]
    earlier = {upload.captured.key: upload.history for upload in held}
    kind = ATTACKS[name].generator
    public = None if kind is None else priors[kind]
    tier: Tier = (
        "surrogate" if public else "adaptive" if setting.reading == "known" else "oblivious"
    )
    begun = time.process_time()
    found = reconstruct(
        seen,
        attack(name),
        budget=Budget(iterations=ITERATIONS[name]),
        tier=tier,
        device="cpu",
        history=lambda o: earlier[o.key] if setting.reading == "known" else (),
        public=public,
    )
    spent = (time.process_time() - begun) / len(truth)
    # A refused upload counts as what the prior would have been guessed to be: nothing.
    made: list[Tensor | None] = []
    for upload, result in zip(held, found, strict=True):
        if isinstance(result, Reconstruction):
            made += matched(result.images, upload.truth)
        else:
            made += [None] * setting.batch
    for result in found:
        if not isinstance(result, Reconstruction):
            note(result.reason)
    return {
        **uploaded().scores(made),
        "tier": tier,
        "accuracy": uploaded().accuracy,
        "iterations": ITERATIONS[name],
        "refused": sum(image is None for image in made),
        "cpu_seconds": spent,
    }


def matched(images: Tensor, truth: Tensor) -> list[Tensor]:
    """Return the images of a batch in the order of the originals, best in all."""
    apart = (images[None] - truth[:, None]).square().flatten(2).mean(dim=2)
    _, order = linear_sum_assignment(apart.numpy())
    return list(images[order.tolist()])


def seen_by(setting: Setting, upload: Upload) -> Any:
    """Return the upload as this attacker takes it."""
    if setting.reading == "plain":
        return upload.plain
    if setting.reading == "known":
        return upload.captured
    declaration = replace(upload.captured.declaration, defenses=())
    return replace(upload.captured, declaration=declaration)


if __name__ == "__main__":
    main()
