"""Forward passes of a witnessed model, and the passes over loaders in which they are made."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bract.client.origins import Origin
from bract.schema.work import OF_PARTS, InputSeen, LayerSeen, LoaderSeen

_DEEP = 4
"""Levels at which tensors are looked for in what a model returns."""

_MOST = 64

_UNLIKELY = 1000
"""One in how many times chance may explain what is taken for new inputs."""

_MOST_NODES = 256
"""Steps of autograd's graph among which the output that entered a loss is looked for."""

_OF_SHAPE = frozenset(
    {"view", "unsafeview", "reshapealias", "squeeze", "unsqueeze", "tocopy", "permute"}
    | {"transpose", "t", "movedim", "clone", "alias", "contiguous"}
)
"""Operations of autograd that leave every value of a tensor as it is."""

_MOST_LOOKED_AT = 1000
"""Objects among which tensors are looked for in what a model returns."""

_WITHOUT = (
    nn.Module,
    Dataset,
    DataLoader,
    str,
    bytes,
    int,
    float,
    complex,
    type,
    FunctionType,
    ModuleType,
)
"""Objects in which no tensors are looked for."""

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class LoaderPass:
    """One pass over a loader; ``source`` is its data set."""

    number: int
    seen: LoaderSeen
    source: object = field(repr=False)

    def is_of(self, other: LoaderPass) -> bool:
        """Return whether both passes are over the same data, or data made alike anew."""
        mine, theirs = self.source, other.source
        alike = type(mine) is type(theirs) and self.seen.examples == other.seen.examples
        return mine is theirs or (alike and self.seen.batch_size == other.seen.batch_size)


@dataclass(eq=False)
class ForwardPass:
    """Inputs of one call of the model, held until it is known whether they are differentiated.

    Attributes
    ----------
    loader
        The pass over a loader that was begun last.
    whole
        Whether the model itself was called, and not a part of it.
    count, shape, origin
        Examples, shape and origin of the first input; None is data.
    tensors
        Copies of the tensors by their argument; empty where nothing more is kept.
    target, has_loss
        What entered the first loss function after it, and whether one was called.
    left
        Whether the model has returned from it.
    watched
        Whether differentiable tensors were found in what it returned.
    taken
        Whether it was differentiated.
    unclear
        Whether a loss may be of it or of other passes, so that its targets are not known.
    values
        How many values each tensor has that the model returned, by autograd's number.
    """

    loader: LoaderPass | None = None
    whole: bool = False
    count: int = 0
    shape: tuple[int, ...] = ()
    origin: Origin | None = None
    inputs: tuple[InputSeen, ...] = ()
    layers: tuple[LayerSeen, ...] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)
    target: Tensor | None = None
    has_loss: bool = False
    left: bool = False
    watched: bool = False
    taken: bool = False
    unclear: bool = False
    values: dict[int, int] = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_NUMBERS))

    @property
    def first(self) -> Tensor | None:
        """The first input that holds examples."""
        return next((v for v in self.tensors.values() if v.dim() > 0), None)


class Entering(NamedTuple):
    """The passes that a loss may be of, and what changed the values that the model returned."""

    passes: list[ForwardPass]
    through: tuple[str, ...]


class Outputs:
    """Find the pass that a loss is of, by what the model returned from it; it holds no graph."""

    def __init__(self) -> None:
        # Autograd numbers what a thread computes; a pass lives as long as its graph.
        self._passes: WeakValueDictionary[int, ForwardPass] = WeakValueDictionary()

    def returned(self, one: ForwardPass, outputs: Iterable[Tensor]) -> None:
        """Note what a pass returned: tensors that autograd computed."""
        for value in outputs:
            if value.grad_fn is not None:
                number = value.grad_fn._sequence_nr()
                self._passes[number] = one
                one.values[number] = value.numel()

    def entering(self, value: Tensor, last: ForwardPass) -> Entering:
        """Find the passes that a loss of ``value`` may be of, and what lies between.

        Parameters
        ----------
        last
            The last pass, which it is of where its outputs cannot be followed and no other waits.
        """
        found: dict[ForwardPass, None] = {}
        whole = 0
        between: dict[str, None] = {}
        waiting, known = deque([value.grad_fn]), {value.grad_fn}
        while waiting and len(known) < _MOST_NODES:
            node = waiting.popleft()
            if node is None:
                continue
            number = node._sequence_nr()
            one = self._passes.get(number)
            if one is not None:
                found[one] = None
                whole += one.values.get(number, 0)
                continue
            between[_operation(node.name())] = None
            new = [following for following, _ in node.next_functions if following not in known]
            known.update(new)
            waiting.extend(new)
        if found:
            usual = _OF_SHAPE | OF_PARTS if whole == value.numel() else _OF_SHAPE
            return Entering(list(found), tuple(name for name in between if name not in usual))
        if not waiting and last.watched:
            return Entering([], ())
        others = [one for one in self._passes.values() if not one.has_loss and not one.taken]
        return Entering(list(dict.fromkeys([*others, last])), ())


