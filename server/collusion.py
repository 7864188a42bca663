"""What a traitor adds to the server's captures: one client's key, and the model that it keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bract.ciphertexts import PARAMETERS, EncryptedUpdate, apply_mean, decrypt_mean
from bract.config import FederationConfig
from bract.errors import BractError
from bract.keyfiles import read_key_file
from bract.observation import Observation
from bract.paillier import KeyShare
from bract.records import from_arrays
from bract.rundir import RunDirectory
from bract.strategies.ledger import Ledger
from bract.update import Tensors


class Collusion:
    """A server together with one client of an encrypted run.

    The client's key opens the captured ciphertexts of every other client where all share one
    private key. One share of a threshold key opens nothing.

    Parameters
    ----------
    run
        The run; its ``aggregates/`` give the global model of each round.
    key
        Key file of the client, as `bract keygen` wrote it.

    Raises
    ------
    BractError
        If the key cannot be read, or the run kept no aggregates.
    """

    def __init__(self, run: RunDirectory, key: Path) -> None:
        self.config: FederationConfig = run.config()
        if not (run.aggregates / "ledger.json").is_file():
            raise BractError(
                f"{run.root}: holds no aggregates; the colluding tier is about encrypted runs"
            )
        held = read_key_file(key)
        self._share = held if isinstance(held, KeyShare) else None
        self._private = None if isinstance(held, KeyShare) else held
        self._ledger = Ledger(run.aggregates)
        self._models = {0: from_arrays(self._ledger.initial)}

    def open(self, observation: Observation) -> Observation:
        """Return the observation as the colluding client and the server see it together.

        Raises
        ------
        BractError
            If the key does not open it; with a key share this is so for every observation.
        """
        if not observation.ciphertexts:
            return observation
        if self._private is None:
            assert self._share is not None
            opened = "so one client and the server read no update"
            if self.config.strategy.name == "fedboosting":
                opened = (
                    "but the client also holds this round's fused models, and can solve them for "
                    "the updates, which this audit does not try"
                )
            raise BractError(
                f"{observation.key}: the update is encrypted (paillier); one share of a key of "
                f"which {self._share.threshold} of {self._share.total} decrypt together opens "
                f"nothing, {opened}"
            )
        update = EncryptedUpdate.from_tensors(observation.ciphertexts)
        plain = decrypt_mean(self._private, update)
        model = self._model(observation.round - 1)
        buffers = {name: v for name, v in model.items() if name not in plain[PARAMETERS]}
        changes = {part: tensors for part, tensors in plain.items() if part != PARAMETERS}
        returned = apply_mean(buffers, changes, 1.0)
        return replace(
            observation,
            parameters={name: model[name] for name in plain[PARAMETERS]},
            buffers=buffers,
            update={n: v.to(model[n].dtype) for n, v in plain[PARAMETERS].items()},
            returned_buffers=returned,
        )

    def _model(self, number: int) -> Tensors:
        """Return the global model after a round, as every client holds it."""
        assert self._private is not None
        last = max(known for known in self._models if known <= number)
        for earlier in range(last + 1, number + 1):
            aggregate = EncryptedUpdate.from_record(self._ledger.aggregate(earlier))
            mean = decrypt_mean(self._private, aggregate)
            lr = self.config.strategy.server_lr
            self._models[earlier] = apply_mean(self._models[earlier - 1], mean, lr)
        return self._models[number]
