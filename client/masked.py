"""A client's side of masked sums: its keys and shares of the round, and its masked update.

What it keeps between messages is one round's: keys, the roster, and shares of the others' seeds.
A restart without ``state-dir`` loses them, and the client drops out of that round alone.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from flwr.app import Context, RecordDict
from torch import Tensor

from bract.client.defenses import DefenseState
from bract.client.encrypted.pins import Pins
from bract.client.failures import hiding
from bract.client.policy import SitePolicy
from bract.client.private import locked
from bract.client.replies import digest
from bract.client.site import Site
from bract.client.training import planned_steps
from bract.client.truth import save_masked
from bract.config import FederationConfig
from bract.data.views import training_examples
from bract.errors import BractError
from bract.masks.party import Party
from bract.masks.roster import Roster
from bract.paillier.exchange import Identity, identity_of, make_identity
from bract.protocol.keyexchange import SESSION_KEY, as_integer
from bract.protocol.masking import (
    STREAMS,
    Advert,
    MaskedUpdate,
    decode_mean,
    encode_update,
    mask_layout,
    masking,
    read_by_node,
    read_parcels,
    read_roster,
    read_survivors,
    write_by_node,
    write_dealt,
    write_refused,
)
from bract.protocol.records import ROUND_KEY, instruction
from bract.protocol.update import Tensors, difference

RECORD = "bract.masks"
"""Name of the record in Flower's client-side ``context.state``."""

FEWEST = 3
"""Clients of a sum before anyone drops out: of two each knows the other's update."""

CLIPPED_WARNING = 0.001
"""Share of clipped values above which a client reports it, to the server as one digit."""

_log = logging.getLogger(__name__)


