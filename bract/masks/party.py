"""A client of masked sums, from its round keys to the shares by which the others are unmasked."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from bract.masks.errors import MaskError
from bract.masks.keystream import add_mask
from bract.masks.layout import Words
from bract.masks.roster import Roster, Seat
from bract.masks.shamir import create_shares
from bract.paillier.errors import SealError
from bract.paillier.exchange import (
    Context,
    Identity,
    identity_of,
    make_identity,
    open_sealed,
    prove,
    seal,
)

SEED_BYTES = 32
SHARE_BYTES = 52
"""Bytes of one Shamir share of a seed: its index, and three chunks of 16."""


@dataclass(frozen=True)
class Shares:
    """One holder's shares of a client's two seeds, of which it gives away one at most.

    Attributes:
        own: Of the seed of the client's own mask, for where the client answered.
        pairs: Of the private key of its pairwise masks, for where it did not.
    """

    own: bytes
    pairs: bytes

    def to_bytes(self) -> bytes:
        """Return both, one after the other."""
        return self.own + self.pairs

    @classmethod
    def from_bytes(cls, data: bytes) -> Shares:
        """Read what `to_bytes` wrote."""
        if len(data) != 2 * SHARE_BYTES:
            raise MaskError(f"{len(data)} bytes of shares, expected {2 * SHARE_BYTES}")
        return cls(data[:SHARE_BYTES], data[SHARE_BYTES:])


@dataclass(frozen=True)
class Parcel:
    """What a client sends one holder through the server.

    Attributes:
        box: Its shares, sealed.
        own, pairs: Hashes of the shares, by which the server and the holder know wrong ones.
    """

    box: bytes
    own: bytes
    pairs: bytes


@dataclass(frozen=True)
class Dealt:
    """A client's sharing of its seeds: a parcel for each holder, and a hash of its own seed."""

    seed: bytes
    parcels: dict[int, Parcel]


