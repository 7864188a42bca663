"""A client's side of encrypted aggregation: its key, and the plain global model that it keeps.

The server sends aggregates as ciphertexts. A client decrypts each one once, in order, and moves the
model that it keeps; it starts from the initial model, which is public. What it keeps belongs to one
run and outlives a message, and a restart of the SuperNode where ``state-dir`` is set.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context, RecordDict
from torch import Tensor

from bract.client.defenses import DefenseState
from bract.client.encrypted.failures import FailedAggregates, record_folder
from bract.client.encrypted.keys import check_key, read_key
from bract.client.encrypted.pins import Pins
from bract.client.encrypted.sharing import deal_keys, join_partials, partials_of
from bract.client.encrypted.state import EncryptedState
from bract.client.gate import IndependentError
from bract.client.site import Site
from bract.config import FederationConfig
from bract.config.agreed import AgreedRun
from bract.errors import BractError
from bract.paillier.errors import UndecryptableError
from bract.paillier.exchange import Identity
from bract.paillier.keyfile import dump_public
from bract.paillier.sharing import KeyShare
from bract.protocol.arrays import from_arrays
from bract.protocol.ciphertexts import (
    EncryptedUpdate,
    apply_mean,
    check_plan,
    decrypt_mean,
    encrypt_update,
)
from bract.protocol.keyexchange import (
    KEY_BOX,
    SESSION_KEY,
    TAG_KEY,
    Hello,
    aggregate_name,
    box_keys,
    continued_runs,
    fused_tag,
    key_box_sender,
    open_key_box,
    read_challenge,
    read_recipients,
    round_tag,
    write_dealt,
)
from bract.protocol.keyfiles import Key, dump_key, parse_key
from bract.protocol.partials import RefusedHelpError, open_bundle, seal_partials
from bract.protocol.records import ARRAYS, instruction
from bract.updates.update import Tensors, difference

RECORD = "bract.encryption"
"""Name of the record in Flower's client-side ``context.state``."""

CLIPPED_WARNING = 0.001
"""Share of clipped values above which a client reports it: as figures in its log, to the server
as one digit. The server chooses ``encryption.clip``: exact counts would be the update's
distribution."""

_log = logging.getLogger(__name__)


