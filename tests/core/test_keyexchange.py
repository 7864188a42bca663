import dataclasses

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict

from bract.ciphertexts import encrypt_update
from bract.encryption import EncryptionConfig
from bract.errors import BractError
from bract.keyexchange import (
    KEY_BOX,
    box_keys,
    open_key_box,
    write_key_box,
)
from bract.paillier import combine, make_identity, partial_decrypt
from bract.partials import open_bundle, seal_partials, write_bundle

CONFIG = EncryptionConfig(scheme="paillier", threshold=2)


def boxed(identities, session="run"):
    publics = {node: identity.public for node, identity in identities.items()}
    return box_keys({n: b"secret %d" % n for n in publics}, publics, session=session, sender=1)


def test_a_key_box_opens_for_its_recipient_in_its_run_only():
    identities = {2: make_identity(), 3: make_identity()}
    boxes = boxed(identities)
    assert not any(b"secret" in box for box in boxes.values())
    content = RecordDict({KEY_BOX: write_key_box(1, boxes[2])})
    assert open_key_box(content, identities[2], session="run", recipient=2) == b"secret 2"
    for identity, session, recipient, sender in (
        (identities[3], "run", 2, 1),
        (identities[2], "other", 2, 1),
        (identities[2], "run", 3, 1),
        (identities[2], "run", 2, 4),
    ):
        content = RecordDict({KEY_BOX: write_key_box(sender, boxes[2])})
        with pytest.raises(BractError):
            open_key_box(content, identity, session=session, recipient=recipient)


def helped(shares, identities):
    values = torch.linspace(-1, 1, 9)
    update, _ = encrypt_update(shares[0].public, {"w": values}, {}, CONFIG)
    vector = update.vectors["parameters"]
    publics = {node: identity.public for node, identity in identities.items()}
    bundle = [
        seal_partials(
            {"0.parameters": partial_decrypt(share, vector)},
            publics,
            session="run",
            sender=share.index,
            tag="round-4",
        )
        for share in shares[:2]
    ]
    return vector, values, bundle


def test_partial_decryptions_reach_the_recipients_and_nobody_else(two_of_three):
    identities = {1: make_identity(), 7: make_identity()}
    vector, values, bundle = helped(two_of_three, identities)
    for node, identity in identities.items():
        content = write_bundle("round-4", bundle, node)
        found = open_bundle(content, "round-4", identity, session="run", recipient=node)
        partials = [
            dataclasses.replace(p, data=p.data.reshape(vector.data.shape))
            for p in found["0.parameters"]
        ]
        mean = combine(two_of_three[0].public, vector, partials)
        np.testing.assert_allclose(mean, values.numpy(), atol=2e-5)
        raw = partials[0].data.tobytes()[:64]
        sent = [a.numpy().tobytes() for r in content.array_records.values() for a in r.values()]
        assert not any(raw in data for data in sent)
    with pytest.raises(BractError):
        open_bundle(content, "round-4", make_identity(), session="run", recipient=7)
    with pytest.raises(BractError, match="round-5 are incomplete"):
        open_bundle(content, "round-5", identities[7], session="run", recipient=7)


def test_an_altered_partial_decryption_is_refused(two_of_three):
    identities = {1: make_identity()}
    _, _, bundle = helped(two_of_three, identities)
    flipped = bundle[0].payload["0.parameters"].numpy().copy()
    flipped[5] ^= 1
    bad = dataclasses.replace(bundle[0], payload=ArrayRecord({"0.parameters": Array(flipped)}))
    content = write_bundle("round-4", [bad, bundle[1]], 1)
    with pytest.raises(BractError, match="altered on its way"):
        open_bundle(content, "round-4", identities[1], session="run", recipient=1)
