"""Several defenses in order: which orders make sense, and the checks after each one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bract.defenses import Defense, ProtectContext, Stage
from bract.defenses.base import DefenseError, cosine_and_ratio
from bract.defenses.entries import read_defense
from bract.defenses.noise import Noise
from bract.errors import BractError
from bract.updates.update import Tensors, flatten

_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

_WHY_LAST = {
    Stage.MODEL: "it changes the model that everything after it trains or reads",
    Stage.REPRESENTATION: (
        "it prunes the last layer's update by the features of this round's batch, which only "
        "fits the update as trained"
    ),
    Stage.SPARSIFY: "after noise it keeps the coordinates where the noise is largest",
}


class DefenseChain:
    """Defenses applied one after the other, with the fail-closed checks between them.

    What follows noise works on the noisy update alone: it is given no field of `ProtectContext`
    that it does not declare in ``needs``, and no state that was made of updates without noise.

    Parameters
    ----------
    defenses
        In the order in which they are applied.
    noised
        Whether the update holds noise before the first of them, as `training.private` adds it.

    Raises
    ------
    BractError
        If a defense occurs twice, two of them transform the whole update, or the order is one
        that undoes a defense.
    """

    def __init__(self, defenses: Iterable[Defense] = (), *, noised: bool = False) -> None:
        self.defenses = tuple(defenses)
        names = [d.name for d in self.defenses]
        at = next((i for i, d in enumerate(self.defenses) if isinstance(d, Noise)), len(names))
        self._after_noise = frozenset(names if noised else names[at + 1 :])
        self._report: dict[str, float] = {}
        _check_order(self.defenses)

    def __len__(self) -> int:
        return len(self.defenses)

    @property
    def needs(self) -> frozenset[str]:
        """Return the fields of `ProtectContext` that some defense cannot do without."""
        return frozenset(need for defense in self.defenses for need in defense.needs)

    @property
    def keeps_model(self) -> bool:
        """Return whether part of each client's model stays at the client, and so in its state."""
        return any(defense.keeps == "model" for defense in self.defenses)

    @property
    def server_lr(self) -> float:
        """Return the ``strategy.server_lr`` that goes with the chain."""
        product = 1.0
        for defense in self.defenses:
            product *= defense.server_lr
        return product

    def public(self) -> list[dict[str, Any]]:
        """Return what the protocol declares: each defense's name and hyper-parameters."""
        return [defense.public() for defense in self.defenses]

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Apply every change of structure; the same at the server and at the clients."""
        for defense in self.defenses:
            model = defense.prepare_model(model)
        return model

    def attach(
        self, model: nn.Module, state: Tensors, context: ProtectContext | None = None
    ) -> None:
        """Give a prepared model the client's secrets, drawing them where ``state`` has none."""
        context = context or ProtectContext()
        for defense in self.defenses:
            prefix = self._prefix(defense)
            own = _own(prefix, state)
            defense.attach(model, own, context)
            _put_back(prefix, state, own)

    def protect(
        self,
        update: Mapping[str, Tensor],
        state: Tensors,
        context: ProtectContext | None = None,
    ) -> Tensors:
        """Return what may leave the client, or raise.

        ``state`` changes only if every defense succeeded.

        Raises
        ------
        DefenseError
            If a defense raised, needs something the client did not give, or changed names,
            shapes or dtypes, or produced a value that is not finite.
        """
        context = context or ProtectContext()
        before = after = _finite("the update before any defense", update)
        staged = dict(state)
        # Half precision has no room for squares and small constants; what is sent has its dtype.
        protected: Tensors = {
            n: v.float() if v.dtype in (torch.float16, torch.bfloat16) else v
            for n, v in update.items()
        }
        report: dict[str, float] = {}
        for defense in self.defenses:
            missing = [need for need in defense.needs if getattr(context, need) is None]
            if missing:
                raise DefenseError(
                    f"defense {defense.name!r} needs the client's {', '.join(missing)}, "
                    "which this client does not give"
                )
            prefix = self._prefix(defense)
            own = _own(prefix, staged)
            try:
                result = defense.protect(protected, own, self._shown(defense, context))
            except DefenseError:
                raise
            except _FAILURES as error:
                raise DefenseError(
                    f"defense {defense.name!r} failed ({type(error).__name__}: {error}); "
                    "nothing was sent"
                ) from error
            _check_same(defense.name, protected, result)
            after = _finite(f"the result of defense {defense.name!r}", result)
            _put_back(prefix, staged, own)
            protected = dict(result)
            report |= {f"{defense.name}.{key}": value for key, value in defense.report.items()}
        protected = {n: v.to(update[n].dtype) for n, v in protected.items()}
        if any(v.dtype != torch.float32 for v in protected.values()):
            after = _finite("the defended update in the dtype it is sent in", protected)
        if self.defenses:
            cosine, ratio = cosine_and_ratio(before, after)
            report |= {"cosine": cosine, "norm_ratio": ratio}
        self._report = report
        state.clear()
        state.update(staged)
        return protected

    def _prefix(self, defense: Defense) -> str:
        """Return what begins the names of a defense's state."""
        return f"{defense.name}@noise." if defense.name in self._after_noise else f"{defense.name}."

    def _shown(self, defense: Defense, context: ProtectContext) -> ProtectContext:
        """Return the context without what a defense after noise does not declare."""
        if defense.name not in self._after_noise:
            return context
        return replace(
            context,
            model=context.model if "model" in defense.needs else None,
            images=context.images if "images" in defense.needs else None,
            labels=context.labels if "labels" in defense.needs else None,
        )

    @property
    def report(self) -> dict[str, float]:
        """Return figures about the last `protect`, for the client's own log."""
        return dict(self._report)


