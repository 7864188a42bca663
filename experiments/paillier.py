"""Encrypted aggregation, time and bytes for each value, against one value per ciphertext in `phe`.

    python -m experiments.paillier [--bits 2048 3072] [--values 61706] [--threads 1] [--json]

Every implementation of one key size and `phe` are timed in turn in each repetition, and the ratio
is the median over the repetitions. With one thread the figures are processor time, which other
programs on the machine do not disturb. TenSEAL and sf-heu are measured where they are installed;
`sf-heu` encrypts one value per ciphertext like `phe`, which is how its Python interface is used.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray

from bract.paillier import (
    Layout,
    PrivateKey,
    PublicKey,
    combine,
    deal,
    decrypt,
    encrypt,
    generate_keypair,
    partial_decrypt,
    weighted_sum,
)
from bract.paillier.stripping import (
    check_powers,
    combine_powers,
    encrypt_with_powers,
    strip_messages,
)
from experiments.harness.command import emit, note, parser
from experiments.harness.result import device_name

CLIENTS = 3
WEIGHTS = [7, 11, 13]
CLIP = 0.1
BITS_A_VALUE = 16
MODELS = {"LeNet": 61_706, "ResNet-20": 272_474}

COLUMNS = (
    "bits",
    "implementation",
    "encrypt_us",
    "encrypt_ratio",
    "sum_us",
    "sum_ratio",
    "decrypt_us",
    "decrypt_ratio",
    "bytes_per_value",
)

Values = list[NDArray[np.float64]]
Run = Callable[[Values], "Timing"]


@dataclass
class Timing:
    """Microseconds a value: one client's encryption, the server's sum, one client's decryption."""

    encrypt_us: float
    sum_us: float
    decrypt_us: float
    bytes_per_value: float

    def per_value(self, count: int) -> "Timing":
        """Return the totals of ``count`` values divided by it."""
        return Timing(
            self.encrypt_us / count,
            self.sum_us / count,
            self.decrypt_us / count,
            self.bytes_per_value / count,
        )


@dataclass
class Implementation:
    """One row: what to run, on how many values, and what came out."""

    name: str
    run: Run
    values: int
    timings: list[Timing] = field(default_factory=list)


def main() -> None:
    """Measure, then print a table or JSON."""
    arguments = parser(__doc__)
    arguments.add_argument("--bits", type=int, nargs="+", default=[2048, 3072])
    arguments.add_argument("--values", type=int, default=MODELS["LeNet"], help="values a vector")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--phe-values", type=int, default=24, help="values for one-by-one peers")
    options = arguments.parse_args()
    if options.threads > 1:
        Clock.source = staticmethod(time.perf_counter)
    rows = [row for bits in options.bits for row in measure(bits, options)]
    if not options.json:
        print(f"{device_name()}, {options.threads} thread(s), {options.repeats} repetitions\n")
    emit(rows, COLUMNS, as_json=options.json, more_versions={"gmp": gmpy2.mp_version()})
    if not options.json:
        show_models(rows, options.bits)


