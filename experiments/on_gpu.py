"""What one GPU does: restarts together and recorded, long attacks on deep models, several clients.

    python -m experiments.on_gpu speed|images|clients [--json]

``speed``: milliseconds of a step of 64 restarts on one photograph together, with the step recorded
(a CUDA graph) and without, and of one restart alone times 64, from the difference of a long and a
short run. ``images``: `ig` as published on 32 photographs, one an upload, all together, 24,000
iterations or as many as ``--iterations`` says, through fresh networks that normalise by running
statistics; with ``--checkpoint`` an interrupted one goes on, and ``seconds`` are its last part's.
``clients``: seconds a round of a federation whose clients share the card, and the most memory that
the card held (``nvidia-smi``).
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bract.attacks import Budget, Engine, Reconstruction, attack, reconstruct
from bract.captures.observation import Observation
from bract.inputs import Truth
from bract.scores.image import score_images
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.images import image_set
from experiments.harness.result import Row
from experiments.harness.scores import columns, mean, of_score
from experiments.harness.splits import first_seed
from experiments.harness.uploads import gradient_upload, network_for, plain_spec

SPEED = (
    *(("ig", "lenet-strided"), ("grnn", "lenet-strided"), ("ig", "resnet20")),
    *(("grnn", "resnet20"), ("ig", "convnet64"), ("ig", "resnet18"), ("ig", "vgg16")),
)
DEEP = ("resnet18", "vgg16", "convnet64")
RESTARTS = 64
IMAGES = 32
ITERATIONS = 24_000
CLIENTS = (1, 3, 8)
_SHORT = 30
_MOST_SECONDS = 3.0


def main() -> None:
    """Run one part; print the table or JSON."""
    arguments = parser(__doc__, "split", "seed", "device", "resume")
    arguments.add_argument("part", choices=("speed", "images", "clients"))
    arguments.add_argument("--model", action="append", help="only these models")
    arguments.add_argument("--iterations", type=int, default=ITERATIONS)
    arguments.add_argument("--rounds", type=int, default=6)
    arguments.add_argument(
        "--checkpoint",
        type=Path,
        help="folder from which an interrupted descent of `images` goes on, on another card too",
    )
    options = parse(arguments)
    done = Finished(options.resume, "experiments.on_gpu")
    rows: list[Row] = []
    for about, measure in _plan(options):
        rows.append(note_row(done.row(about, measure), COLUMNS[options.part]))
    emit(rows, COLUMNS[options.part], as_json=options.json)


COLUMNS = {
    "speed": ("attack", "model", "recorded_ms", "unrecorded_ms", "loop_ms", "gain", "against_loop"),
    "images": (
        *("model", "images", "iterations", "psnr", "psnr_low", "psnr_high", "ssim"),
        *("label_accuracy", "seconds", "gigabytes"),
    ),
    "clients": ("model", "clients", "device", "seconds_per_round", "gigabytes"),
}


def _plan(options: Any) -> Iterator[tuple[list[Any], Any]]:
    def wanted(model: str) -> bool:
        return not options.model or model in options.model

    if options.part == "speed":
        for name, model in SPEED:
            if wanted(model):
                yield ["speed", name, model], lambda n=name, m=model: speed(n, m, options)
    elif options.part == "images":
        for model in filter(wanted, DEEP):
            about = ["images", model, options.iterations, options.split]
            yield about, lambda m=model: images_row(m, options)
    else:
        for clients in CLIENTS:
            about = ["clients", clients, options.device]
            yield about, lambda c=clients: clients_row(c, options)


def uploads_of(model: str, count: int, split: str) -> list[tuple[Observation, Truth]]:
    """Return one upload for each of some photographs, with its truth."""
    images = image_set("photos", count, split)
    network = network_for(
        plain_spec(images.images.shape[1:]), model, first_seed(split), activation="relu"
    ).eval()
    found = []
    for i in range(count):
        truth, label = images.images[i : i + 1], images.labels[i : i + 1]
        seen = gradient_upload(
            network,
            truth,
            label,
            client=f"image-{i}",
            model=model,
            activation="relu",
            norm_mode="eval",
        )
        found.append((seen, Truth(truth, label)))
    return found


def speed(name: str, model: str, options: Any) -> Row:
    """Return the milliseconds of one step, three ways."""
    ((seen, _),) = uploads_of(model, 1, options.split)

    def step(restarts: int, *, record: bool) -> float:
        engine = Engine(device=options.device, record=record, trials=restarts)

        def seconds(iterations: int) -> float:
            begun = time.perf_counter()
            budget = Budget(iterations=iterations, restarts=restarts)
            reconstruct(seen, attack(name), budget=budget, seed=options.seed, engine=engine)
            return time.perf_counter() - begun

        seconds(_SHORT)
        short = seconds(_SHORT)
        more = max(20, min(400, int(_SHORT * _MOST_SECONDS / short / 2)))
        return (seconds(_SHORT + more) - short) / more

    together, unrecorded = (step(RESTARTS, record=record) for record in (True, False))
    alone = step(1, record=False) * RESTARTS
    return {
        "attack": name,
        "model": model,
        "restarts": RESTARTS,
        "recorded_ms": round(1000 * together, 3),
        "unrecorded_ms": round(1000 * unrecorded, 3),
        "loop_ms": round(1000 * alone, 1),
        "gain": round(unrecorded / together, 2),
        "against_loop": round(alone / together, 1),
    }


def images_row(model: str, options: Any) -> Row:
    """Return what a long attack on many images brings."""
    import torch

    cases = uploads_of(model, IMAGES, options.split)
    images = image_set("photos", IMAGES, options.split)
    begun = time.perf_counter()
    outcomes = reconstruct(
        [seen for seen, _ in cases],
        attack("ig"),
        budget=Budget(iterations=options.iterations),
        seed=options.seed,
        engine=Engine(device=options.device, checkpoint=options.checkpoint),
    )
    seconds = time.perf_counter() - begun
    scored = [
        score_images(
            found.images,
            truth,
            recovered=found.labels,
            candidates=images.candidates,
            perceptual=False,
        )
        for found, (_, truth) in zip(outcomes, cases, strict=True)
        if isinstance(found, Reconstruction)
    ]
    known = [s.label_accuracy for s in scored if s.label_accuracy is not None]
    return {
        "model": model,
        "data": "photos",
        "images": len(scored),
        "iterations": options.iterations,
        **columns("psnr", of_score(scored, "psnr"), images.sources),
        **columns("ssim", of_score(scored, "ssim"), images.sources),
        "label_accuracy": mean(known),
        "seconds": round(seconds, 1),
        "gigabytes": round(torch.cuda.max_memory_allocated() / 1e9, 1)
        if options.device.startswith("cuda")
        else None,
    }


def clients_row(clients: int, options: Any) -> Row:
    """Return what a federation costs whose clients share the device."""
    from bract.cli.launch.launcher import Launch
    from bract.cli.run import run_federation
    from bract.config import build_config
    from experiments.rounds import later_rounds

    config = build_config(
        {
            "name": "one-card",
            "clients": clients,
            "rounds": options.rounds,
            "model": {"name": "resnet18", "activation": "relu"},
            "data": {"image_size": 32},
            "capture": {"enabled": False},
            "device": options.device,
        }
    )
    with tempfile.TemporaryDirectory() as folder, _memory() as most:
        rounds = sorted(later_rounds(run_federation(config, Path(folder), Launch())))
    return {
        "model": "resnet18",
        "clients": clients,
        "device": options.device,
        "rounds": len(rounds),
        "seconds_per_round": round(rounds[len(rounds) // 2], 3),
        "gigabytes": round(max(most, default=0.0), 2),
    }


@contextmanager
def _memory() -> Iterator[list[float]]:
    """Collect what the card holds, GB, twice a second; nothing without ``nvidia-smi``."""
    found: list[float] = []
    ended = threading.Event()
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def watch() -> None:
        while not ended.wait(0.5):
            try:
                made = subprocess.run(command, capture_output=True, text=True, check=True)
                found.append(float(made.stdout.split()[0]) * 1048576 / 1e9)
            except (OSError, ValueError, subprocess.CalledProcessError):
                return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield found
    finally:
        ended.set()
        watching.join()


if __name__ == "__main__":
    main()
