"""What an app's parameters held when its training began, beside what was received for them.

A defense is applied to an update, and an update is taken from what was received. An app may read
something else of that: one of two names of a tied weight, a part of another array, nothing at all.
Its sender could then choose from what the update is taken. So the values that the optimizers step
from are compared with those that were received.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bract.client.defenses import DefenseError
from bract.protocol.reading import Reading

_SAMPLED = 16
"""Values that are compared before all of them are."""

FEWEST_FOLLOWED = 16
LEAST_OWN = 0.1
"""A buffer of so many values follows a parameter if the parameter's movement leaves less than this
share of the energy of its change that a constant and what was received do not explain."""


@dataclass(frozen=True)
class _Parameter:
    """One parameter that an optimizer stepped; it is held so that its values outlive the app.

    Attributes
    ----------
    received
        Names of the received arrays whose values, in the parameter's type, it held before.
    dtype
        Its type then.
    """

    value: Tensor
    received: frozenset[str]
    dtype: torch.dtype

    @property
    def place(self) -> tuple[Any, ...]:
        """Return where its values are; equal for two parameters that are one tensor."""
        value = self.value
        return value.data_ptr(), value.shape, value.stride(), value.dtype, str(value.device)


@dataclass
class Held:
    """The parameters that optimizers stepped in one message, each with what it began from.

    Parameters
    ----------
    received
        The arrays that the update is taken from, by their names.
    """

    received: Mapping[str, Tensor]
    _parameters: dict[int, _Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._alike: dict[torch.Size, list[str]] = defaultdict(list)
        for name, value in self.received.items():
            self._alike[value.shape].append(name)

    def begin(self, optimizer: Optimizer) -> None:
        """Note what the parameters of an optimizer hold, those that it has not stepped yet."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad and id(parameter) not in self._parameters:
                self._parameters[id(parameter)] = self._note(parameter)

    def _note(self, parameter: Tensor) -> _Parameter:
        try:
            alike = self._alike.get(parameter.shape, [])
            names = frozenset(n for n in alike if _holds(parameter, self.received[n]))
        except (RuntimeError, NotImplementedError, TypeError):
            # A kind of tensor that cannot be compared; training goes on, and its update stays here.
            names = frozenset()
        return _Parameter(parameter, names, parameter.dtype)

    def check(self, reading: Reading, names: Sequence[str], bare: Collection[str] = ()) -> Began:
        """Return from what the update of a reply was trained.

        Parameters
        ----------
        reading
            Of weights, or of trained minus received weights.
        names
            The arrays to protect.
        bare
            The floating arrays that would leave as they are.

        Raises
        ------
        DefenseError
            If an array came back changed, and no parameter that was stepped began from what was
            received for it; if two arrays are parts of one another; or if a parameter that was
            stepped would leave as it is.
        """
        if not self._parameters:
            if not any(_moved(reading, name) for name in names):
                return Began()
            raise DefenseError(
                "DefenseMod saw no step of a PyTorch optimizer, so it cannot check that the app "
                "trained from what it received; where the app trains in another process or "
                "framework, or without an optimizer, say so and how it reads what it receives: "
                "DefenseMod(..., seen=False, reads='name') or reads='order'; nothing was sent"
            )
        for name in sorted(bare):
            self._check_bare(reading, name)
        began = Began()
        for name in names:
            holders = self._holders(reading.sources[name])
            mine = [p for p in holders if _returned(reading, name, p)]
            if mine:
                began.parameters[name] = mine
            elif not _moved(reading, name):
                continue
            elif not holders or self._is_anothers(reading, name):
                raise _elsewhere(reading.keys[name])
            else:
                began.parameters[name] = holders
                began.loose.append(name)
        for group in self._alike_at_first(reading, began):
            _check_count(reading, group, began)
        _check_parts(began.parameters)
        return began

    @property
    def stepped(self) -> bool:
        """Return whether an optimizer stepped a parameter."""
        return bool(self._parameters)

    def _alike_at_first(self, reading: Reading, began: Began) -> list[_Group]:
        """Return the arrays that began from equal values, with all parameters that did."""
        groups: list[_Group] = []
        for name in began.parameters:
            places = {p.place for p in self._holders(reading.sources[name])}
            joined = [group for group in groups if group.places & places]
            groups = [group for group in groups if not group.places & places]
            names = [one for group in joined for one in group.names]
            groups.append(_Group([*names, name], places.union(*(g.places for g in joined))))
        return groups

    def _check_bare(self, reading: Reading, name: str) -> None:
        """Refuse a buffer that is a parameter, or shows what one moved by."""
        key = reading.keys[name]
        holders = self._holders(reading.sources[name])
        if _moved(reading, name) and any(_returned(reading, name, p) for p in holders):
            raise DefenseError(
                f"DefenseMod: {key} would leave undefended as a buffer, and an optimizer stepped "
                "it; take it out of buffers=; nothing was sent"
            )
        returned = reading.returned[name].double()
        if returned.numel() < FEWEST_FOLLOWED or not _moved(reading, name):
            return
        sent = reading.sent[name].double()
        change = returned if reading.kind == "delta" else returned - sent
        for parameter in self._parameters.values():
            if parameter.received and parameter.value.shape == change.shape:
                before = self.received[min(parameter.received)].double()
                movement = _on_host(parameter.value).double() - before
                if _follows(change, movement, [torch.ones_like(sent), sent, before]):
                    raise DefenseError(
                        f"DefenseMod: {key} would leave undefended as a buffer, and moves as a "
                        "parameter does: an average of the weights shows their update; do not "
                        "return it; nothing was sent"
                    )

    def _holders(self, source: str) -> list[_Parameter]:
        return [p for p in self._parameters.values() if source in p.received]

    def _is_anothers(self, reading: Reading, name: str) -> bool:
        """Return whether an array is a parameter's at the end, which began elsewhere."""
        return any(_returned(reading, name, p) for p in self._parameters.values())