def measure(bits: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one key size, `phe` first."""
    note(f"{bits} bits: generating keys")
    implementations = list(contenders(bits, options))
    rng = np.random.default_rng(0)
    values = list(rng.normal(0, CLIP / 3, (CLIENTS, options.values)))
    for repeat in range(options.repeats):
        for implementation in implementations:
            note(f"{bits} bits, repetition {repeat + 1}: {implementation.name}")
            sample = [row[: implementation.values] for row in values]
            implementation.timings.append(implementation.run(sample))
    baseline = implementations[0].timings
    return [
        {
            "implementation": implementation.name,
            "bits": bits,
            "encrypt_us": median(t.encrypt_us for t in implementation.timings),
            "sum_us": median(t.sum_us for t in implementation.timings),
            "decrypt_us": median(t.decrypt_us for t in implementation.timings),
            "encrypt_ratio": ratio(baseline, implementation.timings, "encrypt_us"),
            "sum_ratio": ratio(baseline, implementation.timings, "sum_us"),
            "decrypt_ratio": ratio(baseline, implementation.timings, "decrypt_us"),
            "bytes_per_value": round(implementation.timings[0].bytes_per_value, 3),
        }
        for implementation in implementations
    ]


def contenders(bits: int, options: argparse.Namespace) -> Iterator[Implementation]:
    """Yield what is compared at one key size, `phe` first."""
    djn = generate_keypair(bits)
    standard = generate_keypair(bits, randomness="standard")
    threads, size = options.threads, options.values
    few = min(size, 1600)

    def ours(encryptor: PublicKey | PrivateKey, key: PrivateKey, degree: int = 1) -> Run:
        return lambda values: packed(encryptor, key, values, degree, threads)

    yield Implementation("phe", lambda v: phe_one_by_one(djn, v), options.phe_values)
    yield Implementation("bract djn", ours(djn, djn), size)
    yield Implementation("bract djn, degree 2", ours(djn, djn, 2), size)
    yield Implementation("bract djn, public key", ours(djn.public, djn), size)
    yield Implementation("bract standard", ours(standard, standard), size)
    yield Implementation("bract standard, public key", ours(standard.public, standard), few)
    shares = deal(2, CLIENTS, bits)
    for whose, count in (("clients", size), ("server", few)):
        yield Implementation(
            f"bract threshold 2 of 3, powers of the {whose}",
            partial(by_threshold, shares, threads=threads, sent=whose == "clients"),
            count,
        )
    if importlib.util.find_spec("tenseal"):
        yield Implementation("tenseal ckks 8192", tenseal_ckks(), size)
    if importlib.util.find_spec("heu"):
        for name in ("zpaillier", "ou"):
            yield Implementation(f"sf-heu {name}", heu(name, bits), options.phe_values * 16)


def packed(
    encryptor: PublicKey | PrivateKey, key: PrivateKey, values: Values, degree: int, threads: int
) -> Timing:
    """Time packed ciphertexts."""
    layout = plan(values, key.public.bits, degree)
    encrypt(encryptor, np.zeros(1), plan([np.zeros(1)], key.public.bits, degree))
    clock = Clock()
    vectors = [encrypt(encryptor, row, layout, threads=threads)[0] for row in values]
    encryption = clock.lap() / CLIENTS
    total = weighted_sum(key.public, vectors, WEIGHTS, threads=threads)
    summation = clock.lap()
    mean = decrypt(key, total, threads=threads)
    decryption = clock.lap()
    check(mean, values, layout.fixed_point.bound)
    return Timing(encryption, summation, decryption, total.data.nbytes).per_value(layout.length)


def by_threshold(shares: list[Any], values: Values, *, threads: int, sent: bool) -> Timing:
    """Time public-key encryption, and one client's share and combination as its decryption.

    ``sent``: clients send the powers of their ciphertexts, and the server multiplies and checks
    them; else it computes those of the sum.
    """
    public = shares[0].public
    layout = plan(values, public.bits, 1)
    encrypt_with_powers(public, np.zeros(1), plan([np.zeros(1)], public.bits, 1))
    clock = Clock()
    powers: list[Any] = []
    if sent:
        found = [encrypt_with_powers(public, row, layout, threads=threads) for row in values]
        vectors, powers = [v for v, _, _ in found], [p for _, p, _ in found]
    else:
        vectors = [encrypt(public, row, layout, threads=threads)[0] for row in values]
    encryption = clock.lap() / CLIENTS
    total = weighted_sum(public, vectors, WEIGHTS, threads=threads)
    if sent:
        stripped = combine_powers(public, layout, powers, WEIGHTS, threads=threads)
        check_powers(public, total, stripped, threads=threads)
    else:
        stripped = strip_messages(public, total, threads=threads)
    summation = clock.lap()
    own = partial_decrypt(shares[0], total, stripped, threads=threads)
    decryption = clock.lap()
    other = partial_decrypt(shares[1], total, stripped, threads=threads)
    clock.lap()
    mean = combine(shares[2], total, [own, other], threads=threads)
    decryption += clock.lap()
    check(mean, values, layout.fixed_point.bound)
    size = total.data.nbytes * (2 if sent else 1)
    return Timing(encryption, summation, decryption, size).per_value(layout.length)


def phe_one_by_one(key: PrivateKey, values: Values) -> Timing:
    """Time one `phe` ciphertext a value."""
    private, public = key.to_phe(), key.public.to_phe()
    clock = Clock()
    vectors = [[public.encrypt(float(v)) for v in row] for row in values]
    encryption = clock.lap() / CLIENTS
    sums = [
        sum((c * w for c, w in zip(rest, WEIGHTS[1:], strict=True)), start=first * WEIGHTS[0])
        for first, *rest in zip(*vectors, strict=True)
    ]
    summation = clock.lap()
    mean = np.array([private.decrypt(c) for c in sums]) / sum(WEIGHTS)
    decryption = clock.lap()
    check(mean, values, 1e-9, clip=False)
    size = 2 * key.public.bits // 8 * len(sums)
    return Timing(encryption, summation, decryption, size).per_value(len(sums))


def tenseal_ckks() -> Run:
    """Return a run with TenSEAL's CKKS, parameters for one multiplication by a weight."""
    import tenseal

    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=8192, coeff_mod_bit_sizes=[60, 40, 40]
    )
    context.global_scale = 2**40
    slots = 4096

    def run(values: Values) -> Timing:
        length = values[0].size
        clock = Clock()
        vectors = [
            [tenseal.ckks_vector(context, row[k : k + slots]) for k in range(0, length, slots)]
            for row in values
        ]
        encryption = clock.lap() / CLIENTS
        sums = []
        for column in zip(*vectors, strict=True):
            total = column[0] * WEIGHTS[0]
            for part, weight in zip(column[1:], WEIGHTS[1:], strict=True):
                total += part * weight
            sums.append(total)
        summation = clock.lap()
        mean = np.concatenate([c.decrypt() for c in sums]) / sum(WEIGHTS)
        decryption = clock.lap()
        check(mean, values, 1e-4, clip=False)
        size = sum(len(c.serialize()) for c in vectors[0])
        return Timing(encryption, summation, decryption, size).per_value(length)

    return run


