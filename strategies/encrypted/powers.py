"""The powers that clients send along for a threshold's decryption; names senders of wrong ones.

Checking every client's would cost the server more than the sum itself. So the powers of the sum are
checked, once; where they are wrong the server computes them itself, finds out whose were, and from
then on refuses an update of that client that brings wrong ones.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from bract.errors import BractError
from bract.paillier import PublicKey
from bract.paillier.errors import CiphertextError
from bract.paillier.stripping import check_powers
from bract.protocol.ciphertexts import EncryptedUpdate
from bract.protocol.node_names import ClientNames

_log = logging.getLogger(__name__)


class SentPowers:
    """Whose powers can be used.

    Parameters
    ----------
    names
        The clients' names, for messages.
    """

    def __init__(self, names: ClientNames) -> None:
        self._names = names
        self._wrong: set[int] = set()

    def check(self, node_id: int, update: EncryptedUpdate, public: PublicKey) -> None:
        """Refuse wrong powers of a client that sent such before."""
        if node_id in self._wrong and (problem := _problem(update, public)):
            raise BractError(
                f"{problem}, for the second time; its update was left out", code="update-refused"
            )

    def settle(
        self, total: EncryptedUpdate, updates: dict[int, EncryptedUpdate], public: PublicKey
    ) -> EncryptedUpdate:
        """Return the sum without powers where those are not its own.

        Parameters
        ----------
        total
            The weighted sum, with the powers that the clients' give.
        updates
            By node id, what it was made of; wrong powers are taken out, for the sums that follow.
        """
        if _problem(total, public) is None:
            return total
        for node_id, update in tuple(updates.items()):
            if (problem := _problem(update, public)) is not None:
                self._wrong.add(node_id)
                updates[node_id] = replace(update, powers={})
                _log.error(
                    "%s: %s; the server computes those of this sum itself, and refuses the next "
                    "update of this client that brings wrong ones",
                    self._names.of(node_id),
                    problem,
                )
        return replace(total, powers={})


def _problem(update: EncryptedUpdate, public: PublicKey) -> str | None:
    for part, powers in update.powers.items():
        try:
            check_powers(public, update.vectors[part], powers)
        except CiphertextError as error:
            return f"{part}: {error}"
    return None
