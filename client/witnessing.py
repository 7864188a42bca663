"""Witness a consenting client's training by PyTorch's public means, on the client's own disk."""

from __future__ import annotations

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
from torch.utils.hooks import RemovableHandle

from bract.client.by_hand import ByHand
from bract.client.clipping_seen import Clips
from bract.client.draws import Draws
from bract.client.forward_passes import Entering, ForwardPass, Outputs, tensors_of
from bract.client.gradients import Gradients
from bract.client.loss_terms import LOSSES, Terms
from bract.client.noted import Noting, layers_of
from bract.client.optimizer_steps import Steps, scaled_by
from bract.client.origins import Origins
from bract.client.truth import TruthWriter, writer_of
from bract.client.watching import Call, Handler, ModuleHook, Watching
from bract.disk.files import write_text
from bract.disk.permissions import make_private_folder
from bract.errors import one_line
from bract.schema.work import MOST_NAMES, InputSeen, Work, blocks_of, work_name
from bract.updates.projection import projection

_log = logging.getLogger(__name__)

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
        self._apart: list[ForwardPass] = []
        self._is_backward = False
        self._rows: Tensor | None = None
        self._noting, self._outputs, self._origins = Noting(writer), Outputs(), Origins()
        self._gradients = Gradients(self._net)
        self._dropped = 0
        self._frozen: tuple[str, ...] = ()
        self._autocast: str | None = None
        self._draws = Draws(lambda loader: self._noting.loaders.begins(loader), self._origins.drew)
        self._clips, self._by_hand = Clips(), ByHand(self._net)
        self._unscaled, self._infinite = 1.0, False
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
        stack.enter_context(
            Watching(self._watched(), self._origins.known, self._safe(self._origins.follow))
        )

    def end(self, *, whole: bool) -> None:
        """Take every hook out, and write what was seen."""
        try:
            self.stack.close()
            if not self._stopped:
                self._take_apart(backwards=self._terms.backwards)
                if self._is_wasted() and (self._steps.total or self._gradients.are_gone):
                    self._drop()
                self._by_hand.ends()
                seen = self._noting.seen
                if self._steps.total and not seen.forwards:
                    _log.warning(
                        "no forward pass of the witnessed model was seen, so no inputs are kept: "
                        "hand the witness the module that the training calls, such as the one that "
                        "torch.compile returned"
                    )
                if seen.computed or seen.drawn:
                    _log.warning(
                        "nothing is kept of %d passes whose inputs were no data, but another "
                        "network's outputs or random numbers",
                        seen.computed + seen.drawn,
                    )
                self._writer.write()
                self._write(whole)
        except Exception as error:  # noqa: BLE001 - no failure of a witness ends a training
            self._stop(error)

    def _write(self, whole: bool) -> None:
        seen, loaders = self._noting.seen, self._noting.loaders
        work = Work(
            round=self._writer.round,
            torch=torch.__version__,
            whole=whole,
            steps=self._steps.total,
            forwards=seen.forwards,
            backwards=self._terms.backwards,
            passes=loaders.passes,
            examples=seen.examples,
            distinct=len(self._writer),
            loader=loaders.first,
            inputs=seen.inputs,
            terms=self._terms.first,
            even=self._terms.even,
            remainder=self._terms.remainder,
            optimizers=self._steps.records(),
            clips=self._clips.records(),
            autocast=self._autocast,
            layers=seen.layers,
            frozen=self._frozen,
            moved=self._steps.moved(),
            transforms=tuple(self._draws.transforms),
            anew=seen.anew,
            unclear=seen.unclear,
            computed=seen.computed,
            drawn=seen.drawn,
            dropped=self._dropped,
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
            self._last, self._differentiated, self._apart = None, [], []
            self._terms = Terms()
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
                self._origins.inside = True
        except Exception as error:  # noqa: BLE001 - no failure of a witness ends a training
            self._stop(error)

    def _find_root(self, module: nn.Module) -> None:
        """Watch the outermost module that is called: the model, or the first part until then."""
        if self._root is not None:
            # What entered a part is no input of the model.
            self._noting.forget_part()
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
        if len(self._differentiated) + len(self._apart) >= _MOST_WAITING:
            self._take_apart(backwards=self._terms.backwards)
        self._see_autocast()
        self._by_hand.enters()
        one = ForwardPass(loader=self._noting.loaders.current, whole=self._is_whole)
        if not self._noting.holds_first:
            one.inputs = tuple(
                InputSeen(name=k[:300] or "?", shape=tuple(v.shape), dtype=str(v.dtype)[6:])
                for k, v in list(tensors.items())[:64]
            )
            one.layers = layers_of(self._net)
        first = next((v for v in tensors.values() if v.dim() > 0), None)
        if first is not None:
            one.count, one.shape = len(first), first.shape
            one.origin = self._origins.of(first)
        if self._noting.seen.keeping and one.origin is None:
            # A layer may change its input in place.
            one.tensors = {k: v.detach().clone() for k, v in tensors.items()}
        self._last = one

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        """Learn of each pass whether it is differentiated: a validation never is."""
        del module, args
        last, self._origins.inside = self._last, False
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
            self._origins.returned(found)
            for value in found:
                value.register_hook(partial(self._reached, last))
        except Exception as error:  # noqa: BLE001 - no failure of a witness ends a training
            self._stop(error)

    def _reached(self, one: ForwardPass, slope: Any) -> None:
        """Note a pass that a backward pass reached, or `torch.autograd.grad` alone."""
        del slope
        if self._is_backward:
            self._differentiates(one)
        elif not one.taken and not self._stopped and one not in self._apart:
            self._apart.append(one)

    def _differentiates(self, one: ForwardPass) -> None:
        if not one.taken and not self._stopped:
            one.taken = True
            self._differentiated.append(one)

    def _take_apart(self, *, backwards: int) -> None:
        """Take what `torch.autograd.grad` alone differentiated, where nothing else made a step."""
        found, self._apart = self._apart, []
        self._dropped += sum(not one.taken for one in found) if backwards else 0
        for one in found if not backwards else ():
            self._differentiates(one)
        self._take()

    def _take(self) -> None:
        """Note the passes that were differentiated, and keep what entered."""
        found, self._differentiated = self._differentiated, []
        rows, self._rows = self._rows, None
        whole, soft = self._is_whole, self._terms.soft
        self._noting.take(found, rows, self._last, whole=whole, soft=soft)

    def _is_wasted(self) -> bool:
        """Return whether the gradients since the last step changed nothing, and will not.

        Without an optimizer a client may collect them, and send their mean.
        """
        if not self._gradients.passes or self._gradients.have_moved:
            return False
        return bool(self._steps.total) or self._infinite

    def _drop(self) -> None:
        """Forget what was noted since the last step, which took nothing of it."""
        self._dropped += self._noting.forget()
        self._terms.forget()
        self._clips.forget()
        self._gradients.settle()
        self._unscaled, self._infinite = 1.0, False

    def _see_autocast(self) -> None:
        for kind in ("cuda", "cpu"):
            if self._autocast is None and torch.is_autocast_enabled(kind):
                self._autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")

    # What the training calls.

    def _watched(self) -> dict[Callable[..., Any], Handler]:
        handlers: dict[Callable[..., Any], Handler] = {
            torch.Tensor.backward: (self._backward, self._differentiated_all),
            **self._clips.handlers(),
            **self._origins.handlers(),
            **self._draws.handlers(),
        }
        handlers |= dict.fromkeys(LOSSES, (None, self._loss))
        if _UNSCALE is not None:
            handlers[_UNSCALE] = (None, self._unscale)
        return {
            function: (before and self._safe(before), after and self._safe(after))
            for function, (before, after) in handlers.items()
        }

    def _safe(self, call: Call) -> Call:
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
                if self._origins.are_noise(one.shape, args, kwargs):
                    one.origin = one.origin or "drawn"
                self._take_unwatched(one)

    def _take_unwatched(self, last: ForwardPass | None) -> None:
        """Take a pass for differentiated whose outputs were not found."""
        if last is not None and not last.watched and last.left:
            self._differentiates(last)

    def _backward(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        del function, result
        whole = len(args) == 1 and kwargs.get("gradient") is None
        if self._gradients.are_gone:
            if self._is_wasted():
                self._drop()
            else:
                self._noting.settle(stepped=False)
                self._terms.settle()
                self._gradients.settle()
        self._gradients.begin()
        self._is_backward = True
        if not self._steps.total and whole and isinstance(args[0], Tensor):
            self._infinite = self._infinite or not bool(args[0].isfinite().all())
        self._terms.begins(args[0] if whole else None)
        self._take_unwatched(self._last)

    def _differentiated_all(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        del function, args, kwargs, result
        self._is_backward = False
        self._rows = self._terms.differentiated()
        if self._gradients.end(sampled=not self._steps.total):
            self._by_hand.differentiated()
            self._take()
        else:
            # It is another model's.
            self._terms.forget_last()
            self._dropped += len(self._differentiated)
            self._differentiated, self._rows = [], None

    def _unscale(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        del function, kwargs, result
        self._unscaled = float(args[2])
        if not self._steps.total:
            self._infinite = self._infinite or bool(args[1].any())

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
            skipped, scale = scaled_by(optimizer)
            if skipped:
                if self._steps.holds(optimizer):
                    self._drop()
                return
            if not self._steps.after(optimizer):
                return
            self._take_apart(backwards=self._gradients.passes)
            scaled = self._clips.called or (self._unscaled, scale) != (1.0, 1.0)
            self._by_hand.stepped(optimizer, clamped=self._clips.clamps, scaled=scaled)
            self._clips.stepped()
            self._terms.stepped(self._unscaled / scale)
            self._unscaled, self._infinite = 1.0, False
            self._noting.settle()
            self._gradients.settle()
        except Exception as error:  # noqa: BLE001 - no failure of a witness ends a training
            self._stop(error)
