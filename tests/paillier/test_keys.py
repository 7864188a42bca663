import stat
from pathlib import Path

import gmpy2
import pytest
from phe import paillier as phe_paillier

from bract.paillier import (
    PaillierError,
    PrivateKey,
    PublicKey,
    dump_private,
    dump_public,
    generate_keypair,
    load_private,
    load_public,
    public_from_phe,
    read_private,
    read_public,
    save_private,
    save_public,
)
from bract.paillier.scheme import PrivateScheme, Scheme

PLAINTEXTS = [0, 1, 2**200 + 5, 2**500]


@pytest.mark.parametrize("randomness", ["djn", "standard"])
def test_phe_decrypts_what_is_encrypted_here(djn_key: PrivateKey, randomness: str) -> None:
    phe_key = djn_key.to_phe()
    for scheme in (Scheme(djn_key.public), PrivateScheme(djn_key)):
        for m in PLAINTEXTS:
            assert phe_key.raw_decrypt(int(scheme.encrypt(m, randomness))) == m


def test_what_phe_encrypts_decrypts_here(djn_key: PrivateKey) -> None:
    phe_key = djn_key.public.to_phe()
    ciphertexts = [gmpy2.mpz(phe_key.raw_encrypt(m)) for m in PLAINTEXTS]
    assert PrivateScheme(djn_key).decrypt(ciphertexts, "standard") == PLAINTEXTS


def test_a_key_of_phe_is_taken_over_both_ways() -> None:
    phe_public, phe_private = phe_paillier.generate_paillier_keypair(n_length=512)
    key = PrivateKey.from_phe(phe_private, insecure=True)
    assert public_from_phe(phe_public, insecure=True) == key.public
    assert key.public.randomness == "standard"
    assert key.to_phe() == phe_private
    c = PrivateScheme(key).encrypt(77, "standard")
    assert phe_private.raw_decrypt(int(c)) == 77


@pytest.mark.parametrize("randomness", ["djn", "standard"])
def test_a_generated_key_has_exactly_its_size(randomness: str) -> None:
    key = generate_keypair(256, randomness=randomness, insecure=True)
    assert key.public.bits == 256
    assert key.public.randomness == randomness


def test_djn_keys_shorten_the_decryption_exponent(
    djn_key: PrivateKey, standard_key: PrivateKey
) -> None:
    assert djn_key.order_p.bit_length() == 65
    assert standard_key.order_p == standard_key.p - 1


def test_only_the_offered_sizes_are_generated() -> None:
    with pytest.raises(PaillierError, match="1024 bits is not offered: take 2048 or 3072"):
        generate_keypair(1024)


def test_the_key_id_depends_on_the_modulus_only(djn_key: PrivateKey, other_key: PrivateKey) -> None:
    assert djn_key.public.key_id == PublicKey(djn_key.public.n).key_id
    assert djn_key.public.key_id != other_key.public.key_id
    assert len(djn_key.public.key_id) == 32


def test_numbers_that_do_not_form_a_key_are_refused(djn_key: PrivateKey) -> None:
    public = djn_key.public
    with pytest.raises(PaillierError, match="factors"):
        PrivateKey(public, djn_key.p, djn_key.p, 1, 1)
    with pytest.raises(PaillierError, match="prime"):
        PrivateKey.from_primes(9, 11, insecure=True)
    with pytest.raises(PaillierError, match="share a factor"):
        PrivateKey.from_primes(3, 7, insecure=True)
    with pytest.raises(PaillierError, match="divide"):
        PrivateKey(public, djn_key.p, djn_key.q, djn_key.order_p + 1, djn_key.order_q)
    with pytest.raises(PaillierError, match="stated orders"):
        PrivateKey(public, djn_key.p, djn_key.q, 2, djn_key.order_q)


def test_secrets_stay_out_of_the_representation(djn_key: PrivateKey) -> None:
    assert str(djn_key.p) not in repr(djn_key)
    assert str(djn_key.order_p) not in repr(djn_key)


@pytest.mark.parametrize("name", ["djn_key", "standard_key"])
def test_keys_survive_their_files(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    key = request.getfixturevalue(name)
    save_private(key, tmp_path / "private.pem")
    save_public(key.public, tmp_path / "public.pem")
    assert read_private(tmp_path / "private.pem", insecure=True) == key
    assert read_public(tmp_path / "public.pem", insecure=True) == key.public
    assert stat.S_IMODE((tmp_path / "private.pem").stat().st_mode) == 0o600
    assert (tmp_path / "public.pem").read_text().startswith("-----BEGIN BRACT PAILLIER PUBLIC KEY-")


def test_a_key_file_is_never_overwritten(djn_key: PrivateKey, tmp_path: Path) -> None:
    path = tmp_path / "private.pem"
    path.write_text("another key")
    with pytest.raises(FileExistsError, match="remove it first"):
        save_private(djn_key, path)
    assert path.read_text() == "another key"


def test_a_private_key_that_others_may_read_is_warned_about(
    djn_key: PrivateKey, tmp_path: Path
) -> None:
    path = tmp_path / "private.pem"
    save_private(djn_key, path)
    path.chmod(0o644)
    with pytest.warns(UserWarning, match="chmod 600"):
        read_private(path, insecure=True)


def test_damaged_key_files_name_the_file_and_what_is_wrong(
    djn_key: PrivateKey, tmp_path: Path
) -> None:
    text = dump_private(djn_key)
    path = tmp_path / "private.pem"
    for damaged, message in [
        (b"", "found none or a cut one"),
        (text[:200], "found none or a cut one"),
        (text.replace(text[60:70], b"!!!!!!!!!!"), "damaged"),
        (dump_public(djn_key.public), "expected a BRACT PAILLIER PRIVATE KEY block, found PUBLIC"),
    ]:
        path.write_bytes(damaged)
        path.chmod(0o600)
        with pytest.raises(PaillierError, match=f"private.pem: .*{message}"):
            read_private(path, insecure=True)


def test_small_keys_do_not_load_by_accident(djn_key: PrivateKey) -> None:
    with pytest.raises(PaillierError, match="512 bits is not offered"):
        load_private(dump_private(djn_key))
    with pytest.raises(PaillierError, match="512 bits is not offered"):
        load_public(dump_public(djn_key.public))
