"""Witness a consenting client's training by PyTorch's public means, on the client's own disk."""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from flwr.app import Context, Message
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from bract.client.by_hand import ByHand
from bract.client.clipping_seen import Clips
from bract.client.forward_passes import (
    Entering,
    ForwardPass,
    Loaders,
    Outputs,
    batch_of,
    layers_of,
    tensors_of,
)
from bract.client.loss_terms import LOSSES, Terms
from bract.client.optimizer_steps import Steps
from bract.client.truth import TruthWriter, writer_of
from bract.client.watching import DEPTH, RANDOM, Call, Handler, ModuleHook, Watching
from bract.disk.files import write_text
from bract.disk.permissions import make_private_folder
from bract.errors import one_line
from bract.schema.work import (
    MOST_KEPT,
    MOST_NAMES,
    MOST_STEPS,
    InputSeen,
    LayerSeen,
    Work,
    blocks_of,
    work_name,
)
from bract.updates.projection import projection

_log = logging.getLogger(__name__)

_LOADING = "torch.utils.data.dataloader"
_TRANSFORMS = "torchvision.transforms"

_UNSCALE = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)


_MOST_WAITING = 16
"""Passes that wait to be noted where neither a backward pass nor a step ends them."""


@contextmanager
def witness(
    net: nn.Module,
    msg: Message | Mapping[str, Any] | None,
    context: Context,
    folder: Any = None,
) -> Iterator[None]:
    """Keep what entered the model and the loss, and how it was trained, on this client's own disk.

    It serves any training in PyTorch that is called inside the block: a loop, `transformers`'
    Trainer, Lightning. Nothing is sent. Beside the inputs and targets of the first pass in order,
    ``FOLDER/RUN_ID/node-<id>/round-NNNN.safetensors`` as `bract.client.keep` writes them, the file
    ``round-NNNN.work.json`` (mode 0600, `bract.schema.work.Work`) says which loss and optimizer
    with which arguments, how many steps of how many examples, clipping, autocast, modes of layers
    and what was frozen. ``bract describe`` reads both.

    The training's result is the same to the bit, and its exceptions pass. A failure of the witness
    itself is logged once, and stops the witness.

    Examples
    --------
    ::

        with witness(net, msg, context, folder="/srv/site/truth"):
            train(net, trainloader, epochs, lr)

    Parameters
    ----------
    net
        The model that is trained, as it is called: of a compiled one what `torch.compile` returned.
        A part of it that is called in its place is seen, too. What is called within a compiled
        function or a model compiled in place is not seen.
    msg, context, folder
        As in `bract.client.keep`: without ``folder`` or ``truth-dir`` of the node config nothing is
        watched and nothing kept.
    """
    seen = _begun(net, msg, context, folder)
    if seen is None:
        yield
        return
    whole = False
    try:
        yield
        whole = True
    finally:
        seen.end(whole=whole)


def _begun(
    net: nn.Module, msg: Message | Mapping[str, Any] | None, context: Context, folder: Any
) -> _Witness | None:
    """Return what watches from now on; None where the client keeps nothing, or it fails."""
    with ExitStack() as stack:
        try:
            writer = writer_of(msg, context, folder)
            if writer is None:
                return None
            seen = _Witness(net, writer, stack)
        except Exception as error:  # noqa: BLE001 - no failure of a witness ends a training
            _log.warning("the training is not witnessed: %s", one_line(error, 300))
            return None
        seen.stack = stack.pop_all()
        return seen


