import dataclasses

import pytest

from bract.paillier import (
    Context,
    PrivateKey,
    SealError,
    dump_private,
    load_private,
    make_identity,
    open_sealed,
    seal,
)

CONTEXT = Context("run 7", "client 1", "client 2")


def test_a_private_key_reaches_its_recipient(djn_key: PrivateKey) -> None:
    recipient = make_identity()
    box = seal(dump_private(djn_key), recipient.public, CONTEXT)
    opened = open_sealed(box, recipient, CONTEXT)
    assert load_private(opened, insecure=True) == djn_key


def test_the_box_hides_the_message_and_never_repeats() -> None:
    recipient = make_identity()
    boxes = [seal(b"secret" * 10, recipient.public, CONTEXT) for _ in range(2)]
    assert boxes[0] != boxes[1]
    assert all(b"secret" not in box for box in boxes)


def test_another_client_gets_one_clear_error() -> None:
    box = seal(b"secret", make_identity().public, CONTEXT)
    with pytest.raises(SealError, match="from client client 1 does not open for client client 2"):
        open_sealed(box, make_identity(), CONTEXT)


@pytest.mark.parametrize("name", ["run_id", "sender", "recipient", "purpose"])
def test_a_box_of_another_context_does_not_open(name: str) -> None:
    recipient = make_identity()
    box = seal(b"secret", recipient.public, CONTEXT)
    with pytest.raises(SealError):
        open_sealed(box, recipient, dataclasses.replace(CONTEXT, **{name: "other"}))


def test_neighbouring_fields_of_a_context_do_not_run_together() -> None:
    assert Context("a", "bc", "d").encode() != Context("ab", "c", "d").encode()


@pytest.mark.parametrize("position", [0, 31, 32, -1])
def test_an_altered_box_does_not_open(position: int) -> None:
    recipient = make_identity()
    box = bytearray(seal(b"secret", recipient.public, CONTEXT))
    box[position] ^= 1
    with pytest.raises(SealError):
        open_sealed(bytes(box), recipient, CONTEXT)


@pytest.mark.parametrize("length", [0, 16, 32, 40])
def test_a_truncated_box_does_not_open(length: int) -> None:
    recipient = make_identity()
    with pytest.raises(SealError):
        open_sealed(seal(b"secret", recipient.public, CONTEXT)[:length], recipient, CONTEXT)


@pytest.mark.parametrize("public", [b"", bytes(31), bytes(32)])
def test_an_unusable_public_key_is_refused(public: bytes) -> None:
    with pytest.raises(SealError, match="client 2 sent no usable X25519 public key"):
        seal(b"secret", public, CONTEXT)


def test_the_representation_hides_the_private_half() -> None:
    identity = make_identity()
    assert identity.private.hex() not in repr(identity)
    assert str(identity.private) not in repr(identity)