@dataclass
class Party:
    """One client in one round; `to_text` is what it keeps between messages.

    Attributes:
        node: Its node id.
        session, number: The run, by a digest of all that its clients must agree on, and the round.
            Both are in every mask and box: between clients of different runs, none opens.
        boxes, pairs: Private keys of the round: for boxes, and of pairwise masks.
        seed: Seed of its own mask.
        roster: The clients of the sum, once it has dealt.
        held: Shares of others' seeds and of its own, by their owner.
        masked: Whether the masks were used; they are good for one update, and the secrets behind
            them are forgotten with it.
        survivors: Who answered, as it was told first; what it gives away follows from it alone.
    """

    node: int
    session: str
    number: int
    boxes: bytes
    pairs: bytes
    seed: bytes
    roster: Roster | None = None
    held: dict[int, Shares] = field(default_factory=dict)
    masked: bool = False
    survivors: tuple[int, ...] | None = None

    @classmethod
    def begin(cls, node: int, session: str, number: int) -> Party:
        """Draw the keys of a round."""
        return cls(
            node,
            session,
            number,
            make_identity().private,
            make_identity().private,
            secrets.token_bytes(SEED_BYTES),
        )

    def seat(self, identity: Identity, weight: int) -> Seat:
        """Return this client's seat."""
        return Seat(
            self.node, identity.public, self._box_keys.public, self._pair_keys.public, weight
        )

    def prove(self, identity: Identity, challenge: bytes) -> bytes:
        """Prove to the server that the keys of this client's seat are its own.

        Args:
            identity: Of the seat.
            challenge: The server's X25519 public key, fresh for this.
        """
        keys = [identity, self._box_keys, self._pair_keys]
        return prove(keys, challenge, seat_context(self.session, self.number, self.node))

    def deal(self, roster: Roster, identity: Identity) -> Dealt:
        """Share both seeds among the holders, sealed for each.

        Raises:
            MaskError: The roster is of another round, does not hold this client's own keys, or was
                given in another form before.
        """
        own = roster.by_node.get(self.node)
        if (roster.session, roster.number) != (self.session, self.number) or own is None:
            raise MaskError(
                f"the clients of a masked sum of round {roster.number} arrived, this client made "
                f"keys for round {self.number}: masks of another round or run"
            )
        if own != self.seat(identity, own.weight):
            raise MaskError("another client stands under this one's node id; its keys are not mine")
        if self.roster is not None:
            raise MaskError(
                f"the seeds of round {self.number} were shared before; another sharing needs "
                "other keys"
            )
        self.roster = roster
        holders = roster.holders_of(self.node)
        seeds = (self.seed, self.pairs)
        own_shares, pair_shares = (
            create_shares(secret, roster.threshold, len(holders)) for secret in seeds
        )
        parcels = {}
        for holder, mine, pair in zip(holders, own_shares, pair_shares, strict=True):
            shares = Shares(mine, pair)
            if holder == self.node:
                self.held = {self.node: shares}
            parcels[holder] = Parcel(
                b""
                if holder == self.node
                else self._seal(holder, shares.to_bytes(), "shares", identity),
                share_hash(roster, self.node, mine),
                share_hash(roster, self.node, pair),
            )
        return Dealt(seed_hash(roster, self.node, self.seed), parcels)

    def open(self, parcels: Mapping[int, Parcel], identity: Identity) -> dict[int, str]:
        """Open the neighbours' parcels and keep the shares.

        A box opens if its sender's identity sealed it for this roster: so this also finds a server
        that put a key of its own in a client's place, and only neighbours whose box opened count
        in `agree`.

        Returns:
            The neighbours whose shares are missing or wrong, and why.
        """
        roster, refused = self._roster, {}
        for sender in roster.neighbours_of(self.node):
            if sender not in parcels:
                refused[sender] = "no shares of it came"
                continue
            parcel = parcels[sender]
            try:
                shares = Shares.from_bytes(self._open(sender, parcel.box, "shares", identity))
                self._check_shares(sender, shares, parcel)
            except (MaskError, SealError) as error:
                refused[sender] = str(error)
                continue
            self.held[sender] = shares
        return refused

    def mask(self, parts: Mapping[int, Words], task: bytes = b"") -> None:
        """Add this client's masks to its words, in place, and forget the secrets behind them.

        Args:
            parts: Weighted codes by the number of their vector.
            task: Digest of the message that asked for the update, the model in it. Masks of
                clients that were sent different ones do not cancel, whatever the server is given.

        Raises:
            MaskError: The shares of too few neighbours are here: the masks could be for clients
                that a server has made up. Or the masks were used: the difference of two vectors
                under the same masks is that of their values.
        """
        roster = self._roster
        if self.masked:
            raise MaskError(
                f"round {self.number}: an update was masked before; another one under the same "
                "masks would give their difference away"
            )
        if len(self.held) < roster.threshold:
            raise MaskError(
                f"shares of {len(self.held) - 1} other clients are here, the threshold is "
                f"{roster.threshold}: with fewer nothing is masked"
            )
        seeds = {
            other: pair_seed(roster, self.pairs, self.node, other, task)
            for other in roster.neighbours_of(self.node)
        }
        own = own_seed(roster, self.node, self.seed)
        self.masked = True
        # Shares are left, fewer than it takes: who takes this client's state later reads nothing.
        self.seed = self.pairs = b""
        for stream, words in parts.items():
            add_mask(words, own, stream)
            for other, seed in seeds.items():
                add_mask(words, seed, stream, negative=other < self.node)

    def agree(self, survivors: Iterable[int], identity: Identity, least: int) -> dict[int, bytes]:
        """Take note of who answered, once, and seal that for the neighbours among them.

        Args:
            least: Fewest clients in a sum that this client helps to unmask. They are counted as
                far as masks connect them through others who answered, since the server learns the
                sum of every part of its own; neighbours whose box did not open do not count.

        Raises:
            MaskError: Another list than before, without this client, with clients that are not of
                the sum, or too short.
        """
        roster, named = self._roster, tuple(sorted(set(survivors)))
        if self.survivors is not None and named != self.survivors:
            raise MaskError(
                f"round {self.number}: other clients are said to have answered than before; both "
                "lists together would give single updates away"
            )
        if not self.masked or self.node not in named:
            raise MaskError(f"round {self.number}: this client is not among those who answered")
        if not set(named) <= set(roster.by_node):
            raise MaskError(f"round {self.number}: clients answered that are not of the sum")
        summed = self.part(named)
        if len(summed) < least:
            raise MaskError(
                f"round {self.number}: a sum of {len(summed)} clients, and this site helps to "
                f"unmask sums of at least {least}"
            )
        self.survivors = named
        purpose = self._survivors_purpose(named)
        return {
            other: self._seal(other, b"", purpose, identity)
            for other in roster.neighbours_of(self.node)
            if other in named
        }

    def part(self, named: Iterable[int], confirmed: Iterable[int] = ()) -> set[int]:
        """Return which of the clients that answered are in one sum with this client.

        The server learns the sum of every part that masks connect. A neighbour whose box did not
        open may be the server's own, so it connects nothing, unless it is among those `confirmed`.
        """
        roster = self._roster
        unproven = set(roster.neighbours_of(self.node)) - set(self.held) - set(confirmed)
        return roster.connected(self.node, set(named) - unproven)

    def confirmed(self, boxes: Mapping[int, bytes], identity: Identity) -> set[int]:
        """Return the neighbours that sealed who answered for this client.

        What opens here was sealed by the identity on the roster, under the roster: its client takes
        part, also where its box of shares was spoilt.
        """
        if self.survivors is None:
            raise MaskError(f"round {self.number}: it was not said who answered")
        purpose, found = self._survivors_purpose(self.survivors), set()
        for sender in set(boxes) & set(self._roster.neighbours_of(self.node)):
            try:
                self._open(sender, boxes[sender], purpose, identity)
            except SealError:
                continue
            found.add(sender)
        return found

    def reveal(self, boxes: Mapping[int, bytes] | None, identity: Identity) -> dict[int, bytes]:
        """Return one share of each client that this one holds shares of.

        Of who answered it is that of the own mask, of others that of the pairwise masks.

        Args:
            boxes: What the neighbours sealed in `agree`; None where the run asks for none.

        Raises:
            MaskError: Fewer than the threshold named the same clients.
        """
        if self.survivors is None:
            raise MaskError(f"round {self.number}: it was not said who answered")
        roster = self._roster
        if boxes is not None:
            agreed = 1 + len(self.confirmed(boxes, identity))
            if agreed < roster.threshold:
                raise MaskError(
                    f"round {self.number}: {agreed} clients confirm who answered, expected "
                    f"{roster.threshold}: the server named other dropouts to others"
                )
        return {
            owner: shares.own if owner in self.survivors else shares.pairs
            for owner, shares in self.held.items()
        }

    def to_text(self) -> str:
        """Return the state as JSON."""
        roster = None if self.roster is None else asdict(self.roster)
        fields = {**self.__dict__, "roster": roster}
        fields["held"] = {str(n): s.to_bytes().hex() for n, s in self.held.items()}
        return json.dumps(fields, default=lambda value: value.hex())

    @classmethod
    def from_text(cls, text: str) -> Party:
        """Read what `to_text` wrote."""
        fields = json.loads(text)
        for name in ("boxes", "pairs", "seed"):
            fields[name] = bytes.fromhex(fields[name])
        if fields["roster"] is not None:
            fields["roster"] = roster_from(fields["roster"])
        fields["held"] = {
            int(n): Shares.from_bytes(bytes.fromhex(s)) for n, s in fields["held"].items()
        }
        if fields["survivors"] is not None:
            fields["survivors"] = tuple(fields["survivors"])
        return cls(**fields)

    @property
    def _roster(self) -> Roster:
        if self.roster is None:
            raise MaskError(f"round {self.number}: the clients of the sum were not named yet")
        return self.roster

    @property
    def _box_keys(self) -> Identity:
        return identity_of(self.boxes)

    @property
    def _pair_keys(self) -> Identity:
        return identity_of(self.pairs)

    def _check_shares(self, sender: int, shares: Shares, parcel: Parcel) -> None:
        roster = self._roster
        index = roster.holders_of(sender).index(self.node) + 1
        for share, stated in ((shares.own, parcel.own), (shares.pairs, parcel.pairs)):
            if share_index(share) != index or share_hash(roster, sender, share) != stated:
                raise MaskError("its shares are not those that it stated to the server")

    def _seal(self, recipient: int, text: bytes, purpose: str, identity: Identity) -> bytes:
        roster = self._roster
        context = _context(roster, self.node, recipient, purpose)
        seat = roster.by_node[recipient]
        # The round's key is the server's word; the identity is what sites pin.
        return seal(text, seat.box_key, context, sender=identity, recipient_identity=seat.identity)

    def _open(self, sender: int, box: bytes, purpose: str, identity: Identity) -> bytes:
        roster = self._roster
        context = _context(roster, sender, self.node, purpose)
        of = roster.by_node[sender].identity
        return open_sealed(box, self._box_keys, context, sender_public=of, second=identity)

    def _survivors_purpose(self, survivors: tuple[int, ...]) -> str:
        listed = hashlib.sha256(",".join(map(str, survivors)).encode()).hexdigest()
        return f"survivors {listed}"


