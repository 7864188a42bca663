"""Handing a private key from one client to another through a server that must not read it.

The recipient sends an X25519 public key, the sender answers with a sealed box: an ephemeral
X25519 key, HKDF-SHA256 over the shared secret and both public keys, ChaCha20-Poly1305. Run and
parties are bound into the key and authenticated, so a box of another run or for another client
does not open.

The public keys travel through the server, unauthenticated. This is safe against a server that
follows the protocol and looks, and not against one that replaces a client's public key by its own:
where that matters, provision key files by another way.
"""

from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from bract.paillier.errors import SealError

_PURPOSE = b"bract paillier sealed box 1"
_KEY_BYTES = 32
_NONCE = bytes(12)  # every box has a fresh key, used for this one message


@dataclass(frozen=True)
class Context:
    """What a sealed box belongs to.

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
    """A client's X25519 key pair for one run.

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
    key = X25519PrivateKey.generate()
    return Identity(key.private_bytes_raw(), key.public_key().public_bytes_raw())


def seal(message: bytes, recipient_public: bytes, context: Context) -> bytes:
    """Seal a message for one recipient.

    Args:
        message: For example :func:`bract.paillier.keyfile.dump_private`'s text.
        recipient_public: The recipient's 32 public bytes.
        context: Bound into the box; both sides must state the same.

    Returns:
        The box: 32 bytes of ephemeral public key, then the encrypted message and its tag.

    Raises:
        SealError: ``recipient_public`` is not an X25519 public key.
    """
    ephemeral = X25519PrivateKey.generate()
    own = ephemeral.public_key().public_bytes_raw()
    key = _derive(ephemeral, recipient_public, own, recipient_public, context)
    return own + ChaCha20Poly1305(key).encrypt(_NONCE, message, context.encode())


def open_sealed(box: bytes, identity: Identity, context: Context) -> bytes:
    """Open a box.

    Args:
        box: What :func:`seal` returned.
        identity: The recipient's key pair.
        context: As the sender stated it.

    Raises:
        SealError: Another recipient, another context, or an altered or truncated box.
    """
    own, sealed = box[:_KEY_BYTES], box[_KEY_BYTES:]
    try:
        private = X25519PrivateKey.from_private_bytes(identity.private)
        key = _derive(private, own, own, identity.public, context)
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, context.encode())
    except (InvalidTag, SealError, ValueError) as error:
        raise SealError(
            f"the sealed {context.purpose} from client {context.sender} does not open for client "
            f"{context.recipient} in run {context.run_id}: it was sealed for another client or "
            "run, or altered on its way; restart the run so that keys are exchanged anew"
        ) from error


def _derive(
    own: X25519PrivateKey, peer: bytes, ephemeral: bytes, recipient: bytes, context: Context
) -> bytes:
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError as error:
        raise SealError(
            f"client {context.recipient} sent no usable X25519 public key "
            f"({len(peer)} bytes, expected {_KEY_BYTES})"
        ) from error
    derivation = HKDF(
        algorithm=hashes.SHA256(),
        length=_KEY_BYTES,
        salt=ephemeral + recipient,
        info=_PURPOSE + context.encode(),
    )
    return derivation.derive(secret)
