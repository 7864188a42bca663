"""See whether the gradients of a model still stand, or were dropped before a step took them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

_SAMPLED = 64
"""Values of each parameter that are held to see a change that PyTorch does not count."""

Mark = tuple[int, int]


class Gradients:
    """Gradients that backward passes gave the parameters of one model since its last step.

    Parameters
    ----------
    model
        Its parameters, those that it gets later too.

    Attributes
    ----------
    passes
        Backward passes since the last step that changed a gradient of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._parameters = model, list(model.parameters())
        self._before: list[Mark | None] = []
        self._touched: dict[int, nn.Parameter] = {}
        self._versions = 0
        self._values: list[Tensor] | None = None
        self.passes = 0

    def begin(self) -> None:
        """Note the gradients before a backward pass is made."""
        self._before = [_mark(p.grad) for p in self._parameters]

    def end(self, *, sampled: bool) -> bool:
        """Note a backward pass that was made; return whether it changed a gradient of the model.

        Parameters
        ----------
        sampled
            Hold some values of the parameters: without an optimizer they may change uncounted.
        """
        pairs = zip(self._parameters, self._before, strict=False)
        changed = {id(p): p for p, before in pairs if _mark(p.grad) != before}
        if not changed:
            # Such as adapters that the training adds.
            known = {id(p) for p in self._parameters}
            self._parameters = list(self._model.parameters())
            changed = {id(p): p for p in self._parameters if id(p) not in known}
        if not changed:
            return False
        if not self.passes:
            self._versions = self._version()
            self._values = self._sample() if sampled else None
        self._touched |= changed
        self.passes += 1
        return True

    @property
    def are_gone(self) -> bool:
        """Return whether nothing is left of what backward passes since the last step gave."""
        return self.passes > 0 and not any(_stands(p.grad) for p in self._touched.values())

    @property
    def have_moved(self) -> bool:
        """Return whether a parameter changed since the first of these passes."""
        if self._versions != self._version():
            return True
        held = self._values
        now = self._sample() if held is not None else ()
        return any(not one.equal(other) for one, other in zip(now, held or (), strict=True))

    def settle(self) -> None:
        """Begin anew: a step took the gradients, or they were dropped."""
        self._touched, self._values, self.passes = {}, None, 0

    def _version(self) -> int:
        return sum(p._version for p in self._parameters if not p.is_inference())

    def _sample(self) -> list[Tensor]:
        known: Sequence[nn.Parameter] = [p for p in self._parameters if not p.is_meta]
        return [p.detach().flatten()[:_SAMPLED].clone() for p in known]


def _mark(slope: Tensor | None) -> Mark | None:
    return None if slope is None else (id(slope), slope._version)


def _stands(slope: Tensor | None) -> bool:
    if slope is None:
        return False
    return slope.is_sparse or slope.is_meta or bool(slope.any())
