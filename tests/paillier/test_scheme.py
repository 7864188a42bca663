import math
import secrets
from collections import Counter
from typing import Any

import gmpy2
import pytest

from bract.paillier import PaillierError, PrivateKey, PublicKey
from bract.paillier.errors import CiphertextError
from bract.paillier.scheme import PrivateScheme, Scheme


def slow_encrypt(n: int, m: int, r: int, degree: int = 1) -> int:
    """Paillier as on paper: g^m r^(n^s) modulo n^(s+1) with g = n + 1."""
    modulus = n ** (degree + 1)
    return int(pow(n + 1, m, modulus) * pow(r, n**degree, modulus) % modulus)


def test_toy_ciphertext_worked_by_hand() -> None:
    """n = 5 * 7 = 35: (1 + 35*4) * 2^35 mod 1225; 2^35 = 943 by 2^10 = 1024 and 2^20 = 1201."""
    assert pow(2, 10, 1225) == 1024 and pow(2, 20, 1225) == 1201
    assert 1201 * 1024 * 32 % 1225 == 18
    assert (1 + 35 * 4) * 18 % 1225 == 88
    scheme = PrivateScheme(PrivateKey.from_primes(5, 7, insecure=True))
    assert scheme.decrypt([gmpy2.mpz(88)], "standard") == [4]
    assert slow_encrypt(35, 4, 2) == 88


def test_every_toy_ciphertext_decrypts() -> None:
    scheme = PrivateScheme(PrivateKey.from_primes(5, 7, insecure=True))
    units = [r for r in range(1, 35) if math.gcd(r, 35) == 1]
    for m in range(35):
        ciphertexts = [gmpy2.mpz(slow_encrypt(35, m, r)) for r in units]
        assert scheme.decrypt(ciphertexts, "standard") == [m] * len(units)


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("randomness", ["djn", "standard"])
@pytest.mark.parametrize("holder", ["public", "private"])
def test_decryption_inverts_encryption(
    djn_key: PrivateKey, degree: int, randomness: Any, holder: str
) -> None:
    private = PrivateScheme(djn_key, degree)
    scheme = private if holder == "private" else Scheme(djn_key.public, degree)
    top = int(scheme.plain_modulus)
    plaintexts = [0, 1, top // 2, top - 1, secrets.randbelow(top)]
    ciphertexts = [scheme.encrypt(m, randomness) for m in plaintexts]
    assert private.decrypt(ciphertexts, randomness) == plaintexts
    assert private.decrypt(ciphertexts, "standard") == plaintexts


def test_embedding_equals_the_power_of_one_plus_n(djn_key: PrivateKey) -> None:
    n = djn_key.public.n
    for degree in (1, 2, 3):
        scheme = Scheme(djn_key.public, degree)
        m = secrets.randbelow(n**degree)
        assert scheme.embed(m) == pow(1 + n, m, n ** (degree + 1))


def test_two_encryptions_of_one_value_differ(djn_key: PrivateKey) -> None:
    for scheme in (PrivateScheme(djn_key), Scheme(djn_key.public)):
        for randomness in ("djn", "standard"):
            assert scheme.encrypt(5, randomness) != scheme.encrypt(5, randomness)


def test_standard_randomness_of_a_key_holder_is_uniform_over_all_residues() -> None:
    """7 * 11 = 77 with safe primes: 60 classes r^77 mod 77^2, drawn 60 * 200 times."""
    scheme = PrivateScheme(PrivateKey.from_primes(7, 11, insecure=True))
    expected = {pow(r, 77, 77**2) for r in range(1, 77) if math.gcd(r, 77) == 1}
    counts = Counter(int(scheme.randomizer("standard")) for _ in range(60 * 200))
    assert set(counts) == expected
    chi_square = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi_square < 130  # 59 degrees of freedom: exceeded with probability 3e-7


def test_djn_randomness_stays_in_the_hidden_subgroup(djn_key: PrivateKey) -> None:
    order = math.lcm(djn_key.order_p, djn_key.order_q)
    assert order.bit_length() < djn_key.public.bits // 2
    for scheme in (PrivateScheme(djn_key), Scheme(djn_key.public)):
        assert pow(scheme.randomizer("djn"), order, scheme.cipher_modulus) == 1
        assert pow(scheme.randomizer("standard"), order, scheme.cipher_modulus) != 1


def test_key_with_unknown_group_orders_still_encrypts_with_the_factors() -> None:
    p, q = 2**61 - 1, 2**31 - 1  # p - 1 and q - 1 have many small factors
    scheme = PrivateScheme(PrivateKey.from_primes(p, q, insecure=True))
    c = scheme.encrypt(123456789, "standard")
    assert scheme.decrypt([c], "standard") == [123456789]


def test_an_altered_ciphertext_leaves_the_subgroup_and_is_refused(djn_key: PrivateKey) -> None:
    scheme = PrivateScheme(djn_key)
    c = scheme.encrypt(5, "djn")
    for bit in (0, 17, 1000):
        with pytest.raises(CiphertextError, match=r"ciphertext 7.*altered"):
            scheme.decrypt([c ^ (1 << bit)], "djn", first=7)


@pytest.mark.parametrize("wrong", ["zero", "modulus", "negative"])
def test_numbers_out_of_range_are_no_ciphertexts(djn_key: PrivateKey, wrong: str) -> None:
    scheme = Scheme(djn_key.public)
    number = {"zero": 0, "modulus": scheme.cipher_modulus, "negative": -3}[wrong]
    with pytest.raises(CiphertextError, match="ciphertext 1 is out of range"):
        scheme.check([scheme.encrypt(1, "djn"), gmpy2.mpz(number)])


def test_a_multiple_of_a_factor_is_no_ciphertext(djn_key: PrivateKey) -> None:
    scheme = Scheme(djn_key.public)
    with pytest.raises(CiphertextError, match="ciphertext 11 shares a factor"):
        scheme.check([scheme.encrypt(1, "djn"), gmpy2.mpz(djn_key.p) * 5], first=10)


def test_plaintexts_out_of_range_are_refused(djn_key: PrivateKey) -> None:
    scheme = Scheme(djn_key.public)
    for m in (-1, djn_key.public.n):
        with pytest.raises(PaillierError, match="between 0 and n"):
            scheme.encrypt(m, "djn")


def test_djn_needs_its_base(standard_key: PrivateKey) -> None:
    for scheme in (PrivateScheme(standard_key), Scheme(PublicKey(standard_key.public.n))):
        with pytest.raises(PaillierError, match="no base h"):
            scheme.encrypt(1, "djn")
