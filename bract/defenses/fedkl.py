"""FedKL: normalisation whose scale and shift come from a key that stays at the client."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from bract.defenses.base import DEFENSES, Defense, DefenseError, Keeps, ProtectContext, Stage
from bract.models.keylock import Lock, insert_key_locks, key_locks
from bract.updates.update import Tensors

_log = logging.getLogger(__name__)

_FORMAT = 3
"""Of the stored key and lock: 1 was drawn from 32 bits, 2 with every gamma turned positive."""

_REDRAWN = {
    1: "were drawn from one of 2^32 seeds, which a server can try",
    2: "were drawn with the sign of every gamma turned to positive, which is not FedKL's formula",
}


@DEFENSES.register("fedkl")
class FedKL(Defense):
    """Lock the first convolution-normalisation block with a private key (FedKL, section III-C).

    The update of the other layers is sent as it is; what protects it is that the server lacks
    gamma = lock_g(key) and beta = lock_b(key). Those are 2 x channels numbers: an attacker who
    regresses them together with the image gets much of the image back.

    The key and the lock layers are kept in the client's state and trained there. Each client
    ends with a model of its own: evaluate it with its own key.

    Parameters
    ----------
    blocks
        ``first``: the first normalisation layer, as in the paper. ``every``: all of them.
    key_length
        Length of the key, drawn once for each client from U[0, 1); the paper has 1024.
    relu
        False: gamma and beta as eq. 29 has them, of either sign. True: behind a ReLU, as in the
        authors' repository, not in the paper; half of the channels then start with a gamma of
        zero, other ones at each client, and those never learn.
    rate
        Share of the learning rate with which the lock layers learn; 1 in the paper. A step moves
        gamma 1 + |key|^2 times as far as it would move a plain gamma, some 340 times for the
        paper's key. Chosen on digits that clients kept from training (LeNet-BN, 12 rounds, four
        seeds, mean and range): 1 gives 0.91 (0.88 to 0.96), 0.5 gives 0.85 (0.68 to 0.97), 0.1
        gives 0.90 (0.75 to 0.97), 0.02 gives 0.92 (0.80 to 0.99). Four seeds do not separate
        these, so the paper's stays.
    """

    name: ClassVar[str] = "fedkl"
    title: ClassVar[str] = "FedKL"
    summary: ClassVar[str] = (
        "the update of a model whose first normalisation is locked with the client's own key"
    )
    stage: ClassVar[Stage] = Stage.MODEL
    keeps: ClassVar[Keeps] = "model"
    needs: ClassVar[tuple[str, ...]] = ("model",)

    blocks: Literal["first", "every"] = "first"
    key_length: Annotated[int, Field(ge=1, le=2**20)] = 1024
    relu: bool = False
    rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Replace normalisation layers by locked ones, which hold no secret yet."""
        return insert_key_locks(model, blocks=self.blocks)

    def attach(self, model: nn.Module, state: Tensors, context: ProtectContext) -> None:
        """Unlock the model with this client's key and lock layers; draw them the first time."""
        locks = key_locks(model)
        if not locks:
            raise DefenseError(
                "defense 'fedkl': the model has no key-lock; prepare_model was not called"
            )
        device = next(model.parameters()).device
        stored = int(state.get("format", torch.tensor(1)))
        if "key" in state and stored < _FORMAT:
            _log.warning(
                "defense 'fedkl': the stored key and lock layers %s; they are drawn anew, and this "
                "client's lock layers learn from the start again",
                _REDRAWN[stored],
            )
            state.clear()
        if "key" not in state:
            channels = {name: module.num_features for name, module in locks.items()}
            drawn = Lock.draw(
                channels, self.key_length, relu=self.relu, source=context.stream("fedkl")
            )
            state.update(drawn.tensors() | {"format": torch.tensor(_FORMAT)})
        lock = Lock.load(state, relu=self.relu, rate=self.rate)
        if set(lock.layers) != set(locks) or len(lock.key) != self.key_length:
            raise DefenseError(
                "defense 'fedkl': the stored key and lock belong to another model "
                f"({', '.join(lock.layers)}); remove this client's state, or run under another name"
            )
        lock.to(device).attach(model)

    def protect(
        self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext
    ) -> Tensors:
        """Keep the trained lock layers, check that none of them is in the update, return it."""
        assert context.model is not None
        locks = key_locks(context.model)
        if not locks or any(module.lock is None for module in locks.values()):
            raise DefenseError(
                "defense 'fedkl': the trained model was not locked; prepare_model and attach come "
                "before training"
            )
        lock = Lock.of(context.model)
        exchanged = {name for name, _ in context.model.named_parameters()}
        strange = sorted(set(update) - exchanged)
        if strange:
            raise DefenseError(
                f"defense 'fedkl': the update holds {', '.join(strange[:5])}, which the shared "
                "model does not; only its named parameters may leave"
            )
        state.update(lock.tensors())
        return dict(update)
