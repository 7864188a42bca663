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

from bract.ciphertexts import (
    EncryptedUpdate,
    apply_mean,
    decrypt_mean,
    encrypt_update,
)
from bract.client.defenses import DefenseState
from bract.client.keeping import Kept
from bract.client.keys import check_key, read_key
from bract.client.sharing import deal_keys, join_partials, partials_of
from bract.client.site import Site
from bract.config import FederationConfig
from bract.errors import BractError
from bract.keyexchange import (
    KEY_BOX,
    SESSION_KEY,
    TAG_KEY,
    Hello,
    aggregate_name,
    box_keys,
    fused_tag,
    open_key_box,
    read_recipients,
    round_tag,
    write_dealt,
)
from bract.keyfiles import Key, dump_key, parse_key
from bract.paillier import KeyShare, PartialDecryption, dump_public
from bract.partials import open_bundle, seal_partials
from bract.records import ARRAYS, CONFIG, from_arrays
from bract.update import Tensors, difference

RECORD = "bract.encryption"
"""Name of the record in Flower's client-side ``context.state``."""

CLIPPED_WARNING = 0.001
"""Share of clipped values above which a client says so in its log."""

_log = logging.getLogger(__name__)


class EncryptedClient:
    """What one client knows and keeps of an encrypted run.

    Parameters
    ----------
    config, site, context
        The federation, the client's node configuration, and the context of the message.
    content
        The message; its config names the run.

    Attributes
    ----------
    key
        The private key or share; None where it comes through the server and has not yet.
    model_round
        The round after which ``model`` is the global model; -1 where there is none yet.
    seconds
        Time that encryption and decryption took in this message, by name.

    Raises
    ------
    BractError
        If the key file is missing, unreadable, or does not fit the run.
    """

    def __init__(
        self, config: FederationConfig, site: Site, context: Context, content: RecordDict
    ) -> None:
        self.config = config
        self.site = site
        self.node_id = context.node_id
        self.session = str(content.config_records[CONFIG][SESSION_KEY])
        self.seconds = {"encrypt_seconds": 0.0, "decrypt_seconds": 0.0}
        store = DefenseState(
            context.state,
            directory=site.state_dir,
            key=f"{config.name}-{site.name}-encryption",
            name=RECORD,
        )
        self._kept = Kept(store, self.session)
        self.key: Key | None = None
        if config.encryption.keys == "provisioned":
            self.key = read_key(site.paillier_key)
        elif self._kept.key:
            self.key = parse_key(self._kept.key)
        if self.key is not None:
            check_key(self.key, config)

    @property
    def model_round(self) -> int:
        """The round after which `model` is the global model; -1 where there is none yet."""
        return self._kept.model_round

    @property
    def model(self) -> Tensors:
        """The plain global model that this client keeps."""
        return self._kept.model

    def hello(self) -> Hello:
        """Say who this is and what it holds."""
        identity = self._kept.identity or self._kept.new_identity()
        return Hello(
            node_id=self.node_id,
            client=self.site.name,
            partition=self.site.partition,
            key=b"" if self.key is None else dump_public(self.key.public),
            identity=identity.public,
            model_round=self.model_round,
        )

    def deal(self, content: RecordDict) -> RecordDict:
        """Box this client's key for others; generate it where there is none yet.

        Raises
        ------
        BractError
            If shares were dealt before: the dealer has forgotten the whole key.
        """
        recipients = read_recipients(content)
        own, keys = deal_keys(self.key, list(recipients), self.config)
        if self.key is None:
            self._keep_key(own)
        boxes = box_keys(keys, recipients, session=self.session, sender=self.node_id)
        return write_dealt(dump_public(own.public), boxes)

    def catch_up(self, content: RecordDict, server_round: int) -> bool:
        """Take what the message brings and move the model to the end of the round before.

        Returns
        -------
        bool
            False where the key or an aggregate is lacking; `hello` then tells the server what.

        Raises
        ------
        BractError
            If a box or an aggregate cannot be opened, or this client is ahead of the server.
        """
        if self.key is None and KEY_BOX in content and self._kept.identity is not None:
            identity = self._kept.identity
            assert identity is not None
            text = open_key_box(content, identity, session=self.session, recipient=self.node_id)
            self._keep_key(parse_key(text))
        if self.key is None:
            return False
        if self.model_round < 0 and ARRAYS in content:
            self._kept.keep_model(from_arrays(content.array_records[ARRAYS]), 0)
        if self.model_round < 0:
            return False
        if self.model_round > server_round - 1:
            raise BractError(
                f"this client holds the model after round {self.model_round}, the server is in "
                f"round {server_round}: the server lost aggregates; start a new run"
            )
        started = time.perf_counter()
        for number in range(self.model_round + 1, server_round):
            record = content.array_records.get(aggregate_name(number))
            if record is None:
                return False
            tag = round_tag(number)
            mean = self.open(EncryptedUpdate.from_record(record), self._partials(content, tag), 0)
            lr = self.config.strategy.server_lr
            self._kept.keep_model(apply_mean(self.model, mean, lr), number)
        self.seconds["decrypt_seconds"] += time.perf_counter() - started
        return True

    def fused(
        self, tensors: Mapping[str, Tensor], index: int, content: RecordDict, server_round: int
    ) -> Tensors:
        """Return the plain model of one encrypted fused update of this round.

        Raises
        ------
        BractError
            If this client does not hold the model that the round started from.
        """
        if self.model_round != server_round - 1:
            raise BractError(
                f"holds the model after round {self.model_round}, not the one that round "
                f"{server_round} started from"
            )
        update = EncryptedUpdate.from_tensors(tensors)
        mean = self.open(update, self._partials(content, fused_tag(server_round)), index)
        return apply_mean(self.model, mean, self.config.strategy.server_lr)

    def open(
        self,
        update: EncryptedUpdate,
        partials: Mapping[str, list[PartialDecryption]],
        index: int,
    ) -> dict[str, Tensors]:
        """Decrypt a weighted mean, with the private key or with ``t`` partial decryptions.

        Parameters
        ----------
        partials
            By ``<index>.<part>``; empty where the key is whole.
        """
        assert self.key is not None
        if isinstance(self.key, KeyShare):
            return join_partials(self.key, update, partials, index)
        return decrypt_mean(self.key, update)

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
            The ciphertexts, and how many values were clipped.
        """
        assert self.key is not None
        started = time.perf_counter()
        model = self.model
        change = difference({name: model[name] for name in buffers}, buffers)
        # Without the factors of n a share's owner encrypts with the public key.
        key = self.key.public if isinstance(self.key, KeyShare) else self.key
        encrypted, clipped = encrypt_update(key, update, change, self.config.encryption)
        total = sum(value.numel() for value in update.values())
        if clipped > CLIPPED_WARNING * total:
            _log.warning(
                "%d of %d values lay outside [-%g, %g] and were clipped; raise encryption.clip",
                clipped,
                total,
                self.config.encryption.clip,
                self.config.encryption.clip,
            )
        self.seconds["encrypt_seconds"] += time.perf_counter() - started
        return encrypted, {"clipped": float(clipped)}

    def partial(self, content: RecordDict) -> RecordDict:
        """Apply this client's share to the aggregates of a message, for the named clients.

        Raises
        ------
        BractError
            If this client holds no share, or an aggregate is of another key.
        """
        if not isinstance(self.key, KeyShare):
            raise BractError("holds no key share, so it cannot help to decrypt")
        sealed = seal_partials(
            partials_of(self.key, content),
            read_recipients(content),
            session=self.session,
            sender=self.node_id,
            tag=str(content.config_records[CONFIG][TAG_KEY]),
        )
        return sealed.to_content()

    def keep_final(self) -> Path | None:
        """Write the final model into the client's own folder; None without a folder."""
        return self._kept.write_model(self.site.state_dir, f"{self.config.name}-{self.site.name}")

    def _partials(self, content: RecordDict, tag: str) -> dict[str, list[PartialDecryption]]:
        if not isinstance(self.key, KeyShare):
            return {}
        identity = self._kept.identity
        if identity is None:
            raise BractError("lost its X25519 key of this run; set state-dir")
        return open_bundle(content, tag, identity, session=self.session, recipient=self.node_id)

    def _keep_key(self, key: Key) -> None:
        check_key(key, self.config)
        self.key = key
        self._kept.key = dump_key(key)
