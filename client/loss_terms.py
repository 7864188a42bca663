"""What a training differentiates: calls of PyTorch's loss functions, seen as they are made."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bract.schema.work import MOST_THROUGH, MOST_WEIGHTS, LossTerm

LOSSES: Mapping[Callable[..., Any], inspect.Signature] = {
    function: inspect.signature(function)
    for function in (
        F.cross_entropy,
        F.nll_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.kl_div,
        F.poisson_nll_loss,
        F.gaussian_nll_loss,
        F.cosine_embedding_loss,
        F.margin_ranking_loss,
        F.multi_margin_loss,
        F.multilabel_margin_loss,
        F.multilabel_soft_margin_loss,
        F.soft_margin_loss,
        F.hinge_embedding_loss,
        F.triplet_margin_loss,
        F.ctc_loss,
    )
}
"""Loss functions that are seen, also as the modules of `torch.nn` that call them."""

LOOKED_AT = 64
"""Backward passes whose terms are compared with the first one's."""

MOST_TERMS = 64

_ALIKE = 1e-4
"""Relative difference up to which two scales are one, and up to which terms make up a total."""

_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_MIXED = ("cross_entropy", "nll_loss")
_IGNORED = frozenset(
    {"input", "target", "weight", "pos_weight", "reduction", "label_smoothing", "ignore_index"}
    | {"size_average", "reduce", "input1", "input2", "anchor", "positive", "negative", "log_probs"}
    | {"targets", "var"}
)


@dataclass(eq=False)
class _Open:
    """A term that was computed and not differentiated yet; it holds no graph.

    Attributes
    ----------
    value
        Its result, without the graph.
    outputs
        What entered it, as long as the training holds that.
    group
        Alike in terms of the same outputs.
    slope
        The derivative of what is differentiated by the result, once it is known.
    """

    term: LossTerm
    value: Tensor
    outputs: weakref.ref[Tensor] | None
    group: object
    target: Tensor | None
    slope: Tensor | None = None

    @property
    def mixes(self) -> bool:
        """Return whether it is of classes of examples, so that its targets may be mixed."""
        term = self.term
        return (
            term.name in _MIXED
            and term.factor is not None
            and len(term.outputs) == 2
            and term.weight is None
            and not term.ignored
            and not term.settings.get("weighted")
        )

    @property
    def rows(self) -> Tensor:
        """Return the targets as probabilities, float32 ``(B, classes)``."""
        assert self.target is not None
        target = self.target.detach()
        if self.term.soft:
            return target.float()
        return F.one_hot(target, self.term.outputs[1]).float()


