"""Share of batches that `spear` returns exactly, by batch, width, depth, data and training.

    OMP_NUM_THREADS=1 python -m experiments.spear [--part noise] [--split choose] [--json]

Parts: ``gradients`` are single gradients, ``batches`` larger ones through wider layers, ``noise``
are gradients clipped to 1 with Gaussian noise, by an attacker who knows both, and ``steps`` are
several local steps of SGD on all images of a client.

Perceptrons with ReLU on 32-pixel images: MNIST's test split, crops of colour photographs; with
weights drawn anew for every batch, or trained for 100 steps on MNIST's training split. Each row
attacks as many batches through as many networks, one gradient each, no prior; scores are over all
images, those of a refused batch left out and its refusal counted. ``exact``: the share of batches
of which every image is above 60 dB. Neither images nor networks chose any setting: those were
chosen on scikit-learn's digits and on noise. CPU seconds are the process' own, on one thread, a
batch, refused ones included; how many turns of the search go where was chosen on MNIST's
training split.

Under noise and after several steps a refused update counts as grey images. ``seen`` counts images
of 20 dB or more, ``multiplier`` is the noise's deviation over the clipping norm, ``epsilon`` what
the Gaussian mechanism promises for one upload of it at delta 1e-5. ``bound`` is the PSNR of least
squares for the images from the noisy gradient with the true L, moved into [0, 1]: what no factors
exceed without a prior. ``peer`` is `ig` on the same updates, with the same knowledge. ``switched``
is the share of pairs of a unit and an image that are not on the same side of the ReLU at the
beginning and the end of the training.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bract.attacks import Budget, Reconstruction, Refusal, reconstruct
from bract.attacks.problem.linear_layers import first_layer
from bract.attacks.problem.target_model import target_model_of
from bract.attacks.result import SeedBudget
from bract.captures.observation import Observation
from bract.client.defenses import ProtectContext, build_defenses
from bract.config.config import TrainingConfig
from bract.data.views import DataSpec
from bract.defenses.noise import Noise
from bract.models import MODELS
from bract.models.fully_connected import perceptron
from bract.models.initialise import initialise
from bract.schema.audit import at_cap
from bract.scores.image import match, psnr
from experiments.harness.command import emit, note_row, parse, parser
from experiments.harness.images import image_set, training_images
from experiments.harness.result import Row
from experiments.harness.scores import columns, mean
from experiments.harness.splits import first_seed
from experiments.harness.uploads import fit, gradient_upload, trained_upload

COLUMNS = (
    *("data", "network", "width", "depth", "batch", "batches", "exact", "refused", "images"),
    *("psnr", "psnr_least", "at_cap", "labels_right", "residual_most", "zeros", "cpu_seconds"),
)
NOISE_COLUMNS = (
    *("data", "network", "width", "batch", "multiplier", "epsilon", "images", "refused", "seen"),
    *("psnr", "psnr_low", "psnr_high", "worst", "bound", "peer", "labels_right", "cpu_seconds"),
)
STEPS_COLUMNS = (
    *("data", "network", "width", "batch", "lr", "epochs", "steps", "switched", "images"),
    *("refused", "exact_images", "seen", "psnr", "psnr_low", "psnr_high", "worst"),
    *("labels_right", "cpu_seconds"),
)
EXACT, SEEN, CLIP = 60.0, 20.0, 1.0
PEER_ITERATIONS = 300
NO_SEEDS = SeedBudget(candidates=0)
"""The noise's seed is none that is guessed, so nothing is spent on guessing it."""
TRAINING_STEPS = 100
FIRST_NETWORK = 500


@dataclass(frozen=True)
class Setting:
    """One row."""

    data: str
    width: int
    depth: int
    batch: int
    network: str = "fresh"
    multiplier: float = 0.0
    lr: float = 0.0
    epochs: int = 1
    steps: int = 1


