"""What a witness costs a training: seconds of a step with and without it, in turn.

    OMP_NUM_THREADS=1 python -m experiments.witness_cost [--repeats 5] [--json]

A ResNet-18 (torchvision's, 10 classes) takes SGD steps with momentum on batches of colour images of
32 pixels, in a plain loop over a loader. Rounds of ``--steps`` steps with and without
`bract.client.witness` alternate; ``ratio`` is the median of the ratios of neighbours, in processor
time of the process.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from flwr.app import Context, RecordDict
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from bract.client import witness
from experiments.harness.command import emit, parse, parser

COLUMNS = ("batch", "steps", "repeats", "seconds_plain", "seconds_witnessed", "ratio", "most")


def trained(batches: DataLoader[Any], folder: Path | None) -> float:
    """Train one round; return its processor time in seconds."""
    torch.manual_seed(0)
    net = resnet18(num_classes=10).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    context = Context(1, 7, {}, RecordDict(), {})
    begun = time.process_time()
    with witness(net, None, context, folder):
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
    return time.process_time() - begun


def main() -> None:
    """Measure both in turn."""
    arguments = parser(__doc__)
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--repeats", type=int, default=5)
    options = parse(arguments)
    count = options.batch * options.steps
    drawn = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.rand(count, 3, 32, 32, generator=drawn),
        torch.randint(10, (count,), generator=drawn),
    )
    batches = DataLoader(data, options.batch)
    trained(batches, None)
    pairs = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            pairs.append((trained(batches, None), trained(batches, Path(folder))))
    ratios = [witnessed / plain for plain, witnessed in pairs]
    row = {
        "batch": options.batch,
        "steps": options.steps,
        "repeats": options.repeats,
        "seconds_plain": round(median(plain for plain, _ in pairs) / options.steps, 4),
        "seconds_witnessed": round(median(seen for _, seen in pairs) / options.steps, 4),
        "ratio": round(median(ratios), 4),
        "most": round(max(ratios), 4),
    }
    emit([row], COLUMNS, as_json=options.json)


if __name__ == "__main__":
    main()
