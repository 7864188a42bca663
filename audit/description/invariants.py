"""What every upload of a described client has, whatever it was trained on: checks without truth.

An invariant follows from the description alone, by a few lines of algebra, and costs no
simulation. One that fails shows that the description is wrong, or that something else changed the
update; one that holds shows nothing. A package adds one in the group ``bract.invariants``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch

from bract.audit.description.label_counts import label_counts, last_bias, rate_of
from bract.audit.description.noise import Residue, residues, unit_of
from bract.captures.observation import Observation
from bract.errors import BractError
from bract.installed.plugins import PluginError, blaming
from bract.registry import Registry, named


class Invariant(ABC):
    """One check of an upload against its description; it holds no state.

    Attributes
    ----------
    name
        Its name in the registry.
    """

    name: ClassVar[str]

    @abstractmethod
    def failing(self, observation: Observation, earlier: Sequence[Observation]) -> str | None:
        """Return in words what the upload lacks; None where it holds, or does not apply.

        Parameters
        ----------
        observation
            Checked; its update is plain.
        earlier
            Uploads of the same client in earlier rounds, by round; each is read when it is asked
            for.
        """


INVARIANTS: Registry[type[Invariant]] = Registry(
    "invariant", group="bract.invariants", check=partial(named, Invariant)
)


def failing_invariants(observation: Observation, earlier: Sequence[Observation] = ()) -> list[str]:
    """Return in words the invariants that an upload does not have; none of a defended one."""
    if observation.declaration.defenses or observation.ciphertexts:
        return []
    try:
        observation.check()
    except BractError:
        return []
    found = []
    for name in INVARIANTS:
        kind = INVARIANTS[name]
        try:
            with blaming(kind):
                reason = kind().failing(observation, earlier)
        except PluginError:
            continue
        except BractError:
            continue  # an earlier round that cannot be read shows nothing
        if reason is not None:
            found.append(reason)
    return found


BALANCED = 0.1
"""Sum of the last bias' update, as a share of the sum of sizes, that arithmetic in bfloat16 and
rounding leave: the largest of the project's undefended uploads is below a tenth of it."""

SIXTEEN_BITS = 2.0**-6
"""Share of an update up to which arithmetic in bfloat16, of eight bits, may leave something."""

STILL = 0.1
"""Share of coordinates that must not have moved for a gap to be looked for."""

GAP = 0.05
"""Share of the median size below which coordinates are looked for."""

FEWEST_MOVED = 1000
"""Different sizes that must have moved: none is below the gap by a chance of 1e-11. Of one row of
zeros and ones whole columns move alike, which are no more than one."""

ROUNDINGS = 4.0
"""Last places of the largest weight up to which rounding alone may make the gap."""

SLACK = 1.05
"""Factor over a bound that holds up to rounding."""

ALIKE = 1e-2
"""Relative distance from the median within which steps are of one size."""

FIRST_STEPS = {"sgd": None, "nesterov": None, "adam": 1.0, "rmsprop": 1.0 / math.sqrt(0.01)}
"""Size of every coordinate of the first step, as a multiple of the learning rate; None where it
is the gradient's."""

FEW = 100
"""Coordinates that must have moved for one size of all of them to be no accident."""


@INVARIANTS.register("last-bias-sum")
class LastBiasSum(Invariant):
    """The last bias' update sums to 0 under softmax and cross entropy.

    Its gradient is the mean of ``p - y`` over examples, of which both are distributions. Weights
    of classes, smoothing, momentum, a proximal term and clipping keep that; weight decay, Adam and
    noise do not.
    """

    name = "last-bias-sum"

    def failing(self, observation: Observation, earlier: Sequence[Observation]) -> str | None:
        """Compare the sum of the last bias' update with the sum of its sizes."""
        del earlier
        name, p = last_bias(observation), observation.declaration
        if name is None or p.weight_decay or p.proximal_mu or not observation.law.linear:
            return None
        update = observation.update[name].double()
        sizes = float(update.abs().sum())
        allowed = BALANCED * sizes + _rounding(observation, name)
        off = abs(float(update.sum()))
        if off <= allowed:
            return None
        return (
            f"{name} does not sum to 0 (off by {off / sizes:.0%} of its size), as it does under "
            "softmax and cross entropy: another loss or optimizer, noise, or a head of the "
            "client's own"
        )


