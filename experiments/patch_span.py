"""Activations off a convolution's gradient, then the image: `patch-span` beside what searches.

    OMP_NUM_THREADS=1 python -m experiments.patch_span [--split choose] [--images 8] [--json]
    OMP_NUM_THREADS=1 python -m experiments.patch_span --part limits [--json]

One image an upload or four, ReLU, labels inferred, one start, blind, equal iterations; uploads are
those of `experiments.peers`, whose rows have breaching's recipes on the same images. ``patch-span``
runs with the batch statistics that returned buffers give and without them, beside ``statistics``,
which has them alone, and ``ig``. An upload that an attack refuses is scored with a grey image.
*Read* counts uploads where the linear system found a space that holds the true activations of all
of its images, to a squared sine of 1e-3; it is measured with the truth and decides nothing.

Rules, fixed before a row was scored: an attack *gains* where the 95 % interval of its mean
difference in PSNR from ``ig``, paired by image and with images and networks crossed, is above zero,
*loses* where it is below, and is *open* otherwise. An image counts as *found* at an SSIM of a half
or more. Nothing was chosen on these images.

``--part limits`` runs no descent: what an upload undergoes before it is read, undeclared, and how
many are then *read*, *refused*, or *wrong*, where a space is found that the true activations are
not in. Noise is Gaussian, its deviation a share of the update's root mean square; pruning drops the
smallest coordinates of the update; two steps are of plain SGD on one image, at rates at which the
second gradient is not next to nothing (at 0.1 it is 1e-8 of the first); two images are a batch that
is declared as one image; a shuffled update keeps its values alone.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from bract.attacks import Budget, Engine, Reconstruction, reconstruct
from bract.attacks.methods.patch_span.activations import entering, read_activations
from bract.attacks.problem.case import open_case
from bract.errors import BractError
from bract.updates.update import Tensors
from experiments import peers
from experiments.harness.command import Finished, emit, note_row, parse, parser
from experiments.harness.result import Row
from experiments.harness.scores import columns, gain_over, mean, of_score
from experiments.peer_recipes import Upload

COLUMNS = (
    *(
        "model",
        "data",
        "mode",
        "batch",
        "attack",
        "images",
        "read",
        "psnr",
        "psnr_low",
        "psnr_high",
    ),
    *("ssim", "found", "gain", "gain_low", "gain_high", "verdict", "accuracy", "cpu_seconds"),
)
Disturbance = Callable[[Upload, Upload, int], Tensors]
"""Of an upload, another one and its number: what is read in place of the update."""

ITERATIONS = 300
FOUND, READ = 0.5, 1e-3
ALONE = "patch-span, no statistics"
ATTACKS = ("ig", "statistics", ALONE, "patch-span")
LIMIT_COLUMNS = ("model", "data", "mode", "disturbance", "uploads", "read", "refused", "wrong")
LIMITS = (
    peers.Setting("resnet20", "relu"),
    peers.Setting("resnet20", "relu", data="digits", trained=True),
    peers.Setting("resnet20", "relu", mode="eval"),
    peers.Setting("resnet20", "relu", data="digits", trained=True, mode="eval"),
)
SETTINGS = (
    peers.Setting("resnet20", "relu"),
    peers.Setting("resnet18", "relu", batch=4),
    peers.Setting("resnet20", "relu", data="digits", trained=True),
    peers.Setting("resnet20", "relu", data="mnist", trained=True),
)


def main() -> None:
    """Attack every setting's uploads; then print the table or JSON."""
    arguments = parser(__doc__, "split", "resume")
    arguments.add_argument("--images", type=int, default=8, help="of a row")
    arguments.add_argument("--part", choices=("attacks", "limits"), default="attacks")
    options = parse(arguments)
    if options.part == "limits":
        limits = [note_row(row, LIMIT_COLUMNS) for row in limit_rows(options)]
        emit(limits, LIMIT_COLUMNS, as_json=options.json)
        return
    done = Finished(options.resume, "experiments.patch_span", "experiments.peers")
    rows = [
        note_row(row, COLUMNS) for setting in SETTINGS for row in rows_of(setting, options, done)
    ]
    emit(rows, COLUMNS, as_json=options.json)