def heu(scheme: str, bits: int) -> Run:
    """Return a run with one sf-heu ciphertext a value."""
    from heu import phe as heu_phe

    kit = heu_phe.setup(
        {"zpaillier": heu_phe.SchemaType.ZPaillier, "ou": heu_phe.SchemaType.OU}[scheme], bits
    )
    levels = 2 ** (BITS_A_VALUE - 1) - 1
    encryptor, evaluator, decryptor = kit.encryptor(), kit.evaluator(), kit.decryptor()

    def run(values: Values) -> Timing:
        codes = [np.rint(np.clip(row, -CLIP, CLIP) / CLIP * levels).astype(int) for row in values]
        plain = [[kit.plaintext(int(c)) for c in row] for row in codes]
        weights = [kit.plaintext(w) for w in WEIGHTS]
        clock = Clock()
        vectors = [[encryptor.encrypt(c) for c in row] for row in plain]
        encryption = clock.lap() / CLIENTS
        sums = []
        for column in zip(*vectors, strict=True):
            total = evaluator.mul(column[0], weights[0])
            for part, weight in zip(column[1:], weights[1:], strict=True):
                evaluator.add_inplace(total, evaluator.mul(part, weight))
            sums.append(total)
        summation = clock.lap()
        decrypted = [int(decryptor.decrypt(c)) for c in sums]
        decryption = clock.lap()
        mean = np.array(decrypted) / sum(WEIGHTS) * CLIP / levels
        check(mean, values, CLIP / levels)
        size = sum(len(c.serialize()) for c in vectors[0])
        return Timing(encryption, summation, decryption, size).per_value(len(sums))

    return run


def show_models(rows: list[dict[str, Any]], sizes: list[int]) -> None:
    """Print what a round costs a client, by model."""
    print(
        "\nper value, three clients; ratio: how many times faster than phe, one value a ciphertext"
    )
    for size in sizes:
        row = next(r for r in rows if r["bits"] == size and r["implementation"] == "bract djn")
        for model, count in MODELS.items():
            added = count * (row["encrypt_us"] + row["decrypt_us"]) / 1e6
            print(f"{model} ({count} values), {size} bits: {added:.2f} s added for each client")


class Clock:
    """Microseconds between laps: of processor time, or of real time with several threads."""

    source = staticmethod(time.process_time)

    def __init__(self) -> None:
        self._last = self.source()

    def lap(self) -> float:
        """Return the time since the last lap."""
        now = self.source()
        passed, self._last = now - self._last, now
        return passed * 1e6


def plan(values: Values, bits: int, degree: int) -> Layout:
    """Return the layout that all clients share."""
    return Layout(values[0].size, CLIP, BITS_A_VALUE, sum(WEIGHTS), bits, degree)


def check(mean: NDArray[np.float64], values: Values, bound: float, *, clip: bool = True) -> None:
    """Stop where an aggregate is wrong: a time for a wrong answer is worthless."""
    kept = np.clip(values, -CLIP, CLIP) if clip else np.array(values)
    error = np.abs(mean[: kept.shape[1]] - np.average(kept, axis=0, weights=WEIGHTS)).max()
    if error > bound:
        raise SystemExit(f"wrong aggregate: off by {error}, allowed {bound}")


def ratio(baseline: list[Timing], timings: list[Timing], name: str) -> float:
    """Return the median over the repetitions of how many times faster than the baseline."""
    pairs = zip(baseline, timings, strict=True)
    return median(getattr(slow, name) / getattr(fast, name) for slow, fast in pairs)


def median(numbers: Iterable[float]) -> float:
    """Return the rounded median."""
    return round(statistics.median(numbers), 3)


if __name__ == "__main__":
    main()