@INVARIANTS.register("no-residue")
class NoResidue(Invariant):
    """Nothing is left of an upload beyond what gradients add up to.

    The last matrix sums to 0 over classes, and a linear layer's update has at most the rank of the
    examples behind it (`bract.audit.description.noise`).
    """

    name = "no-residue"

    def failing(self, observation: Observation, earlier: Sequence[Observation]) -> str | None:
        """Name what is left where it is more than arithmetic in 16 bits leaves."""
        del earlier
        for left in residues(observation):
            if left.share > BALANCED:
                return in_words(left)
        return None


def in_words(left: Residue) -> str:
    """Say what an upload holds beyond gradients, and how much of it."""
    if left.decay is not None:
        return (
            f"{left.tensor} moved along its own weights, as under a weight decay of about "
            f"{left.decay:.2g}, and none is declared"
        )
    if left.share <= SIXTEEN_BITS:
        return (
            f"noise of about {left.size:.2g} a coordinate is in {left.tensor}, or arithmetic in 16 "
            "bits; none is declared"
        )
    if left.is_normal:
        return f"noise of about {left.size:.2g} a coordinate is in {left.tensor}, none is declared"
    if left.kurtosis is None:
        return (
            f"{left.tensor} does not sum to 0 over classes: another loss or optimizer, noise of "
            f"about {left.size:.2g} a coordinate, or a layer of the client's own"
        )
    return (
        f"{left.tensor} holds {left.share:.0%} beyond what so few examples give: another "
        f"optimizer, or noise of about {left.size:.2g}, and none is declared"
    )


@INVARIANTS.register("gap-above-zero")
class GapAboveZero(Invariant):
    """Sizes of an update's coordinates go down to 0 without a gap.

    Around 0 they are no rarer than further out, so that the smallest of ``n`` that moved is below a
    twentieth of their median but for a chance of ``0.975 ** n``. Pruning and quantisation leave a
    gap; so do optimizers that normalise every coordinate.
    """

    name = "gap-above-zero"

    def failing(self, observation: Observation, earlier: Sequence[Observation]) -> str | None:
        """Look for coordinates that did not move beside others that all moved far."""
        del earlier
        if not observation.law.linear or observation.rounded:
            return None
        values = {n: v for n, v in observation.update.items() if bool(v.any())}
        if not values:
            return None
        whole = torch.cat([v.double().flatten().abs() for v in values.values()])
        moved = whole[whole > 0.0]
        rounded = max((unit_of(observation, n) for n in values), default=0.0)
        smallest, middle = float(moved.min()), float(moved.median())
        still = 1.0 - len(moved) / len(whole)
        if still < STILL or len(moved.unique()) < FEWEST_MOVED or smallest <= ROUNDINGS * rounded:
            return None
        if smallest < GAP * middle:
            return None
        return (
            f"{still:.0%} of the coordinates did not move, and all others by more than "
            f"{smallest:.2g}: pruned or quantised, and no defense is declared"
        )


