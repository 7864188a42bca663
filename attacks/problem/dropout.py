"""Read the mask of a client's dropout off its update, where that is possible.

With inverted dropout a layer takes ``m h / (1 - p)`` in the place of its inputs ``h``, each ``m``
0 with probability p, else 1. For one example the gradient of its weights is an outer product of
``m h / (1 - p)`` with the gradient of its outputs: columns of dropped inputs are exactly zero. So
are those of inputs that are zero themselves; to hold these dropped changes nothing, for neither
passes anything on. Batches and several steps mix masks, and show none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bract.attacks.problem.target_model import TargetModel
from bract.captures.observation import Observation
from bract.errors import BractError
from bract.models.dropout import masked_layers
from bract.models.layers import last_linear
from bract.updates.update import Tensors

MASK = "dropout.mask."
"""Among the buffers, before the name of a linear layer's weight: what multiplies the layer's
inputs, 0 or ``1 / (1 - p)``, ``(L, features)``."""


@dataclass(frozen=True)
class Dropout:
    """What an update shows of the client's dropout.

    Attributes
    ----------
    masks
        What multiplies the inputs of each masked layer, ``(features,)``, by `MASK` and the name of
        its weight; empty where nothing was read.
    readable
        Whether no mask is left unknown.
    note
        How the masks were read, or why not; None where the client dropped nothing.
    """

    masks: Tensors = field(default_factory=dict)
    readable: bool = True
    note: str | None = None


def read_dropout(observation: Observation, target_model: TargetModel) -> Dropout:
    """Read the masks of an undefended update of one image and one step."""
    p = observation.declaration
    declared = p.dropout
    rates = _rates(target_model, declared)
    if rates is not None and not any(rates.values()):
        return Dropout()
    if rates is None:
        if not declared:
            return Dropout()
        return _unreadable("the model's dropout layers are not followed by linear ones")
    if p.defenses:
        return _unreadable("a defense changed the update")
    if observation.computed:
        return _unreadable("the update was computed from float32 models, whose rounding covers it")
    if not observation.law.one_step:
        return _unreadable("every local step drew its own")
    if 1 not in (p.num_examples, p.batch_size):
        return _unreadable("every image of the batch has its own")
    if any(f"{name}.weight" not in observation.update for name in rates):
        return _unreadable("the layer behind them is not trained")
    masks, read = {}, []
    for name, share in rates.items():
        weight = f"{name}.weight"
        kept = _kept(observation, weight)
        # It is undeclared: without a zero column the layers were in evaluation mode.
        if bool(kept.all()) and declared is None:
            continue
        masks[MASK + weight] = kept.float() / (1.0 - share)
        read.append(f"{int((~kept).sum())} of {len(kept)} inputs of {name}")
    if not masks:
        return Dropout()
    return Dropout(masks, note=f"read from the zero columns of the gradient: {', '.join(read)}")


def split_masks(buffers: Tensors) -> tuple[Tensors, Tensors]:
    """Return masks by the name of their weights, and the other buffers."""
    masks = {n.removeprefix(MASK): v for n, v in buffers.items() if n.startswith(MASK)}
    return masks, {n: v for n, v in buffers.items() if not n.startswith(MASK)}


def masked(parameters: Tensors, masks: Tensors) -> Tensors:
    """Return parameters ``(L, out, in)`` whose layers take masked inputs, for one image a trial.

    ``W (m h) = (W m) h``, and the gradient passes through the product alike.
    """
    return parameters | {n: parameters[n] * m.unsqueeze(-2) for n, m in masks.items()}


def _unreadable(reason: str) -> Dropout:
    return Dropout(
        readable=False, note=f"the masks cannot be read ({reason}); simulated without dropout"
    )


def _rates(target_model: TargetModel, declared: float | None) -> dict[str, float] | None:
    """Return the rate of each masked layer by its name; None where masks reach other layers."""
    if declared == 0.0:
        return {}
    own = masked_layers(target_model.model)
    if declared is None:
        trains = target_model.declaration.norm_mode == "train"
        return own if trains else {}
    if own is None or own:
        return own and dict.fromkeys(own, declared)
    try:
        name, _ = last_linear(target_model.model)
    except BractError:
        return None
    return {name: declared} if name else None


def _kept(observation: Observation, weight: str) -> Tensor:
    """Return which inputs of a layer passed anything on, bool ``(features,)``."""
    p, sent = observation.declaration, observation.parameters[weight].double()
    update = observation.update[weight].double()
    slack = torch.zeros(())
    if observation.law.averaging and p.weight_decay:
        # A dropped column holds its own decay, rounded like the weights that it was taken from.
        pull = (p.lr or 0.0) * p.weight_decay * sent
        slack = torch.finfo(torch.float32).eps * (sent.abs() + pull.abs())
        if observation.rounded is not None:
            slack = slack + torch.finfo(getattr(torch, observation.rounded.dtype)).eps * pull.abs()
        update = update - pull
    return (update.abs() > slack).any(dim=0)