class _Witness:
    """Everything that is seen of one training; it stops at its own first failure."""

    def __init__(self, net: nn.Module, writer: TruthWriter, stack: ExitStack) -> None:
        self.stack = stack
        # Of a compiled model the wrapper is called, and the names are the model's own.
        self._net, self._writer = getattr(net, "_orig_mod", net), writer
        self._thread = threading.get_ident()
        self._stopped = False
        self._terms, self._steps = Terms(), Steps(self._net)
        self._root: nn.Module | None = None
        self._whole, self._is_whole = net, False
        self._leaving: RemovableHandle | None = None
        self._last: ForwardPass | None = None
        self._differentiated: list[ForwardPass] = []
        self._rows: Tensor | None = None
        self._keeping, self._anew, self._unclear = True, False, False
        self._examples: list[int] = []
        self._since = self._forwards = 0
        self._loaders, self._outputs = Loaders(), Outputs()
        self._inputs: tuple[InputSeen, ...] = ()
        self._layers: tuple[LayerSeen, ...] = ()
        self._frozen: tuple[str, ...] = ()
        self._autocast: str | None = None
        self._transforms: dict[str, None] = {}
        self._clips, self._by_hand = Clips(), ByHand(self._net)
        self._unscaled = 1.0
        writer.begin()
        self._path = writer.folder / work_name(writer.round)
        self._handles = {
            module: module.register_forward_pre_hook(ModuleHook(self._enters), with_kwargs=True)
            for module in (net.modules() if self._net is net else [net])
        }
        stack.callback(self._remove_hooks)
        for handle in (
            register_optimizer_step_pre_hook(self._steps_begin),
            register_optimizer_step_post_hook(self._step_ends),
        ):
            stack.callback(handle.remove)
        stack.enter_context(Watching(self._watched()))

    def end(self, *, whole: bool) -> None:
        """Take every hook out, and write what was seen."""
        try:
            self.stack.close()
            if not self._stopped:
                self._take()
                self._by_hand.ends()
                if self._steps.total and not self._forwards:
                    _log.warning(
                        "no forward pass of the witnessed model was seen, so no inputs are kept: "
                        "hand the witness the module that the training calls, such as the one that "
                        "torch.compile returned"
                    )
                self._writer.write()
                self._write(whole)
        except Exception as error:  # noqa: BLE001 - no failure of a witness ends a training
            self._stop(error)

    def _write(self, whole: bool) -> None:
        work = Work(
            round=self._writer.round,
            torch=torch.__version__,
            whole=whole,
            steps=self._steps.total,
            forwards=self._forwards,
            backwards=self._terms.backwards,
            passes=self._loaders.passes,
            examples=tuple(self._examples),
            distinct=len(self._writer),
            loader=self._loaders.first,
            inputs=self._inputs,
            terms=self._terms.first,
            even=self._terms.even,
            remainder=self._terms.remainder,
            optimizers=self._steps.records(),
            clips=self._clips.records(),
            autocast=self._autocast,
            layers=self._layers,
            frozen=self._frozen,
            moved=self._steps.moved(),
            transforms=tuple(self._transforms)[:64],
            anew=self._anew,
            unclear=self._unclear,
            blocks=1 + blocks_of(self._path),
            edited=self._by_hand.weights,
            turned=self._by_hand.gradients,
            ends=self._ends(),
        )
        make_private_folder(self._writer.folder)
        write_text(self._path, work.to_text(), private=True)

    def _ends(self) -> dict[str, float]:
        held = list(self._net.named_parameters())[:MOST_NAMES]
        ends = {n: projection(v) for n, v in held if not v.is_meta and len(n) <= 500}
        return {name: value for name, value in ends.items() if math.isfinite(value)}

    def _stop(self, error: Exception) -> None:
        if not self._stopped:
            self._stopped = True
            self._last, self._differentiated, self._terms = None, [], Terms()
            _log.warning(
                "the training goes on and is not witnessed any more: %s: %s",
                type(error).__name__,
                one_line(error, 300),
            )

    def _remove_hooks(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._stop_leaving()

    def _stop_leaving(self) -> None:
        if self._leaving is not None:
            self._leaving.remove()

    # What the model takes.

    def _enters(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        if self._stopped or not torch.is_grad_enabled():
            return
        if threading.get_ident() != self._thread:
            return
        try:
            if self._root is None or (module is self._whole and module is not self._root):
                self._find_root(module)
            if module is self._root:
                self._forward(args, kwargs)
        except Exception as error:  # noqa: BLE001 - no failure of a witness ends a training
            self._stop(error)

    def _find_root(self, module: nn.Module) -> None:
        """Watch the outermost module that is called: the model, or the first part until then."""
        if self._root is not None:
            # What entered a part is no input of the model.
            self._writer.forget()
            self._inputs, self._layers = (), ()
            self._stop_leaving()
        self._root = module
        self._is_whole = module is self._whole
        for other, handle in list(self._handles.items()):
            if other is not module and other is not self._whole:
                handle.remove()
                del self._handles[other]
        self._frozen = tuple(
            name for name, value in self._net.named_parameters() if not value.requires_grad
        )[:MOST_NAMES]
        self._leaving = module.register_forward_hook(ModuleHook(self._leaves))

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {str(k): v for k, v in enumerate(args)} | kwargs
        tensors = {k: v for k, v in named.items() if isinstance(v, Tensor)}
        if len(self._differentiated) >= _MOST_WAITING:
            self._take()
        self._see_autocast()
        self._by_hand.enters()
        one = ForwardPass(loader=self._loaders.current, whole=self._is_whole)
        if not self._inputs:
            one.inputs = tuple(
                InputSeen(name=k[:300] or "?", shape=tuple(v.shape), dtype=str(v.dtype)[6:])
                for k, v in list(tensors.items())[:64]
            )
            one.layers = tuple(layers_of(self._net))[:MOST_NAMES]
        first = next((v for v in tensors.values() if v.dim() > 0), None)
        one.count = len(first) if first is not None else 0
        if self._keeping:
            # A layer may change its input in place.
            one.tensors = {k: v.detach().clone() for k, v in tensors.items()}
        self._last = one

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        """Learn of each pass whether it is differentiated: a validation never is."""
        del module, args
        last = self._last
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        if self._stopped or last is None or last.left:
            return
        try:
            last.left = True
            # A leaf is a parameter, and keeps its hooks.
            found = [v for v in tensors_of(output) if v.requires_grad and not v.is_leaf]
            last.watched = bool(found)
            self._outputs.returned(last, found)
            for value in found:
                value.register_hook(partial(self._differentiates, last))
        except Exception as error:  # noqa: BLE001 - no failure of a witness ends a training
            self._stop(error)

    def _differentiates(self, one: ForwardPass, slope: Any = None) -> None:
        del slope
        if not one.taken and not self._stopped:
            one.taken = True
            self._differentiated.append(one)

    def _take(self) -> None:
        """Note the passes that were differentiated, in their order, and keep what entered."""
        found, self._differentiated = self._differentiated, []
        rows, self._rows = self._rows, None
        for one in sorted(found, key=lambda each: each.number):
            if one.whole is not self._is_whole:
                self._unclear = True  # of a part, before the model itself was called
                continue
            self._forwards += 1
            self._since += one.count
            if one.unclear:
                self._unclear, one.tensors = True, {}
            if not self._inputs:
                self._inputs, self._layers = one.inputs, one.layers
            self._loaders.took(one.loader)
            # Examples that are mixed are others in every pass.
            if self._keeping and self._loaders.passes > 1 and not self._terms.soft:
                batch = batch_of(one.first, one.tensors, one.target)
                unknown = (0, 0) if batch is None else self._writer.unknown(batch)
                self._anew = self._loaders.shows_new(*unknown, kept=len(self._writer))
                self._keeping = False
            self._keep(one, rows if one is self._last else None)

    def _see_autocast(self) -> None:
        for kind in ("cuda", "cpu"):
            if self._autocast is None and torch.is_autocast_enabled(kind):
                self._autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")

    def _keep(self, one: ForwardPass, rows: Tensor | None) -> None:
        """Keep what entered the model with its target, or with the probabilities of a mix."""
        entered = one.first
        batch = batch_of(entered, one.tensors, one.target) if self._keeping else None
        one.tensors = {}
        if batch is None:
            return
        new = self._writer.remember(batch)
        # Nothing but known examples shows the end of a pass where no loader does.
        ended = not new and (new is None or not self._loaders.passes)
        if ended or len(self._writer) >= MOST_KEPT:
            self._keeping = False
        if rows is not None and entered is not None and len(entered) == len(rows):
            self._writer.soften(entered, rows)

    # What the training calls.

    def _watched(self) -> dict[Callable[..., Any], Handler]:
        handlers: dict[Callable[..., Any], Handler] = {
            torch.Tensor.backward: (self._backward, self._differentiated_all),
            **self._clips.handlers(),
        }
        handlers |= dict.fromkeys(LOSSES, (None, self._loss))
        handlers |= dict.fromkeys(RANDOM, (None, self._draws))
        if _UNSCALE is not None:
            handlers[_UNSCALE] = (self._unscale, None)
        return {
            function: (self._safe(before), self._safe(after))
            for function, (before, after) in handlers.items()
        }

    def _safe(self, call: Call | None) -> Call | None:
        if call is None:
            return None

        def guarded(*given: Any) -> None:
            if self._stopped:
                return
            try:
                call(*given)
            except Exception as error:  # noqa: BLE001 - no failure of a witness ends a training
                self._stop(error)

        return guarded

    def _loss(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.requires_grad]
        last = self._last
        none = Entering([], ())
        of, through = none if last is None or not given else self._outputs.entering(given[0], last)
        one = of[0] if len(of) == 1 else last
        entered = None if one is None else one.first
        # What a part of the model returns is not the model's output.
        through = through if self._is_whole else ()
        target = self._terms.computed(function, args, kwargs, result, entered, through)
        if not isinstance(result, Tensor) or not result.requires_grad:
            return
        self._see_autocast()
        for one in of:
            if not one.has_loss:
                one.has_loss, one.unclear = True, len(of) > 1
                one.target = None if one.unclear else target
                self._take_unwatched(one)

    def _take_unwatched(self, last: ForwardPass | None) -> None:
        """Take a pass for differentiated whose outputs were not found."""
        if last is not None and not last.watched and last.left:
            self._differentiates(last)

    def _backward(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        del function, result
        whole = len(args) == 1 and kwargs.get("gradient") is None
        self._terms.begins(args[0] if whole else None)
        self._take_unwatched(self._last)

    def _differentiated_all(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        del function, args, kwargs, result
        self._rows = self._terms.differentiated()
        self._by_hand.differentiated()
        self._take()

    def _unscale(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        del function, kwargs, result
        self._unscaled = float(args[2])

    def _draws(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        del args, kwargs, result
        frame = inspect.currentframe()
        for _ in range(DEPTH):
            frame = None if frame is None else frame.f_back
            if frame is None:
                return
            module = str(frame.f_globals.get("__name__", ""))
            if module == _LOADING and function is torch.Tensor.random_:
                loader = frame.f_locals.get("loader")
                if isinstance(loader, DataLoader):
                    self._loaders.begins(loader)
                    return
            if module.startswith(_TRANSFORMS) and len(self._transforms) < 64:
                own = frame.f_locals.get("self")
                if isinstance(own, nn.Module):
                    self._transforms[type(own).__name__] = None
                    return

    # What the optimizer does.

    def _steps_begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if self._stopped or threading.get_ident() != self._thread:
            return
        try:
            self._steps.before(optimizer)
        except Exception as error:  # noqa: BLE001 - no failure of a witness ends a training
            self._stop(error)

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if self._stopped or threading.get_ident() != self._thread:
            return
        try:
            if not self._steps.after(optimizer):
                return
            self._take()
            scaled = self._clips.called or self._unscaled != 1.0
            self._by_hand.stepped(optimizer, clamped=self._clips.clamps, scaled=scaled)
            self._clips.stepped()
            self._terms.stepped(self._unscaled)
            self._unscaled = 1.0
            if self._since and len(self._examples) < MOST_STEPS:
                self._examples.append(self._since)
            self._since = 0
        except Exception as error:  # noqa: BLE001 - no failure of a witness ends a training
            self._stop(error)
