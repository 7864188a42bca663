"""Note the passes of which a step took the gradients, and keep what entered them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bract.client.forward_passes import ForwardPass, Loaders
from bract.client.truth import TruthWriter
from bract.schema.work import MOST_KEPT, MOST_NAMES, MOST_STEPS, InputSeen, LayerSeen


@dataclass
class Noted:
    """Passes of one training that were differentiated, until a step takes them or they are dropped.

    Attributes
    ----------
    forwards
        How many there were.
    since
        Examples of those since the last step.
    examples
        Examples of each step.
    computed, drawn
        Passes that are no data: of what networks computed, and of random numbers.
    inputs, layers
        Of the first pass.
    keeping
        Whether examples are still kept.
    fresh
        Whether some were kept since the last step.
    anew, unclear
        As in `bract.schema.work.Work`.
    """

    forwards: int = 0
    since: int = 0
    examples: tuple[int, ...] = ()
    computed: int = 0
    drawn: int = 0
    inputs: tuple[InputSeen, ...] = ()
    layers: tuple[LayerSeen, ...] = ()
    keeping: bool = True
    fresh: bool = False
    anew: bool = False
    unclear: bool = False


class Noting:
    """Notes passes in `seen`, and forgets those since the last step where these were dropped.

    Parameters
    ----------
    writer
        Keeps the examples.
    """

    def __init__(self, writer: TruthWriter) -> None:
        self._writer = writer
        self.seen, self.loaders = Noted(), Loaders()
        self.settle()

    @property
    def holds_first(self) -> bool:
        """Return whether inputs and layers of the first pass are held, and will not be dropped."""
        return bool(self._settled[0].inputs)

    def settle(self, *, stepped: bool = True) -> None:
        """Take what was noted for part of a step, which it is the end of where ``stepped``."""
        seen = self.seen
        if stepped:
            if seen.since and len(seen.examples) < MOST_STEPS:
                seen.examples += (seen.since,)
            seen.since, seen.fresh = 0, False
        self._settled = copy.copy(seen), self.loaders.mark()
        self._writer.settle()

    def forget(self) -> int:
        """Drop what was noted since the last step; return how many passes that was."""
        (held, mark), noted = self._settled, self.seen.forwards
        self.seen = copy.copy(held)
        self.loaders.restore(mark)
        self._writer.forget_unsettled()
        return noted - held.forwards

    def forget_part(self) -> None:
        """Forget what entered a part of the model, which was called before the model itself."""
        self._writer.forget_all()
        for seen in (self.seen, self._settled[0]):
            seen.inputs, seen.layers, seen.fresh = (), (), False

    def take(
        self,
        passes: Iterable[ForwardPass],
        rows: Tensor | None,
        last: ForwardPass | None,
        *,
        whole: bool,
        soft: bool,
    ) -> None:
        """Note passes that were differentiated, in their order, and keep what entered.

        Parameters
        ----------
        rows
            Probabilities that were the targets of the ``last`` pass.
        whole
            Whether the model itself is called by now, so that passes of a part are none of it.
        soft
            Whether targets are probabilities, so that examples are others in every pass.
        """
        seen = self.seen
        for one in sorted(passes, key=lambda each: each.number):
            if one.whole is not whole:
                seen.unclear, one.tensors = True, {}
                continue
            seen.forwards += 1
            seen.inputs, seen.layers = seen.inputs or one.inputs, seen.layers or one.layers
            if one.origin is not None:
                seen.computed += one.origin == "computed"
                seen.drawn += one.origin == "drawn"
                one.tensors = {}
                continue
            seen.since += one.count
            if one.unclear:
                seen.unclear, one.tensors = True, {}
            self.loaders.took(one.loader)
            if seen.keeping and self.loaders.passes > 1 and not soft:
                batch = batch_of(one.first, one.tensors, one.target)
                unknown = (0, 0) if batch is None else self._writer.unknown(batch)
                seen.anew = self.loaders.shows_new(*unknown, kept=len(self._writer))
                seen.keeping = False
            self._keep(one, rows if one is last else None)

    def _keep(self, one: ForwardPass, rows: Tensor | None) -> None:
        """Keep what entered the model with its target, or with the probabilities of a mix."""
        entered = one.first
        batch = batch_of(entered, one.tensors, one.target) if self.seen.keeping else None
        one.tensors = {}
        if batch is None:
            return
        new = self._writer.remember(batch)
        self.seen.fresh = self.seen.fresh or bool(new)
        # Nothing but examples of earlier steps shows the end of a pass where no loader does.
        ended = new is None or not (new or self.loaders.passes or self.seen.fresh)
        if ended or len(self._writer) >= MOST_KEPT:
            self.seen.keeping = False
        if rows is not None and entered is not None and len(entered) == len(rows):
            self._writer.soften(entered, rows)


def batch_of(entered: Tensor | None, tensors: Mapping[str, Tensor], target: Tensor | None) -> Any:
    """Return what entered model and loss in a form that inputs recognise; None without a target."""
    if entered is None:
        return None
    # What is not one value an example, such as a count of tokens, is no part of it.
    tensors = {k: v for k, v in tensors.items() if v.shape[:1] == entered.shape[:1]}
    if "input_ids" in tensors or (entered.dim() == 2 and not entered.is_floating_point()):
        batch = {"input_ids": entered, **tensors}
        count = batch["input_ids"].shape[0]
        if target is not None and "labels" not in batch and target.shape[:1] == (count,):
            batch["labels"] = target.detach()
        return batch
    labels = tensors.get("labels", target)
    if labels is None:
        return None
    labels = labels.detach()
    if entered.dim() == 4 and labels.is_floating_point():
        if labels.shape == entered.shape:
            labels = torch.zeros(len(entered), dtype=torch.int64)
        elif labels.numel() == len(entered):
            labels = labels.flatten()
    return entered, labels


def layers_of(net: nn.Module) -> tuple[LayerSeen, ...]:
    """Return the layers that work otherwise in training mode, in the mode of now."""
    found = []
    for name, module in net.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found.append(
                LayerSeen(name=name[:500], kind="dropout", training=module.training, rate=module.p)
            )
        elif isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            found.append(LayerSeen(name=name[:500], kind="normalisation", training=module.training))
    return tuple(found[:MOST_NAMES])