@dataclass(frozen=True)
class _Group:
    """Arrays that were received with equal values, and where the parameters are that held them."""

    names: list[str]
    places: set[tuple[Any, ...]]


@dataclass
class Began:
    """Where the arrays of a reply began.

    Attributes
    ----------
    parameters
        The parameters that began from what was received for an array, and may be it; of an array
        that came back as it was received there may be none.
    loose
        Arrays that came back with values that no parameter has at the end, as those of the best
        epoch or an average do.
    tied
        Arrays that are one tensor under a second name: each later name, and the first.
    """

    parameters: dict[str, list[_Parameter]] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)

    def base(self, name: str, received: Tensor, returned: torch.dtype) -> Tensor:
        """Return what an array was trained from: what was received, in the parameter's type.

        Raises
        ------
        DefenseError
            If parameters of several types began from it, and none has the type that came back.
        """
        types = {parameter.dtype for parameter in self.parameters.get(name, ())}
        if not types:
            return received
        if len(types) > 1 and returned not in types:
            raise _elsewhere(name)
        return received.to(returned if returned in types else types.pop()).to(returned)


@contextmanager
def holding(
    received: Mapping[str, Tensor], *, first_step: Callable[[], None] | None = None
) -> Iterator[Held]:
    """Note meanwhile what optimizers step, before their first steps, in any thread.

    Parameters
    ----------
    first_step
        Called before the first step of all.
    """
    held = Held(received)

    def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if first_step is not None and not held.stepped:
            first_step()
        held.begin(optimizer)

    # A compiled step calls it, and compiles none of it.
    uncompiled: Callable[[Optimizer, Any, Any], None] = torch.compiler.disable(begin)
    handle = register_optimizer_step_pre_hook(uncompiled)
    try:
        yield held
    finally:
        handle.remove()


def _elsewhere(key: str) -> DefenseError:
    return DefenseError(
        f"DefenseMod: {key} came back changed, and no parameter that an optimizer stepped began "
        "from what was received for it alone, so the server could choose from what its update is "
        "taken. Where the model keeps it (a head of the client's own) or it is another one's part, "
        "do not return it; a buffer leaves undefended where it is named, DefenseMod(..., "
        "buffers=['...']), but an average of the weights shows their update; where the app starts "
        "from values of its own, or returns none of its parameters, DefenseMod(..., seen=False) "
        "leaves this to its author; nothing was sent"
    )