def standard_plan() -> Iterator[Setting]:
    """Every combination that the documentation speaks of."""
    for data in ("mnist", "photos"):
        for width in (200, 400):
            for batch in (1, 2, 4, 8, 16, 20, 24):
                yield Setting(data, width, 2, batch)
    for depth in (1, 3):
        yield Setting("mnist", 400, depth, 16)
    for width in (200, 400, 1000):
        for batch in (4, 8, 16):
            yield Setting("mnist", width, 2, batch, "trained")


def batches_plan() -> Iterator[Setting]:
    """Larger batches through wider layers."""
    for width, batch in ((256, 24), (1000, 32), (2000, 48)):
        yield Setting("mnist", width, 2, batch)


def noise_plan() -> Iterator[Setting]:
    """Multipliers up to where nothing is seen any more."""
    for multiplier in (1e-5, 1e-4, 5e-4, 1e-3, 2e-3, 5e-3):
        yield Setting("mnist", 256, 2, 8, multiplier=multiplier)
    for multiplier in (5e-4, 1e-3):
        yield Setting("photos", 256, 2, 8, multiplier=multiplier)
    for multiplier in (5e-3, 2e-2):
        yield Setting("mnist", 256, 2, 1, multiplier=multiplier)
    for multiplier in (1e-4, 5e-4):
        yield Setting("mnist", 256, 2, 16, multiplier=multiplier)
    yield Setting("mnist", 1000, 2, 16, multiplier=1e-4)
    yield Setting("mnist", 1000, 2, 8, "trained", multiplier=1e-4)


def steps_plan() -> Iterator[Setting]:
    """Local training on all images of a client, by learning rate, epochs and steps an epoch."""
    for lr in (0.01, 0.1):
        for epochs, steps in ((1, 2), (1, 4), (5, 1), (5, 2), (5, 4)):
            yield Setting("mnist", 256, 2, 8, lr=lr, epochs=epochs, steps=steps)
    yield Setting("mnist", 256, 2, 16, lr=0.01, epochs=5, steps=2)
    yield Setting("mnist", 1000, 2, 16, lr=0.1, epochs=2, steps=2)
    yield Setting("photos", 256, 2, 8, lr=0.01, epochs=5, steps=2)
    yield Setting("mnist", 1000, 2, 8, "trained", lr=0.01, epochs=5, steps=2)


PLANS = {
    "gradients": standard_plan,
    "batches": batches_plan,
    "noise": noise_plan,
    "steps": steps_plan,
}


def main() -> None:
    """Attack every setting's batches; then print the table or JSON."""
    arguments = parser(__doc__, "split")
    arguments.add_argument("--part", choices=tuple(PLANS), default="gradients")
    arguments.add_argument("--batches", type=int, default=4)
    arguments.add_argument("--iterations", type=int, default=60)
    options = parse(arguments)
    shown = {"noise": NOISE_COLUMNS, "steps": STEPS_COLUMNS}.get(options.part, COLUMNS)
    rows = []
    for setting in PLANS[options.part]():
        if options.part in ("noise", "steps"):
            found = blurred_row(setting, options.batches, options.split)
        else:
            found = row(setting, options.batches, options.iterations, options.split)
        rows.append(note_row(found, shown))
    emit(rows, shown, as_json=options.json)


