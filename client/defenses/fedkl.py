"""FedKL: normalisation whose scale and shift come from a key that stays at the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from bract.client.defenses.base import DEFENSES, Defense, DefenseError, ProtectContext, Stage
from bract.models.keylock import Lock, key_locks
from bract.models.prepare import prepare_model
from bract.update import Tensors


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
        Whether gamma and beta go through a ReLU, as in the authors' repository.
    rate
        Share of the learning rate with which the lock layers learn. A step moves gamma 1 + |key|^2
        times as far as it would move a plain gamma, some 340 times for the paper's key; at 1 that
        kills channels now and then.
    """

    name: ClassVar[str] = "fedkl"
    stage: ClassVar[Stage] = Stage.MODEL
    needs: ClassVar[tuple[str, ...]] = ("model",)

    blocks: Literal["first", "every"] = "first"
    key_length: Annotated[int, Field(ge=1, le=2**20)] = 1024
    relu: bool = True
    rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Replace normalisation layers by locked ones, which hold no secret yet."""
        return prepare_model(model, [self.public()])

    def attach(self, model: nn.Module, state: Tensors, context: ProtectContext) -> None:
        """Unlock the model with this client's key and lock layers; draw them the first time."""
        locks = key_locks(model)
        if not locks:
            raise DefenseError(
                "defense 'fedkl': the model has no key-lock; prepare_model was not called"
            )
        device = next(model.parameters()).device
        if "key" not in state:
            generator = context.generator("fedkl")
            channels = {name: module.num_features for name, module in locks.items()}
            drawn = Lock.draw(channels, self.key_length, relu=self.relu, generator=generator)
            state.update(drawn.tensors())
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