@dataclass
class Terms:
    """The loss of a training, by its terms.

    Attributes
    ----------
    first
        The terms of the first backward pass.
    even
        Whether later passes, of those that were looked at, had the same.
    remainder
        Whether what was differentiated held more than known terms.
    backwards
        Backward passes.
    soft
        Whether targets of a pass were probabilities, or mixed by several terms of one output.
    """

    first: tuple[LossTerm, ...] = ()
    even: bool = True
    remainder: bool = False
    backwards: int = 0
    soft: bool = False
    _open: list[_Open] = field(default_factory=list)
    _raw: list[tuple[LossTerm, ...]] = field(default_factory=list)
    _known: bool = False
    _total: Tensor | None = None
    _settled: tuple[int, bool, bool] = (0, False, False)
    _earlier: tuple[int, bool, bool] = (0, False, False)
    _counted: int = 0

    def computed(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: object,
        entered: Tensor | None,
        through: tuple[str, ...] = (),
    ) -> Tensor | None:
        """Note one call of a loss function; return its labels where the result is differentiable.

        Parameters
        ----------
        entered
            What entered the model last.
        through
            What changed the model's output before.
        """
        if not isinstance(result, Tensor) or not result.requires_grad:
            return None
        bound = LOSSES[function].bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        target = given.get("target")
        if self._looks(self.backwards + 1):
            # Terms of a validation are never differentiated.
            del self._open[: max(0, len(self._open) + 1 - MOST_TERMS)]
            outputs, kept = given.get("input"), target if isinstance(target, Tensor) else None
            one = _Open(
                _term(function, given, entered, through),
                result.detach().clone(),
                weakref.ref(outputs) if isinstance(outputs, Tensor) else None,
                self._group(outputs),
                kept,
            )
            result.register_hook(partial(self._reaches, one))
            self._open.append(one)
        if not isinstance(target, Tensor):
            return None
        # Of probabilities the likeliest class is an example's label.
        return target.argmax(dim=1) if _is_soft(function, target) and target.dim() == 2 else target

    def _looks(self, number: int) -> bool:
        """Return whether the terms of a backward pass are looked at; of all where labels mix."""
        return number <= LOOKED_AT or self.soft

    def _group(self, outputs: object) -> object:
        """Return what terms of the same outputs have in common."""
        known = (o for o in self._open if o.outputs is not None and o.outputs() is outputs)
        found = next(known, None)
        return object() if found is None else found.group

    def _reaches(self, one: _Open, slope: Tensor) -> None:
        if self._total is not None:
            one.slope = slope.detach()

    def begins(self, total: object) -> None:
        """Note a backward pass before it is made."""
        for one in self._open:
            one.slope = None
        self._earlier = self.backwards, self.remainder, self.soft
        self._counted = len(self._raw)
        looks = self._looks(self.backwards + 1)
        single = isinstance(total, Tensor) and total.numel() == 1
        self._total = total.detach() if looks and single and isinstance(total, Tensor) else None

    def differentiated(self) -> Tensor | None:
        """Note a backward pass that was made: find what each term counts in the total.

        Returns
        -------
        Tensor or None
            float32 ``(B, classes)``: the targets, where they are probabilities, or mixed by several
            terms of the same outputs, each as much as it counts.
        """
        self.backwards += 1
        total, self._total = self._total, None
        if total is None:
            self._open.clear()
            return None
        found: list[_Open] = []
        explained = 0.0
        for one in self._open:
            slope = one.slope
            if slope is None:
                continue
            explained += float((slope.double() * one.value.double()).sum())
            even = slope.numel() == 1 or bool((slope == slope.flatten()[0]).all())
            factor = float(slope.flatten()[0]) if even and slope.numel() else None
            found.append(replace(one, term=one.term.model_copy(update={"factor": factor})))
        self._open = [one for one in self._open if one.slope is None]
        left = abs(float(total.double()) - explained)
        exact = total.dtype in (torch.float32, torch.float64)
        if found and left > (_ALIKE if exact else 0.02) * max(1e-3, abs(explained)):
            self.remainder = True
        terms, rows = _mixed(found)
        self.soft = self.soft or rows is not None
        self._raw.append(terms)
        return rows

    def forget(self) -> None:
        """Forget the backward passes since the last step, whose gradients were dropped."""
        self.backwards, self.remainder, self.soft = self._settled
        self._raw.clear()

    def forget_last(self) -> None:
        """Forget the last backward pass, which was of another model."""
        self.backwards, self.remainder, self.soft = self._earlier
        del self._raw[self._counted :]

    def stepped(self, unscaled: float = 1.0) -> None:
        """Note an optimizer's step, with the factor by which gradients were unscaled before it."""
        for terms in self._raw:
            scaled = tuple(_times(term, unscaled) for term in terms)
            if not self._known:
                self.first, self._known = scaled, True
            elif not _are_alike(scaled, self.first):
                self.even = False
            elif any(term.soft for term in scaled):
                # Labels are mixed in some steps alone.
                self.first = scaled
        self._raw.clear()
        self._open.clear()
        self.settle()

    def settle(self) -> None:
        """Keep what is known by now, whatever is forgotten later."""
        self._settled = self.backwards, self.remainder, self.soft


