"""Servers that break the protocol of masked sums: what they ask for, and that they get nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from masked_rounds import Group

from bract.masks.errors import LostSumError, MaskError
from bract.masks.layout import MaskLayout
from bract.masks.party import Dealt, Parcel, Party, Shares, share_hash
from bract.masks.roster import Roster
from bract.masks.unmasking import rebuild
from bract.paillier.errors import SealError
from bract.paillier.exchange import Identity, make_identity

LAYOUT = MaskLayout(length=8, clip=1.0, bits=16, max_weight=127)


class Impersonated:
    """Six clients and a server that plays three more, of whose sites it knows the public keys."""

    def __init__(self) -> None:
        self.identities = {n: make_identity() for n in range(1, 10)}
        self.parties = {n: Party.begin(n, "run", 1) for n in range(1, 10)}
        public = {n: Identity(b"", i.public) for n, i in self.identities.items()}
        seats = tuple(self.parties[n].seat(public[n], 1) for n in range(1, 10))
        self.roster = Roster("run", 1, 6, 8, seats)
        self.real = range(1, 7)
        self.dealt = {n: self.parties[n].deal(self.roster, self.identities[n]) for n in self.real}

    def open(self) -> None:
        for node in self.real:
            sent = {n: self.dealt[n].parcels[node] for n in self.real if n != node}
            assert set(self.parties[node].open(sent, self.identities[node])) == {7, 8, 9}


def test_the_key_of_a_round_without_that_of_the_site_opens_no_shares() -> None:
    group = Impersonated()
    spy = group.parties[7]
    spy.roster = group.roster
    # Its site's public key is known to everybody.
    site = Identity(make_identity().private, group.identities[7].public)
    box = group.dealt[1].parcels[7].box
    with pytest.raises(SealError, match="does not open"):
        spy._open(1, box, "shares", site)
    assert spy._open(1, box, "shares", group.identities[7])


def test_clients_that_a_server_plays_do_not_count_in_a_sum() -> None:
    group = Impersonated()
    group.open()
    everybody = range(1, 10)
    for node in group.real:
        group.parties[node].mask({0: np.zeros(8, dtype=np.uint32)})
    with pytest.raises(MaskError, match="a sum of 6 clients, and this site helps"):
        group.parties[1].agree(everybody, group.identities[1], 7)
    assert group.parties[1].agree(everybody, group.identities[1], 6)


@pytest.mark.thorough
def test_survivors_whose_masks_fall_apart_count_by_their_part() -> None:
    """Of a ring with 17 neighbours a side, two gaps of 17 leave a sum of 18 by itself."""
    group = Group.of(dict.fromkeys(range(1, 101), 1), threshold=18, neighbours=34)
    ring, _ = group.roster._ring
    group.upload(LAYOUT, {n: np.zeros(8) for n in ring})
    survivors = set(ring) - set(ring[18:35]) - set(ring[83:100])
    assert len(survivors) == 66
    alone, other = ring[0], ring[40]
    assert group.roster.connected(alone, survivors) == set(ring[:18])
    with pytest.raises(MaskError, match="a sum of 18 clients"):
        group.parties[alone].agree(survivors, group.identities[alone], 19)
    assert group.parties[other].agree(survivors, group.identities[other], 48)


def test_masks_of_clients_that_were_sent_different_models_do_not_cancel() -> None:
    """A server that knows the others' updates would read the one of client 1 off the sum."""
    group = Group.of(dict.fromkeys(range(1, 5), 1), threshold=3)
    uploads = {}
    for node, party in group.parties.items():
        words, _ = LAYOUT.encode(np.full(8, 0.5), 1)
        party.mask({0: words}, b"model" if node == 1 else b"dead")
        uploads[node] = LAYOUT.to_bytes(words)
    revealed = group.reveal(uploads)
    for task in (b"model", b"dead"):
        total, _ = group.total(LAYOUT, uploads, revealed, task)
        with pytest.raises(MaskError, match="sums are larger"):
            LAYOUT.decode(total, 4)


def test_boxes_of_clients_in_different_runs_do_not_open() -> None:
    """A learning rate of nearly 0 would have the others send what the server knows."""
    identities = {n: make_identity() for n in (1, 2, 3)}
    runs = {1: "rate 0.1", 2: "rate 0", 3: "rate 0"}
    parties = {n: Party.begin(n, run, 1) for n, run in runs.items()}
    seats = tuple(parties[n].seat(identities[n], 1) for n in (1, 2, 3))
    rosters = {n: Roster(run, 1, 2, 2, seats) for n, run in runs.items()}
    with pytest.raises(MaskError):
        parties[1].deal(rosters[2], identities[1])
    dealt = {n: parties[n].deal(rosters[n], identities[n]) for n in (1, 2, 3)}
    for node, refused in ((1, {2, 3}), (2, {1})):
        sent = {n: dealt[n].parcels[node] for n in (1, 2, 3) if n != node}
        assert set(parties[node].open(sent, identities[node])) == refused


def test_a_masked_client_holds_no_seed_of_its_own_any_more() -> None:
    group = Group.of({1: 1, 2: 1, 3: 1}, threshold=2)
    party = group.parties[1]
    seed, pairs = party.seed, party.pairs
    group.upload(LAYOUT, {1: np.zeros(8)})
    text = party.to_text()
    assert seed.hex() not in text and pairs.hex() not in text
    group.keep()
    assert group.parties[1].agree((1, 2, 3), group.identities[1], 2)


@pytest.mark.parametrize("size", [20, 53, 5000])
def test_a_share_of_another_length_is_wrong_whatever_its_owner_stated(size: int) -> None:
    group = Group.of({1: 1, 2: 1, 3: 1}, threshold=3)
    uploads = group.upload(LAYOUT, {n: np.zeros(8) for n in (1, 2, 3)})
    revealed = group.reveal(uploads)
    made = (1).to_bytes(4, "little") + bytes(size - 4)
    parcels = dict(group.dealt[1].parcels)
    parcels[1] = Parcel(b"", share_hash(group.roster, 1, made), parcels[1].pairs)
    group.dealt[1] = Dealt(group.dealt[1].seed, parcels)
    revealed[1][1] = made
    with pytest.raises(LostSumError, match="2 right shares"):
        rebuild(group.roster, group.dealt, (1, 2, 3), revealed)


def test_numbers_that_no_digest_holds_are_refused() -> None:
    group = Group.of({1: 1, 2: 1, 3: 1}, threshold=2)
    seats = group.roster.seats
    changes: tuple[dict[str, Any], ...] = (
        {"number": -1},
        {"number": 1 << 70},
        {"neighbours": 1 << 70},
        {"seats": (*seats[:2], replace(seats[2], weight=1 << 70))},
        {"seats": (*seats[:2], replace(seats[2], node=1 << 130))},
    )
    for changed in changes:
        with pytest.raises(MaskError):
            replace(group.roster, **changed)


def test_shares_are_read_whole() -> None:
    with pytest.raises(MaskError, match="103 bytes"):
        Shares.from_bytes(bytes(103))