@INVARIANTS.register("last-bias-bound")
class LastBiasBound(Invariant):
    """The last bias moves no further than labels can lead it.

    The sizes of ``p - y`` add up to at most 2, so those of the update to at most 2 in each step,
    times the learning rate and the momentum's gain.
    """

    name = "last-bias-bound"

    def failing(self, observation: Observation, earlier: Sequence[Observation]) -> str | None:
        """Compare the sizes of the last bias' update with the largest possible."""
        del earlier
        name, p, law = last_bias(observation), observation.declaration, observation.law
        if name is None or p.weight_decay or p.proximal_mu or not law.linear:
            return None
        if not law.scaled:
            return None
        # Late steps of a large rate may follow a velocity that is longer than the mean one.
        late = max(p.lr_factors, default=1.0) if p.momentum else 1.0
        most = 2.0 * law.rate * law.gain * late
        update = observation.update[name].double()
        moved = float(update.abs().sum())
        if moved <= SLACK * most + _rounding(observation, name):
            return None
        return (
            f"{name} moved {moved / most:.3g} times as far as any labels lead it: a larger "
            "learning rate, more steps, a loss that is summed, or no update of weights at all"
        )


@INVARIANTS.register("whole-labels")
class WholeLabels(Invariant):
    """The last bias of a fresh model shows how many examples each class has: whole numbers.

    See `bract.audit.description.label_counts`.
    """

    name = "whole-labels"

    def failing(self, observation: Observation, earlier: Sequence[Observation]) -> str | None:
        """Compare the counts of classes that the update implies with whole numbers."""
        del earlier
        counts, rate = label_counts(observation), rate_of(observation.declaration)
        if counts is None or counts.is_whole(rate):
            return None
        return (
            f"{last_bias(observation)} does not show whole numbers of examples by class, as that "
            f"of a fresh model does (off by {counts.apart(rate):.2f} of {counts.examples}): "
            "another learning rate, momentum or loss, clipped gradients, weights of classes, or "
            "the opposite sign"
        )


@INVARIANTS.register("step-size")
class StepSize(Invariant):
    """One step of Adam or RMSprop moves every coordinate alike, one of SGD does not."""

    name = "step-size"

    def failing(self, observation: Observation, earlier: Sequence[Observation]) -> str | None:
        """Compare the sizes of all coordinates that moved."""
        del earlier
        p, law = observation.declaration, observation.law
        if not law.averaging or not law.one_step or p.optimizer not in FIRST_STEPS:
            return None
        whole = torch.cat([v.double().flatten().abs() for v in observation.update.values()])
        moved = whole[whole > 0.0]
        if len(moved) < FEW:
            return None
        middle = float(moved.median())
        alike = float(((moved - middle).abs() <= ALIKE * middle).double().mean())
        size = FIRST_STEPS[p.optimizer]
        if size is None:
            if alike < 0.95:
                return None
            return (
                f"{alike:.0%} of what moved did so by {middle:.3g}, as one step of Adam or "
                f"RMSprop does and {p.optimizer} does not"
            )
        if not p.lr or p.weight_decay or float(moved.max()) > 0.5 * size * p.lr:
            return None
        return (
            f"nothing moved further than {float(moved.max()):.3g}, and one step of {p.optimizer} "
            f"with lr {p.lr:g} moves by {size * p.lr:g}"
        )


@INVARIANTS.register("new-upload")
class NewUpload(Invariant):
    """A client that starts from another model does not send the same update again."""

    name = "new-upload"

    def failing(self, observation: Observation, earlier: Sequence[Observation]) -> str | None:
        """Compare the update with that of the round before."""
        if not len(earlier):
            return None
        before = earlier[-1]
        names = observation.update.keys() & before.update.keys()
        if not names or any(observation.update[n].shape != before.update[n].shape for n in names):
            return None
        same = all(torch.equal(observation.update[n], before.update[n]) for n in names)
        moved = any(bool(observation.update[n].any()) for n in names)
        other = any(
            not torch.equal(observation.parameters[n], before.parameters[n])
            for n in names & observation.parameters.keys() & before.parameters.keys()
        )
        if not (same and moved and other):
            return None
        return f"the update is that of round {before.round}, of another model that was sent"


def _rounding(observation: Observation, name: str) -> float:
    """Return how far rounding after every step may have moved the sum of a tensor's update."""
    if not observation.law.averaging:
        return 0.0
    steps = math.ceil(observation.law.counted)
    return unit_of(observation, name) * observation.parameters[name].numel() * steps