def _check_count(reading: Reading, group: _Group, began: Began) -> None:
    """Tell which arrays of equal beginnings are one tensor; refuse more of them than parameters.

    A server that sends two arrays with equal values would else have one that began elsewhere taken
    for the other.
    """
    equal: list[list[str]] = []
    for name in group.names:
        value = reading.returned[name]
        known = next((one for one in equal if _same(reading.returned[one[0]], value)), None)
        if known is None:
            equal.append([name])
        else:
            known.append(name)
    # Of those that came back as a parameter is at the end, it is that parameter.
    exact = [name for name in group.names if name not in began.loose]
    taken = {p.place for name in exact for p in began.parameters[name]}
    loose = sum(any(name in began.loose for name in names) for names in equal)
    if loose + min(len(taken), len(exact)) > len(group.places):
        raise _elsewhere(reading.keys[group.names[-1]])
    for names in equal:
        first = names[0]
        same = (
            _moved(reading, first)
            or len({p.place for n in names for p in began.parameters[n]}) == 1
        )
        if same:
            began.tied |= dict.fromkeys(names[1:], first)


def _check_parts(parameters: Mapping[str, Sequence[_Parameter]]) -> None:
    """Refuse two arrays whose parameters share some of their memory, and are not one tensor."""
    spans = [
        (*_span(found[0].value), found[0].place, name)
        for name, found in parameters.items()
        if found[0].value.layout == torch.strided
    ]
    spans.sort(key=lambda span: span[:3])
    for one, other in pairwise(spans):
        if one[0] == other[0] and other[1] < one[2] and one[3] != other[3]:
            raise DefenseError(
                f"DefenseMod: {one[-1]} and {other[-1]} share values of one tensor, so defenses "
                "would be applied twice to them, and an average would part them; return one of "
                "them; nothing was sent"
            )


def _span(value: Tensor) -> tuple[str, int, int]:
    """Return the device of a tensor's memory, where it begins and where it ends."""
    last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    begins = value.data_ptr()
    return str(value.device), begins, begins + (last + 1) * value.element_size()


def _moved(reading: Reading, name: str) -> bool:
    """Return whether an array says anything that was not received."""
    returned = reading.returned[name]
    if reading.kind == "delta":
        return bool(returned.count_nonzero())
    return not _same(reading.sent[name].to(returned.dtype), returned)


def _returned(reading: Reading, name: str, parameter: _Parameter) -> bool:
    """Return whether an array is what a parameter holds now, or what it has moved by."""
    returned, value = reading.returned[name], parameter.value
    if returned.shape != value.shape:
        return False
    if reading.kind != "delta":
        return _holds(value, returned, returned.dtype)
    received = reading.sent[name]
    return any(
        _same(moved, returned)
        for moved in (_on_host(value) - received, received - _on_host(value))
        if moved.dtype == returned.dtype
    )


def _holds(parameter: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether a parameter holds a value, to the bit, in one type: by default its own."""
    if parameter.is_meta or parameter.layout != torch.strided or not value.is_floating_point():
        return False
    kind = dtype or parameter.dtype
    every = max(1, parameter.numel() // _SAMPLED)
    few = _on_host(parameter.detach().reshape(-1)[::every]).to(kind)
    if not torch.equal(few, value.reshape(-1)[::every].to(kind)):
        return False
    return _same(_on_host(parameter).to(kind), value.to(kind))


def _follows(change: Tensor, movement: Tensor, known: Sequence[Tensor]) -> bool:
    """Return whether a movement explains what is left of a change beside known tensors."""
    columns = torch.stack([one.flatten() for one in known], dim=1)
    wanted = torch.stack([change.flatten(), movement.flatten()], dim=1)
    if not bool(columns.isfinite().all() and wanted.isfinite().all()):
        return True
    left = wanted - columns @ torch.linalg.lstsq(columns, wanted, driver="gelsd").solution
    own, moved = left.unbind(dim=1)
    size, span = float(own.square().sum()), float(moved.square().sum())
    if size == 0.0 or span == 0.0:
        return False
    return size - float(own @ moved) ** 2 / span < LEAST_OWN * size


def _on_host(parameter: Tensor) -> Tensor:
    return parameter.detach().cpu()


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
