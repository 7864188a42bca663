"""The attacks of this project compared with those of breaching and LeakPro, on identical gradients.

    pip install breaching; git clone https://github.com/aidotse/LeakPro; pip install -e LeakPro[dev]
    python -m experiments.peers [--full] --json

Each row is a tool's recipe on the same uploads: the same network, the same images, labels unknown
to both, equal iterations and one start; with ``--full`` a peer has all iterations that its recipe
ships with, and this project's attacks those of the setting. breaching (Geiping et al., the library
of Inverting Gradients, Fishing, and others) runs from its own package as it is published, each
recipe with the hyper-parameters it ships but for the number of iterations; ``information`` says
what it was given of batch statistics: nothing (it normalises by the candidate's own batch, as the
client did) or the batch's own, which the client's returned buffers tell. Images and networks of
``--split score`` chose no setting of either tool; ``choose`` has others. Images of one channel are
copied into three, since breaching's total variation takes colour. Scores are means over images,
paired by assignment within a batch, with 95 % intervals over images and networks. Without breaching
its rows are left out, as are LeakPro's without it. Of LeakPro the presets of its modular attacks
run, each with the hyper-parameters that it ships but for the number of iterations, and with labels
that it infers where it would take them from the client. CPU seconds are the process's own; with
``--jobs`` the rows run side by side, a process each.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from typing import Literal

import torch
from torch import Tensor, nn

from bract.attacks import Budget, Engine, Reconstruction, reconstruct
from bract.inputs import Truth
from bract.scores.base import ScoredImages
from bract.scores.image import score_images
from experiments.harness.clients import NETWORKS
from experiments.harness.command import Finished, emit, note, parse, parser
from experiments.harness.federation import correct
from experiments.harness.images import held_out_images, image_set, training_images
from experiments.harness.result import Row
from experiments.harness.scores import columns, mean, of_score
from experiments.harness.splits import first_seed
from experiments.harness.uploads import fit, gradient_upload, network_for, plain_spec
from experiments.peer_recipes import (
    PRESETS,
    RECIPES,
    Upload,
    breach,
    breaching_installed,
    leak,
    leakpro_installed,
    shipped_iterations,
)

COLUMNS = (
    *("tool", "attack", "information", "model", "data", "batch", "iterations"),
    *("psnr", "psnr_low", "psnr_high", "ssim", "label_accuracy", "cpu_seconds"),
)
CLASSES, CHANNELS, SIZE = 10, 3, 32
SPEC = plain_spec((CHANNELS, SIZE, SIZE), CLASSES)

_TRAINED_STEPS, _TRAINED_BATCH, _TRAINED_LR = 150, 64, 2e-3


@dataclass(frozen=True)
class Setting:
    """What clients did.

    Attributes
    ----------
    model, activation
        Of the registry.
    trained
        Whether the network was trained on other images first; else it is fresh.
    data
        An image set.
    batch
        Images of an upload.
    mode
        Of batch normalisation: ``train`` or, by running statistics, ``eval``.
    """

    model: str
    activation: str
    data: str = "photos"
    trained: bool = False
    batch: int = 1
    iterations: int = 2000
    mode: Literal["train", "eval"] = "train"

    @property
    def name(self) -> str:
        """The model in words."""
        return f"{self.model}, {self.activation}, {'trained' if self.trained else 'fresh'}"


SETTINGS = (
    Setting("lenet-strided", "sigmoid"),
    Setting("lenet", "sigmoid"),
    Setting("lenet", "sigmoid", data="clothes", iterations=600),
    Setting("resnet20", "relu", iterations=300),
    Setting("resnet20", "relu", data="digits", trained=True, iterations=300),
    Setting("convnet64", "relu", iterations=100),
    Setting("lenet-strided", "relu"),
    Setting("resnet18", "relu", iterations=300),
    Setting("resnet18", "relu", data="digits", trained=True, iterations=300),
    Setting("vgg16", "relu", iterations=100),
)
_NORMALISED = ("resnet20", "resnet18", "convnet64")
_BATCHES_ONLY = ("resnet18",)
"""A batch of one leaves one value a channel in its last normalisation, at 32 pixels."""

_ALONE = ("vgg16",)
"""Of 134 million parameters: uploads are made and attacked one by one."""


def uploads(setting: Setting, count: int, split: str) -> list[Upload]:
    """Run ``count`` clients on images of their own; images and networks are crossed."""
    return list(uploads_in_turn(setting, count, split))


def uploads_in_turn(setting: Setting, count: int, split: str) -> Iterator[Upload]:
    """Run the clients of `uploads` one after the other."""
    images = image_set(setting.data, count * setting.batch, split)
    for client in range(count):
        part = slice(client * setting.batch, (client + 1) * setting.batch)
        truth = images.images[part].expand(-1, CHANNELS, -1, -1).contiguous()
        seed = first_seed(split) + (client + client // NETWORKS) % NETWORKS
        network, accuracy = network_of(setting.model, setting.activation, setting.trained, seed)
        source = images.sources[client] if setting.batch == 1 else client
        labels = images.labels[part]
        yield _upload(network, truth, labels, client, setting, accuracy, seed, source)


def network_of(
    model: str, activation: str, trained: bool, seed: int
) -> tuple[nn.Module, float | None]:
    """Return a fresh or trained network of three channels, and the trained one's accuracy."""
    return _trained(model, activation, seed) if trained else (_fresh(model, activation, seed), None)


