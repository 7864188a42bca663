"""Masked sums equal the plain quantised sum, whichever clients drop out, and reveal no more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_rounds import Group, plain_sum

from bract.masks.errors import LostSumError, MaskError
from bract.masks.layout import MaskLayout
from bract.masks.party import Party, Shares
from bract.masks.roster import Roster, lost_odds, usual_neighbours, usual_threshold

LAYOUT = MaskLayout(length=300, clip=1.0, bits=16, max_weight=31)
WEIGHTS = {11: 18, 12: 9, 13: 3}


def values_of(group: Group, layout: MaskLayout = LAYOUT, seed: int = 0) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {node: rng.uniform(-1.2, 1.2, layout.length) for node in group.parties}


def test_the_sum_is_the_plain_quantised_one_to_the_bit() -> None:
    group = Group.of(WEIGHTS, threshold=2)
    values = values_of(group)
    uploads = group.upload(LAYOUT, values)
    total, seeds = group.total(LAYOUT, uploads, group.reveal(uploads))
    assert total.tolist() == plain_sum(LAYOUT, values, WEIGHTS)
    assert not seeds.wrong
    mean = LAYOUT.decode(total, 30)
    clipped = {n: np.clip(v, -1, 1) for n, v in values.items()}
    exact = sum(WEIGHTS[n] * v for n, v in clipped.items()) / 30
    assert np.abs(mean - exact).max() <= LAYOUT.fixed_point.bound


@pytest.mark.parametrize("absent", [11, 12, 13])
def test_whoever_of_three_drops_out_after_dealing_the_others_sum_is_left(absent: int) -> None:
    group = Group.of(WEIGHTS, threshold=2)
    values = {n: v for n, v in values_of(group).items() if n != absent}
    uploads = group.upload(LAYOUT, values)
    total, _ = group.total(LAYOUT, uploads, group.reveal(uploads))
    assert total.tolist() == plain_sum(LAYOUT, values, WEIGHTS)


def test_a_client_that_leaves_after_its_upload_stays_in_the_sum() -> None:
    group = Group.of(WEIGHTS, threshold=2)
    values = values_of(group)
    uploads = group.upload(LAYOUT, values)
    total, _ = group.total(LAYOUT, uploads, group.reveal(uploads, helpers=(11, 13)))
    assert total.tolist() == plain_sum(LAYOUT, values, WEIGHTS)


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_dropouts_up_to_the_threshold_are_survived(data: st.DataObject) -> None:
    clients = data.draw(st.integers(3, 7))
    bits, most = data.draw(st.sampled_from([(2, 1), (8, 7), (16, 255), (32, 31)]))
    layout = MaskLayout(data.draw(st.integers(1, 40)), 0.5, bits, most * clients)
    weights = {n: data.draw(st.integers(1, most)) for n in range(clients)}
    threshold = usual_threshold(clients, clients - 1, consistency=True)
    survivors = data.draw(st.sets(st.sampled_from(range(clients)), min_size=threshold))
    group = Group.of(weights, threshold=threshold)
    group.keep()
    values = {n: v for n, v in values_of(group, layout).items() if n in survivors}
    uploads = group.upload(layout, values)
    group.keep()
    total, _ = group.total(layout, uploads, group.reveal(uploads))
    assert total.tolist() == plain_sum(layout, values, weights)


@pytest.mark.thorough
def test_a_hundred_clients_with_logarithmic_neighbours_and_a_third_gone() -> None:
    neighbours = usual_neighbours(100)
    threshold = usual_threshold(100, neighbours, consistency=False)
    assert (neighbours, threshold) == (34, 14)
    weights = {n: 1 + n % 3 for n in range(100)}
    layout = MaskLayout(64, 1.0, 16, 300)
    group = Group.of(weights, threshold=threshold, neighbours=neighbours)
    assert {len(group.roster.neighbours_of(n)) for n in weights} == {34}
    gone = set(np.random.default_rng(5).permutation(100)[:33].tolist())
    values = {n: v for n, v in values_of(group, layout).items() if n not in gone}
    uploads = group.upload(layout, values)
    total, seeds = group.total(layout, uploads, group.reveal(uploads))
    assert total.tolist() == plain_sum(layout, values, weights)
    assert len(seeds.own) == 67
    assert len(seeds.pairs) < 33 * 34


def test_an_upload_alone_is_uniform_and_differs_where_the_values_do_not() -> None:
    layout = MaskLayout(60_000, 1.0, 8, 257)  # 16 bits
    group = Group.of({1: 1, 2: 1, 3: 1}, threshold=2)
    zeros = dict.fromkeys(group.parties, np.zeros(layout.length))
    uploads = group.upload(layout, zeros)
    for data in uploads.values():
        counts = np.bincount(data, minlength=256)
        expected = data.size / 256
        # Chi square with 255 degrees of freedom: mean 255, standard deviation 22.6.
        assert 255 - 6 * 22.6 < ((counts - expected) ** 2 / expected).sum() < 255 + 6 * 22.6
    assert not np.array_equal(uploads[1], uploads[2])


def test_without_the_threshold_nothing_is_unmasked() -> None:
    group = Group.of(WEIGHTS, threshold=2)
    uploads = group.upload(LAYOUT, values_of(group))
    revealed = group.reveal(uploads)
    one = {11: revealed[11]}
    with pytest.raises(LostSumError, match="1 right shares of a seed are left"):
        group.total(LAYOUT, uploads, one)


def test_a_wrong_share_is_named_and_the_others_suffice() -> None:
    group = Group.of(WEIGHTS, threshold=2)
    values = values_of(group)
    uploads = group.upload(LAYOUT, values)
    revealed = group.reveal(uploads)
    share = bytearray(revealed[12][11])
    share[-1] ^= 1
    revealed[12][11] = bytes(share)
    total, seeds = group.total(LAYOUT, uploads, revealed)
    assert total.tolist() == plain_sum(LAYOUT, values, WEIGHTS)
    assert seeds.wrong == {12: 11}


def test_shares_that_are_not_those_stated_are_refused_by_their_holder() -> None:
    group = Group.of(WEIGHTS, threshold=2)
    fresh = Group.of(WEIGHTS, threshold=2)
    parcel = group.dealt[11].parcels[12]
    group.dealt[11].parcels[12] = replace(parcel, own=fresh.dealt[11].parcels[12].own)
    assert "not those that it stated" in group.open(12)[11]


def test_another_seed_than_the_stated_one_names_its_owner() -> None:
    group = Group.of(WEIGHTS, threshold=2)
    group.dealt[13] = replace(group.dealt[13], seed=bytes(32))
    uploads = group.upload(LAYOUT, values_of(group))
    with pytest.raises(LostSumError) as caught:
        group.total(LAYOUT, uploads, group.reveal(uploads))
    assert caught.value.node == 13


def test_a_server_that_puts_its_own_key_in_a_clients_place_is_found_out() -> None:
    """Man in the middle: client 12 is shown another mask key of client 11 than 11 made."""
    parties = {n: Party.begin(n, "run", 1) for n in WEIGHTS}
    group = Group.of(WEIGHTS, threshold=2)
    seats = {n: parties[n].seat(group.identities[n], w) for n, w in WEIGHTS.items()}
    spy = Party.begin(11, "run", 1).seat(group.identities[11], 18)
    honest = Roster("run", 1, 2, 2, tuple(seats.values()))
    forged = Roster("run", 1, 2, 2, (spy, seats[12], seats[13]))
    dealt = {n: parties[n].deal(honest, group.identities[n]) for n in (11, 13)}
    dealt[12] = parties[12].deal(forged, group.identities[12])
    refused = parties[12].open({n: dealt[n].parcels[12] for n in (11, 13)}, group.identities[12])
    assert set(refused) == {11, 13}
    with pytest.raises(MaskError, match="shares of 0 other clients"):
        parties[12].mask({0: np.zeros(3, dtype=np.uint32)})


def test_a_server_that_shows_one_client_other_weights_is_found_out() -> None:
    group = Group.of(WEIGHTS, threshold=2)
    parties = {n: Party.begin(n, "run", 1) for n in WEIGHTS}
    seats = {n: parties[n].seat(group.identities[n], w) for n, w in WEIGHTS.items()}
    roster = Roster("run", 1, 2, 2, tuple(seats.values()))
    other = Roster("run", 1, 2, 2, (replace(seats[11], weight=1), seats[12], seats[13]))
    dealt = {n: parties[n].deal(roster, group.identities[n]) for n in (11, 12)}
    dealt[13] = parties[13].deal(other, group.identities[13])
    assert 13 in parties[11].open({n: dealt[n].parcels[11] for n in (12, 13)}, group.identities[11])


def test_a_server_that_names_other_dropouts_to_others_gets_nothing() -> None:
    """It wants both seeds of client 4: to half of the clients it answered, to half it did not."""
    group = Group.of({1: 1, 2: 1, 3: 1, 4: 1}, threshold=3)
    group.upload(LAYOUT, values_of(group))
    here, gone = (1, 2, 3, 4), (1, 2, 3)
    sealed = {n: group.parties[n].agree(here, group.identities[n], 2) for n in (1, 4)}
    sealed |= {n: group.parties[n].agree(gone, group.identities[n], 2) for n in (2, 3)}
    for node in (1, 2, 3):
        with pytest.raises(MaskError, match="2 clients confirm who answered, expected 3"):
            group.parties[node].reveal(
                {h: b[node] for h, b in sealed.items() if node in b}, group.identities[node]
            )
    with pytest.raises(MaskError, match="other clients are said to have answered than before"):
        group.parties[1].agree(gone, group.identities[1], 2)


def test_no_client_gives_away_both_shares_of_another() -> None:
    group = Group.of(WEIGHTS, threshold=2)
    uploads = group.upload(LAYOUT, values_of(group))
    revealed = group.reveal(uploads)
    for helper, shares in revealed.items():
        for owner, share in shares.items():
            held = group.parties[helper].held[owner]
            assert share == held.own != held.pairs
    with pytest.raises(MaskError):
        group.parties[11].agree((11, 13), group.identities[11], 2)


@pytest.mark.parametrize("least", [3, 4])
def test_a_sum_of_fewer_clients_than_the_site_wants_is_not_unmasked(least: int) -> None:
    group = Group.of(WEIGHTS, threshold=2)
    group.upload(LAYOUT, values_of(group))
    with pytest.raises(MaskError, match="a sum of 2 clients, and this site"):
        group.parties[11].agree((11, 12), group.identities[11], least)


def test_masks_are_used_once() -> None:
    group = Group.of(WEIGHTS, threshold=2)
    values = values_of(group)
    group.upload(LAYOUT, {11: values[11]})
    group.keep()
    with pytest.raises(MaskError, match="masked before"):
        group.upload(LAYOUT, {11: values[12]})


def test_masks_of_another_round_are_refused() -> None:
    group = Group.of(WEIGHTS, threshold=2, number=2)
    party = Party.begin(11, "run", 3)
    with pytest.raises(MaskError, match="masks of another round"):
        party.deal(group.roster, group.identities[11])


def test_an_identity_counts_once_and_weights_are_positive() -> None:
    group = Group.of(WEIGHTS, threshold=2)
    first, second, third = group.roster.seats
    for wrong in (replace(second, identity=first.identity), replace(second, weight=0)):
        with pytest.raises(MaskError):
            Roster("run", 1, 2, 2, (first, wrong, third))
    with pytest.raises(MaskError, match="3 clients are too few for a threshold of 4"):
        Roster("run", 1, 4, 2, group.roster.seats)


def test_a_sum_that_no_codes_give_is_refused() -> None:
    with pytest.raises(MaskError, match="1 of 300 sums"):
        sums = np.zeros(300, dtype=np.uint32)
        sums[7] = 3 * 65534 + 1
        LAYOUT.decode(sums, 3)


def test_words_take_three_bytes_at_sixteen_bits_and_weights_up_to_255() -> None:
    assert [MaskLayout(1, 1.0, 16, w).word_bytes for w in (1, 31, 255, 257, 2**16)] == [
        2,
        3,
        3,
        4,
        4,
    ]
    assert MaskLayout(1, 1.0, 32, 31).word_bytes == 5


def test_shares_of_another_length_are_refused() -> None:
    with pytest.raises(MaskError, match="3 bytes of shares"):
        Shares.from_bytes(b"abc")


def test_odds_that_a_seed_is_lost_are_those_of_counting() -> None:
    # 4 clients, ring of 2 neighbours, threshold 3, one gone: a client keeps all 3 holders with
    # probability 1/4, so each of 4 is lost with 3/4.
    assert lost_odds(4, 2, 3, 1) == 1.0
    assert lost_odds(4, 2, 2, 1) == 0.0
    assert lost_odds(10, 9, 7, 3) == 0.0
    assert lost_odds(10, 9, 8, 3) == 1.0
    # 5 clients, 2 neighbours, threshold 2, two gone: C(3,1) C(2,2) / C(5,3) for each.
    assert lost_odds(5, 2, 2, 2) == pytest.approx(1.0)
    assert lost_odds(100, 34, 14, 33) < 1e-3
