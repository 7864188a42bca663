"""Parsers of keys, shares and sealed boxes."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from fuzz.mutations import damaged, garbage, mangled, text_of
from fuzz.outcome import Parser
from hypothesis import strategies as st

from bract.paillier import PaillierError, deal, generate_keypair
from bract.paillier.exchange import Context, make_identity, open_sealed, seal
from bract.paillier.keyfile import (
    decode_block,
    dump_private,
    dump_public,
    load_private,
    load_public,
    read_identity,
    save_identity,
)
from bract.paillier.sharefile import dump_share, load_share
from bract.protocol.keyfiles import read_key_file


@functools.cache
def _texts(label: str) -> list[bytes]:
    if label == "KEY SHARE":
        return [dump_share(share) for share in deal(2, 3, 2048)]
    keys = [generate_keypair(2048), generate_keypair(2048)]
    if label == "PUBLIC KEY":
        return [dump_public(key.public) for key in keys]
    return [dump_private(key) for key in keys]


@functools.cache
def _identity_text() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "identity.pem"
        save_identity(make_identity(), path)
        return path.read_bytes()


@st.composite
def _blocks(draw: Any, label: str) -> Any:
    """Draw a key's text whose fields are damaged, most of them under a checksum that fits."""
    texts = [_identity_text()] if label == "IDENTITY" else _texts(label)
    fields = decode_block(label, texts[0])
    other = decode_block(label, texts[-1])
    numbers = [fields, {**fields, **dict(draw(st.sampled_from([tuple(other.items())[:1], ()])))}]
    document = draw(damaged(numbers, _numbers(fields)))
    body = text_of(document)
    if draw(st.integers(0, 5)):
        try:
            content = json.loads(body)
            text = f"{label}\n{json.dumps(content, sort_keys=True)}"
            content["checksum"] = hashlib.sha256(text.encode()).hexdigest()
            body = json.dumps(content)
        except (ValueError, TypeError, AttributeError, RecursionError):
            pass
    encoded = base64.b64encode(body.encode(errors="surrogatepass")).decode()
    name = f"BRACT PAILLIER {label}"
    return f"-----BEGIN {name}-----\n{encoded}\n-----END {name}-----\n".encode()


def _numbers(fields: dict[str, Any]) -> list[Any]:
    from fuzz.mutations import HOSTILE

    n = int(fields["n"], 16) if "n" in fields else 15
    made = [n, n - 1, n + 1, n * n, 2 * n, n >> 1, 1, 0, 3, (1 << 2048) - 1, 1 << 2047, 1 << 8191]
    return [
        *HOSTILE,
        *map(hex, made),
        hex(n) + "L",
        "0X1F",
        "-0x1",
        "0x" + "f" * 2049,
        999,
        1000,
        1001,
        512,
        2112,
    ]


def _inputs(label: str) -> st.SearchStrategy[bytes]:
    def make() -> st.SearchStrategy[bytes]:
        texts = [_identity_text()] if label == "IDENTITY" else _texts(label)
        others = [*texts, *_texts("PUBLIC KEY")]
        return st.one_of(
            _blocks(label), _blocks(label), mangled(others), st.sampled_from(others), garbage()
        )

    return st.deferred(make)


def _file(data: bytes, folder: Path) -> Path:
    path = folder / "key.pem"
    path.write_bytes(data)
    path.chmod(0o600)
    return path


CONTEXT = Context("run", "1", "7")


@functools.cache
def _parties() -> tuple[Any, Any, bytes]:
    sender, recipient = make_identity(), make_identity()
    return sender, recipient, seal(b"secret", recipient.public, CONTEXT, sender=sender)


@st.composite
def _boxes(draw: Any) -> Any:
    sender, _, box = _parties()
    low = [bytes(32), b"\x01" + bytes(31), b"\xff" * 32, b"", bytes(31), bytes(33)]
    public = draw(st.sampled_from([sender.public] * 4 + low))
    return draw(st.one_of(st.just(box), mangled([box]), garbage(), st.sampled_from(low))), public


def _open(value: tuple[bytes, bytes], folder: Path) -> object:
    box, public = value
    return open_sealed(box, _parties()[1], CONTEXT, sender_public=public)


ERRORS = (PaillierError,)
KEYS = [
    Parser(
        "public key",
        _inputs("PUBLIC KEY"),
        lambda d, _: load_public(d).key_id,
        "bract/paillier/keyfile.py",
        ERRORS,
    ),
    Parser(
        "private key",
        _inputs("PRIVATE KEY"),
        lambda d, _: load_private(d),
        "bract/paillier/keyfile.py",
        ERRORS,
    ),
    Parser(
        "key share",
        _inputs("KEY SHARE"),
        lambda d, _: load_share(d),
        "bract/paillier/sharefile.py",
        ERRORS,
    ),
    Parser(
        "key file",
        st.one_of(_inputs("KEY SHARE"), _inputs("PRIVATE KEY")),
        lambda d, f: read_key_file(_file(d, f)),
        "bract/protocol/keyfiles.py",
    ),
    Parser(
        "identity file",
        _inputs("IDENTITY"),
        lambda d, f: read_identity(_file(d, f)),
        "bract/paillier/keyfile.py",
        ERRORS,
    ),
    Parser("sealed box", _boxes(), _open, "bract/paillier/exchange.py", ERRORS),
]
