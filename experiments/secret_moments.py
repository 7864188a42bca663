"""How much of what an upload of AdaDefense with secret updates tells is used by its mean.

    python -m experiments.secret_moments [--json]

Fisher's information on a coordinate of the gradient, in units of its tensor's root mean square, in
one first upload: of the upload's law, estimated from a histogram, and of the difference from its
mean, ``(dT/dx)^2 / var``, which the adaptive attacker matches. ``used`` is the second over the
first: an attacker who used the whole law could do with so much less.
"""

from typing import Any

import numpy as np
import torch

from bract.client.defenses import AdaDefense, ProtectContext
from experiments.harness.command import emit, parser
from experiments.harness.result import Row

COLUMNS = ("secret_updates", "size", "law", "mean", "used")
SECRETS = (1, 2, 8)
SIZES = (0.3, 1.0)
BINS, FEWEST, STEP = 120, 2e-4, 0.1
"""Bins of the histogram, the share below which one is left out, and the step in x, as a share."""


def main() -> None:
    """Print a row for each number of secret updates and size of a coordinate."""
    options = parser(__doc__).parse_args()
    rows = [row(count, size) for count in SECRETS for size in SIZES]
    emit(rows, COLUMNS, as_json=options.json)


def row(count: int, size: float, samples: int = 200_000) -> Row:
    """Return both kinds of information at one size."""
    below, at, above = (uploads(count, size * f, samples) for f in (1 - STEP, 1.0, 1 + STEP))
    law, mean = informations(below, at, above, 2.0 * STEP * size)
    return {"secret_updates": count, "size": size, "law": law, "mean": mean, "used": mean / law}


def uploads(count: int, size: float, samples: int) -> Any:
    """Return first uploads of one coordinate under many secrets, as the client makes them.

    As many other coordinates bring the tensor's root mean square to 1.
    """
    x = torch.full((samples,), size)
    update = {"w": torch.stack([x, torch.full_like(x, (2.0 - size**2) ** 0.5)])}
    defense = AdaDefense(alpha=1.0, secret_updates=count)
    sent = defense.protect(update, {}, ProtectContext(seed=1))["w"][0]
    return sent.double().numpy()


def informations(below: Any, at: Any, above: Any, width: float) -> tuple[float, float]:
    """Return the information of a law and of its mean, from samples around a point."""
    together = np.concatenate([below, at, above])
    edges = np.linspace(together.min(), together.max(), BINS + 1)
    left, here, right = (np.histogram(s, edges)[0] / len(s) for s in (below, at, above))
    kept = here > FEWEST
    law = float((((right - left)[kept] / width) ** 2 / here[kept]).sum())
    mean = float(((above.mean() - below.mean()) / width) ** 2 / at.var())
    return law, mean


if __name__ == "__main__":
    main()
