"""The same digits undefended, and under a defense: oblivious and adaptive attacker.

    python -m experiments.gallery --picture experiments/results/gallery.png --json

The first clients of the row "first round, lenet-strided" of `audit.py`, with the same networks and
attack: one digit an upload, AdaDefense at its defaults. The picture holds the originals and the
three rows of blind picks, nothing chosen, each with its scores.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bract.attacks import Budget, Engine, Reconstruction, reconstruct
from bract.inputs import Truth
from bract.scores.image import score_images
from experiments.audit_plan import Situation
from experiments.harness.clients import uploads
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.pictures import canvas, save
from experiments.harness.scores import columns, of_score

SHOWN = 5
ROWS = (
    ("what the client trained on", ""),
    ("undefended", "plain"),
    ("defended, the attacker ignores it", "oblivious"),
    ("defended, the attacker knows it", "adaptive"),
)


def main() -> None:
    """Attack, print the scores, draw the picture."""
    arguments = parser(__doc__, "seed", picture="gallery-cpu")
    arguments.add_argument("--iterations", type=int, default=600)
    options = parse(arguments)
    originals, pictures, rows = attacked(options)
    draw(originals, pictures, rows, options.picture)
    emit(rows, ("tier", "psnr", "ssim"), as_json=options.json)


def attacked(
    options: argparse.Namespace,
) -> tuple[Tensor, dict[str, Tensor], list[dict[str, Any]]]:
    """Return originals, reconstructions by tier, and a row of scores for each tier."""
    situation = Situation("digits", "lenet-strided", "adadefense", uploads=SHOWN)
    clients = uploads(situation.clients, split="score", secret=options.seed)
    originals = torch.cat([client.truth for client in clients])
    pictures: dict[str, Tensor] = {}
    rows: list[dict[str, Any]] = []
    for _, tier in ROWS[1:]:
        note(f"{tier}: {SHOWN} uploads")
        found = reconstruct(
            [client.plain if tier == "plain" else client.captured for client in clients],
            "grnn",
            budget=Budget(iterations=options.iterations),
            seed=options.seed,
            tier="adaptive" if tier == "adaptive" else "oblivious",
            engine=Engine(),
        )
        images = [result.images for result in found if isinstance(result, Reconstruction)]
        pictures[tier] = torch.cat(images)
        scores = [
            score_images(image, Truth(client.truth, client.labels), perceptual=False)
            for image, client in zip(images, clients, strict=True)
        ]
        drawn = ([client.source for client in clients], [client.network for client in clients])
        rows.append(
            {
                "tier": tier,
                "defense": "none" if tier == "plain" else "adadefense",
                "model": "lenet-strided",
                "attack": "grnn",
                "iterations": options.iterations,
                **columns("psnr", of_score(scores, "psnr"), *drawn),
                **columns("ssim", of_score(scores, "ssim"), *drawn),
            }
        )
    return originals, pictures, rows


def draw(
    originals: Tensor, pictures: dict[str, Tensor], rows: list[dict[str, Any]], path: Path
) -> None:
    """Draw one row of images a tier, with its mean SSIM."""
    mean = {row["tier"]: row["ssim"] for row in rows}
    figure, grid = canvas(len(ROWS), SHOWN, 8.2, 3.6)
    for axes, (title, tier) in zip(grid, ROWS, strict=True):
        images = pictures[tier] if tier else originals
        said = f"{title}\nmean SSIM {mean[tier]:.2f}" if tier else title
        axes[0].set_ylabel(said, rotation=0, ha="right", va="center", fontsize=9)
        for axis, image in zip(axes, images, strict=True):
            axis.imshow(image[0], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
    figure.tight_layout(pad=0.4, w_pad=0.2, h_pad=0.2)
    save(figure, path, dpi=110)


if __name__ == "__main__":
    main()
