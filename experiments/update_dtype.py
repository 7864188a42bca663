"""Updates of 16 bits: accuracy, bytes a round, and what is left to attacks on single digits.

    python -m experiments.update_dtype [--seeds 3] [--images 8] [--iterations 300] \\
        [--only accuracy] [--json]

Accuracy: three clients train LeNet (ReLU) on the embedded digits, with rounds and optimizer of
`experiments.defended_accuracy`; each update is rounded as the client rounds it. A seed decides
split, first model and order of the examples for every dtype alike, so ``points`` is paired.
Accuracy is that on all held-out digits, mean over the last 10 rounds. Bytes are those of the
records that the clients send in one round.

Attacks: gradients of single digits, undefended, on one network; the attacker knows the dtype. The
true gradient is rounded before it is sent; ``error`` is the part of its norm that this changes.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from bract.attacks import Budget, Reconstruction, reconstruct
from bract.captures.observation import Observation
from bract.config import build_config
from bract.config.capture import Dtype
from bract.data.views import client_data, data_spec, test_data
from bract.protocol.arrays import to_packed
from bract.protocol.records import Contribution
from bract.scores.image import psnr
from bract.updates.rounding import rounded, sent_rounded, widened
from bract.updates.update import flatten
from experiments.defended_accuracy import JUDGED, SETTINGS
from experiments.harness.command import emit, note, parse, parser
from experiments.harness.federation import Clients, correct
from experiments.harness.result import Row
from experiments.harness.scores import columns, interval
from experiments.harness.uploads import gradient_upload, network_for

DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
ATTACKS = ("gauss-newton", "ig")
COLUMNS = (
    *("kind", "model", "attack", "dtype", "accuracy", "points", "points_ci95", "bytes", "error"),
    *("images", "psnr", "psnr_low", "psnr_high"),
)


class Rounding(Clients):
    """Clients that round their updates to ``dtype``; `bytes` counts what they sent."""

    dtype: Dtype = "float32"
    bytes = 0

    def answer(self, client: int) -> Contribution:
        """Return what one client sends."""
        made = super().answer(client)
        update, _ = rounded(made.update, self.dtype)
        self.bytes += sum(len(array.data) for array in to_packed(update).values())
        return replace(made, update=update)


def main() -> None:
    """Train and attack; print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--images", type=int, default=8)
    arguments.add_argument("--iterations", type=int, default=300)
    arguments.add_argument("--only", choices=("accuracy", "attack"))
    options = parse(arguments)
    rows = accuracy_rows(options.seeds) if options.only != "attack" else []
    rows += attack_rows(options) if options.only != "accuracy" else []
    emit(rows, COLUMNS, as_json=options.json)


def accuracy_rows(seeds: int) -> list[Row]:
    """Return a row a dtype."""
    by_dtype: dict[str, list[float]] = {}
    rows = []
    for dtype in DTYPES:
        found = [trained(dtype, seed) for seed in range(seeds)]
        by_dtype[dtype] = [accuracy for accuracy, _ in found]
        pairs = zip(by_dtype[dtype], by_dtype["float32"], strict=True)
        points, half = interval([100 * (a - b) for a, b in pairs])
        rows.append(
            {
                "kind": "accuracy",
                "model": "lenet",
                "dtype": dtype,
                "seeds": seeds,
                "accuracy": statistics.fmean(by_dtype[dtype]),
                "accuracies": by_dtype[dtype],
                "points": points,
                "points_ci95": half,
                "bytes": found[0][1],
            }
        )
    return rows


def trained(dtype: Dtype, seed: int) -> tuple[float, int]:
    """Return the accuracy of one federation, and the bytes of one round's updates."""
    content = {
        "seed": seed,
        "model": {"name": "lenet", "activation": "relu"},
        **SETTINGS["lenet", "relu"],
    }
    config = build_config(content)
    clients = Rounding(config)
    clients.dtype = dtype
    images, labels = test_data(config.data)
    judged = []
    for number in range(1, config.rounds + 1):
        clients.round()
        if number > config.rounds - JUDGED:
            (model,) = clients.models()
            inputs = clients.spec.normalise(images)
            judged.append(float(correct(model, inputs, labels).mean()))
    note(f"{dtype}, seed {seed}: {statistics.fmean(judged):.4f}")
    return statistics.fmean(judged), clients.bytes // config.rounds


def attack_rows(options: argparse.Namespace) -> list[Row]:
    """Return a row an attack and dtype."""
    config = build_config({"clients": 1, "data": {"image_size": 16}})
    spec, data = data_spec(config.data), client_data(config, 0)
    model = network_for(spec, "lenet-strided", 0)
    rows = []
    for attack in ATTACKS:
        for dtype in DTYPES:
            sent, errors = [], []
            for index in range(options.images):
                picked = slice(index, index + 1)
                seen = gradient_upload(
                    model,
                    data.images[picked],
                    data.labels[picked],
                    spec=spec,
                    client=f"client-{index}",
                    model="lenet-strided",
                )
                sent.append(as_sent(seen, dtype))
                change = flatten(sent[-1].update) - flatten(seen.update)
                errors.append(float(change.norm() / flatten(seen.update).norm()))
            scores = attacked(sent, data.images, attack, options.iterations)
            note(f"{attack}, {dtype}: {statistics.fmean(scores):.1f} dB")
            rows.append(
                {
                    "kind": "attack",
                    "model": "lenet-strided",
                    "attack": attack,
                    "dtype": dtype,
                    "images": len(scores),
                    "error": max(errors),
                    **columns("psnr", scores),
                }
            )
    return rows


def as_sent(seen: Observation, dtype: Dtype) -> Observation:
    """Return an observation whose client rounded, as it is read from a capture."""
    update, _ = rounded(seen.update, dtype)
    loss = sent_rounded(update, seen.parameters, dtype)
    return replace(seen, update=widened(update, loss), rounded=loss)


def attacked(
    sent: Sequence[Observation], images: torch.Tensor, attack: str, iterations: int
) -> list[float]:
    """Return the PSNR of every observation; one that was not attacked ends the experiment."""
    budget = Budget(iterations=None if attack == "gauss-newton" else iterations)
    results = reconstruct(sent, attack, budget=budget, device="cpu")
    scores = []
    for index, found in enumerate(results):
        assert isinstance(found, Reconstruction), found
        scores.append(float(psnr(found.images, images[index : index + 1]).mean()))
    return scores


if __name__ == "__main__":
    main()
