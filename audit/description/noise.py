"""Noise in an upload that no declaration explains, by what a gradient cannot hold.

Under softmax and cross entropy the rows of the last matrix sum to 0; and the update of a linear
layer has no larger rank than examples were stepped on. What is left of either beyond rounding is
noise, another optimizer than a linear one, or weight decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bract.attacks.problem.target_model import TargetModel, target_model_of
from bract.captures.observation import ClientDeclaration, Observation
from bract.errors import BractError
from bract.models import tap
from bract.models.losses import loss_of
from bract.updates.step_law import StepLaw
from bract.updates.ties import ties_of

ABOVE_ROUNDING = 8.0
"""Factor over the bound of rounding from which on something is left."""

LEAST_COUNT = 8
"""Columns, or singular values, from which a size is estimated."""

MOST_SIDE = 1024
"""Largest smaller side of a matrix whose singular values are computed."""

DECAYS = 0.9
"""Squared correlation with the weights from which on weight decay explains what is left."""

NORMAL = 0.3
"""Distance of a kurtosis from 3 up to which values are taken for normal: five standard errors of
the estimate from 7,000 values, two from 1,000; that of signs is 1.0, of even values 1.8."""

OFF = 0.1
"""Share of the last matrix' update from which on its sums are another loss than cross entropy."""

HIDING = 0.7
"""Share of an update's norm from which on noise is more of it than anything else."""

FEW = 1000
"""Values from which a kurtosis is computed."""


@dataclass(frozen=True)
class Residue:
    """The part of an upload beyond what gradients of its description can add up to.

    Attributes
    ----------
    tensor
        Whose update it is.
    size
        Standard deviation of a coordinate, of what is left.
    share
        Its norm as a share of that of the part of the update in which it is measured.
    decay
        Weight decay that would explain it, per unit of learning rate and step; None where none
        does.
    kurtosis
        Of what is left; 3 for normal values. None where it was not computed.
    """

    tensor: str
    size: float
    share: float
    decay: float | None
    kurtosis: float | None

    @property
    def is_normal(self) -> bool:
        """True for values as of normal noise, which hides the gradient."""
        return self.kurtosis is not None and abs(self.kurtosis - 3.0) < NORMAL


def residues(observation: Observation, *, clean: bool = True) -> list[Residue]:
    """Return what is left of each test that applies; none of a defended or rounded upload.

    Parameters
    ----------
    clean
        Leave out tests of which nothing is left.
    """
    p = observation.declaration
    if p.defenses or observation.ciphertexts or observation.rounded or not observation.law.linear:
        return []
    if p.weight_decay or p.proximal_mu:
        return []
    found = [_of_sums(observation), _of_rank(observation)]
    return [one for one in found if one is not None and (one.size or not clean)]


def hides(noise: Residue) -> bool:
    """Return whether noise is most of an upload, which has its size and direction then."""
    return noise.is_normal and noise.share > HIDING


def undeclared_noise(observation: Observation) -> Residue | None:
    """Return the clearest sign of noise that no declaration explains; None without one."""
    try:
        observation.check()
    except BractError:
        return None
    found = residues(observation, clean=False)
    if any(one.decay is not None for one in found):
        return None
    # Noise is in every layer; another loss is in the sums alone, another start is not normal.
    if any(not one.size or (one.kurtosis is not None and not one.is_normal) for one in found):
        return None
    return max(found, key=lambda one: (one.is_normal, one.share), default=None)


def is_other_loss(observation: Observation) -> bool:
    """Return whether an upload of the rank of its examples lacks the sums of cross entropy."""
    found = residues(observation, clean=False)
    sums = [one.share for one in found if one.kurtosis is None and one.size and one.decay is None]
    return any(not one.size for one in found) and any(share > OFF for share in sums)


def _of_sums(observation: Observation) -> Residue | None:
    """Measure the sums over classes of the last matrix, ``(classes, features)``."""
    p, names = observation.declaration, list(observation.parameters)
    if not loss_of(p.loss).of_classes or not p.classes or p.classes < 2 or len(names) < 2:
        return None
    # Only where the model ends with a matrix and its bias is it sure that nothing is behind them.
    name, bias = names[-2:]
    if name.rpartition(".")[0] != bias.rpartition(".")[0] or not bias.endswith("bias"):
        return None
    weights, update = observation.parameters[name].double(), observation.update[name].double()
    if weights.dim() != 2 or len(weights) != p.classes or weights.shape[1] < LEAST_COUNT:
        return None
    left = update.sum(dim=0)
    size = float(left.norm()) / math.sqrt(update.numel())
    allowed = unit_of(observation, name) * math.sqrt(observation.law.counted) + _arithmetic(update)
    if size <= ABOVE_ROUNDING * allowed:
        return None
    share = float(left.norm() / update.norm()) if bool(update.any()) else 0.0
    return Residue(name, size, share, _decay(left, weights.sum(dim=0), p), None)


