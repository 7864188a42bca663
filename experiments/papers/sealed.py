"""FedAvg and FedBoosting over ciphertexts in one process: bract's own encryption, no key exchange.

Every update is quantised, packed and encrypted as a client does it, the sums are of ciphertexts
under integer weights, and what is decrypted is applied as a client does it
(`bract.strategies.encrypted` has the protocol around that). One process holds both keys, so this
tells what encryption does to a model and what it costs, and hides nothing from anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord

from bract.config.encryption import EncryptionConfig
from bract.paillier import PrivateKey, generate_keypair
from bract.paillier.weights import integer_weights
from bract.protocol.ciphertexts import (
    EncryptedUpdate,
    apply_mean,
    combine_updates,
    decrypt_mean,
    encrypt_update,
)
from bract.protocol.records import Contribution, to_arrays
from bract.strategies import FedAvg, FedBoosting
from bract.updates.update import difference


class SealedFedAvg(FedAvg):
    """FedAvg whose sums are of ciphertexts.

    Parameters
    ----------
    encryption
        Key size, bits, clip range and largest sum of the integer weights.
    options
        As `FedAvg` takes them.

    Attributes
    ----------
    clipped
        Values that lay outside the clip range, over all rounds and clients.
    """

    def __init__(self, *, encryption: EncryptionConfig, **options: Any) -> None:
        super().__init__(**options)
        self.encryption = encryption
        self.clipped = 0
        self._sealed: dict[int, EncryptedUpdate] = {}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the updates that came back, each of them encrypted once."""
        self._sealed = {}
        return super().aggregate_train(server_round, replies)

    def weigh(self, contributions: tuple[Contribution, ...]) -> list[float]:
        """Return the shares that the integer weights stand for; they sum to 1."""
        integers = integer_weights(super().weigh(contributions), self.encryption.max_weight_sum)
        return [weight / sum(integers) for weight in integers]

    def combine(
        self, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> ArrayRecord:
        """Encrypt, sum under the public key, decrypt the mean and apply it."""
        key = private_key(self.encryption.key_bits)
        integers = integer_weights(weights, self.encryption.max_weight_sum)
        updates = [self._seal(contribution) for contribution in contributions]
        mean = decrypt_mean(key, combine_updates(key.public, updates, integers))
        return to_arrays(apply_mean(self._sent, mean, self.server_lr))

    def _seal(self, contribution: Contribution) -> EncryptedUpdate:
        if contribution.node_id not in self._sealed:
            sealed, clipped = encrypt_update(
                private_key(self.encryption.key_bits),
                contribution.update,
                difference(
                    {name: self._sent[name] for name in contribution.buffers},
                    contribution.buffers,
                ),
                self.encryption,
            )
            self._sealed[contribution.node_id] = sealed
            self.clipped += clipped
        return self._sealed[contribution.node_id]


class SealedFedBoosting(SealedFedAvg, FedBoosting):
    """FedBoosting whose fused models and sums are of ciphertexts."""


@cache
def private_key(bits: int) -> PrivateKey:
    """Return a key of this process; results do not depend on which one."""
    return generate_keypair(bits)
