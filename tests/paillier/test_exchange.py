import dataclasses
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from flwr.app import RecordDict
from refusals import refused

from bract.config import build_config
from bract.crypto import key_problem
from bract.masks import errors, party, roster
from bract.paillier import PaillierError, PrivateKey, exchange
from bract.paillier.errors import SealError
from bract.paillier.exchange import Context, make_identity, open_sealed, seal
from bract.paillier.keyfile import dump_private, load_private, read_identity, save_identity
from bract.protocol import keyexchange, masking

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


def top_bit(public: bytes) -> bytes:
    """The same key to X25519, which ignores the top bit."""
    return public[:31] + bytes([public[31] ^ 0x80])


def test_another_encoding_of_a_key_is_refused_wherever_one_is_read() -> None:
    identity, sender = make_identity(), X25519PrivateKey.generate()
    twice = [sender.exchange(X25519PublicKey.from_public_bytes(p)) for p in encodings(identity)]
    assert twice[0] == twice[1]
    other = top_bit(identity.public)
    with pytest.raises(SealError):
        exchange.require_usable(other)
    with refused("message-malformed"):
        keyexchange.read_recipients(recipients({1: identity.public, 2: other}))
    box = keyexchange.write_key_box(1, other, b"")
    with refused("message-malformed"):
        keyexchange.key_box_sender(RecordDict({keyexchange.KEY_BOX: box}))
    with refused("message-malformed"):
        masking.Advert.read(masking.Advert(other, identity.public, identity.public, 3).to_content())
    seats = [party.Party.begin(n, "run", 1).seat(make_identity(), 1) for n in range(3)]
    copied = dataclasses.replace(seats[2], box_key=top_bit(seats[1].box_key))
    with pytest.raises(errors.MaskError):
        roster.Roster("run", 1, 2, 2, (seats[0], seats[1], copied))
    with refused("config-value", other.hex()):
        build_config({"encryption": {"scheme": "masks", "identities": [other.hex()] * 3}})


def recipients(identities: dict[int, bytes]) -> RecordDict:
    return RecordDict({keyexchange.RECIPIENTS: keyexchange.write_recipients(identities)})


def encodings(identity: exchange.Identity) -> tuple[bytes, bytes]:
    return identity.public, top_bit(identity.public)


def test_one_client_is_sealed_for_once() -> None:
    """Named under two node ids, it would be dealt two shares of a threshold's key."""
    identity = make_identity().public
    with refused("identity-refused", 5, 6, identity.hex()):
        keyexchange.read_recipients(recipients({5: identity, 6: identity}))


LOW = [
    0,
    1,
    P - 1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
]


@pytest.mark.parametrize("coordinate", [*LOW, P, P + 1, 2**255 - 1, P - 2, 2, 9])
def test_the_points_of_low_order_are_those_with_which_all_share_one_secret(coordinate: int) -> None:
    public = coordinate.to_bytes(32, "little")
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
        usable = coordinate < P
    except ValueError:
        usable = False
    assert (key_problem(public) is None) == usable


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


def test_keys_are_proven_by_their_private_halves_alone() -> None:
    challenge, other = exchange.make_identity(), exchange.make_identity()
    keys = [exchange.make_identity() for _ in range(3)]
    public = [key.public for key in keys]
    context = exchange.Context("run", "1", "server", "keys of round 1")
    proof = exchange.prove(keys, challenge.public, context)
    assert exchange.is_proven(proof, public, challenge, context)
    assert not exchange.is_proven(b"", public, challenge, context)
    assert not exchange.is_proven(proof, public, other, context)
    assert not exchange.is_proven(proof, public[::-1], challenge, context)
    for place in range(3):
        copied = [*public[:place], other.public, *public[place + 1 :]]
        assert not exchange.is_proven(proof, copied, challenge, context)
    for changed in ("session", "2", "another run"):
        elsewhere = exchange.Context("run", changed, "server", "keys of round 1")
        assert not exchange.is_proven(proof, public, challenge, elsewhere)


def test_no_proof_is_made_for_a_challenge_of_low_order() -> None:
    context = exchange.Context("run", "1", "server", "keys of round 1")
    with pytest.raises(SealError):
        exchange.prove([exchange.make_identity()], bytes(32), context)
