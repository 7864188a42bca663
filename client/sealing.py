"""How an update travels: plain, under Paillier, or under masks; nothing else here depends on it.

A sealing checks that this client can take part, gives the model to start from, seals the update.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from flwr.app import ArrayRecord, Context, RecordDict

from bract.client.policy import SitePolicy
from bract.client.site import Site
from bract.config import FederationConfig
from bract.errors import BractError
from bract.protocol.arrays import from_arrays, to_arrays, view_arrays
from bract.protocol.records import ARRAYS
from bract.updates.update import Tensors

if TYPE_CHECKING:
    from bract.client.encrypted.client import EncryptedClient
    from bract.client.masked import MaskedClient


class Sealing(ABC):
    """How the update of one message travels.

    Attributes
    ----------
    hides
        Whether the server cannot read this client's own update.
    sums
        Whether the server reads sums of updates, of which two can be subtracted.
    covers_buffers
        Whether the model's buffers leave as well hidden as in ciphertexts.
    judges
        Whether only clients hold the global model, so that they judge it for the server.
    figures
        Seconds that the scheme took in this message, by name.
    """

    hides = sums = covers_buffers = judges = False

    def __init__(self, content: RecordDict) -> None:
        self._received = content.array_records.get(ARRAYS)
        self.figures: dict[str, float] = {}

    def ready(self) -> RecordDict | None:
        """Return what to answer in place of work where something is lacking; None where nothing is.

        Raises
        ------
        BractError
            If this client can take no part in the round.
        """
        return None

    def model(self) -> Tensors | None:
        """Return the global model to start from; None where the message brings none."""
        return None if self._received is None else view_arrays(self._received)

    def start_checked(self) -> None:  # noqa: B027 - only who keeps a model replaces it
        """Take note that the model that the run starts from is the one that the site demands."""

    def open(self, arrays: Tensors) -> Tensors:
        """Return the plain model of the next fused one that the message brings."""
        return arrays

    def keep_final(self) -> None:
        """Write the final model into this client's own folder, where only clients hold it."""
        raise NotImplementedError

    @abstractmethod
    def seal(self, update: Tensors, buffers: Tensors) -> tuple[dict[str, ArrayRecord], Figures]:
        """Seal what may leave this client.

        Parameters
        ----------
        update
            The defended update.
        buffers
            The model's buffers after training.

        Returns
        -------
        tuple of dict and dict
            The records of the reply that take the update's place, and figures for the server.
        """


Figures = dict[str, float]
"""Numbers about the sealing that the server may read."""


class PlainSealing(Sealing):
    """The update leaves as it is."""

    def seal(self, update: Tensors, buffers: Tensors) -> tuple[dict[str, ArrayRecord], Figures]:
        """Return no record: the reply holds the update itself."""
        del update, buffers
        return {}, {}


class PaillierSealing(Sealing):
    """The update leaves as Paillier ciphertexts; the global model is the clients' alone."""

    hides = covers_buffers = judges = True

    def __init__(
        self,
        client: EncryptedClient,
        content: RecordDict,
        server_round: int,
        *,
        compares: bool = False,
    ) -> None:
        super().__init__(content)
        self._client, self._content, self._round = client, content, server_round
        self._compares = compares
        self._positions = itertools.count()
        self.figures = client.seconds

    def ready(self) -> RecordDict | None:
        """Move the kept model to the end of the round before; announce what is lacking for it."""
        if self._client.catch_up(self._content, self._round, compares=self._compares):
            return None
        return self._client.hello().to_content()

    def start_checked(self) -> None:
        """Keep to the first model, which the site has compared."""
        self._client.start_checked()

    def model(self) -> Tensors:
        """Return the model that this client keeps."""
        return self._client.model

    def open(self, arrays: Tensors) -> Tensors:
        """Decrypt the next fused model."""
        return self._client.fused(arrays, next(self._positions), self._content, self._round)

    def keep_final(self) -> None:
        """Write the kept model into this client's own folder."""
        self._client.keep_final()

    def seal(self, update: Tensors, buffers: Tensors) -> tuple[dict[str, ArrayRecord], Figures]:
        """Encrypt the update and the change of the buffers."""
        ciphertexts, figures = self._client.encrypt(update, buffers)
        records = {"ciphertexts": to_arrays(ciphertexts.to_tensors())}
        if ciphertexts.powers:
            powers = {part: torch.from_numpy(p) for part, p in ciphertexts.powers.items()}
            records["powers"] = to_arrays(powers)
        return records, figures | self.figures


class MaskedSealing(Sealing):
    """The update leaves under masks that cancel in the round's sum."""

    hides = sums = True

    def __init__(self, client: MaskedClient, content: RecordDict) -> None:
        super().__init__(content)
        self._client = client

    def ready(self) -> None:
        """Refuse to train where this client could not mask the result."""
        self._client.check_ready()

    def seal(self, update: Tensors, buffers: Tensors) -> tuple[dict[str, ArrayRecord], Figures]:
        """Mask the update and the change of the buffers."""
        assert self._received is not None
        masked, figures = self._client.mask(update, from_arrays(self._received), buffers)
        return {"ciphertexts": to_arrays(masked.to_tensors())}, figures


def sealing_of(
    config: FederationConfig,
    site: Site,
    policy: SitePolicy,
    context: Context,
    content: RecordDict,
    *,
    server_round: int,
    trains: bool,
) -> Sealing:
    """Return how the update of a message travels, as the run's configuration has it."""
    if config.encryption.uses_paillier:
        client = encrypted_client(config, site, context, content)
        compares = policy.initial_model == "from-seed"
        return PaillierSealing(client, content, server_round, compares=compares)
    if config.encryption.uses_masks and trains:
        return MaskedSealing(masked_client(config, site, policy, context, content), content)
    return PlainSealing(content)


def encrypted_client(
    config: FederationConfig,
    site: Site,
    context: Context,
    content: RecordDict,
    *,
    run_config: Mapping[str, object] | None = None,
) -> EncryptedClient:
    """Return this client's keys and model; gmpy2 and phe are loaded by such runs only."""
    from bract.client.encrypted.client import EncryptedClient

    _check_scheme(config, "a key", asked=config.encryption.uses_paillier)
    return EncryptedClient(config, site, context, content, run_config=run_config)


def masked_client(
    config: FederationConfig,
    site: Site,
    policy: SitePolicy,
    context: Context,
    content: RecordDict,
    open_data: Callable[[], None] = lambda: None,
) -> MaskedClient:
    """Return this client's part in a masked sum; see `MaskedClient` for ``open_data``."""
    from bract.client.masked import MaskedClient

    _check_scheme(config, "masks", asked=config.encryption.uses_masks)
    return MaskedClient(config, site, policy, context, content, open_data)


def _check_scheme(config: FederationConfig, what: str, *, asked: bool) -> None:
    if not asked:
        raise BractError(
            f"was asked for {what}, but the run has encryption.scheme: {config.encryption.scheme}",
            code="request-refused",
        )