def blurred_row(setting: Setting, batches: int, split: str) -> Row:
    """Attack noisy gradients, or updates of several steps, each through a network of its own."""
    pool = image_set(setting.data, batches * setting.batch, split)
    scores: list[float] = []
    bounds: list[float] = []
    peers: list[float] = []
    networks: list[int] = []
    refused, right, spent, switched = 0, 0, 0.0, []
    for number in range(batches):
        part = slice(number * setting.batch, (number + 1) * setting.batch)
        images, labels = pool.images[part], pool.labels[part]
        model = network(setting, images.shape[1], FIRST_NETWORK + first_seed(split) + number)
        if setting.multiplier:
            exact, _ = observation(setting, model, images, labels, number)
            seen = noisy(exact, setting.multiplier, number)
            bounds += known_rows(exact, seen, images)
            (other,) = reconstruct(
                seen,
                "ig",
                tier="adaptive",
                budget=Budget(
                    iterations=PEER_ITERATIONS, max_images=setting.batch, weak_seeds=NO_SEEDS
                ),
                seed=number,
                device="cpu",
            )
            assert isinstance(other, Reconstruction)
            peers += psnr(other.images[match(other.images, images)], images).tolist()
        else:
            seen, share = trained(setting, model, images, labels, number)
            switched.append(share)
        begun = time.process_time()
        (found,) = reconstruct(
            seen,
            "spear",
            tier="adaptive",
            budget=Budget(weak_seeds=NO_SEEDS),
            seed=number,
            device="cpu",
        )
        spent += time.process_time() - begun
        networks += [number] * len(images)
        if isinstance(found, Refusal):
            refused += 1
            scores += psnr(torch.full_like(images, 0.5), images).tolist()
            continue
        pairs = match(found.images, images)
        scores += psnr(found.images[pairs], images).tolist()
        right += int((found.labels[pairs] == labels).sum())
    settings = {name: value for name, value in vars(setting).items() if value}
    noise = Noise(clip=CLIP, std=setting.multiplier * CLIP) if setting.multiplier else None
    return {
        **settings,
        "steps": setting.epochs * setting.steps,
        "batches": batches,
        "images": len(scores),
        "refused": refused,
        "threshold": EXACT,
        "seen_from": SEEN,
        "seen": sum(one >= SEEN for one in scores),
        "exact_images": sum(one > EXACT for one in scores),
        **columns("psnr", scores, list(range(len(scores))), networks),
        "worst": min(scores),
        "at_cap": at_cap(scores),
        "labels_right": right,
        "cpu_seconds": spent / batches,
        **({"epsilon": noise.spent(1), "clip": CLIP} if noise else {"switched": mean(switched)}),
        **(
            {"bound": mean(bounds), "peer": mean(peers), "peer_seen": sum(p >= SEEN for p in peers)}
            if noise
            else {}
        ),
    }


def noisy(exact: Observation, multiplier: float, number: int) -> Observation:
    """Return a gradient clipped to `CLIP` with Gaussian noise, from a seed that is not guessed."""
    chain = build_defenses([{"name": "noise", "clip": CLIP, "std": multiplier * CLIP}])
    context = ProtectContext(seed=(1 << 90) + number)
    declared = replace(exact.declaration, defenses=tuple(chain.public()))
    return replace(exact, update=chain.protect(exact.update, {}, context), declaration=declared)


def known_rows(exact: Observation, seen: Observation, images: Tensor) -> list[float]:
    """Return the PSNR of each image by least squares from the noisy gradient with the true L."""
    model = target_model_of(exact)
    site = first_layer(model, exact).site
    inputs = model.normalise(images).flatten(1).double()
    joint = torch.cat([exact.update[site.weight], exact.update[site.bias][:, None]], dim=1)
    ones = torch.ones(len(inputs), 1, dtype=torch.float64)
    rows = torch.linalg.lstsq(torch.cat([inputs, ones], dim=1).T, joint.T.double()).solution
    norm = torch.cat([value.flatten() for value in exact.update.values()]).norm().double()
    rows = rows * (CLIP / norm).clamp_max(1.0)
    found = torch.linalg.lstsq(rows.T, seen.update[site.weight].double()).solution
    shown = model.denormalise(found.view(-1, *images.shape[1:]).to(images)).clamp(0.0, 1.0)
    return psnr(shown, images).tolist()


