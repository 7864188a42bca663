import gmpy2
import pytest

from bract.paillier.primes import _survivors, linked_prime, primitive_root, random_prime, safe_prime


@pytest.mark.parametrize("bits", [24, 64, 256, 512])
def test_a_safe_prime_has_its_size_and_a_prime_half(bits: int) -> None:
    p = safe_prime(bits)
    assert p.bit_length() == bits
    assert p >> (bits - 2) == 3
    assert gmpy2.is_prime(p)
    assert gmpy2.is_prime(p // 2)


def test_a_linked_prime_gives_a_prime_with_the_wanted_factor() -> None:
    a = random_prime(64)
    b = linked_prime(256, 2 * a)
    p = 2 * a * b + 1
    assert p.bit_length() == 256
    assert all(gmpy2.is_prime(x) for x in (a, b, p))


def test_a_factor_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="no room"):
        linked_prime(64, 1 << 63)


def test_primitive_root_of_23_is_5() -> None:
    assert primitive_root(23, (2, 11)) == 5
    assert len({pow(5, k, 23) for k in range(22)}) == 22


def test_the_sieve_keeps_exactly_the_candidates_without_a_small_divisor() -> None:
    start, multiplier = 2**40 + 15, 2 * 1009
    primes = [r for r in range(3, 1 << 18, 2) if gmpy2.is_prime(r)]
    for k, alive in enumerate(_survivors(start, multiplier, 300)):
        b = start + 2 * k
        divided = any(b % r == 0 or (multiplier * b + 1) % r == 0 for r in primes)
        assert alive == (not divided)