def _operation(name: str) -> str:
    """Return autograd's name of an operation as people know it: ``div`` of ``DivBackward0``."""
    return name.rpartition("::")[2].partition("Backward")[0].lower()[:100] or "?"


class Loaders:
    """Passes over the loaders of a training, without those over other data, as of a validation.

    Attributes
    ----------
    current
        The pass over training data that was begun last, or of any before the first step.
    first
        The loader of the first pass of which an example was trained on.
    passes
        How many such passes there were.
    """

    def __init__(self) -> None:
        self.current: LoaderPass | None = None
        self.first: LoaderSeen | None = None
        self.passes = 0
        self._trained: LoaderPass | None = None

    def begins(self, loader: DataLoader[Any]) -> None:
        """Note that a pass over a loader begins."""
        count = None
        with suppress(TypeError):
            count = len(loader.dataset)  # type: ignore[arg-type]
        size = loader.batch_size if isinstance(loader.batch_size, int) else None
        seen = LoaderSeen(batch_size=size, drop_last=bool(loader.drop_last), examples=count)
        found = LoaderPass(next(_NUMBERS), seen, loader.dataset)
        if self._trained is None or found.is_of(self._trained):
            self.current = found

    def took(self, one: LoaderPass | None) -> None:
        """Note that what was read in a pass was trained on."""
        if one is None or (self._trained is not None and one.number == self._trained.number):
            return
        self.first = self.first or one.seen
        self._trained = one
        self.passes += 1

    def mark(self) -> tuple[LoaderSeen | None, int, LoaderPass | None]:
        """Return what `took` changes, for `restore`."""
        return self.first, self.passes, self._trained

    def restore(self, mark: tuple[LoaderSeen | None, int, LoaderPass | None]) -> None:
        """Forget what was trained on since `mark`."""
        self.first, self.passes, self._trained = mark

    def shows_new(self, unknown: int, size: int, *, kept: int) -> bool:
        """Return whether a later pass has inputs that are not the data set's, as augmented ones.

        A first pass that drops its last batch, or draws a part, leaves some of the data set out.

        Parameters
        ----------
        unknown, size
            Examples of the later batch that the first pass did not have, and all of them.
        kept
            Examples of the first pass.
        """
        count = None if self.first is None else self.first.examples
        if count is None:
            return 0 < unknown == size
        left = max(0, count - kept)
        if unknown > left:
            return True
        # All of a batch is left out by chance, at this likelihood.
        return unknown == size > 0 and _UNLIKELY * math.comb(left, size) < math.comb(count, size)


@dataclass
class _Budget:
    """Objects that may still be looked at."""

    left: int


def tensors_of(output: object) -> list[Tensor]:
    """Return the tensors in what a model returned: alone, or in lists, mappings and records."""
    return list(itertools.islice(_tensors_of(output, _DEEP, _Budget(_MOST_LOOKED_AT)), _MOST))


def _tensors_of(output: object, deep: int, budget: _Budget) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
        return
    if not deep or isinstance(output, _WITHOUT):
        return
    for part in itertools.islice(_parts_of(output), budget.left):
        if budget.left <= 0:
            return
        budget.left -= 1
        yield from _tensors_of(part, deep - 1, budget)


def _parts_of(output: object) -> Iterable[object]:
    """Return what an object holds; nothing where it cannot be read."""
    # What a model returns is of any class, and may raise whatever it likes.
    with suppress(Exception):
        if isinstance(output, Mapping):
            return list(itertools.islice(output.values(), _MOST_LOOKED_AT))
        if isinstance(output, list | tuple):
            return output[:_MOST_LOOKED_AT]
        if is_dataclass(output):
            return [getattr(output, one.name, None) for one in fields(output)]
        return list(itertools.islice(vars(output).values(), _MOST_LOOKED_AT))
    return ()
