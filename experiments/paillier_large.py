"""Encryption and decryption of a large model by a key holder: processor and wall time, memory.

    python -m experiments.paillier_large [--values 11200000] [--clients 3] [--threads 1] [--json]

``decrypt`` is of a weighted sum, whose randomness key holders know. ``slow`` is the
same sum decrypted by exponentiation, on a tenth of its ciphertexts. ``MB`` is the most that the
process has had in memory by then; what it had before it made any value is ``MB before``. Wall time
goes by what else the machine does: ``load`` is its load average over the last minute.
"""

import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from bract.paillier import Layout, decrypt, encrypt, generate_keypair, weighted_sum
from bract.paillier.cipher import CipherVector
from experiments.harness.command import emit, note, parser

COLUMNS = ["step", "values", "bits", "threads", "seconds", "cpu_seconds", "cpu_us", "MB", "load"]
CLIP = 0.1


def peak() -> float:
    """Return the most megabytes that this process has had in memory."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def main() -> None:
    """Measure, then print the table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--values", type=int, default=11_200_000)
    arguments.add_argument("--clients", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--bits", type=int, default=2048)
    options = arguments.parse_args()
    key = generate_keypair(options.bits)
    layout = Layout(options.values, CLIP, 16, 31, options.bits)
    rows: list[dict[str, Any]] = []
    before = peak()

    def timed(step: str, work: Callable[[], Any], values: int) -> Any:
        wall, used = time.perf_counter(), time.process_time()
        result = work()
        wall, used = time.perf_counter() - wall, time.process_time() - used
        rows.append(
            {
                "step": step,
                "values": values,
                "bits": options.bits,
                "threads": options.threads,
                "seconds": round(wall, 2),
                "cpu_seconds": round(used, 2),
                "cpu_us": round(used / values * 1e6, 3),
                "MB": peak(),
                "MB before": before,
                "load": round(os.getloadavg()[0], 1),
            }
        )
        note(f"{step}: {used:.1f} s of processors, {wall:.1f} s, {peak():.0f} MB")
        return result

    generator = np.random.default_rng(0)
    threads, weights = options.threads, [7, 11, 13][: options.clients]
    first = generator.standard_normal(options.values, dtype=np.float32) * np.float32(0.03)
    (vector, _) = timed(
        "encrypt", lambda: encrypt(key, first, layout, threads=threads), options.values
    )
    small = replace(layout, length=max(1, options.values // 10))
    total = weighted_sum(key.public, [vector], [weights[0]])
    mean = timed("decrypt, one client", lambda: decrypt(key, total, threads=threads), layout.length)
    check(mean, first, layout)
    parts: list[CipherVector] = [
        encrypt(key, first[: small.length], small, threads=threads)[0] for _ in weights
    ]
    summed = timed(
        f"sum, {len(weights)} clients",
        lambda: weighted_sum(key.public, parts, weights, threads=threads),
        small.length,
    )
    fast = timed(
        f"decrypt, {len(weights)} clients",
        lambda: decrypt(key, summed, threads=threads),
        small.length,
    )
    slow = timed(
        f"slow, {len(weights)} clients",
        lambda: decrypt(key, replace(summed, parts=()), threads=threads),
        small.length,
    )
    if not np.array_equal(fast, slow):
        raise SystemExit("the two ways of decrypting differ")
    for row in rows:
        row["bytes_per_value"] = round(vector.data.nbytes / options.values, 3)
    emit(rows, [*COLUMNS, "bytes_per_value"], as_json=options.json)


def check(mean: Any, values: Any, layout: Layout) -> None:
    """Stop where an aggregate is wrong: a time for a wrong answer is worthless."""
    error = float(np.abs(mean - np.clip(values, -CLIP, CLIP)).max())
    if error > layout.fixed_point.bound * 1.01:
        raise SystemExit(f"wrong aggregate: off by {error}, allowed {layout.fixed_point.bound}")


if __name__ == "__main__":
    main()