def build_defenses(entries: Iterable[Mapping[str, Any]], *, noised: bool = False) -> DefenseChain:
    """Build a chain from ``[{"name": ..., <hyper-parameter>: ...}, ...]``.

    See `DefenseChain` for ``noised``.

    Raises
    ------
    BractError
        If a name or hyper-parameter is unknown (naming the nearest), a value is out of range, or
        the order makes no sense.
    """
    return DefenseChain((build_defense(entry) for entry in entries), noised=noised)


def build_defense(entry: Mapping[str, Any]) -> Defense:
    """Build one defense from its name and hyper-parameters, ready to run on this machine."""
    defense = read_defense(entry)
    defense.check_installed()
    return defense


def _check_order(defenses: tuple[Defense, ...]) -> None:
    names = [defense.name for defense in defenses]
    for name in names:
        if names.count(name) > 1:
            raise BractError(
                f"defenses: {name!r} occurs {names.count(name)} times; give it once",
                code="config-conflict",
            )
    transforms = [d.name for d in defenses if d.stage is Stage.TRANSFORM]
    if len(transforms) > 1:
        raise BractError(
            f"defenses: {' and '.join(map(repr, transforms))} each replace the whole update, the "
            "second would work on the first one's defended update; choose one",
            code="config-conflict",
        )
    for earlier, later in pairwise(defenses):
        # Noise or pruning may come before or after a transformation:
        # noise before it keeps its privacy guarantee, since what follows sees the sum alone.
        if earlier.stage > later.stage and later.stage is not Stage.TRANSFORM:
            raise BractError(
                f"defenses: {later.name!r} cannot come after {earlier.name!r}: "
                f"{_WHY_LAST[later.stage]}; put {later.name!r} first",
                code="config-conflict",
            )


def _own(prefix: str, state: Tensors) -> Tensors:
    return {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}


def _put_back(prefix: str, state: Tensors, own: Tensors) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        del state[key]
    state.update({prefix + key: value for key, value in own.items()})


def _check_same(name: str, before: Mapping[str, Tensor], after: Any) -> None:
    def refuse(what: str) -> None:
        raise DefenseError(f"defense {name!r} {what}; nothing was sent")

    if not isinstance(after, Mapping):
        refuse(f"returned a {type(after).__name__}, expected tensors by name")
    if list(before) != list(after):
        strange = sorted(set(before) ^ set(after))
        refuse(f"changed the names or their order ({', '.join(strange[:5]) or 'order'})")
    for key, value in before.items():
        other = after[key]
        if not isinstance(other, Tensor):
            refuse(f"returned a {type(other).__name__} for {key}")
        if other.shape != value.shape:
            refuse(f"changed the shape of {key} from {tuple(value.shape)} to {tuple(other.shape)}")
        if other.dtype != value.dtype:
            refuse(f"changed the dtype of {key} from {value.dtype} to {other.dtype}")


def _finite(what: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return all tensors as one vector, or refuse them."""
    vector = flatten(tensors) if tensors else torch.zeros(0)
    # One sum is much cheaper than testing every value. It is non-finite wherever a value is; where
    # finite values add up to infinity, they are looked at one by one.
    if not bool(torch.isfinite(vector.sum())) and not bool(torch.isfinite(vector).all()):
        names = [n for n, value in tensors.items() if not bool(torch.isfinite(value).all())]
        raise DefenseError(
            f"{what} holds NaN or infinite values in {', '.join(names[:5])}; nothing was sent"
        )
    return vector
