import copy
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from bract.crypto import SecretStream, randomness

SEEDS = (5, 5 + 2**31, 5 + 2**32, 5 + 2**60, 5 + 2**64, 5 + 2**255, -5)


def stream(seed: Any = 0) -> Any:
    return SecretStream.derived(seed, "test")


@pytest.mark.parametrize("kind", ["normal", "uniform", "discrete_gaussian", "discrete_laplace"])
def test_every_bit_of_a_seed_matters(kind: Any) -> None:
    arguments = ((8,),) if kind in ("normal", "uniform") else (8, 2.0**24)
    drawn = {tuple(getattr(stream(seed), kind)(*arguments).tolist()) for seed in SEEDS}
    assert len(drawn) == len(SEEDS)
    assert getattr(stream(5), kind)(*arguments).tolist() in map(list, drawn)


def test_torch_takes_the_low_bits_only_so_nothing_secret_may_come_from_it() -> None:
    drawn = {
        tuple(torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist())
        for seed in (5, 5 + 2**32, 5 + 2**60)
    }
    assert len(drawn) == 1


def test_purposes_are_apart_however_their_parts_are_cut() -> None:
    purposes = [(1, "noise"), (2, "noise"), (1, "key"), ("1noise",), (11, "noise"), (1, 1, "noise")]
    keys = {bytes(SecretStream.derived(7, *purpose).bytes(32)) for purpose in purposes}
    assert len(keys) == len(purposes)


def test_the_keystream_is_rfc_8439s() -> None:
    # Appendix A.1, test vector 1: a key of zeros, nonce 0, counter 0. The draw's number is its
    # nonce, so the first draw starts there.
    expected = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    assert bytes(SecretStream(bytes(32)).bytes(32)).hex() == expected


def test_fresh_streams_differ_and_draws_never_repeat() -> None:
    one = SecretStream.fresh()
    blocks = [bytes(s.bytes(64)) for s in (one, one, SecretStream.fresh())]
    assert len(set(blocks)) == 3


def test_a_copy_goes_on_where_the_stream_is_and_nothing_writes_it() -> None:
    one = stream()
    other = copy.deepcopy({"held": one})["held"]
    assert bytes(one.bytes(16)) != bytes(other.bytes(16))
    with pytest.raises(TypeError, match="neither stored nor sent"):
        pickle.dumps(one)
    assert one._key.hex() not in repr(one)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes, expected 32"):
        SecretStream(bytes(16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_uniform_numbers_are_uniform_and_below_one(dtype: Any) -> None:
    drawn = stream().uniform((100, 200), dtype=dtype)
    assert drawn.shape == (100, 200) and drawn.dtype == dtype
    assert float(drawn.min()) >= 0.0 and float(drawn.max()) < 1.0
    # Float16 has 2^11 steps only: shift them by half a step.
    spread = drawn.double().flatten().numpy() + torch.finfo(dtype).eps / 4
    assert stats.kstest(spread, "uniform").pvalue > 1e-3
    shifted = stream().uniform((20_000,), -3.0, 5.0)
    assert stats.kstest(shifted.numpy(), stats.uniform(-3, 8).cdf).pvalue > 1e-3


def test_normal_numbers_are_normal() -> None:
    drawn = stream().normal((50_000,), torch.float64)
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-3
    assert torch.equal(drawn * 2**24, (drawn * 2**24).round())
    assert stream().normal((2, 3)).dtype == torch.float32


def test_fine_grids_give_the_continuous_distributions() -> None:
    gaussian = stream(1).discrete_gaussian(50_000, 1.3 * 2**24).double() / (1.3 * 2**24)
    assert stats.kstest(gaussian.numpy(), "norm").pvalue > 1e-3
    laplace = stream(2).discrete_laplace(50_000, 1.3 * 2**24).double() / (1.3 * 2**24)
    assert stats.kstest(laplace.numpy(), "laplace").pvalue > 1e-3


def chi_square(drawn: Any, pmf: Any, reach: Any) -> Any:
    inside = np.arange(-reach, reach + 1)
    expected = np.array([pmf(x) for x in inside])
    counted = np.array([(drawn == x).sum() for x in inside])
    expected = np.append(expected, 1 - expected.sum()) * len(drawn)
    counted = np.append(counted, len(drawn) - counted.sum())
    keep = expected > 5
    expected, counted = (np.append(v[keep], v[~keep].sum() + 1e-9) for v in (expected, counted))
    return stats.chisquare(counted, expected, sum_check=False).pvalue


@pytest.mark.parametrize("sigma", [0.3, 0.75, 1.0, 2.5, 7.9, 8.0, 20.0])
def test_the_discrete_gaussian_has_its_probabilities(sigma: Any) -> None:
    drawn = stream(3).discrete_gaussian(100_000, sigma).numpy()
    whole = sum(math.exp(-(x**2) / (2 * sigma**2)) for x in range(-400, 401))
    reach = math.ceil(5 * sigma)
    assert chi_square(drawn, lambda x: math.exp(-(x**2) / (2 * sigma**2)) / whole, reach) > 1e-3


@pytest.mark.parametrize("scale", [0.3, 1.0, 6.5])
def test_the_discrete_laplace_has_its_probabilities(scale: Any) -> None:
    drawn = stream(4).discrete_laplace(100_000, scale).numpy()
    ratio = math.exp(-1 / scale)
    first = (1 - ratio) / (1 + ratio)
    assert chi_square(drawn, lambda x: first * ratio ** abs(x), math.ceil(8 * scale)) > 1e-3


@pytest.mark.parametrize("sigma", [1.0, 37.7, 2.0**24 * 1.1])
def test_deciding_everything_exactly_gives_the_same_numbers(monkeypatch: Any, sigma: Any) -> None:
    fast = stream(5).discrete_gaussian(200, sigma), stream(5).discrete_laplace(200, sigma)
    monkeypatch.setattr(randomness, "_ERROR", 2.0)
    monkeypatch.setattr(np, "maximum", lambda a, b: np.full_like(a, 1e-30))
    slow = stream(5).discrete_gaussian(200, sigma), stream(5).discrete_laplace(200, sigma)
    for one, other in zip(fast, slow, strict=True):
        assert torch.equal(one, other)


def test_an_undecided_comparison_draws_more_bits_until_it_is_decided() -> None:
    # U < exp(-1) = 0.0101111000101101010110... in binary, worked to 180 bits by `decimal`.
    low, high = randomness._exp_between(Fraction(-1), 180)
    assert float(low) == pytest.approx(math.exp(-1)) and high - low < Fraction(1, 2**180)
    bits = int(low * 2**116)
    prefix, later = bits >> 64, bits & (2**64 - 1)
    for offset, expected in ((-1, True), (1, False)):
        asked: list[int] = []

        def more(asked: list[int] = asked, word: int = later + offset) -> int:
            asked.append(1)
            return word

        uniform = randomness._Uniform(prefix, more)
        assert uniform.below(Fraction(1)) is expected
        assert len(asked) == 1
    assert randomness._Uniform(0, lambda: 0).below(Fraction(0))


def test_scales_that_the_sampler_is_not_made_for_are_refused() -> None:
    for sample in (stream().discrete_gaussian, stream().discrete_laplace):
        for scale in (0.0, 1e-3, 2.0**41, math.inf, math.nan):
            with pytest.raises(ValueError, match="expected a number in"):
                sample(3, scale)
        assert sample(0, 1.0).shape == (0,)
