import base64
import dataclasses
import json
import stat
from pathlib import Path
from typing import Any

import gmpy2
import pytest
from phe import paillier as phe_paillier

from bract.paillier import PaillierError, PrivateKey, PublicKey, generate_keypair
from bract.paillier.keyfile import (
    dump_private,
    dump_public,
    encode_block,
    load_private,
    load_public,
    read_private,
    read_public,
    save_private,
    save_public,
)
from bract.paillier.scheme import PrivateScheme, Scheme
from bract.paillier.sharefile import dump_share, load_share
from bract.paillier.sharing import KeyShare

PLAINTEXTS = [0, 1, 2**200 + 5, 2**500]


@pytest.mark.parametrize("randomness", ["djn", "standard"])
def test_phe_decrypts_what_is_encrypted_here(djn_key: PrivateKey, randomness: Any) -> None:
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
    key = PrivateKey.from_primes(phe_private.p, phe_private.q, insecure=True)
    assert phe_public.n == key.public.n
    assert key.public.randomness == "standard"
    assert key.to_phe() == phe_private
    c = PrivateScheme(key).encrypt(77, "standard")
    assert phe_private.raw_decrypt(int(c)) == 77


@pytest.mark.parametrize("randomness", ["djn", "standard"])
def test_a_generated_key_has_exactly_its_size(randomness: Any) -> None:
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


def test_the_key_id_covers_every_field(djn_key: PrivateKey, other_key: PrivateKey) -> None:
    public = djn_key.public
    assert public.h is not None
    others = [
        other_key.public,
        PublicKey(public.n),
        dataclasses.replace(public, h=public.h * public.h % public.n),
        dataclasses.replace(public, exponent_bits=public.exponent_bits + 1),
    ]
    assert len({key.key_id for key in (public, *others)}) == 5
    assert len(public.key_id) == 32


@pytest.mark.parametrize("h", [-1, 0, 1, "n - 1", "n", "p"])
def test_a_base_that_hides_nothing_is_refused(djn_key: PrivateKey, h: int | str) -> None:
    n = djn_key.public.n
    base = {"n - 1": n - 1, "n": n, "p": djn_key.p}[h] if isinstance(h, str) else h
    with pytest.raises(PaillierError, match="h must lie above 1"):
        dataclasses.replace(djn_key.public, h=base)


@pytest.mark.parametrize("bits", [0, 1, 64, 127, 10**9])
def test_exponents_that_could_be_guessed_or_fill_the_memory_are_refused(
    djn_key: PrivateKey, bits: int
) -> None:
    with pytest.raises(PaillierError, match="'exponent_bits' is outside"):
        dataclasses.replace(djn_key.public, exponent_bits=bits)


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


def test_a_private_key_that_others_may_read_is_refused(djn_key: PrivateKey, tmp_path: Path) -> None:
    path = tmp_path / "private.pem"
    save_private(djn_key, path)
    for mode in (0o644, 0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(PaillierError, match=f"mode {mode:04o}.*chmod 600"):
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
        (text[:80] + bytes([text[80] | 128]) + text[81:], "damaged"),
        (body(b"[" * 100_000), "damaged .RecursionError"),
        (body(b'{"version": ' + b"9" * 5000 + b"}"), "damaged"),
        (body(b'{"version": 1}'), "not of version 2.*bract keygen"),
        (body(b"\xff\xfe"), "damaged"),
        (b"-" * (1 << 23), "at most"),
        (dump_public(djn_key.public), "expected a BRACT PAILLIER PRIVATE KEY block, found PUBLIC"),
    ]:
        path.write_bytes(damaged)
        path.chmod(0o600)
        with pytest.raises(PaillierError, match=f"private.pem: .*{message}"):
            read_private(path, insecure=True)


def body(content: bytes) -> bytes:
    name = b"BRACT PAILLIER PRIVATE KEY-----"
    return b"-----BEGIN " + name + b"\n" + base64.b64encode(content) + b"\n-----END " + name + b"\n"


def fields_of(text: bytes) -> dict[str, object]:
    fields: dict[str, object] = json.loads(base64.b64decode(b"".join(text.split(b"\n")[1:-2])))
    return fields


def test_damage_to_any_field_is_found_by_the_checksum(
    djn_key: PrivateKey, shares: list[KeyShare]
) -> None:
    for text, load in ((dump_private(djn_key), load_private), (dump_share(shares[1]), load_share)):
        fields = fields_of(text)
        label = text.split(b"-----")[1]
        for name, value in fields.items():
            if name == "version":
                continue
            if isinstance(value, list):
                changed: object = [*value[1:], value[0]]
            elif isinstance(value, str):
                changed = value[:-1] + ("0" if value[-1] != "0" else "1")
            else:
                assert isinstance(value, int)
                changed = value + 1
            content = base64.b64encode(json.dumps(fields | {name: changed}).encode())
            damaged = (
                b"-----" + label + b"-----\n" + content + b"\n" + text.split(b"\n")[-2] + b"\n"
            )
            with pytest.raises(PaillierError, match="checksum does not fit"):
                load(damaged, insecure=True)


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 10**400},
        {"threshold": 10**9},
        {"total": 2**30},
        {"degree": 10**6},
        {"threshold": 0},
        {"threshold": True},
        {"n": "0x" + "f" * 3000},
        {"value": "-0x5"},
        {"value": None},
        {"verification": [["0x1"]]},
        {"verification": ["0x1"] * 1001},
    ],
)
def test_impossible_numbers_in_a_share_are_one_clear_error(
    shares: list[KeyShare], change: dict[str, object]
) -> None:
    fields = fields_of(dump_share(shares[1])) | change
    del fields["checksum"]
    with pytest.raises(PaillierError):
        load_share(encode_block("KEY SHARE", fields), insecure=True)  # type: ignore[arg-type]


def test_small_keys_do_not_load_by_accident(djn_key: PrivateKey) -> None:
    with pytest.raises(PaillierError, match="512 bits is not offered"):
        load_private(dump_private(djn_key))
    with pytest.raises(PaillierError, match="512 bits is not offered"):
        load_public(dump_public(djn_key.public))
