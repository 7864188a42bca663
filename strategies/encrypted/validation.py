"""Validate a client's ciphertexts before aggregation."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bract.config.encryption import EncryptionConfig
from bract.errors import BractError, one_line
from bract.paillier import PublicKey
from bract.paillier.cipher import from_matrix
from bract.paillier.scheme import scheme_for
from bract.paillier.stripping import check_powers_form
from bract.protocol.ciphertexts import EncryptedUpdate, check_plan, readable


def check_ciphertexts(
    update: EncryptedUpdate,
    public: PublicKey,
    config: EncryptionConfig,
    initial: Mapping[str, Tensor],
) -> None:
    """Refuse ciphertexts that would spoil the sum.

    One of another key or layout would turn the aggregate into noise for every client.

    Parameters
    ----------
    initial
        The run's public initial model, whose tensors have to be there.

    Raises
    ------
    BractError
        If they are out of range, or of another key, randomness, layout, weight or model, or came
        with powers that cannot be theirs.
    """
    check_plan(update, config, initial)
    for part, vector in update.vectors.items():
        if vector.key_id != public.key_id:
            raise BractError(
                f"encrypted {part} under key {vector.key_id}, this run's is {public.key_id}",
                code="update-refused",
            )
        if vector.weight != 1:
            raise BractError(
                f"encrypted {part} with weight {vector.weight}; an update has 1",
                code="update-refused",
            )
        if config.threshold is None and config.randomness == "djn" and not vector.parts:
            raise BractError(
                f"encrypted {part} without a nonce, which all who share the private key send; "
                "without it every client decrypts the sum several times slower",
                code="update-refused",
            )
        with readable():
            scheme_for(public, vector.layout.degree).check(from_matrix(vector.data))
    if not update.powers:
        return
    if config.threshold is None or set(update.powers) != set(update.vectors):
        raise BractError(
            f"sent powers of {one_line(', '.join(update.powers), 200)}; this run has a use for "
            f"{'those of ' + ', '.join(update.vectors) if config.threshold else 'none'}",
            code="update-refused",
        )
    for part, powers in update.powers.items():
        with readable():
            check_powers_form(public, update.vectors[part], powers)
