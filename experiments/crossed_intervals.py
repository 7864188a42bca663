"""What intervals over images and networks cover, and how often the test of equivalence errs.

    python -m experiments.crossed_intervals [--samples 2000] [--json]

A score is an effect of its image, one of its network and one of the pair, normal, with the standard
deviations of a row; designs are those of the audit: pictures (of which crops return) by networks.
``clients`` is the t interval that takes every upload for independent, ``crossed`` that of
`experiments.harness.crossed`. ``alike`` is the share of samples that are called alike where the
true difference is exactly the margin (at most 0.05 is right), ``alike_at_0`` where there is none.
"""

from typing import Any

import numpy as np

from bract.audit.intervals import mean_interval
from experiments.harness.command import emit, parser
from experiments.harness.crossed import EQUIVALENCE_DB, crossed_interval, equivalence

COLUMNS = (
    *("design", "uploads", "pictures", "networks", "image", "network", "pair"),
    *("clients", "crossed", "alike", "alike_at_0"),
)

DESIGNS: dict[str, tuple[int, int, int, bool]] = {
    "in step, as before": (8, 4, 4, False),
    "digits": (8, 8, 8, True),
    "digits, two turns": (16, 16, 8, True),
    "photographs": (8, 4, 8, True),
    "photographs, two turns": (16, 4, 8, True),
}
"""Uploads, pictures, networks, and whether a second turn is shifted."""

SPREADS = ((3.0, 1.0, 1.0), (1.0, 3.0, 1.0), (3.0, 3.0, 1.0), (0.5, 0.5, 3.0))
"""Standard deviations over images, networks and pairs, dB."""


def main() -> None:
    """Simulate every design under every spread."""
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, default=2000)
    options = arguments.parse_args()
    rows = [row(name, spread, options.samples) for name in DESIGNS for spread in SPREADS]
    emit(rows, COLUMNS, as_json=options.json)


def row(design: str, spread: tuple[float, float, float], samples: int) -> dict[str, Any]:
    """Count how often the intervals of one design hold the mean, and the test errs."""
    uploads, pictures, networks, shifted = DESIGNS[design]
    images = [client % pictures for client in range(uploads)]
    nets = [
        (client + (client // networks if shifted else 0)) % networks for client in range(uploads)
    ]
    rng = np.random.default_rng([uploads, pictures, networks, *(int(10 * s) for s in spread)])
    counts = {"clients": 0, "crossed": 0, "alike": 0, "alike_at_0": 0}
    for _ in range(samples):
        of_image = rng.normal(0.0, spread[0], pictures)[images]
        of_network = rng.normal(0.0, spread[1], networks)[nets]
        values = of_image + of_network + rng.normal(0.0, spread[2], uploads)
        for name, found in (
            ("clients", mean_interval(values.tolist())),
            ("crossed", crossed_interval(values.tolist(), images, nets)),
        ):
            counts[name] += found is not None and found[0] <= 0.0 <= found[1]
        at_margin = (values + EQUIVALENCE_DB).tolist()
        counts["alike"] += equivalence(at_margin, images, nets) == "alike"
        counts["alike_at_0"] += equivalence(values.tolist(), images, nets) == "alike"
    return {
        "design": design,
        "uploads": uploads,
        "pictures": pictures,
        "networks": networks,
        "image": spread[0],
        "network": spread[1],
        "pair": spread[2],
        "samples": samples,
        **{name: count / samples for name, count in counts.items()},
    }


if __name__ == "__main__":
    main()