def seat_context(session: str, number: int, node: int) -> Context:
    """Return the context of a client's proof of its keys in one round of a run."""
    return Context(session, str(node), "server", f"keys of round {number}")


def pair_seed(roster: Roster, private: bytes, node: int, other: int, task: bytes = b"") -> bytes:
    """Return the seed of the masks that two clients share, from the private key of one of them.

    Args:
        private: Of ``node``'s pairwise masks.
        task: As `Party.mask` was given it.
    """
    peer = X25519PublicKey.from_public_bytes(roster.by_node[other].mask_key)
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(peer)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise MaskError(f"the mask key of client {other} is no usable X25519 key") from error
    low, high = sorted((node, other))
    return _derive(secret, roster, f"pair {low} {high} {task.hex()}")


def own_seed(roster: Roster, node: int, seed: bytes) -> bytes:
    """Return the seed of a client's own mask, from the secret that it shared."""
    return _derive(seed, roster, f"own {node}")


def seed_hash(roster: Roster, node: int, seed: bytes) -> bytes:
    """Return the hash that a client states of the secret behind its own mask."""
    return hashlib.sha256(b"seed" + roster.digest + str(node).encode() + b":" + seed).digest()


def share_hash(roster: Roster, owner: int, share: bytes) -> bytes:
    """Return the hash that a client states of a share of one of its secrets."""
    return hashlib.sha256(b"share" + roster.digest + str(owner).encode() + b":" + share).digest()


def share_index(share: bytes) -> int:
    """Return at which point, from 1, a share is: its holder's place among the holders."""
    return int.from_bytes(share[:4], "little")


def roster_from(fields: Mapping[str, object]) -> Roster:
    """Return the roster of fields as JSON holds them, keys in hexadecimal digits."""
    seats = fields["seats"]
    assert isinstance(seats, list)
    read = [
        {name: bytes.fromhex(v) if isinstance(v, str) else v for name, v in seat.items()}
        for seat in seats
    ]
    return Roster(**{**fields, "seats": tuple(Seat(**seat) for seat in read)})  # type: ignore[arg-type]


def _context(roster: Roster, sender: int, recipient: int, purpose: str) -> Context:
    return Context(roster.session, str(sender), str(recipient), f"{purpose} {roster.digest.hex()}")


def _derive(secret: bytes, roster: Roster, purpose: str) -> bytes:
    derivation = HKDF(
        algorithm=hashes.SHA256(),
        length=SEED_BYTES,
        salt=roster.digest,
        info=b"bract masks " + purpose.encode(),
    )
    return derivation.derive(secret)
