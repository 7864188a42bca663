"""Tell a client's data from what networks computed, and from numbers that were drawn at random."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.client.watching import Handler

Origin = Literal["computed", "drawn"]
"""``computed``: by layers with parameters; ``drawn``: random numbers and nothing else."""

_LAYERS: tuple[Callable[..., Any], ...] = (
    F.linear,
    F.bilinear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    F.embedding,
    F.embedding_bag,
    F.batch_norm,
    F.layer_norm,
    F.group_norm,
    F.multi_head_attention_forward,
    torch.lstm,
    torch.gru,
    torch.rnn_tanh,
    torch.rnn_relu,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.mm,
)
"""Functions by which a layer puts its parameters to what enters it."""

_PICKING = (torch.Tensor.__getitem__, torch.stack, torch.Tensor.unbind, torch.unbind)
"""Functions that read single examples of a data set, which is data even if it is random."""

_MOST_NODES = 256
_MOST_KNOWN = 4096
_OWN = 16


class Origins:
    """Tensors that are no data, and what is made of them, as long as the training holds them.

    Attributes
    ----------
    inside
        Whether the witnessed model is computing: what it makes within is not followed.
    """

    def __init__(self) -> None:
        self.inside = False
        self.known: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}
        self._own: deque[weakref.ref[Tensor]] = deque(maxlen=_OWN)

    def handlers(self) -> dict[Callable[..., Any], Handler]:
        """Return what watches the functions of layers."""
        return dict.fromkeys(_LAYERS, (None, self._computes))

    def of(self, value: Tensor) -> Origin | None:
        """Return where a tensor comes from; None for data."""
        held = self.known.get(id(value))
        if held is not None and held[0]() is value:
            return held[1]
        if value.grad_fn is not None and _has_parameters(value):
            return "computed"
        place = _place(value)
        mine = (one() for one in self._own)
        if place and any(one is not None and _place(one) == place for one in mine):
            return "computed"
        return None

    def are_noise(self, shape: tuple[int, ...], args: Any, kwargs: Any) -> bool:
        """Return whether a loss has targets of the inputs' shape that are random numbers.

        Such are those of diffusion: the noise that was added to the inputs.
        """
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        alike = isinstance(target, Tensor) and target.shape == shape and target.dim() > 1
        return alike and self._known(target) == "drawn"

    def drew(self, value: object) -> None:
        """Note random numbers that were drawn outside of a data set."""
        if isinstance(value, Tensor) and value.dim() > 1:
            self._note(value, "drawn")

    def returned(self, outputs: Iterable[Tensor]) -> None:
        """Note what the witnessed model returned, which may enter it again."""
        self._own.extend(weakref.ref(one) for one in outputs)

    def follow(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what a function made of tensors that are known."""
        if self.inside:
            return
        if function is torch.Tensor.__setitem__:
            result = args[0]
        made = [v for v in _tensors(result) if not isinstance(v, nn.Parameter)]
        if not made:
            return
        entered = [v for v in _tensors([*args, *kwargs.values()]) if _may_be_known(v)]
        found = [self._known(v) for v in entered]
        if "computed" in found:
            origin: Origin | None = "computed"
        elif found and function not in _PICKING and all(one == "drawn" for one in found):
            origin = "drawn"
        else:
            origin = None
        for value in made:
            if origin is not None:
                self._note(value, origin)
            elif self._known(value) == "drawn" and found:
                del self.known[id(value)]

    def _computes(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        del function
        if self.inside:
            return
        if any(isinstance(v, nn.Parameter) for v in _tensors([*args, *kwargs.values()])):
            for value in _tensors(result):
                self._note(value, "computed")

    def _known(self, value: Tensor) -> Origin | None:
        held = self.known.get(id(value))
        return held[1] if held is not None and held[0]() is value else None

    def _note(self, value: Tensor, origin: Origin) -> None:
        if not _may_be_known(value) or len(self.known) >= _MOST_KNOWN:
            return
        key, known = id(value), self.known

        def gone(reference: weakref.ref[Tensor]) -> None:
            if known.get(key, (None,))[0] is reference:
                del known[key]

        known[key] = weakref.ref(value, gone), origin


def _may_be_known(value: Tensor) -> bool:
    """Return whether a tensor may hold examples, which no index, mask or loss does."""
    return value.dim() > 0 and value.is_floating_point() and not isinstance(value, nn.Parameter)


def _tensors(held: object) -> Iterator[Tensor]:
    """Return tensors, alone or in lists and tuples of lists."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, list | tuple):
        for part in held:
            if isinstance(part, Tensor):
                yield part
            elif isinstance(part, list | tuple):
                yield from (v for v in part if isinstance(v, Tensor))


def _has_parameters(value: Tensor) -> bool:
    """Return whether autograd computed a tensor from a layer's parameters."""
    waiting, known = deque([value.grad_fn]), {value.grad_fn}
    while waiting:
        node = waiting.popleft()
        if isinstance(getattr(node, "variable", None), nn.Parameter) or len(known) > _MOST_NODES:
            return True
        new = [each for each, _ in getattr(node, "next_functions", ()) if each not in known]
        known.update(new)
        waiting.extend(one for one in new if one is not None)
    return False


def _place(value: Tensor) -> int:
    """Return where a tensor's values lie; 0 where that is not known."""
    if value.is_sparse or value.is_meta:
        return 0
    try:
        return value.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
