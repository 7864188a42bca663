"""What `r-gap` reads off single images, by activation, data and training.

    OMP_NUM_THREADS=1 python -m experiments.recursion [--split choose] [--json]

Each row is 8 single images of `experiments.harness.images` (digits of MNIST in grey, photographs in
colour, 32 pixels) through strided LeNets of 4 seeds, one gradient each, undefended. ``trained``
networks were trained on other images of the same set. ``exact`` counts images above 60 dB,
``refused`` updates for which the attack says that it does not arrive; PSNR is that of the others,
capped at 100 dB, with a 95 % t interval, ``worst`` their least. ``open`` is the mean share of the
image's dimensions that equations left to bounds and total variation. Nothing was chosen on what
scores. CPU seconds are the process' own on one thread, an image.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bract.attacks import Reconstruction, reconstruct
from bract.audit.scoring.metrics import psnr
from bract.models import MODELS, create_model, initialise
from bract.protocol.observation import ClientDeclaration, Observation
from bract.protocol.update import parameters_of
from experiments.harness.command import emit, interval, note, parser
from experiments.harness.images import image_set, training_images

COLUMNS = (
    *("activation", "data", "channels", "training", "init", "images", "exact", "refused"),
    *("psnr", "psnr_low", "psnr_high", "worst", "open", "cpu_seconds"),
)
IMAGES, NETWORKS, CLASSES = 8, 4, 10
_FIRST_SEED = {"score": 0, "choose": 1000}
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


@cache
def network_of(setting: Setting, seed: int) -> nn.Module:
    """Return a network; training takes images that nothing here is scored on."""
    made = create_model(
        "lenet-strided",
        classes=CLASSES,
        channels=setting.channels,
        image_size=32,
        activation="relu",
    )
    features = made.get_submodule("features")
    for name, module in list(features.named_children()):
        if isinstance(module, nn.ReLU):
            setattr(features, name, _LAYERS[setting.activation]())
    network = initialise(made, setting.init, seed)
    if setting.training == "trained":
        images, labels = training_images(setting.data)
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(network.parameters(), lr=_LR)
        for _ in range(_STEPS):
            taken = torch.randint(len(images), (_BATCH,), generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(network(images[taken]), labels[taken]).backward()
            optimizer.step()
    return network


def row_of(setting: Setting, split: str) -> dict[str, Any]:
    """Attack the images of a setting one by one."""
    held = image_set(setting.data, IMAGES, split)
    images = held.images.float()
    if images.shape[1] != setting.channels:
        images = images.mean(dim=1, keepdim=True)
    made, gaps, spent, refused = [], [], 0.0, 0
    for number in range(IMAGES):
        network = network_of(setting, _FIRST_SEED[split] + number % NETWORKS)
        image, label = images[number : number + 1], held.labels[number : number + 1]
        seen = upload_of(network, image, label, number)
        MODELS._entries["benchmarked"] = lambda network=network, **_: network
        begun = time.process_time()
        (found,) = reconstruct(seen, "r-gap", device="cpu")
        spent += time.process_time() - begun
        if not isinstance(found, Reconstruction):
            note(found.reason)
            refused += 1
            continue
        made.append(float(psnr(found.images, image)[0]))
        share = [part for part in found.components if "bounds" in part]
        gaps.append(float(share[0].split("%")[0]) / 100 if share else 0.0)
    mean, half = interval(made) if made else (None, None)
    return {
        **vars(setting),
        "images": IMAGES,
        "exact": sum(one > 60 for one in made),
        "refused": refused,
        "psnr": mean,
        "psnr_low": None if half is None or mean is None else mean - half,
        "psnr_high": None if half is None or mean is None else mean + half,
        "worst": min(made, default=None),
        "psnr_each": made,
        "open": statistics.fmean(gaps) if gaps else None,
        "cpu_seconds": spent / IMAGES,
    }


def upload_of(
    network: nn.Module, image: torch.Tensor, label: torch.Tensor, number: int
) -> Observation:
    """Return the gradient of one image as a server sees it."""
    loss = F.cross_entropy(network(image), label)
    names = [name for name, _ in network.named_parameters()]
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    return Observation(
        round=1,
        client=f"client-{number}",
        parameters=parameters_of(network),
        update=dict(zip(names, gradients, strict=True)),
        declaration=ClientDeclaration(
            algorithm="fedsgd",
            model="benchmarked",
            activation="relu",
            image_shape=(image.shape[1], image.shape[2], image.shape[3]),
            classes=CLASSES,
            batch_size=1,
            num_examples=1,
        ),
    )


def rows(split: str) -> Iterator[dict[str, Any]]:
    """Measure every setting."""
    for setting in SETTINGS:
        row = row_of(setting, split)
        note(" ".join(f"{column}={row[column]}" for column in COLUMNS))
        yield row


def main() -> None:
    """Measure; print the table or JSON."""
    arguments = parser(__doc__ or "", "recursion", picture=False)
    arguments.add_argument("--split", choices=("score", "choose"), default="score")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    emit(list(rows(options.split)), COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
