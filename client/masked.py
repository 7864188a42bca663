"""A client's side of masked sums: its keys and shares of the round, and its masked update.

What it keeps between messages is one round's of one run and configuration: keys, the roster, and
shares of the others' seeds.
A restart without ``state-dir`` loses them, and the client drops out of that round alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from flwr.app import Context, RecordDict
from torch import Tensor

from bract.client.assignment import assignment_secret
from bract.client.defending import defenses_of
from bract.client.defenses import DefenseState
from bract.client.encrypted.pins import Pins
from bract.client.policy import PolicyError, SitePolicy
from bract.client.policy_checks import check_training
from bract.client.replies import digest
from bract.client.site import Site
from bract.client.sum_rules import SumRules
from bract.client.sums import Sums, model_digest
from bract.client.training import planned_examples
from bract.client.truth import save_masked
from bract.config import FederationConfig
from bract.config.agreed import AgreedRun
from bract.data.views import training_examples
from bract.disk import locked
from bract.errors import BractError, one_line
from bract.masks.party import Party
from bract.masks.roster import Roster
from bract.paillier.exchange import SEALED_BYTES, Identity, identity_of, make_identity
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
from bract.updates.update import Tensors, difference

RECORD = "bract.masks"
"""Name of the record in Flower's client-side ``context.state``."""

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
        self._rules = SumRules(
            config, policy, self.pins, self._sums, self.node_id, self.session, self.number
        )
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
        self._rules.check_roster(roster)
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
        self._rules.check_planned(party, self._roster())

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
            self._rules.check_planned(party, roster, masks=True)
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
            self._sums.amend(party.roster.digest.hex(), self._rules.weights(seats))

    def _agree(self, party: Party, content: RecordDict) -> dict[int, bytes]:
        """Take note of who answered, where the sum may be unmasked beside those before it."""
        with masking():
            boxes = party.agree(
                read_survivors(content), self._known_identity(), self._rules.least(party.roster)
            )
        assert party.roster is not None and party.survivors is not None
        seats = [party.roster.by_node[node] for node in party.part(party.survivors)]
        self._rules.check_weights(seats)
        self._sums.add(
            party.roster.digest.hex(),
            self._rules.weights(seats),
            model=_text(self._state.get("model")),
            config=self._settings,
            lost=read_lost(self._content),
        )
        self._keep(party)
        return boxes

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