class EncryptedClient:
    """One client's knowledge and state of an encrypted run.

    Parameters
    ----------
    config, site, context
        The federation, the client's node configuration, and the context of the message.
    content
        The message; its config names the run.
    run_config
        Flower's run config, where the app reads settings of its own from it.

    Attributes
    ----------
    key
        The private key or share; None where it comes through the server and has not yet.
    model_round
        The round after which ``model`` is the global model; -1 where there is none yet.
    refused
        Node ids whose partial decryptions in this message were refused.
    seconds
        Time that encryption and decryption took in this message, by name.
    """

    def __init__(
        self,
        config: FederationConfig,
        site: Site,
        context: Context,
        content: RecordDict,
        *,
        run_config: Mapping[str, object] | None = None,
    ) -> None:
        self.config = config
        self.site = site
        self.pins = Pins.from_node_config(context.node_config)
        self.pins.check_run(config, site.paillier_key)
        self.refused: tuple[int, ...] = ()
        self.node_id = context.node_id
        session = str(instruction(content, SESSION_KEY))
        run = AgreedRun.of(config, context.run_id, session, besides=run_config)
        self.session = run.identity
        self._server_session, self._challenge = session, read_challenge(content)
        self.seconds = {"encrypt_seconds": 0.0, "decrypt_seconds": 0.0}
        store = DefenseState(
            context.state,
            directory=site.state_dir,
            key=f"{config.name}-{site.name}-encryption",
            name=RECORD,
        )
        self._state = EncryptedState(store, run, continued_runs(content))
        self._memory = context.state
        self.key: Key | None = None
        if config.encryption.keys == "provisioned":
            self.key = read_key(site.paillier_key, config.encryption.degree)
        elif self._state.key:
            self.key = parse_key(self._state.key)
        if self.key is not None:
            self._check_key(self.key)
        self._state.hold()

    @property
    def model_round(self) -> int:
        """The round after which `model` is the global model; -1 where there is none yet."""
        return self._state.model_round

    @property
    def model(self) -> Tensors:
        """The plain global model that this client keeps."""
        return self._state.model

    def hello(self) -> Hello:
        """Return this client's announcement: its identity, key and model."""
        if self.model_round < 0:
            self.pins.warn_of_unpinned_help(self.config)
        identity = self._identity() or self._state.new_identity()
        hello = Hello(
            node_id=self.node_id,
            client=self.site.name,
            partition=self.site.partition,
            key=b"" if self.key is None else dump_public(self.key.public),
            identity=identity.public,
            model_round=-1 if self._state.unchecked else self.model_round,
            refused=self.refused,
            unconfirmed=self._state.unconfirmed,
        )
        return hello.proven(identity, self._challenge, self._server_session)

    def deal(self, content: RecordDict) -> RecordDict:
        """Box this client's in-band key for others; generate it where there is none yet.

        Raises
        ------
        BractError
            If the run's keys are provisioned, which never leave; if a recipient is not among the
            pinned peers; or if shares were dealt before: the dealer has forgotten the whole key.
        """
        if self.config.encryption.keys != "in-band":
            raise BractError(
                "was asked to hand over a key that was provisioned; it never leaves this client",
                code="request-refused",
            )
        recipients = read_recipients(content)
        if not 0 < len(recipients) < self.config.clients:
            raise BractError(
                f"was asked to seal the key for {len(recipients)} others, the run has "
                f"{self.config.clients} clients",
                code="message-malformed",
            )
        self.pins.check_peers(recipients.values())
        # Shares of a key that was never sent are dealt anew.
        forgotten = self._state.unconfirmed and isinstance(self.key, KeyShare)
        held = None if forgotten else self.key
        own, keys = deal_keys(held, list(recipients), self.config)
        if held is None:
            self._keep_key(own, unconfirmed=True)
        boxes = box_keys(
            keys,
            recipients,
            session=self.session,
            sender=self.node_id,
            identity=self._known_identity(),
        )
        return write_dealt(dump_public(own.public), boxes)

    def catch_up(self, content: RecordDict, server_round: int, *, compares: bool = False) -> bool:
        """Take what the message brings and move the model to the end of the round before.

        Parameters
        ----------
        compares
            Whether the site compares the first model: until `start_checked` the next message's
            takes its place.

        Returns
        -------
        bool
            False where the key or an aggregate is lacking, or the help to decrypt it is refused;
            `hello` then reports which.
        """
        identity = self._identity()
        unsettled = self.key is None or self._state.unconfirmed
        if unsettled and KEY_BOX in content.config_records and identity is not None:
            self.pins.check_dealer(key_box_sender(content))
            text = open_key_box(content, identity, session=self.session, recipient=self.node_id)
            if self.key is not None:
                _log.warning("the run never used the key that this client generated; took another")
            self._keep_key(parse_key(text), unconfirmed=False)
        if self.key is None:
            return False
        if self._state.unconfirmed:
            self._state.confirm_key()
        if self.model_round < 0 or self._state.unchecked:
            if ARRAYS not in content.array_records:
                return False
            first = from_arrays(content.array_records[ARRAYS])
            self._state.mark_start(unchecked=compares)
            self._state.keep_model(first, 0)
        if self.model_round > server_round - 1:
            raise BractError(
                f"this client holds the model after round {self.model_round}, the server is in "
                f"round {server_round}: the server lost aggregates; start a new run",
                code="round-mismatch",
            )
        started = time.perf_counter()
        for number in range(self.model_round + 1, server_round):
            record = content.array_records.get(aggregate_name(number))
            if record is None:
                return False
            try:
                update = EncryptedUpdate.from_tensors(from_arrays(record))
                mean = self.open(update, content, round_tag(number), 0)
            except RefusedHelpError as error:
                _log.error("%s; asking the server for others", error)
                self.refused = error.nodes
                return False
            lr = self.config.strategy.server_lr
            self._state.keep_model(apply_mean(self.model, mean, lr), number)
        self.seconds["decrypt_seconds"] += time.perf_counter() - started
        return True

    def start_checked(self) -> None:
        """Keep to the first model, which the site has compared."""
        self._state.mark_start(unchecked=False)

    def fused(
        self, tensors: Mapping[str, Tensor], index: int, content: RecordDict, server_round: int
    ) -> Tensors:
        """Return the plain model of one encrypted fused update of this round.

        Raises
        ------
        IndependentError
            If the help to decrypt it is refused.
        BractError
            As `open`, or if this client does not hold the model that the round started from.
        """
        if self.model_round != server_round - 1:
            raise BractError(
                f"holds the model after round {self.model_round}, not the one that round "
                f"{server_round} started from",
                code="round-mismatch",
            )
        update = EncryptedUpdate.from_tensors(tensors)
        try:
            mean = self.open(update, content, fused_tag(server_round), index)
        except RefusedHelpError as error:
            raise IndependentError(str(error), code=error.code) from error
        return apply_mean(self.model, mean, self.config.strategy.server_lr)

    def open(
        self, update: EncryptedUpdate, content: RecordDict, tag: str, index: int
    ) -> dict[str, Tensors]:
        """Decrypt a weighted mean, with the private key or with ``t`` partial decryptions.

        Parameters
        ----------
        content
            The message, which carries the partial decryptions where the key is a share.
        tag, index
            What is decrypted, and which of the updates that go by this tag.

        Raises
        ------
        RefusedHelpError
            If a partial decryption is damaged or not proven.
        BractError
            If there are too few, the update does not belong to the key or to the run's
            configuration, or gives no values of its layout, or `FailedAggregates` refuses the key.
        """
        assert self.key is not None
        check_plan(update, self.config.encryption, self.model)
        failures = self._failures()
        failures.check()
        try:
            mean = self._decrypt(update, content, tag, index)
        except BractError as error:
            if not isinstance(error.__cause__, UndecryptableError):
                raise
            # The exact fault would reveal the content to a server that altered the aggregate.
            _log.error("%s, update %d: %s", tag, index, error)
            failures.count(update)
            raise BractError(
                f"{tag} does not decrypt to values of this run's layout; this client's log has "
                "what was found",
                code="decryption-refused",
            ) from None
        failures.check()
        return mean

    def _decrypt(
        self, update: EncryptedUpdate, content: RecordDict, tag: str, index: int
    ) -> dict[str, Tensors]:
        assert self.key is not None
        if not isinstance(self.key, KeyShare):
            return decrypt_mean(self.key, update)
        helpers = open_bundle(
            content, tag, self._known_identity(), session=self.session, recipient=self.node_id
        )
        self.pins.check_peers(h.identity for h in helpers if h.sender != self.node_id)
        return join_partials(self.key, update, helpers, tag, index)

    def _failures(self) -> FailedAggregates:
        assert self.key is not None
        folder = record_folder(
            self.site.paillier_key, self.pins.identity_key, state_dir=self.site.state_dir
        )
        return FailedAggregates(self.key.public.key_id, folder, self._memory)

    def encrypt(
        self, update: Tensors, buffers: Tensors
    ) -> tuple[EncryptedUpdate, dict[str, float]]:
        """Encrypt a defended update and the change of the buffers.

        Parameters
        ----------
        update
            What may leave this client, once it is encrypted.
        buffers
            The model's buffers after training.

        Returns
        -------
        tuple of EncryptedUpdate and dict
            The ciphertexts, and about how many values were clipped.
        """
        assert self.key is not None
        started = time.perf_counter()
        model = self.model
        change = difference({name: model[name] for name in buffers}, buffers)
        # Without the factors of n a share's owner encrypts with the public key.
        key = self.key.public if isinstance(self.key, KeyShare) else self.key
        encrypted, clipped = encrypt_update(key, update, change, self.config.encryption)
        total = sum(value.numel() for value in update.values())
        many = clipped > CLIPPED_WARNING * total
        if many:
            _log.warning(
                "%d of %d values lay outside [-%g, %g] and were clipped; raise encryption.clip",
                clipped,
                total,
                self.config.encryption.clip,
                self.config.encryption.clip,
            )
        self.seconds["encrypt_seconds"] += time.perf_counter() - started
        return encrypted, {"clipped": float(f"{clipped:.1g}") if many else 0.0}

    def partial(self, content: RecordDict) -> RecordDict:
        """Apply this client's share to the aggregates of a message, for the named clients.

        Raises
        ------
        BractError
            If this client holds no share, a recipient is not among the pinned peers, or what it
            was sent is no aggregate of the key with its ``n``-th powers.
        """
        if not isinstance(self.key, KeyShare):
            raise BractError("holds no key share, so it cannot help to decrypt", code="key-missing")
        recipients = read_recipients(content)
        self.pins.check_peers(public for n, public in recipients.items() if n != self.node_id)
        own = self._known_identity()
        if recipients.get(self.node_id, own.public) != own.public:
            raise BractError(
                "was asked to seal for itself with a key that is not its own",
                code="request-refused",
            )
        sealed = seal_partials(
            partials_of(self.key, content),
            recipients,
            session=self.session,
            sender=self.node_id,
            identity=own,
            tag=str(instruction(content, TAG_KEY)),
        )
        return sealed.to_content()

    def keep_final(self) -> Path | None:
        """Write the final model into the client's own folder; None without a folder."""
        return self._state.write_model(self.site.state_dir, f"{self.config.name}-{self.site.name}")

    def _identity(self) -> Identity | None:
        """Return the X25519 key pair of the site, or the one drawn for this run; None before."""
        return self._state.identity if self.pins.identity_key is None else self.pins.identity()

    def _known_identity(self) -> Identity:
        identity = self._identity()
        if identity is None:
            raise BractError(
                "lost its X25519 key of this run; set state-dir or identity-key", code="state-lost"
            )
        return identity

    def _check_key(self, key: Key) -> None:
        check_key(key, self.config)
        self.pins.check_key(key.public.key_id)

    def _keep_key(self, key: Key, *, unconfirmed: bool) -> None:
        self._check_key(key)
        self.key = key
        self._state.keep_key(dump_key(key), unconfirmed=unconfirmed)