def _of_rank(observation: Observation) -> Residue | None:
    """Measure what the widest linear layer moved beyond the rank that its examples give.

    Of size 0 where nothing is left; None where no layer is as wide.
    """
    p = observation.declaration
    examples = _examples(p)
    if p.text is not None or examples is None or p.image_shape is None or not p.model:
        return None
    shapes = {n: v.shape for n, v in observation.update.items() if v.dim() == 2}
    fitting = {
        name: (shape[0] - examples) * (shape[1] - examples)
        for name, shape in shapes.items()
        if examples + LEAST_COUNT <= min(shape) <= MOST_SIDE and name in observation.parameters
    }
    if not fitting:
        return None
    try:
        plain = _applied_once(target_model_of(observation), p)
    except (BractError, RuntimeError, ValueError):
        return None
    name = max(fitting.keys() & plain, key=lambda n: (fitting[n], n), default=None)
    if name is None:
        return None
    update = observation.update[name].double()
    one, values, other = torch.linalg.svd(update, full_matrices=False)
    rest = (one[:, examples:] * values[examples:]) @ other[examples:]
    left = float(values[examples:].norm())
    size = left / math.sqrt(fitting[name])
    allowed = unit_of(observation, name) * math.sqrt(observation.law.counted) + _arithmetic(update)
    if size <= ABOVE_ROUNDING * allowed or not bool(values.any()):
        return Residue(name, 0.0, 0.0, None, None)
    share, kurtosis = left / float(values.norm()), _kurtosis(rest)
    if kurtosis is not None and share > HIDING:
        # Singular vectors mix any values into nearly normal ones; the update itself does not.
        kurtosis = min(kurtosis, _kurtosis(update) or kurtosis)
    decay = _decay(update, observation.parameters[name].double(), p)
    return Residue(name, size, share, decay, kurtosis)


def _applied_once(target: TargetModel, p: ClientDeclaration) -> set[str]:
    """Return the names of the matrices through which each example goes once."""
    seen: dict[str, int] = {}

    def count(path: str, value: Tensor) -> None:
        seen[path] = seen.get(path, 0) + (1 if value.dim() == 2 else 2)

    with tap.entering(target.model, tap.named(target.model, nn.Linear), count), torch.no_grad():
        target.model.eval()(torch.full((2, *(p.image_shape or ())), 0.5))
    names = [f"{path}.weight" if path else "weight" for path in seen]
    ties = ties_of(target.model)
    once = {name for name, times in zip(names, seen.values(), strict=True) if times == 1}
    return once - ties.keys() - set(ties.values())


def _decay(left: Tensor, weights: Tensor, p: ClientDeclaration) -> float | None:
    """Return the weight decay that explains what is left; None where it is something else."""
    both = float((left * weights).sum())
    square = float(weights.square().sum())
    whole = float(left.square().sum())
    if both <= 0.0 or not square or both**2 < DECAYS * square * whole:
        return None
    law = StepLaw.of(p)
    rate = (law.lr or 0.0) * law.counted if law.averaging else 1.0
    return both / square / rate if rate else None


def _kurtosis(values: Tensor) -> float | None:
    if values.numel() < FEW:
        return None
    centred = values - values.mean()
    return float(centred.pow(4).mean() / centred.square().mean().square())


def _examples(p: ClientDeclaration) -> int | None:
    """Return how many examples were stepped on, each as often as it was."""
    batch, held = p.batch_size, p.num_examples
    if batch is None and held is None:
        return None
    each = min(n for n in (batch, held) if n is not None)
    return each * StepLaw.of(p).counted


def unit_of(observation: Observation, name: str) -> float:
    """Return the last place of a tensor's largest value: how far one step may be rounded."""
    if not observation.law.averaging:
        return 0.0
    held = observation.parameters[name]
    returned = held - observation.update[name]
    half = bool((returned.to(torch.bfloat16).to(returned.dtype) == returned).all())
    unit = 2.0**-8 if half else 2.0**-23
    return unit * float(torch.maximum(held.abs(), returned.abs()).max())


def _arithmetic(update: Tensor) -> float:
    """Return what arithmetic in float32 leaves of a coordinate's update."""
    return 2.0**-20 * float(update.square().mean().sqrt())
