"""Recurrent layers as plain operations, which have second derivatives and run batched."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bract.config.signal import SignalSchema
from bract.errors import BractError
from bract.models.registry import MODELS

_State = tuple[Tensor, ...]


def unroll(model: nn.Module) -> nn.Module:
    """Let LSTM, GRU and RNN layers of a model compute step by step, in place; return the model.

    Parameters, names and results stay the same, to rounding. PyTorch's fused layers have no second
    derivative on a GPU and no rule for `torch.func.vmap`. Layers with a projection
    (``proj_size``) stay as they are. Packed sequences are refused when they enter.
    """
    for module in model.modules():
        kind = _KINDS.get(type(module))
        if kind is not None and not getattr(module, "proj_size", 0):
            module.__class__ = kind
    return model


class _Unrolled(nn.RNNBase):
    """Forward of PyTorch's recurrent layers, one operation after another."""

    def _step(self, entered: Tensor, state: _State, weight: Tensor, bias: Tensor | None) -> _State:
        """Return the state after one step; ``entered`` is ``W_ih x + b_ih``."""
        raise NotImplementedError

    def forward(
        self, input: Tensor, hx: Tensor | _State | None = None
    ) -> tuple[Tensor, Tensor | _State]:
        """Return outputs and last states as PyTorch's layer does."""
        if isinstance(input, PackedSequence):
            raise BractError(
                f"model takes packed sequences in {type(self).__name__}; name a callable whose "
                "model takes signals of one length",
                code="model-unsuited",
            )
        alone = input.dim() == 2
        sequence = input.unsqueeze(0 if self.batch_first else 1) if alone else input
        if self.batch_first:
            sequence = sequence.transpose(0, 1)
        given = (hx,) if isinstance(hx, Tensor) else hx
        if given is not None and alone:
            given = tuple(one.unsqueeze(1) for one in given)
        directions = 2 if self.bidirectional else 1
        last: list[_State] = []
        for layer in range(self.num_layers):
            outputs = []
            for way in range(directions):
                at = layer * directions + way
                zero = sequence.new_zeros(sequence.shape[1], self.hidden_size)
                state: _State = (
                    (zero,) * self._held if given is None else tuple(one[at] for one in given)
                )
                found, state = self._run(sequence, state, layer, reverse=way == 1)
                outputs.append(found)
                last.append(state)
            sequence = torch.cat(outputs, dim=-1)
        states = tuple(torch.stack([one[i] for one in last]) for i in range(self._held))
        if self.batch_first:
            sequence = sequence.transpose(0, 1)
        if alone:
            sequence = sequence.squeeze(0 if self.batch_first else 1)
            states = tuple(one.squeeze(1) for one in states)
        return sequence, states if self._held == 2 else states[0]

    _held = 1

    def _run(
        self, sequence: Tensor, state: _State, layer: int, *, reverse: bool
    ) -> tuple[Tensor, _State]:
        suffix = f"_l{layer}{'_reverse' if reverse else ''}"
        inner, outer = (getattr(self, f"weight_{kind}{suffix}") for kind in ("hh", "ih"))
        entered = sequence @ outer.T
        bias = None
        if self.bias:
            entered = entered + getattr(self, f"bias_ih{suffix}")
            bias = getattr(self, f"bias_hh{suffix}")
        steps = range(len(sequence))
        found = []
        for step in reversed(steps) if reverse else steps:
            state = self._step(entered[step], state, inner, bias)
            found.append(state[0])
        return torch.stack(found[::-1] if reverse else found), state


def _moved(state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found = state @ weight.T
    return found if bias is None else found + bias


class _LSTM(_Unrolled):
    _held = 2

    def _step(self, entered: Tensor, state: _State, weight: Tensor, bias: Tensor | None) -> _State:
        gates = entered + _moved(state[0], weight, bias)
        taken, kept, new, shown = gates.chunk(4, dim=-1)
        cell = kept.sigmoid() * state[1] + taken.sigmoid() * new.tanh()
        return shown.sigmoid() * cell.tanh(), cell


class _GRU(_Unrolled):
    def _step(self, entered: Tensor, state: _State, weight: Tensor, bias: Tensor | None) -> _State:
        moved = _moved(state[0], weight, bias).chunk(3, dim=-1)
        came = entered.chunk(3, dim=-1)
        reset, update = ((came[i] + moved[i]).sigmoid() for i in range(2))
        new = (came[2] + reset * moved[2]).tanh()
        return ((1 - update) * new + update * state[0],)


class _RNN(_Unrolled):
    def _step(self, entered: Tensor, state: _State, weight: Tensor, bias: Tensor | None) -> _State:
        act: Callable[[Tensor], Tensor] = (
            torch.relu if getattr(self, "nonlinearity", "tanh") == "relu" else torch.tanh
        )
        return (act(entered + _moved(state[0], weight, bias)),)


_KINDS: dict[type[nn.Module], type[_Unrolled]] = {nn.LSTM: _LSTM, nn.GRU: _GRU, nn.RNN: _RNN}


class Recurrent(nn.Module):
    """An LSTM over signals and a linear layer on its last state.

    Parameters
    ----------
    channels
        Of the signals.
    outputs
        Classes, or values that are predicted.
    width
        Units of the LSTM.
    time_first
        Whether signals are ``(B, length, channels)``, else ``(B, channels, length)``.
    """

    def __init__(self, channels: int, outputs: int, width: int, *, time_first: bool) -> None:
        super().__init__()
        self.time_first = time_first
        self.lstm = nn.LSTM(channels, width, batch_first=True)
        self.out = nn.Linear(width, outputs)

    def forward(self, signals: Tensor) -> Tensor:
        """Return logits or predictions ``(B, outputs)`` of signals."""
        states, _ = self.lstm(signals if self.time_first else signals.transpose(1, 2))
        found: Tensor = self.out(states[:, -1])
        return found


@MODELS.register("lstm")
def lstm(
    *,
    classes: int,
    channels: int,
    image_size: int,
    activation: str = "sigmoid",
    signal: SignalSchema | None = None,
    width: int = 16,
) -> nn.Module:
    """Build an LSTM of ``width`` units and a linear layer, of signals."""
    del image_size, activation
    if signal is None or signal.layout == "flat":
        raise BractError(
            "model lstm takes signals in the layout time-first or channels-first; set data.input "
            "to signal, or another model.name",
            code="input-mismatch",
        )
    return Recurrent(channels, classes, width, time_first=signal.layout == "time-first")
