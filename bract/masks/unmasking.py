"""The server's part: rebuild the seeds of what did not cancel, and take it off the sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bract.masks.errors import LostSumError
from bract.masks.keystream import add_mask
from bract.masks.layout import Words
from bract.masks.party import (
    SHARE_BYTES,
    Dealt,
    own_seed,
    pair_seed,
    seed_hash,
    share_hash,
    share_index,
)
from bract.masks.roster import Roster
from bract.masks.shamir import combine_shares
from bract.paillier.exchange import identity_of


@dataclass(frozen=True)
class Unmasked:
    """Seeds that take the masks off one round's sum.

    Attributes:
        own: Of the masks of who answered, by node.
        pairs: Of the masks that who answered shared with who did not: (answered, absent) to seed.
        wrong: Who gave a share that its owner did not deal, and of whom.
    """

    own: dict[int, bytes]
    pairs: dict[tuple[int, int], bytes]
    wrong: dict[int, int]


def rebuild(
    roster: Roster,
    dealt: Mapping[int, Dealt],
    survivors: tuple[int, ...],
    revealed: Mapping[int, Mapping[int, bytes]],
    task: bytes = b"",
) -> Unmasked:
    """Rebuild the seeds from what helpers revealed.

    Args:
        dealt: What each client stated of its seeds, by node.
        survivors: Whose masked updates are in the sum.
        revealed: Helper to owner to share.
        task: What the survivors masked for.

    Raises:
        LostSumError: Fewer than ``t`` right shares of a seed, or they give another seed than its
            owner stated: it then names the owner.
    """
    wrong: dict[int, int] = {}
    own, pairs = {}, {}
    for owner in roster.by_node:
        answered = owner in survivors
        holders, right = roster.holders_of(owner), []
        for helper in holders:
            share = revealed.get(helper, {}).get(owner)
            if share is None:
                continue
            parcel = dealt[owner].parcels[helper]
            stated = parcel.own if answered else parcel.pairs
            if (
                len(share) != SHARE_BYTES
                or share_index(share) != holders.index(helper) + 1
                or (share_hash(roster, owner, share) != stated)
            ):
                wrong.setdefault(helper, owner)
                continue
            right.append(share)
        absent = [n for n in roster.neighbours_of(owner) if n in survivors]
        if not answered and not absent:
            continue
        if len(right) < roster.threshold:
            raise LostSumError(
                f"{len(right)} right shares of a seed are left, the threshold is "
                f"{roster.threshold}: too few clients answered"
            )
        secret = _combined(right[: roster.threshold])
        if answered:
            if secret is None or seed_hash(roster, owner, secret) != dealt[owner].seed:
                raise LostSumError("shared another seed than the one of its mask", owner)
            own[owner] = own_seed(roster, owner, secret)
            continue
        if secret is None or identity_of(secret).public != roster.by_node[owner].mask_key:
            raise LostSumError("shared another key than that of its pairwise masks", owner)
        for survivor in absent:
            pairs[survivor, owner] = pair_seed(roster, secret, owner, survivor, task)
    return Unmasked(own, pairs, wrong)


def unmask(total: Words, seeds: Unmasked, stream: int) -> None:
    """Take the masks off the sum of one vector, in place."""
    for seed in seeds.own.values():
        add_mask(total, seed, stream, negative=True)
    for (survivor, absent), seed in seeds.pairs.items():
        # The survivor added this mask where its node id is the smaller one.
        add_mask(total, seed, stream, negative=survivor < absent)


def _combined(shares: list[bytes]) -> bytes | None:
    try:
        secret = combine_shares(shares)
    except ValueError:
        return None
    return secret if len(secret) == 32 else None
