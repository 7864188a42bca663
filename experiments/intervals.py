"""What 95 % intervals of a mean cover when few clients are drawn: Student's t and others.

    python -m experiments.intervals [--samples 4000] [--json]

Each row draws ``samples`` sets of ``clients`` values from one distribution and counts the intervals
that hold its mean: `mean_interval` (t), the percentile and BCa bootstraps, and `share_interval`,
which takes the score's range as known. ``width`` is the median width of t's as a share of that
range. Distributions are stand-ins for scores: PSNR of 30 dB with a standard deviation of 5, of
which a share are exact copies (100 dB), beta distributions for SSIM, and images that leaked or not.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from bract.audit.intervals import mean_interval, share_interval
from experiments.harness.command import emit, parser

Array = NDArray[np.float64]
CLIENTS = (2, 3, 4, 8, 16, 30)
RESAMPLES = 1000


def capped(share: float) -> Callable[[np.random.Generator, tuple[int, int]], Array]:
    """PSNR of which a share are exact copies."""
    return lambda rng, size: np.where(rng.random(size) < share, 100.0, rng.normal(30.0, 5.0, size))


DISTRIBUTIONS: dict[str, tuple[Callable[..., Array], float, tuple[float, float]]] = {
    "PSNR, normal": (lambda rng, size: rng.normal(30.0, 5.0, size), 30.0, (0.0, 100.0)),
    "PSNR, 10 % at the cap": (capped(0.1), 37.0, (0.0, 100.0)),
    "PSNR, 30 % at the cap": (capped(0.3), 51.0, (0.0, 100.0)),
    "PSNR, 50 % at the cap": (capped(0.5), 65.0, (0.0, 100.0)),
    "SSIM, beta(8, 2)": (lambda rng, size: rng.beta(8, 2, size), 0.8, (-1.0, 1.0)),
    "SSIM, beta(2, 0.5)": (lambda rng, size: rng.beta(2, 0.5, size), 0.8, (-1.0, 1.0)),
    "SSIM, beta(0.8, 0.8)": (lambda rng, size: rng.beta(0.8, 0.8, size), 0.5, (-1.0, 1.0)),
    "MSE, log-normal(0.6)": (
        lambda rng, size: 0.02 * rng.lognormal(0.0, 0.6, size),
        0.02 * float(np.exp(0.18)),
        (0.0, 1.0),
    ),
    "share, 50 %": (lambda rng, size: (rng.random(size) < 0.5) * 1.0, 0.5, (0.0, 1.0)),
    "share, 90 %": (lambda rng, size: (rng.random(size) < 0.9) * 1.0, 0.9, (0.0, 1.0)),
}


def main() -> None:
    """Count how often each interval holds the mean."""
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, default=4000)
    options = arguments.parse_args()
    rows = []
    for name, (draw, mean, bounds) in DISTRIBUTIONS.items():
        for clients in CLIENTS:
            rng = np.random.default_rng([clients, len(name)])
            drawn = draw(rng, (options.samples, clients))
            rows.append(row(name, drawn, mean, bounds, rng))
    columns = ("scores", "clients", "t", "percentile", "bca", "bounded", "width")
    emit(rows, columns, as_json=options.json)


def row(
    name: str, drawn: Array, mean: float, bounds: tuple[float, float], rng: np.random.Generator
) -> dict[str, Any]:
    """Cover one mean by every interval; a sample without an interval does not hold it."""
    low, high = bounds
    found = [mean_interval(each.tolist(), bounds=bounds) for each in drawn]
    few = drawn[:500]
    scaled = (few - low) / (high - low)
    ends = [share_interval(each.clip(0.0, 1.0).tolist()) for each in scaled]
    percentile, bca = bootstraps(drawn[:1000], rng)
    return {
        "scores": name,
        "clients": drawn.shape[1],
        "samples": len(drawn),
        "t": held(found, mean),
        "percentile": held(percentile, mean),
        "bca": held(bca, mean),
        "bounded": held(ends, (mean - low) / (high - low)),
        "width": float(np.median([f[1] - f[0] for f in found if f is not None])) / (high - low),
    }


def held(found: Any, mean: float) -> float:
    """Share of the intervals that hold the mean, up to rounding."""
    return float(np.mean([f is not None and f[0] - 1e-9 <= mean <= f[1] + 1e-9 for f in found]))


def bootstraps(drawn: Array, rng: np.random.Generator) -> tuple[Any, Any]:
    """Return percentile and BCa intervals of each row (Efron 1987), resampled alike."""
    count = drawn.shape[1]
    means = np.sort(drawn[:, rng.integers(0, count, (RESAMPLES, count))].mean(axis=2), axis=1)
    own = drawn.mean(axis=1)
    below = (means < own[:, None]).mean(1) / 2 + (means <= own[:, None]).mean(1) / 2
    bias = norm.ppf(below.clip(1e-3, 1 - 1e-3))
    apart = drawn - own[:, None]
    spread = np.square(apart).sum(1).clip(1e-30)
    skew = (apart**3).sum(1) / (6 * spread**1.5)
    ends = []
    for z in norm.ppf([0.025, 0.975]):
        at = norm.cdf(bias + (bias + z) / (1 - skew * (bias + z)))
        index = (at * RESAMPLES).astype(int).clip(0, RESAMPLES - 1)
        ends.append(means[np.arange(len(means)), index])
    percentile = np.quantile(means, [0.025, 0.975], axis=1).T
    return percentile, np.stack(ends, axis=1)


if __name__ == "__main__":
    main()
