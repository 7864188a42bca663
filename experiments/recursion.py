"""What `r-gap` reads off single images, by activation, data and training.

    OMP_NUM_THREADS=1 python -m experiments.recursion [--part defended] [--split choose] [--json]

Each row is 8 single images of `experiments.harness.images` (digits of MNIST in grey, photographs in
colour, 32 pixels) through strided LeNets of 4 seeds, one gradient each, undefended. ``trained``
networks were trained on other images of the same set. ``exact`` counts images above 60 dB,
``refused`` updates for which the attack reports that it fails; PSNR is that of the others,
capped at 100 dB, with a 95 % t interval, ``worst`` their least. ``open`` is the mean share of the
image's dimensions that equations left to bounds and total variation. Nothing was chosen on what
scores. CPU seconds are the process' own on one thread, an image.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from bract.attacks import Reconstruction, reconstruct
from bract.client.defenses import build_defenses
from bract.models import MODELS
from bract.scores.image import psnr
from experiments.harness.command import emit, note, note_row, parse, parser
from experiments.harness.images import image_set, training_images
from experiments.harness.result import Row
from experiments.harness.scores import columns, mean
from experiments.harness.splits import first_seed
from experiments.harness.uploads import fit, gradient_upload, network_for, plain_spec

COLUMNS = (
    *("activation", "data", "channels", "training", "init", "images", "exact", "refused"),
    *("psnr", "psnr_low", "psnr_high", "worst", "open", "cpu_seconds"),
)
DEFENDED_COLUMNS = (
    *("activation", "data", "training", "images", "plain", "known"),
    *("lost", "lost_low", "lost_high", "plain_exact", "known_exact", "known_worst"),
    *("known_refused", "plain_cpu_seconds", "known_cpu_seconds"),
)
IMAGES, NETWORKS, CLASSES = 8, 4, 10
EXACT = 60.0
_STEPS, _BATCH, _LR = 200, 64, 2e-3
_LAYERS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


@dataclass(frozen=True)
class Setting:
    """What clients did."""

    activation: str
    data: str
    channels: int
    training: str = "fresh"
    init: str = "default"


SETTINGS = (
    *(Setting(activation, "mnist", 1) for activation in _LAYERS),
    *(Setting(activation, "photos", 3) for activation in _LAYERS),
    Setting("relu", "photos", 1),
    Setting("relu", "mnist", 1, init="uniform"),
    Setting("relu", "mnist", 1, training="trained"),
    Setting("sigmoid", "mnist", 1, training="trained"),
)

DEFENDED = (Setting("relu", "mnist", 1),)


@cache
def network_of(setting: Setting, seed: int) -> nn.Module:
    """Return a network; training takes images that nothing here is scored on."""
    spec = plain_spec((setting.channels, 32, 32), CLASSES)
    made = network_for(spec, "lenet-strided", seed, activation="relu", init=setting.init)
    features = made.get_submodule("features")
    for name, module in list(features.named_children()):
        if isinstance(module, nn.ReLU):
            setattr(features, name, _LAYERS[setting.activation]())
    if setting.training == "trained":
        optimizer = torch.optim.Adam(made.parameters(), lr=_LR)
        fit(made, *training_images(setting.data), optimizer, steps=_STEPS, batch=_BATCH, seed=seed)
    return made


def row_of(setting: Setting, split: str) -> Row:
    """Attack the images of a setting one by one."""
    held = image_set(setting.data, IMAGES, split)
    images = held.images.float()
    if images.shape[1] != setting.channels:
        images = images.mean(dim=1, keepdim=True)
    made, places, gaps, spent, refused = [], [], [], 0.0, 0
    for number in range(IMAGES):
        network = network_of(setting, first_seed(split) + number % NETWORKS)
        image, label = images[number : number + 1], held.labels[number : number + 1]
        seen = gradient_upload(network, image, label, model="benchmarked", activation="relu")
        MODELS._entries["benchmarked"] = lambda network=network, **_: network
        begun = time.process_time()
        (found,) = reconstruct(seen, "r-gap", device="cpu")
        spent += time.process_time() - begun
        if not isinstance(found, Reconstruction):
            note(found.reason)
            refused += 1
            continue
        made.append(float(psnr(found.images, image)[0]))
        places.append(number)
        share = [part for part in found.components if "bounds" in part]
        gaps.append(float(share[0].split("%")[0]) / 100 if share else 0.0)
    return {
        **vars(setting),
        "images": IMAGES,
        "exact": sum(one > EXACT for one in made),
        "refused": refused,
        **columns("psnr", made, places, [number % NETWORKS for number in places]),
        "worst": min(made, default=None),
        "open": mean(gaps),
        "cpu_seconds": spent / IMAGES,
    }


def defended_row(setting: Setting, split: str) -> Row:
    """Attack the images of a setting, each undefended and behind AdaDefense."""
    held = image_set(setting.data, IMAGES, split)
    images = held.images.float()
    if images.shape[1] != setting.channels:
        images = images.mean(dim=1, keepdim=True)
    made: dict[str, list[float]] = {"plain": [], "known": []}
    spent = dict.fromkeys(made, 0.0)
    refused = dict.fromkeys(made, 0)
    for number in range(IMAGES):
        network = network_of(setting, first_seed(split) + number % NETWORKS)
        image, label = images[number : number + 1], held.labels[number : number + 1]
        seen = gradient_upload(network, image, label, model="benchmarked", activation="relu")
        MODELS._entries["benchmarked"] = lambda network=network, **_: network
        chain = build_defenses([{"name": "adadefense"}])
        declared = replace(seen.declaration, defenses=tuple(chain.public()))
        sent = replace(seen, update=chain.protect(seen.update, {}), declaration=declared)
        for name, upload in (("plain", seen), ("known", sent)):
            begun = time.process_time()
            (found,) = reconstruct(upload, "r-gap", tier="adaptive", device="cpu")
            spent[name] += time.process_time() - begun
            if isinstance(found, Reconstruction):
                shown = found.images
            else:
                note(found.reason)
                refused[name] += 1
                shown = torch.full_like(image, 0.5)
            made[name].append(float(psnr(shown, image)[0]))
        note(f"{number}: {made['plain'][-1]:.1f} dB undefended, {made['known'][-1]:.1f} defended")
    places, networks = list(range(IMAGES)), [number % NETWORKS for number in range(IMAGES)]
    lost = [one - other for one, other in zip(made["plain"], made["known"], strict=True)]
    row: Row = {**vars(setting), "images": IMAGES, **columns("lost", lost, places, networks)}
    for name, values in made.items():
        row |= columns(name, values, places, networks)
        row |= {
            f"{name}_exact": sum(one > EXACT for one in values),
            f"{name}_worst": min(values),
            f"{name}_refused": refused[name],
            f"{name}_cpu_seconds": spent[name] / IMAGES,
        }
    return row


def rows(split: str, part: str) -> Iterator[Row]:
    """Measure every setting of a part."""
    if part == "defended":
        for setting in DEFENDED:
            yield note_row(defended_row(setting, split), DEFENDED_COLUMNS)
        return
    for setting in SETTINGS:
        yield note_row(row_of(setting, split), COLUMNS)


def main() -> None:
    """Measure; print the table or JSON."""
    made = parser(__doc__, "split")
    made.add_argument("--part", choices=("activations", "defended"), default="activations")
    options = parse(made)
    shown = DEFENDED_COLUMNS if options.part == "defended" else COLUMNS
    emit(list(rows(options.split, options.part)), shown, as_json=options.json)


if __name__ == "__main__":
    main()