class MaskedClient:
    """One client's part in the masked sum of a message's round.

    Parameters
    ----------
    config, site, policy, context
        The federation, the client's node configuration and policy, and the context of the message.
    content
        The message; its config names the run and the round.
    """

    def __init__(
        self,
        config: FederationConfig,
        site: Site,
        policy: SitePolicy,
        context: Context,
        content: RecordDict,
    ) -> None:
        self.config = config
        self.site = site
        self.policy = policy
        self.pins = Pins.from_node_config(context.node_config)
        self.node_id = context.node_id
        if self.pins.peers is not None and site.state_dir is None:
            raise BractError(
                "this client's node config pins its peers, so it does not rely on the server, "
                "which may send two messages at once; only a folder holds one against the other: "
                "set state-dir, or take peers out of the node config",
                code="config-key",
            )
        self._content = content
        self.session = str(instruction(content, SESSION_KEY))
        try:
            self.number = as_integer(instruction(content, ROUND_KEY))
        except ValueError as error:
            raise BractError(
                f"the message's {ROUND_KEY}: {error}", code="message-malformed"
            ) from None
        self._store = DefenseState(
            context.state,
            directory=site.state_dir,
            key=f"{config.name}-{site.name}-masks",
            name=RECORD,
        )
        self._load()

    def advertise(self) -> RecordDict:
        """Draw this round's keys and announce them, with the examples that it will train on."""
        with self._alone():
            party = Party.begin(self.node_id, self.session, self.number, self._settings())
            identity = self._identity() or self._new_identity()
            self._keep(party)
            seat = party.seat(identity, 1)
            examples = self._examples()
        return Advert(seat.identity, seat.box_key, seat.mask_key, examples).to_content()

    def share(self, content: RecordDict) -> RecordDict:
        """Share the seeds among the neighbours of the roster.

        Raises
        ------
        BractError
            If the roster is of another round or run, holds clients that are not pinned or too few
            of them, has another threshold than the configuration, or weights by which this
            client's update would be most of the sum.
        """
        roster = read_roster(content)
        self._check_roster(roster)
        with self._alone():
            party = self._party()
            with masking():
                dealt = party.deal(roster, self._known_identity())
            self._keep(party)
        return write_dealt(dealt)

    def open(self, content: RecordDict) -> RecordDict:
        """Take the neighbours' shares; name those whose are missing or wrong."""
        with self._alone():
            party = self._party()
            with masking():
                refused = party.open(read_parcels(content), self._known_identity())
            self._keep(party)
        for node, why in refused.items():
            _log.error("round %d: the shares of client %d: %s", self.number, node, why)
        return write_refused(refused)

    def check_ready(self) -> None:
        """Refuse to train where this client could not mask the result.

        Raises
        ------
        BractError
            If it has no roster and shares of this round, or has masked an update of this round.
        """
        if self._party().masked:
            raise BractError(
                f"was asked to train twice in round {self.number}; the masks of a round are good "
                "for one update",
                code="round-mismatch",
            )
        self._roster()

    def mask(
        self, update: Tensors, received: Mapping[str, Tensor], buffers: Tensors
    ) -> tuple[MaskedUpdate, dict[str, float]]:
        """Quantise, weigh and mask a defended update and the change of the buffers.

        Parameters
        ----------
        update
            What may leave this client, once it is masked.
        received
            The model as the server sent it.
        buffers
            The model's buffers after training.

        Returns
        -------
        tuple of MaskedUpdate and dict
            The masked update, and how long it took and about how many values were clipped.
        """
        started = time.perf_counter()
        roster = self._roster()
        change = difference({name: received[name] for name in buffers}, buffers)
        weight = roster.by_node[self.node_id].weight
        section = self.config.encryption
        words, shapes, clipped = encode_update(update, change, section, weight)
        if self.site.truth_dir is not None:
            # What this client and the server hold together, for an audit's colluding tier.
            own = decode_mean(words, shapes, section, weight)
            plain = {name: value for tensors in own.values() for name, value in tensors.items()}
            save_masked(self.site.truth_dir, self.number, plain)
        # A server that sends one client the model, and the others one whose updates it knows, would
        # read that client's update off the sum.
        task = bytes.fromhex(digest(self._content))
        # Another message may have come while this one trained.
        with self._alone():
            self.check_ready()
            party = self._party()
            if party.roster != roster:
                raise BractError(
                    f"round {self.number}: was given other masks while it trained",
                    code="message-malformed",
                )
            with masking():
                party.mask({STREAMS[p]: vector for p, vector in words.items()}, task)
            self._keep(party)
        parts = {
            part: mask_layout(section, part, vector.size).to_bytes(vector)
            for part, vector in words.items()
        }
        masked = MaskedUpdate(self.number, roster.digest.hex(), parts, shapes, task.hex())
        many = clipped > CLIPPED_WARNING * sum(value.numel() for value in update.values())
        if many:
            _log.warning(
                "%d values lay outside [-%g, %g] and were clipped; raise encryption.clip",
                clipped,
                section.clip,
                section.clip,
            )
        return masked, {
            "clipped": float(f"{clipped:.1g}") if many else 0.0,
            "mask_seconds": time.perf_counter() - started,
        }

    def agree(self, content: RecordDict) -> RecordDict:
        """Take note of who answered, and seal that for the neighbours among them."""
        with self._alone():
            party = self._party()
            with masking():
                boxes = party.agree(read_survivors(content), self._known_identity(), self._least)
            self._keep(party)
        return write_by_node(boxes)

    def unmask(self, content: RecordDict) -> RecordDict:
        """Return one share of each client, once the neighbours confirmed who answered."""
        with self._alone(), masking():
            party = self._party()
            if self.config.encryption.consistency:
                boxes = read_by_node(content, "seals of who answered")
            else:
                boxes = None
                party.agree(read_survivors(content), self._known_identity(), self._least)
                self._keep(party)
            return write_by_node(party.reveal(boxes, self._known_identity()))

    @property
    def _least(self) -> int:
        """Fewest clients in a sum: the site's own bound, and a threshold of the roster's."""
        roster = self._party().roster
        neighbours = 0 if roster is None else roster.neighbours
        whole = roster is not None and neighbours >= len(roster.seats) - 1
        threshold = roster.threshold if whole and roster is not None else 2
        return max(self.policy.min_summed_clients, threshold)

    def _check_roster(self, roster: Roster) -> None:
        clients, section = len(roster.seats), self.config.encryption
        if (roster.session, roster.number) != (self.session, self.number):
            raise BractError(
                f"was sent the clients of round {roster.number} with a message of round "
                f"{self.number}: masks of another round",
                code="round-mismatch",
            )
        least = max(FEWEST, self.policy.min_summed_clients)
        if clients < least:
            raise BractError(
                f"was asked to join a sum of {clients} clients, and this site joins those of "
                f"{least} or more (min_summed_clients in its policy, and never fewer than "
                f"{FEWEST})",
                code="policy-refused",
            )
        planned = section.mask_plan(clients)
        if (roster.neighbours, roster.threshold) != planned:
            raise BractError(
                f"was asked to share with {roster.neighbours} neighbours and threshold "
                f"{roster.threshold}, the configuration plans {planned[0]} and {planned[1]} for "
                f"{clients} clients",
                code="request-refused",
            )
        holders = min(roster.neighbours, clients - 1) + 1
        if section.consistency and 2 * roster.threshold <= holders:
            raise BractError(
                f"was asked to share with {holders - 1} neighbours and threshold "
                f"{roster.threshold}: a server could name other survivors to one half than to the "
                f"other, and find helpers for both; raise encryption.threshold to "
                f"{holders // 2 + 1}, or leave it out",
                code="request-refused",
            )
        self.pins.check_peers(s.identity for s in roster.seats if s.node != self.node_id)
        if roster.weight > section.max_weight_sum:
            raise BractError(
                f"was sent weights that sum to {roster.weight}, encryption.max_weight_sum is "
                f"{section.max_weight_sum}",
                code="request-refused",
            )
        own = roster.by_node.get(self.node_id)
        strategy = self.config.strategy
        # FedBoosting, which has no such bound, is never masked.
        most = getattr(strategy, "max_share", 1.0)
        if strategy.weighting == "uniform":
            most = 1.0 / clients
        # Integer weights are the shares' to within one.
        if own is not None and own.weight > max(most, 1.0 / clients) * roster.weight + 1.0:
            raise BractError(
                f"was given weight {own.weight} of {roster.weight}, so that the sum is mostly this "
                f"client's update; the configuration allows a share of {most:.2f}",
                code="request-refused",
            )

    def _settings(self) -> str:
        """Return a digest of how the run trains, masks and combines."""
        config = self.config
        # What is left at its default need not be known to every release.
        settings = [
            section.model_dump_json(exclude_defaults=True)
            for section in (config.training, config.strategy, config.encryption)
        ]
        return hashlib.sha256(repr((settings, config.defenses)).encode()).hexdigest()

    def _examples(self) -> int:
        """Return on how many examples a round trains, by the configuration alone."""
        if "examples" not in self._state:
            with hiding("opening the data", own=False):
                count = training_examples(self.site.local(self.config), self.site.part)
            self._put(examples=torch.tensor(count))
        count = int(self._state["examples"])
        training = self.config.training
        if training.private is not None:
            return count
        return min(count, planned_steps(training, count) * training.batch_size)

    def _party(self) -> Party:
        text = _text(self._state.get("party"))
        party = Party.from_text(text) if text else None
        if party is None or party.number != self.number or party.node != self.node_id:
            held = "none" if party is None else f"those of round {party.number}"
            raise BractError(
                f"has no masks of round {self.number} ({held}): it was restarted since without "
                "state-dir, or the message is of another round",
                code="state-lost",
            )
        return party

    def _roster(self) -> Roster:
        roster = self._party().roster
        if roster is None:
            raise BractError(
                f"has no masks of round {self.number}: the clients of the sum were not named; "
                "nothing was trained",
                code="state-lost",
            )
        return roster

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Read this client's state and keep other messages, of whatever run, from it meanwhile.

        Raises
        ------
        BractError
            If the lock cannot be made.
        """
        if self._store.path is None:
            self._load()
            yield
            return
        lock = self._store.path.with_name(f".{self._store.path.stem}.lock")
        try:
            with locked(lock):
                self._load()
                yield
        except OSError as error:
            raise BractError(
                f"{lock}: this client's masks cannot be locked ({error}); set state-dir in the "
                "node config to a folder this client may write",
                code="file-unwritable",
            ) from error

    def _load(self) -> None:
        self._state = self._store.load()
        if _text(self._state.get("session")) != self.session:
            self._state = {"session": _tensor(self.session)}

    def _keep(self, party: Party) -> None:
        self._put(party=_tensor(party.to_text()))

    def _put(self, **tensors: Tensor) -> None:
        self._state = {**self._state, **tensors}
        self._store.save(self._state)

    def _identity(self) -> Identity | None:
        pinned = self.pins.identity()
        if pinned is not None:
            return pinned
        text = _text(self._state.get("identity"))
        return identity_of(bytes.fromhex(text)) if text else None

    def _new_identity(self) -> Identity:
        identity = make_identity()
        self._put(identity=_tensor(identity.private.hex()))
        return identity

    def _known_identity(self) -> Identity:
        identity = self._identity()
        if identity is None:
            raise BractError(
                "lost its X25519 key of this run; set state-dir or identity-key", code="state-lost"
            )
        return identity


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _text(tensor: Tensor | None) -> str:
    return "" if tensor is None else tensor.numpy().tobytes().decode()
