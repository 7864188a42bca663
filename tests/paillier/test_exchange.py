import dataclasses
from pathlib import Path

import pytest

from bract.paillier import PaillierError, PrivateKey
from bract.paillier.errors import SealError
from bract.paillier.exchange import Context, make_identity, open_sealed, seal
from bract.paillier.keyfile import dump_private, load_private, read_identity, save_identity

CONTEXT = Context("run 7", "client 1", "client 2")
SENDER = make_identity()
P = 2**255 - 19  # the same point as 0


def test_a_private_key_reaches_its_recipient(djn_key: PrivateKey) -> None:
    recipient = make_identity()
    box = seal(dump_private(djn_key), recipient.public, CONTEXT, sender=SENDER)
    opened = open_sealed(box, recipient, CONTEXT, sender_public=SENDER.public)
    assert load_private(opened, insecure=True) == djn_key


def test_the_box_hides_the_message_and_never_repeats() -> None:
    recipient = make_identity()
    boxes = [seal(b"secret" * 10, recipient.public, CONTEXT, sender=SENDER) for _ in range(2)]
    assert boxes[0] != boxes[1]
    assert all(b"secret" not in box for box in boxes)


def test_another_client_gets_one_clear_error() -> None:
    box = seal(b"secret", make_identity().public, CONTEXT, sender=SENDER)
    with pytest.raises(SealError, match="from client client 1 does not open for client client 2"):
        open_sealed(box, make_identity(), CONTEXT, sender_public=SENDER.public)


@pytest.mark.parametrize("name", ["run_id", "sender", "recipient", "purpose"])
def test_a_box_of_another_context_does_not_open(name: str) -> None:
    recipient = make_identity()
    box = seal(b"secret", recipient.public, CONTEXT, sender=SENDER)
    with pytest.raises(SealError):
        open_sealed(
            box,
            recipient,
            dataclasses.replace(CONTEXT, **{name: "other"}),
            sender_public=SENDER.public,
        )


def test_neighbouring_fields_of_a_context_do_not_run_together() -> None:
    assert Context("a", "bc", "d").encode() != Context("ab", "c", "d").encode()


@pytest.mark.parametrize("position", [0, 31, 32, -1])
def test_an_altered_box_does_not_open(position: int) -> None:
    recipient = make_identity()
    box = bytearray(seal(b"secret", recipient.public, CONTEXT, sender=SENDER))
    box[position] ^= 1
    with pytest.raises(SealError):
        open_sealed(bytes(box), recipient, CONTEXT, sender_public=SENDER.public)


@pytest.mark.parametrize("length", [0, 16, 32, 40])
def test_a_truncated_box_does_not_open(length: int) -> None:
    recipient = make_identity()
    with pytest.raises(SealError):
        box = seal(b"secret", recipient.public, CONTEXT, sender=SENDER)[:length]
        open_sealed(box, recipient, CONTEXT, sender_public=SENDER.public)


@pytest.mark.parametrize(
    "public", [b"", bytes(31), bytes(32), (1).to_bytes(32, "little"), P.to_bytes(32, "little")]
)
def test_an_unusable_public_key_is_refused(public: bytes) -> None:
    with pytest.raises(SealError, match="client 2 sent no usable X25519 public key"):
        seal(b"secret", public, CONTEXT, sender=SENDER)


def test_the_representation_hides_the_private_half() -> None:
    identity = make_identity()
    assert identity.private.hex() not in repr(identity)
    assert str(identity.private) not in repr(identity)


def test_a_box_does_not_open_as_another_senders() -> None:
    """What a server can do that seals for a client in the name of another one."""
    recipient, server = make_identity(), make_identity()
    forged = seal(b"key", recipient.public, CONTEXT, sender=server)
    with pytest.raises(SealError, match="sealed by another sender"):
        open_sealed(forged, recipient, CONTEXT, sender_public=SENDER.public)
    assert open_sealed(forged, recipient, CONTEXT, sender_public=server.public) == b"key"


def test_an_identity_survives_its_file_and_stays_private(tmp_path: Path) -> None:
    identity, path = make_identity(), tmp_path / "identity.pem"
    save_identity(identity, path)
    assert read_identity(path) == identity
    path.chmod(0o644)
    with pytest.raises(PaillierError, match="chmod 600"):
        read_identity(path)
    path.write_text("nothing")
    path.chmod(0o600)
    with pytest.raises(PaillierError, match=r"identity\.pem: expected a BRACT PAILLIER IDENTITY"):
        read_identity(path)