def rows_of(setting: peers.Setting, options: argparse.Namespace, done: Finished) -> Iterator[Row]:
    """Run every attack on the same uploads, each compared with the first."""
    given = peers.uploads(setting, options.images // setting.batch, options.split)
    reference: list[float] = []
    for name in ATTACKS:
        about = [repr(setting), len(given), options.split, name]
        row = done.get(about) or done.add(about, attacked(setting, given, name))
        reference = reference or row["psnr_each"]
        yield row | gain_over(reference, row)


def attacked(setting: peers.Setting, given: list[Upload], name: str) -> Row:
    """Attack the uploads of a setting."""
    seen = [upload.seen for upload in given]
    if name == ALONE:
        seen = [replace(observation, returned_buffers={}) for observation in seen]
    begun = time.process_time()
    outcomes = reconstruct(
        seen,
        name.partition(",")[0],
        budget=Budget(iterations=ITERATIONS, max_images=setting.batch),
        engine=Engine(device="cpu"),
    )
    spent = time.process_time() - begun
    scored = []
    for outcome, upload in zip(outcomes, given, strict=True):
        if isinstance(outcome, Reconstruction):
            scored.append(peers.score(outcome.images, outcome.labels, upload))
        else:
            grey = torch.full_like(upload.truth, 0.5)
            scored.append(peers.score(grey, torch.zeros_like(upload.labels), upload))
    each = [u for u, s in zip(given, scored, strict=True) for _ in s.rows]
    sources, networks = [u.source for u in each], [u.number for u in each]
    similar = of_score(scored, "ssim")
    return {
        "model": setting.name,
        "data": setting.data,
        "mode": setting.mode,
        "batch": setting.batch,
        "iterations": ITERATIONS,
        "attack": name,
        "images": len(each),
        "read": sum(map(_read, given)) if name.startswith("patch-span") else None,
        **columns("psnr", of_score(scored, "psnr"), sources, networks),
        "sources_each": sources,
        "networks_each": networks,
        "ssim": mean(similar),
        "ssim_each": similar,
        "found": sum(value >= FOUND for value in similar),
        "accuracy": mean([u.accuracy for u in given if u.accuracy is not None]),
        "cpu_seconds": spent / len(each),
    }


def limit_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Read uploads of one image after each disturbance, in every setting."""
    for setting in LIMITS:
        given = peers.uploads(setting, options.images, options.split)
        others = [*given[1:], *given[:1]]
        for name, disturb in DISTURBANCES.items():
            found = Counter(
                _outcome(upload, disturb(upload, other, number))
                for number, (upload, other) in enumerate(zip(given, others, strict=True))
            )
            yield {
                "model": setting.name,
                "data": setting.data,
                "mode": setting.mode,
                "disturbance": name,
                "uploads": len(given),
                **{kind: found[kind] for kind in ("read", "refused", "wrong")},
            }


def _read(upload: Upload) -> bool:
    return _outcome(upload, upload.seen.update) == "read"


def _outcome(upload: Upload, update: Tensors) -> str:
    seen = replace(upload.seen, update=update)
    try:
        case = open_case(seen, tier="oblivious", max_images=len(upload.truth), unroll=16)
        read = read_activations(case)
    except BractError:
        return "refused"
    state = case.target_model.captured(case.observation)
    inputs = case.target_model.normalise(upload.truth)
    true, _ = entering(case.target_model, state, inputs, read.layer.name)
    near = all(float(read.distance(maps.double())) < READ for maps in true)
    return "read" if near else "wrong"


def _as_it_is(upload: Upload, other: Upload, number: int) -> Tensors:
    del other, number
    return upload.seen.update


def _noisy(share: float) -> Disturbance:
    def disturb(upload: Upload, other: Upload, number: int) -> Tensors:
        del other
        generator = torch.Generator().manual_seed(number)
        size = torch.cat([v.flatten() for v in upload.seen.update.values()]).square().mean().sqrt()
        return {
            name: v + share * size * torch.randn(v.shape, generator=generator)
            for name, v in upload.seen.update.items()
        }

    return disturb


def _pruned(share: float) -> Disturbance:
    def disturb(upload: Upload, other: Upload, number: int) -> Tensors:
        del other, number
        sizes = torch.cat([v.flatten() for v in upload.seen.update.values()]).abs()
        edge = sizes.kthvalue(max(1, int(share * len(sizes)))).values
        return {name: v * (v.abs() > edge) for name, v in upload.seen.update.items()}

    return disturb


def _rounded(upload: Upload, other: Upload, number: int) -> Tensors:
    del other, number
    return {name: v.half().float() for name, v in upload.seen.update.items()}


def _shuffled(upload: Upload, other: Upload, number: int) -> Tensors:
    del other
    generator = torch.Generator().manual_seed(number)
    return {
        name: v.flatten()[torch.randperm(v.numel(), generator=generator)].view_as(v)
        for name, v in upload.seen.update.items()
    }


def _two_images(upload: Upload, other: Upload, number: int) -> Tensors:
    del number
    images, labels = (torch.cat(two) for two in zip(_batch(upload), _batch(other), strict=True))
    return _gradient(upload, images, labels, upload.seen.parameters)


def _two_steps(rate: float) -> Disturbance:
    def disturb(upload: Upload, other: Upload, number: int) -> Tensors:
        del other, number
        first = _gradient(upload, *_batch(upload), upload.seen.parameters)
        moved = {name: v - rate * first[name] for name, v in upload.seen.parameters.items()}
        second = _gradient(upload, *_batch(upload), moved)
        return {name: v + second[name] for name, v in first.items()}

    return disturb


def _batch(upload: Upload) -> tuple[Tensor, Tensor]:
    return upload.truth, upload.labels


def _gradient(upload: Upload, images: Tensor, labels: Tensor, at: Tensors) -> Tensors:
    case = open_case(upload.seen, tier="oblivious", max_images=1, unroll=16)
    model = case.target_model
    state = model.captured(case.observation) | {
        n: v.clone().requires_grad_() for n, v in at.items()
    }
    logits = functional_call(model.model, state, (model.normalise(images),))
    found = torch.autograd.grad(F.cross_entropy(logits, labels), [state[n] for n in at])
    return dict(zip(at, found, strict=True))


DISTURBANCES: dict[str, Disturbance] = {
    "none": _as_it_is,
    **{f"noise {share:.0e}": _noisy(share) for share in (1e-6, 1e-5, 1e-4, 1e-3)},
    **{f"pruning {share:.0%}": _pruned(share) for share in (0.1, 0.5)},
    "float16": _rounded,
    **{f"two steps at {rate:.0e}": _two_steps(rate) for rate in (1e-4, 1e-3, 1e-2)},
    "two images": _two_images,
    "shuffled": _shuffled,
}


if __name__ == "__main__":
    main()
