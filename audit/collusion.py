"""Add to the captures what a colluding client knows: its key, and the model that it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from bract.attacks.problem.global_models import joint_declaration
from bract.audit.captures import Capture
from bract.captures.aggregates import Aggregates
from bract.captures.observation import Observation
from bract.config import FederationConfig
from bract.config.client_names import AGGREGATE
from bract.errors import BractError
from bract.paillier import combine, partial_decrypt
from bract.paillier.sharing import KeyShare
from bract.protocol.ciphertexts import (
    PARAMETERS,
    EncryptedUpdate,
    apply_mean,
    decrypt_mean,
    readable,
    shaped,
)
from bract.protocol.keyfiles import read_key_file
from bract.rundir import RunDirectory
from bract.updates.update import Tensors


class Collusion:
    """A server together with one client of an encrypted run.

    The client's key opens the captured ciphertexts of every other client where all share one
    private key. One share of a threshold key opens nothing, but the client read every round's
    aggregate when the clients decrypted it together, and keeps the model; to repeat that, the
    audit takes the shares in the folder of the client's, and uses them for aggregates alone.

    Parameters
    ----------
    run
        The run; its ``aggregates/`` give the global model of each round.
    key
        Key file of the client, as `bract keygen` wrote it.
    """

    def __init__(self, run: RunDirectory, key: Path) -> None:
        self.config: FederationConfig = run.config()
        if not (run.aggregates / "aggregates.json").is_file():
            raise BractError(
                f"{run.root}: holds no aggregates; the colluding tier is about encrypted runs",
                code="captures-none",
            )
        held = read_key_file(key)
        self._shares = _shares_beside(key, held) if isinstance(held, KeyShare) else []
        self._private = None if isinstance(held, KeyShare) else held
        self._aggregates = Aggregates(run.aggregates)
        self._models = {0: self._aggregates.initial}

    def open(self, observation: Observation) -> Observation:
        """Return the observation as the colluding client and the server see it together."""
        if not observation.ciphertexts:
            return observation
        if self._private is None:
            share = self._shares[0]
            opened = "so one client and the server read no update"
            if self.config.strategy.name == "fedboosting":
                opened = (
                    "but the client also holds this round's fused models, and can solve them for "
                    "the updates, which this audit does not try"
                )
            raise BractError(
                f"{observation.key}: the update is encrypted (paillier); one share of a key of "
                f"which {share.threshold} of {share.total} decrypt together opens nothing, "
                f"{opened}",
                code="key-missing",
            )
        update = EncryptedUpdate.from_tensors(observation.ciphertexts)
        plain = decrypt_mean(self._private, update)
        return self._seen(observation, plain)

    def aggregates(self, rounds: Iterable[Sequence[Capture]]) -> list[Capture]:
        """Return a capture for each round whose mean update the client decrypted.

        Parameters
        ----------
        rounds
            The clients' captures of each round.
        """
        found = []
        for captures in rounds:
            hidden = [c for c in captures if c.declaration.encryption != "none"]
            if hidden and hidden[0].round <= self._aggregates.last:
                members = tuple(c.client for c in hidden)
                declaration = joint_declaration([c.declaration for c in hidden])
                found.append(Capture(hidden[0].round, AGGREGATE, declaration, members=members))
        return found

    def aggregate(self, capture: Capture) -> Observation:
        """Return a round's mean update ``sum_i p_i g_i`` as one observation of all its images.

        This is what any client of an encrypted run reads, without the server's help. One batch's
        gradients with weights by examples average to the gradient of the joint batch. Several
        local steps are taken for joint steps, which holds to first order in the learning rate. The
        mean of defended updates is taken as it is.
        """
        mean = self._mean(capture.round)
        empty = Observation(
            round=capture.round,
            client=capture.client,
            parameters={},
            update={},
            declaration=capture.declaration,
            provenance={"members": list(capture.members)},
        )
        return self._seen(empty, mean)

    def _seen(self, observation: Observation, plain: dict[str, Tensors]) -> Observation:
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

    def _mean(self, number: int) -> dict[str, Tensors]:
        """Decrypt a round's aggregate, as every client did."""
        aggregate = EncryptedUpdate.from_tensors(self._aggregates.aggregate(number))
        if self._private is not None:
            return decrypt_mean(self._private, aggregate)
        first = self._shares[0]
        if len(self._shares) < first.threshold:
            raise BractError(
                f"round-{number:04d}/{AGGREGATE}: {first.threshold} clients decrypted it together "
                f"and all of them read it, but only {len(self._shares)} key shares lie in the "
                "folder of --key; put those of other clients there to repeat it",
                code="key-missing",
            )
        with readable():
            return {
                part: shaped(
                    combine(first, vector, [partial_decrypt(s, vector) for s in self._shares]),
                    aggregate.shapes[part],
                )
                for part, vector in aggregate.vectors.items()
            }

    def _model(self, number: int) -> Tensors:
        """Return the global model after a round, as every client holds it."""
        last = max(known for known in self._models if known <= number)
        for earlier in range(last + 1, number + 1):
            mean = self._mean(earlier)
            lr = self.config.strategy.server_lr
            self._models[earlier] = apply_mean(self._models[earlier - 1], mean, lr)
        return self._models[number]


def _shares_beside(path: Path, own: KeyShare) -> list[KeyShare]:
    """Return the client's share and others of the same key in its folder, up to the threshold."""
    shares = [own]
    for other in sorted(path.parent.glob("*.pem")):
        if len(shares) == own.threshold:
            break
        try:
            found = read_key_file(other)
        except BractError:
            continue
        known = {share.index for share in shares}
        if isinstance(found, KeyShare) and found.public == own.public and found.index not in known:
            shares.append(found)
    return shares