def _mixed(found: Sequence[_Open]) -> tuple[tuple[LossTerm, ...], Tensor | None]:
    """Return terms with those of one output in one, and what are then its targets.

    ``a CE(z, y) + b CE(z, u)`` is ``(a + b) CE(z, t)`` of ``t = (a y + b u) / (a + b)``, as mixup
    (Zhang et al., ICLR 2018) has it.
    """
    first = next((one for one in found if one.mixes), None)
    if first is None:
        return tuple(one.term for one in found), None
    alike = [one for one in found if one.mixes and _mix(one, first)]
    factors = [one.term.factor or 0.0 for one in alike]
    whole = sum(factors)
    if whole <= 0.0 or (len(alike) == 1 and not first.term.soft):
        return tuple(one.term for one in found), None
    rows = sum(f / whole * one.rows for f, one in zip(factors, alike, strict=True))
    changes = {"soft": True, "targets": first.term.outputs, "factor": whole}
    others = tuple(one.term for one in found if all(one is not other for other in alike))
    assert isinstance(rows, Tensor)
    return (first.term.model_copy(update=changes), *others), None if others else rows


def _mix(one: _Open, other: _Open) -> bool:
    """Return whether two terms are one with mixed targets."""
    fields = ("name", "reduction", "label_smoothing")
    alike = all(getattr(one.term, name) == getattr(other.term, name) for name in fields)
    return alike and one.group is other.group


def _term(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    entered: Tensor | None,
    through: tuple[str, ...],
) -> LossTerm:
    outputs = next((v for v in given.values() if isinstance(v, Tensor)), None)
    target = given.get("target")
    of_classes = function in _OF_CLASSES
    shape = tuple(target.shape) if isinstance(target, Tensor) else ()
    soft = _is_soft(function, target)
    weight, pos_weight = given.get("weight"), given.get("pos_weight")
    ignored = 0
    if of_classes and isinstance(target, Tensor) and not soft:
        ignored = int((target == given.get("ignore_index", -100)).sum())
    elements = target.numel() if isinstance(target, Tensor) else 0
    if soft and outputs is not None and outputs.dim() > 0:
        elements //= max(1, outputs.shape[1] if outputs.dim() > 1 else outputs.shape[0])
    settings = {
        name: value
        for name, value in given.items()
        if name not in _IGNORED and isinstance(value, bool | int | float | str)
    }
    weights = _numbers(weight) if of_classes else None
    if isinstance(weight, Tensor) and weights is None:
        settings["weighted"] = True
    return LossTerm(
        name=function.__name__,
        reduction=str(given.get("reduction", "mean")),
        outputs=tuple(outputs.shape) if outputs is not None else (),
        targets=shape,
        soft=soft,
        weight=weights,
        pos_weight=_numbers(pos_weight),
        label_smoothing=float(given.get("label_smoothing", 0.0)),
        ignored=ignored,
        counted=max(0, elements - ignored),
        rebuilds=_rebuilds(target, entered),
        through=through[:MOST_THROUGH],
        settings={name: _finite(value) for name, value in settings.items()},
    )


def _is_soft(function: Callable[..., Any], target: object) -> bool:
    """Return whether targets of a loss of classes are probabilities."""
    return function in _OF_CLASSES and isinstance(target, Tensor) and target.is_floating_point()


def _rebuilds(target: object, entered: Tensor | None) -> bool:
    if not isinstance(target, Tensor) or entered is None or target.numel() != entered.numel():
        return False
    if target.dim() < 2 or not target.is_floating_point():
        return False
    return torch.equal(target.detach().flatten().cpu(), entered.detach().flatten().cpu())


def _numbers(value: object) -> tuple[float, ...] | None:
    if not isinstance(value, Tensor) or value.numel() > MOST_WEIGHTS:
        return None
    found = tuple(float(v) for v in value.detach().flatten().tolist())
    return found if all(map(math.isfinite, found)) else None


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _times(term: LossTerm, unscaled: float) -> LossTerm:
    if term.factor is None or unscaled == 1.0:
        return term
    return term.model_copy(update={"factor": term.factor * unscaled})


def _are_alike(one: tuple[LossTerm, ...], other: tuple[LossTerm, ...]) -> bool:
    return len(one) == len(other) and all(map(_is_alike, one, other))


def _is_alike(one: LossTerm, other: LossTerm) -> bool:
    fields = ("name", "reduction", "weight", "pos_weight", "label_smoothing", "settings", "through")
    if any(getattr(one, name) != getattr(other, name) for name in fields):
        return False
    if one.scale is None or other.scale is None:
        return one.scale is other.scale
    return abs(one.scale - other.scale) <= _ALIKE * abs(other.scale)