def trained(
    setting: Setting, model: nn.Module, images: Tensor, labels: Tensor, number: int
) -> tuple[Observation, float]:
    """Return what a server captures of local training, and the share of units that it switches."""
    name, spec = registered(setting), spec_of(images.shape[1])

    def on() -> Tensor:
        assert isinstance(model, nn.Sequential)
        with torch.no_grad():
            left: Tensor = model[1](model[0](spec.normalise(images)))
            return left > 0

    before = on()
    training = TrainingConfig(
        batch_size=-(-len(images) // setting.steps), local_epochs=setting.epochs, lr=setting.lr
    )
    sent = trained_upload(
        model,
        images,
        labels,
        training=training,
        spec=spec,
        chain=build_defenses([]),
        state={},
        context=ProtectContext(),
        seed=number,
        client=f"batch-{number}",
        model=name,
        activation="relu",
    )
    return sent.captured, float((on() != before).float().mean())


def row(setting: Setting, batches: int, iterations: int, split: str) -> Row:
    """Attack as many batches as asked for, each through a network of its own."""
    most = max(24, setting.batch)
    pool = image_set(setting.data, batches * most, split)
    scores: list[float] = []
    exact, refused, right, zeros, spent = 0, 0, 0, [], 0.0
    residuals = []
    for number in range(batches):
        part = slice(number * most, number * most + setting.batch)
        images, labels = pool.images[part], pool.labels[part]
        model = network(setting, images.shape[1], FIRST_NETWORK + first_seed(split) + number)
        seen, share = observation(setting, model, images, labels, number)
        zeros.append(share)
        begun = time.process_time()
        (found,) = reconstruct(
            seen, "spear", budget=Budget(iterations=iterations), seed=number, device="cpu"
        )
        spent += time.process_time() - begun
        if isinstance(found, Refusal):
            refused += 1
            continue
        assert isinstance(found, Reconstruction) and found.gradient_residual is not None
        pairs = match(found.images, images)
        each = psnr(found.images[pairs], images).tolist()
        scores += each
        exact += min(each) > EXACT
        right += int((found.labels[pairs] == labels).sum())
        residuals.append(found.gradient_residual)
    return {
        **{name: value for name, value in vars(setting).items() if value},
        "batches": batches,
        "iterations": iterations,
        "threshold": EXACT,
        "training_steps": TRAINING_STEPS if setting.network == "trained" else 0,
        "exact": exact / batches,
        "refused": refused,
        "images": len(scores),
        "psnr": mean(scores),
        "psnr_least": min(scores, default=None),
        "at_cap": at_cap(scores),
        "labels_right": right,
        "residual_most": max(residuals, default=None),
        "zeros": mean(zeros),
        "cpu_seconds": spent / batches,
    }


def network(setting: Setting, channels: int, seed: int) -> nn.Module:
    """Return a perceptron with PyTorch's first weights, trained on digits where that is asked."""
    hidden = (setting.width,) * setting.depth
    model = perceptron(hidden, classes=10, channels=channels, image_size=32, activation="relu")
    initialise(model, "default", seed)
    if setting.network == "trained":
        images, labels = training_images("mnist")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fit(
            model,
            spec_of(channels).normalise(images),
            labels,
            optimizer,
            steps=TRAINING_STEPS,
            batch=32,
            seed=seed,
        )
    return model


def spec_of(channels: int) -> DataSpec:
    """Describe the images: less 0.5, over 0.5."""
    return DataSpec((channels, 32, 32), 10, (0.5,) * channels, (0.5,) * channels)


def observation(
    setting: Setting, model: nn.Module, images: Tensor, labels: Tensor, number: int
) -> tuple[Observation, float]:
    """Return what a server captures of a batch's gradient, and the share of L that is zero."""
    name = registered(setting)
    spec = spec_of(images.shape[1])
    seen = gradient_upload(
        model, images, labels, spec=spec, client=f"batch-{number}", model=name, activation="relu"
    )
    assert isinstance(model, nn.Sequential)
    before = model[1](model[0](spec.normalise(images)))
    return seen, float((before <= 0).float().mean())


def registered(setting: Setting) -> str:
    """Register the setting's perceptron as a model, and return its name."""
    name = f"perceptron-{setting.width}-{setting.depth}"
    if name not in MODELS:
        hidden = (setting.width,) * setting.depth
        MODELS.register(name)(lambda **sizes: perceptron(hidden, **sizes))
    return name


if __name__ == "__main__":
    main()
