"""A client's side of masked sums: its keys and shares of the round, and its masked update.

What it keeps between messages is one round's of one run and configuration: keys, the roster, and
shares of the others' seeds.
A restart without ``state-dir`` loses them, and the client drops out of that round alone.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from flwr.app import Context, RecordDict
from torch import Tensor

from bract.client.assignment import assignment_secret
from bract.client.defending import defenses_of
from bract.client.defenses import DefenseState
from bract.client.encrypted.pins import Pins
from bract.client.policy import PolicyError, SitePolicy, check_training
from bract.client.replies import digest
from bract.client.site import Site
from bract.client.sums import Sums, model_digest
from bract.client.training import planned_examples
from bract.client.truth import save_masked
from bract.config import FederationConfig
from bract.config.agreed import AgreedRun
from bract.data.views import training_examples
from bract.disk import locked
from bract.errors import BractError, one_line
from bract.masks.party import Party
from bract.masks.roster import Roster, Seat
from bract.paillier.exchange import SEALED_BYTES, Identity, identity_of, make_identity
from bract.paillier.weights import allows
from bract.protocol.keyexchange import SESSION_KEY, as_integer, read_challenge
from bract.protocol.masking import (
    STREAMS,
    Advert,
    MaskedUpdate,
    decode_mean,
    encode_update,
    mask_layout,
    masking,
    read_by_node,
    read_lost,
    read_parcels,
    read_roster,
    read_survivors,
    write_by_node,
    write_dealt,
    write_refused,
)
from bract.protocol.records import ROUND_KEY, instruction
from bract.protocol.shares import SMALLEST_SUM, counted, largest_share, sufficient_share
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
    open_data
        Called before the site's data are opened, to count how many examples there are.
    """

    def __init__(
        self,
        config: FederationConfig,
        site: Site,
        policy: SitePolicy,
        context: Context,
        content: RecordDict,
        open_data: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_data, self._flower_state = open_data, context.state
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
        if policy.fixed_members and self.pins.peers is None:
            raise PolicyError(
                "this site's policy sets fixed_members, but its node config pins no peers, so that "
                "the server may play members; set peers to the file of the members' public "
                "identities, and state-dir"
            )
        if (policy.bounds_sums or policy.fixed_members) and not config.encryption.consistency:
            key = "min_summed_clients" if policy.bounds_sums else "fixed_members"
            raise PolicyError(
                f"this site's policy sets {key}, but the run has "
                "encryption.consistency: false, with which a server that names a client as gone to "
                "some alone reads its update; set it to true"
            )
        self._content = content
        session = str(instruction(content, SESSION_KEY))
        run = AgreedRun.of(config, context.run_id, session)
        self.session, self._settings = run.identity, run.kept
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
        self._sums = Sums(context.state, directory=site.state_dir, site=site.name, policy=policy)
        self._load()

    def advertise(self) -> RecordDict:
        """Draw this round's keys and announce them, with the examples that it will train on."""
        with self._alone():
            party = Party.begin(self.node_id, self.session, self.number)
            identity = self._identity() or self._new_identity()
            self._keep(party)
            seat = party.seat(identity, 1)
            challenge = read_challenge(self._content)
            proof = b"" if challenge is None else party.prove(identity, challenge)
            examples = self._examples()
        return Advert(seat.identity, seat.box_key, seat.mask_key, examples, proof).to_content()

    def share(self, content: RecordDict) -> RecordDict:
        """Share the seeds among the neighbours of the roster.

        Raises
        ------
        BractError
            If the roster is of another round or run, holds clients that are not pinned or too few
            of them, has another threshold than the configuration, or weights by which one update
            would be most of the sum.
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
            If it has no roster and shares of this round, has masked an update of this round, or
            would not help to take the masks off.
        """
        party = self._party()
        if party.masked:
            raise BractError(
                f"was asked to train twice in round {self.number}; the masks of a round are good "
                "for one update",
                code="round-mismatch",
            )
        self._check_planned(party, self._roster())

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
            self._check_planned(party, roster, masks=True)
            with masking():
                party.mask({STREAMS[p]: vector for p, vector in words.items()}, task)
            self._put(party=_tensor(party.to_text()), model=_tensor(model_digest(received, update)))
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
            return write_by_node(self._agree(party, content))

    def unmask(self, content: RecordDict) -> RecordDict:
        """Return one share of each client, once the neighbours confirmed who answered."""
        with self._alone(), masking():
            party = self._party()
            if self.config.encryption.consistency:
                boxes = read_by_node(content, "seals of who answered", SEALED_BYTES)
            else:
                boxes = None
                self._agree(party, content)
            revealed = party.reveal(boxes, self._known_identity())
            if boxes is not None:
                self._count_confirmed(party, boxes)
            return write_by_node(revealed)

    def _count_confirmed(self, party: Party, boxes: Mapping[int, bytes]) -> None:
        """Count in the sum who has sealed that it is in it, though its box of shares was spoilt."""
        assert party.roster is not None and party.survivors is not None
        confirmed = party.confirmed(boxes, self._known_identity())
        before = party.part(party.survivors)
        summed = party.part(party.survivors, confirmed)
        if strange := set(party.survivors) & set(party.roster.neighbours_of(self.node_id)) - summed:
            _log.error(
                "round %d: no box of client %s opened here, so that this site's record counts it "
                "in no sum of the round; min_summed_clients may refuse it in later ones",
                self.number,
                ", ".join(map(str, sorted(strange))),
            )
        if summed != before:
            seats = [party.roster.by_node[node] for node in summed]
            self._sums.amend(party.roster.digest.hex(), self._weights(seats))

    def _agree(self, party: Party, content: RecordDict) -> dict[int, bytes]:
        """Take note of who answered, where the sum may be unmasked beside those before it."""
        with masking():
            boxes = party.agree(read_survivors(content), self._known_identity(), self._least)
        assert party.roster is not None and party.survivors is not None
        seats = [party.roster.by_node[node] for node in party.part(party.survivors)]
        self._check_weights(seats)
        self._sums.add(
            party.roster.digest.hex(),
            self._weights(seats),
            model=_text(self._state.get("model")),
            config=self._settings,
            lost=read_lost(self._content),
        )
        self._keep(party)
        return boxes

    def _check_planned(self, party: Party, roster: Roster, *, masks: bool = False) -> None:
        """Refuse, while nothing is masked, a sum that this site would not help to unmask."""
        if self.policy.fixed_members:
            self._check_all_members(roster)
        connected = party.part(roster.by_node)
        if self.policy.fixed_members and connected != set(roster.by_node):
            unproven = ", ".join(str(node) for node in sorted(set(roster.by_node) - connected))
            raise PolicyError(
                f"holds no shares of clients {one_line(unproven, 200)}, whose boxes did not open, "
                "and this site's policy sets fixed_members; nothing was masked in this round"
            )
        seats = [roster.by_node[node] for node in connected]
        self._sums.check(self._weights(seats), masks=masks)

    def _check_all_members(self, roster: Roster) -> None:
        """Refuse a sum over other members than all that this site pins.

        So no sum of fewer is opened first, and one member that comes late binds none of the others.
        """
        own = roster.by_node[self.node_id].identity
        others = {seat.identity for seat in roster.seats} - {own}
        pinned = (self.pins.peers or frozenset()) - {own}  # one file may serve all members
        if others != pinned:
            raise PolicyError(
                f"was asked for a sum of {len(others) + 1} clients, and this site's policy sets "
                f"fixed_members: it masks for all {len(pinned) + 1} whose identities its peers "
                "file pins, itself included, and for no others; nothing was masked in this round"
            )

    def _weights(self, seats: Iterable[Seat]) -> dict[str, int]:
        """Return weights by identity where this site pins its peers, else by node id."""
        pinned = self.pins.peers is not None
        return {s.identity.hex() if pinned else str(s.node): s.weight for s in seats}

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
        if roster.session != self.session:
            raise BractError(
                f"was sent the clients of run {one_line(roster.session, 16)}, this client's is "
                f"{self.session[:16]}: its clients are in another run, or have another "
                "configuration; start them all in one run",
                code="request-refused",
            )
        if roster.number != self.number:
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
        self._check_weights(roster.seats)
        self._sums.check(self._weights(roster.seats))

    def _check_weights(self, seats: Sequence[Seat]) -> None:
        """Refuse a sum that is mostly one client's update, as planned and as it is unmasked."""
        total = sum(seat.weight for seat in seats)
        heaviest = max(seats, key=lambda seat: seat.weight)
        strategy = self.config.strategy
        # FedBoosting, which has no such bound, is never masked.
        most = largest_share(len(seats), getattr(strategy, "max_share", 1.0))
        if strategy.weighting == "uniform":
            most = 1.0 / len(seats)
        if not allows(heaviest.weight, total, most):
            raise BractError(
                f"was sent weight {heaviest.weight} of {total} for client {heaviest.node}, so that "
                f"the sum is mostly its update; strategy.weighting: {strategy.weighting} allows a "
                f"share of {most:.4g}",
                code="request-refused",
            )
        # What the configuration allows is the server's word; this is the site's own bound.
        found, least = counted([seat.weight for seat in seats]), self.policy.least_counted
        if found < least:
            share = sufficient_share(len(seats), least)
            raise PolicyError(
                f"was sent weight {heaviest.weight} of {total} for client {heaviest.node}, so that "
                f"the sum of {len(seats)} counts as {float(found):.3g} clients, and this site "
                f"joins those that count as {least:g} or more (min_summed_clients in its policy; "
                f"{SMALLEST_SUM:g} where it has none); set strategy.weighting: uniform, or "
                f"strategy.max_share: {math.floor(share * 1000) / 1000:g}, or ask the site to "
                "lower min_summed_clients or to leave it out"
            )

    def _examples(self) -> int:
        """Return on how many examples a round trains, by the configuration alone."""
        if "examples" not in self._state:
            self._open_data()
            secret = assignment_secret(self.config, self.site, self._flower_state)
            count = training_examples(self.site.local(self.config), self.site.part, secret)
            # Refused here: what is advertised is read by the server before anything is trained.
            check_training(self.policy, self.config.training, count, defenses_of(self.config))
            self._put(examples=torch.tensor(count))
        count = int(self._state["examples"])
        training = self.config.training
        return count if training.private is not None else planned_examples(training, count)

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
                f"{lock}: this client's masks cannot be locked ({one_line(error)}); set "
                "state-dir in the node config to a folder this client may write",
                code="file-unwritable",
            ) from error

    def _load(self) -> None:
        self._state = self._store.load()
        if _text(self._state.get("session")) != self.session:
            self._state = {"session": _tensor(self.session)}

    def _keep(self, party: Party) -> None:
        text = party.to_text()
        Party.from_text(text)  # what is kept can be read again
        self._put(party=_tensor(text))

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
