"""Handing a private key from one client to another through a server that must not read it.

The recipient sends an X25519 public key, the sender answers with a sealed box: an ephemeral
X25519 key, HKDF-SHA256 over two shared secrets (the recipient's key with the ephemeral one and with
the sender's own) and all public keys, ChaCha20-Poly1305. Run and parties are bound into the key and
authenticated, so a box of another run or for another client does not open, nor one that a party
other than the stated sender sealed (one-pass authenticated Diffie-Hellman, as in the ``Auth`` mode
of RFC 9180). Who holds the recipient's private key can forge boxes to that recipient, to no others.

The public keys travel through the server. That is safe against a server that follows the protocol
and looks. One that replaces a client's public key by its own is found out only by who knows the
right keys from elsewhere.

A client proves to the server that it holds the private halves of the keys that it announces, since
public keys are no secret (`prove`): the server sends a fresh X25519 key, and the proof is a MAC
under what both share. Its key is derived for this purpose alone, so it opens no box.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from bract.crypto.x25519 import KEY_BYTES, key_problem
from bract.paillier.errors import SealError

_PURPOSE = b"bract paillier sealed box 2"
SEALED_BYTES = KEY_BYTES + 16
"""Bytes that a box has more than its message: an ephemeral key and a tag."""

_POSSESSION = b"bract possession of X25519 keys 1"
_NONCE = bytes(12)  # every box has a fresh key, used for this one message


@dataclass(frozen=True)
class Context:
    """The context of a sealed box.

    Attributes:
        run_id: Identity of the run.
        sender: Identity of the client that seals.
        recipient: Identity of the client that opens.
        purpose: What is inside, for example ``private key`` or ``partial decryption 7``.
    """

    run_id: str
    sender: str
    recipient: str
    purpose: str = "private key"

    def encode(self) -> bytes:
        """Return the fields as bytes; each carries its length, so none runs into the next."""
        parts = [part.encode() for part in (self.run_id, self.sender, self.recipient, self.purpose)]
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


@dataclass(frozen=True)
class Identity:
    """A client's X25519 key pair, of one run or of one site.

    Attributes:
        private: 32 secret bytes, never sent.
        public: 32 bytes, sent through the server.
    """

    private: bytes
    public: bytes

    def __repr__(self) -> str:
        return f"Identity(public={self.public.hex()})"


def make_identity() -> Identity:
    """Generate a key pair."""
    return identity_of(X25519PrivateKey.generate().private_bytes_raw())


def identity_of(private: bytes) -> Identity:
    """Return the key pair of 32 secret bytes; ValueError for another number of them."""
    key = X25519PrivateKey.from_private_bytes(private)
    return Identity(private, key.public_key().public_bytes_raw())


def require_usable(public: bytes) -> None:
    """Refuse what no honest client sends as its X25519 public key.

    Raises:
        SealError: Not 32 bytes, another encoding than that of key generation, which would be
            counted as another client's key, or a point of low order, with which all parties share
            the same secret.
    """
    problem = key_problem(public)
    if problem is not None:
        raise SealError(f"sent no usable X25519 public key ({problem})")


def seal(
    message: bytes,
    recipient_public: bytes,
    context: Context,
    *,
    sender: Identity,
    recipient_identity: bytes = b"",
) -> bytes:
    """Seal a message for one recipient.

    Args:
        message: For example :func:`bract.paillier.keyfile.dump_private`'s text.
        recipient_public: The recipient's 32 public bytes.
        context: Bound into the box; both sides must state the same.
        sender: The sender's key pair.
        recipient_identity: A second key of the recipient, whose private half opening then needs
            as well: of its site, where ``recipient_public`` is one of a round.

    Returns:
        The box: 32 bytes of ephemeral public key, then the encrypted message and its tag.

    Raises:
        SealError: ``recipient_public`` is not a usable X25519 public key.
    """
    ephemeral = X25519PrivateKey.generate()
    own = ephemeral.public_key().public_bytes_raw()
    static = X25519PrivateKey.from_private_bytes(sender.private)
    try:
        secret = _shared(ephemeral, recipient_public) + _shared(static, recipient_public)
        if recipient_identity:
            secret += _shared(ephemeral, recipient_identity)
    except SealError as error:
        raise SealError(f"client {context.recipient} {error}") from error
    key = _derive(secret, own, recipient_public + recipient_identity, sender.public, context)
    return own + ChaCha20Poly1305(key).encrypt(_NONCE, message, context.encode())


def open_sealed(
    box: bytes,
    identity: Identity,
    context: Context,
    *,
    sender_public: bytes,
    second: Identity | None = None,
) -> bytes:
    """Open a box.

    Args:
        box: What :func:`seal` returned.
        identity: The recipient's key pair.
        context: As the sender stated it.
        sender_public: The 32 public bytes of the stated sender.
        second: The key pair of ``recipient_identity``, where the box was sealed for one.

    Raises:
        SealError: Another sender, recipient or context, or an altered or truncated box.
    """
    own, sealed = box[:KEY_BYTES], box[KEY_BYTES:]
    try:
        private = X25519PrivateKey.from_private_bytes(identity.private)
        secret = _shared(private, own) + _shared(private, sender_public)
        if second is not None:
            secret += _shared(X25519PrivateKey.from_private_bytes(second.private), own)
        keys = identity.public + (b"" if second is None else second.public)
        key = _derive(secret, own, keys, sender_public, context)
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, context.encode())
    except (InvalidTag, SealError, ValueError) as error:
        raise SealError(
            f"the sealed {context.purpose} from client {context.sender} does not open for client "
            f"{context.recipient}: it was altered, or sealed by another sender, for another client "
            "or for another run"
        ) from error


def prove(keys: Sequence[Identity], challenge: bytes, context: Context) -> bytes:
    """Prove that the private halves of some keys are held, to who holds that of a challenge.

    HMAC-SHA256 of the context, under HKDF-SHA256 of each key's shared secret with the challenge;
    all public keys are in the derivation, so the proof is good for these keys alone.

    Args:
        keys: The key pairs.
        challenge: A fresh X25519 public key of the verifier.
        context: Who proves what; both sides must state the same.

    Raises:
        SealError: ``challenge`` is not a usable X25519 public key.
    """
    secret = b"".join(
        _shared(X25519PrivateKey.from_private_bytes(key.private), challenge) for key in keys
    )
    return _possession(secret, challenge, [key.public for key in keys], context)


def is_proven(proof: bytes, public: Sequence[bytes], challenge: Identity, context: Context) -> bool:
    """Return whether `prove` made a proof with the private halves of these public keys.

    Args:
        proof: As it was received.
        public: The announced keys, usable ones, in the order of the proof.
        challenge: The key pair whose public half was sent for this proof.
        context: As the client must have stated it.
    """
    private = X25519PrivateKey.from_private_bytes(challenge.private)
    secret = b"".join(_shared(private, key) for key in public)
    return hmac.compare_digest(proof, _possession(secret, challenge.public, public, context))


def _possession(
    secret: bytes, challenge: bytes, public: Sequence[bytes], context: Context
) -> bytes:
    derivation = HKDF(
        algorithm=hashes.SHA256(),
        length=KEY_BYTES,
        salt=challenge + b"".join(public),
        info=_POSSESSION,
    )
    return hmac.digest(derivation.derive(secret), context.encode(), hashlib.sha256)


def _shared(own: X25519PrivateKey, peer: bytes) -> bytes:
    require_usable(peer)
    return own.exchange(X25519PublicKey.from_public_bytes(peer))


def _derive(
    secret: bytes, ephemeral: bytes, recipient: bytes, sender: bytes, context: Context
) -> bytes:
    derivation = HKDF(
        algorithm=hashes.SHA256(),
        length=KEY_BYTES,
        salt=ephemeral + recipient + sender,
        info=_PURPOSE + context.encode(),
    )
    return derivation.derive(secret)