def _fresh(model: str, activation: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return network_for(SPEC, model, seed, activation=activation)


@cache
def _trained(model: str, activation: str, seed: int) -> tuple[nn.Module, float]:
    network = _fresh(model, activation, seed)
    return network, _train(network, seed)


def _train(network: nn.Module, seed: int) -> float:
    """Train on digits that nothing is scored on; return the accuracy on others."""
    images, labels = training_images("digits")
    # The last ones are attacked in the split that chooses.
    images, labels = images[:-64].expand(-1, CHANNELS, -1, -1), labels[:-64]
    optimizer = torch.optim.Adam(network.parameters(), lr=_TRAINED_LR)
    fit(network, images, labels, optimizer, steps=_TRAINED_STEPS, batch=_TRAINED_BATCH, seed=seed)
    held, wanted = held_out_images("digits")
    accuracy = float(correct(network, held.expand(-1, CHANNELS, -1, -1), wanted).mean())
    network.train()
    return accuracy


def _upload(
    network: nn.Module,
    truth: Tensor,
    labels: Tensor,
    client: int,
    setting: Setting,
    accuracy: float | None,
    number: int,
    source: int,
) -> Upload:
    network.train(setting.mode == "train")
    seen = gradient_upload(
        network,
        truth,
        labels,
        spec=SPEC,
        client=f"client-{client}",
        model=setting.model,
        activation=setting.activation,
        norm_mode=setting.mode,
    )
    gradients = tuple(seen.update[name] for name, _ in network.named_parameters())
    statistics = _batch_statistics(network, seen.buffers, seen.returned_buffers)
    return Upload(
        network, seen, gradients, statistics, truth, labels, CLASSES, accuracy, number, source
    )


def _batch_statistics(
    network: nn.Module, sent: dict[str, Tensor], returned: dict[str, Tensor]
) -> tuple[Tensor, ...]:
    """Return the buffers of a network whose running statistics are those of the client's batch."""
    found = []
    for name, module in network.named_modules():
        if not isinstance(module, nn.BatchNorm2d):
            continue
        keep = 1 - (module.momentum or 0.0)
        for kind in ("running_mean", "running_var"):
            full = f"{name}.{kind}"
            found.append((returned[full] - keep * sent[full]) / (1 - keep))
        found.append(torch.tensor(1))
    return tuple(found)


def ours(
    setting: Setting, given: Sequence[Upload], name: str, device: str
) -> list[tuple[Tensor, Tensor]]:
    """Return images and labels by an attack of this project."""
    outcomes = reconstruct(
        [upload.seen for upload in given],
        name,
        budget=Budget(iterations=setting.iterations),
        engine=Engine(device=device),
    )
    for outcome in outcomes:
        if not isinstance(outcome, Reconstruction):
            raise SystemExit(f"{setting}: {outcome.reason}")
    return [(o.images, o.labels) for o in outcomes if isinstance(o, Reconstruction)]


def score(images: Tensor, labels: Tensor, upload: Upload) -> ScoredImages:
    """Score what an attack made of an upload against what its client keeps."""
    return score_images(
        images, Truth(upload.truth, upload.labels), recovered=labels, perceptual=False
    )


Run = tuple[Setting, int, str, str, bool]
"""A setting, its number of uploads, a tool, its recipe, and whether it is given statistics."""


def plan(options: argparse.Namespace) -> Iterator[Run]:
    """Every row that options ask for."""
    for setting in SETTINGS:
        if options.model and not any(part in setting.name for part in options.model):
            continue
        if options.data and setting.data not in options.data:
            continue
        iterations = options.iterations or setting.iterations
        for batch in options.batch or (1, 4):
            if batch == 1 and setting.model in _BATCHES_ONLY:
                continue
            count = max(1, options.images // batch)
            for tool, name, known in _runs(setting, options):
                whole = shipped_iterations(tool, name) if options.full else iterations
                yield (
                    replace(setting, batch=batch, iterations=whole or iterations),
                    count,
                    tool,
                    name,
                    known,
                )


def _runs(setting: Setting, options: argparse.Namespace) -> list[tuple[str, str, bool]]:
    normalised = setting.model in _NORMALISED
    runs: list[tuple[str, str, bool]] = [("bract", name, normalised) for name in options.attack]
    if breaching_installed():
        given = (False, True) if normalised else (False,)
        names = [name for name in options.recipe if name in RECIPES]
        runs += [("breaching", name, known) for name in names for known in given]
    if leakpro_installed():
        matched = [(name, True) for name in PRESETS[2:]] if normalised else []
        pairs = [*((name, False) for name in PRESETS[:2]), *matched]
        runs += [("LeakPro", name, known) for name, known in pairs if name in options.recipe]
    return runs


def rows_of(runs: Sequence[Run], options: argparse.Namespace, done: Finished) -> list[Row]:
    """Run tools, several side by side, but for rows that are done; keep each as it ends."""
    about = {run: [asdict(run[0]), run[1], options.split, *run[2:]] for run in runs}
    rows = {run: done.get(key) for run, key in about.items()}
    missing = [run for run, row in rows.items() if row is None]
    with ProcessPoolExecutor(
        options.jobs,
        mp_context=get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(options.threads,),
    ) as pool:
        waiting = {pool.submit(_measured, *run, options): run for run in missing}
        for future in as_completed(waiting):
            run = waiting[future]
            row = rows[run] = done.add(about[run], future.result())
            note(
                f"{row['model']}, batch {row['batch']}: {row['tool']} {row['attack']} "
                f"({row['information']}): {row['psnr']:.1f} dB, {row['ssim']:.2f}, labels "
                f"{row['label_accuracy']:.2f}, {row['cpu_seconds']:.0f} CPU s an image"
            )
    return [row for row in rows.values() if row is not None]


def _measured(
    setting: Setting, count: int, tool: str, name: str, known: bool, options: argparse.Namespace
) -> Row:
    scored, sources, networks, accuracies, spent = [], [], [], [], 0.0
    given = uploads_in_turn(setting, count, options.split)
    for number, some in enumerate(_together(setting, given)):
        begun = time.process_time()
        if tool == "bract":
            found = ours(setting, some, name, options.device)
        else:
            attacked = leak if tool == "LeakPro" else breach
            found = []
            for place, upload in enumerate(some):
                torch.manual_seed(number + place)
                found.append(attacked(setting.iterations, upload, name, known, options.device))
        spent += time.process_time() - begun
        for one, upload in zip(found, some, strict=True):
            scored.append(score(*one, upload))
            sources += [upload.source] * setting.batch
            networks += [upload.number] * setting.batch
            accuracies += [] if upload.accuracy is None else [upload.accuracy]
    return {
        "tool": tool,
        "attack": name,
        "information": "batch statistics" if known else "none",
        "model": setting.name,
        "data": setting.data,
        "batch": setting.batch,
        "iterations": setting.iterations,
        "images": len(sources),
        **columns("psnr", of_score(scored, "psnr"), sources, networks),
        "sources_each": sources,
        "networks_each": networks,
        "ssim": mean(of_score(scored, "ssim")),
        "label_accuracy": mean([s.label_accuracy or 0.0 for s in scored]),
        "cpu_seconds": spent / len(sources),
        "network_accuracy": mean(accuracies),
    }


def _together(setting: Setting, given: Iterator[Upload]) -> Iterator[list[Upload]]:
    """Yield the uploads that are held at once: all, or one where eight do not fit into memory."""
    if setting.model in _ALONE:
        return ([upload] for upload in given)
    return iter([list(given)])


def main() -> None:
    """Run all settings or some."""
    options_parser = parser(__doc__, "split", "device", "threads", "resume")
    add = options_parser.add_argument
    add("--model", action="append", help="a part of a model's name in words")
    add("--data", action="append", help="an image set; by default each")
    add("--batch", type=int, action="append")
    add("--images", type=int, default=8)
    add("--iterations", type=int, help="instead of the setting's own")
    add("--full", action="store_true", help="peers with all iterations that they ship with")
    add("--attack", action="append")
    add("--jobs", type=int, default=1, help="rows that are measured side by side")
    add("--recipe", action="append", choices=(*RECIPES, *PRESETS))
    options = parse(options_parser)
    options.attack = options.attack or ["ig", "best"]
    options.recipe = options.recipe or [*RECIPES, *PRESETS]
    done = Finished(options.resume, "experiments.peers")
    rows = rows_of(list(plan(options)), options, done)
    emit(rows, COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
