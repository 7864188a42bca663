"""Against FedKL: regress gamma and beta of every locked layer together with the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from bract.attacks.adaptive.batch_statistics import (
    layers_of,
    simulated_statistics,
    statistics_to_match,
)
from bract.attacks.adaptive.declared import declared
from bract.attacks.adaptive.fedkl.lock_reading import Reading, read_lock
from bract.attacks.adaptive.weak_locks import lock_seed
from bract.attacks.problem.client_model import (
    ForwardModel,
    LocalTraining,
    images_in,
    local_training,
    loss_gradient,
)
from bract.attacks.problem.evidence import ADAPTIVE, Evidence, Known
from bract.attacks.problem.target_model import TargetModel, target_model_of
from bract.attacks.result import SeedBudget
from bract.captures.observation import Observation
from bract.defenses import FedKL
from bract.errors import BractError
from bract.models.keylock import Lock, key_locks
from bract.updates.update import Tensors

Held = Literal["nothing", "key", "lock", "both"]
"""What an attacker holds of a client's secrets; the adaptive tier holds nothing."""

PACE = "fedkl.pace"
"""Among the buffers: ``1 + |key|^2`` of a key that is held, ``(L,)``."""

CENTRE, REACH = "fedkl.centre", "fedkl.reach"
"""Among the buffers, of lock layers that are held: gamma and beta of every locked layer are
``centre + reach @ z``, ``(L, N)`` and ``(L, N, R)``, with z near N(0, I) for keys from U[0, 1)."""

STARTS = 8
"""Locks that a search begins with; see `bract.attacks.solve.start_search`."""

FOUND, LOST = 1e-3, 1e-2
"""Relative residuals up to which a searched lock counts as found, and from which on as not found.
A second-order finish left 1e-7 at the right lock and 3e-3 to 1e-2 at wrong ones; GRNN with 600
iterations 6e-3 to 9e-3 at the right one and 1e-2 to 8e-2 at wrong ones: between them no verdict
is recorded."""

HIDDEN = "fedkl.key"
"""The unknown z, ``(L, R)``, which replaces the key where the lock layers are held."""


@dataclass(frozen=True, kw_only=True)
class LockedClient:
    """A FedKL client whose gamma and beta, ``(channels,)`` each, are unknowns.

    The key and the lock layers need not be found: only what they make of each other enters the
    update. Values are plain numbers, not behind a ReLU, so one that the client's ReLU holds at zero
    can be reached and left again.

    Where steps are unrolled the lock learns along. A step moves gamma by
    ``lr * rate * (1 + |key|^2)`` times its gradient; ``|key|^2`` of a key from U[0, 1)^K is K / 3
    to within ``0.3 sqrt(K)``, and exact where the key is held. The unknowns are then the values
    before the first step.

    Attributes
    ----------
    layers
        Name and channels of every locked layer.
    key_length, relu, rate
        As the protocol declares them.
    training
        The local steps that are unrolled; None for a gradient.
    statistics
        Layers whose batch statistics are matched as well.
    held
        The secrets that are among the buffers: with ``both`` nothing is unknown, with ``lock`` a
        key is, in as many numbers as it can move gamma and beta.
    starts
        Locks that each restart begins with; see `bract.attacks.solve.start_search`.
    """

    layers: tuple[tuple[str, int], ...]
    key_length: int
    relu: bool
    rate: float
    training: LocalTraining | None = None
    statistics: tuple[str, ...] = ()
    held: Held = "nothing"
    starts: int = STARTS

    @property
    def either_sign(self) -> bool:
        """Return whether an unknown's other sign is as likely as its own."""
        return self.held in ("nothing", "key") and not self.relu

    def unknowns(
        self, target_model: TargetModel, trials: int, generators: list[torch.Generator]
    ) -> Tensors:
        """Draw a lock for each trial as a client draws its own: restarts start apart."""
        del target_model, trials
        if self.held == "both":
            return {}
        if self.held == "lock":
            return {HIDDEN: torch.stack([torch.randn(self.rank, generator=g) for g in generators])}
        drawn = [
            Lock.draw(
                dict(self.layers), self.key_length, relu=self.relu, source=generator
            ).coefficients()
            for generator in generators
        ]
        return {name: torch.stack([d[name] for d in drawn]) for name in drawn[0]}

    def __call__(
        self,
        target_model: TargetModel,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        """Return what the client would send, and the batch statistics that are matched."""
        lock = self.coefficients(buffers, unknowns)
        fixed = {n: v for n, v in buffers.items() if n not in (PACE, CENTRE, REACH, *lock)}
        if self.training is None:
            state = fixed | lock
            seen = simulated_statistics(target_model, parameters, state, inputs, self.statistics)
            return loss_gradient(target_model, parameters, state, inputs, labels) | seen
        training = self.training
        batch, fixed = training.batches(inputs, labels, fixed)

        def gradient(step: int, current: Tensors) -> Tensors:
            positive = {n: v.clamp_min(0.0) for n, v in current.items() if self.relu and n in lock}
            found = loss_gradient(target_model, current | positive, fixed, *batch(step))
            return found | {n: found[n] * (current[n] > 0) for n in positive}

        length = buffers[PACE][:, None] if PACE in buffers else 1.0 + self.key_length / 3.0
        pace = self.rate * length
        # A client measures the distance over the model's parameters: gamma and beta are none.
        end = training.trajectory(
            parameters | lock, gradient, dict.fromkeys(lock, pace), pulled=parameters.keys()
        )
        return training.mean_direction(parameters, end)

    def coefficients(self, buffers: Tensors, unknowns: Tensors) -> Tensors:
        """Return gamma and beta of every locked layer, ``(L, channels)`` by name."""
        if self.held != "lock":
            known = buffers | unknowns
            return {name: known[name] for name in self.names}
        flat = buffers[CENTRE] + torch.einsum("lnr,lr->ln", buffers[REACH], unknowns[HIDDEN])
        if self.relu and self.training is None:
            # The ReLU, but with a slope of 1 below zero: a key that is held there can leave it.
            flat = flat + (flat.clamp_min(0.0) - flat).detach()
        sizes = [channels for _, channels in self.layers for _ in ("gamma", "beta")]
        return dict(zip(self.names, flat.split(sizes, dim=1), strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of gamma and beta of every locked layer."""
        return tuple(f"{layer}.{part}" for layer, _ in self.layers for part in ("gamma", "beta"))

    @property
    def rank(self) -> int:
        """Numbers in which a key can move gamma and beta of all locked layers, given these."""
        return min(self.key_length, sum(2 * channels for _, channels in self.layers))


@ADAPTIVE.register("fedkl")
def regress_lock(observation: Observation, known: Known) -> Evidence:
    """Regress the lock on an upload as FedKL alone leaves it; see `regressed`."""
    return regressed(observation, known)


def regressed(observation: Observation, known: Known, *, exact: bool = True) -> Evidence:
    """Read gamma and beta of the locked layer, or search them with the images.

    From one image through a chain of convolutions and sigmoids they follow in closed form
    (`bract.attacks.adaptive.fedkl.lock_reading`), and every attack then runs as with the key.
    Elsewhere they are 2 x channels numbers to be found together with the images: from some starts
    an attack finds them, from others it ends in a match that is visibly worse. So each restart
    chooses among `STARTS` locks by the residual of short runs, with Gauss-Newton steps and the
    other sign of each number between them (`bract.attacks.solve.start_search`); the result records
    by ``lock_residual`` and ``lock_found`` (or None) whether that succeeded. Through kinks (max
    pooling) each restart begins with one lock as it is drawn, without a warning: residuals do not
    distinguish locks there. Where the client returned its normalisation buffers after one step, the
    statistics of its batch are matched too (`bract.attacks.adaptive.batch_statistics`). Where an
    attack explains the update, torch seeds of the key are tried
    (`bract.attacks.adaptive.weak_locks`).

    Parameters
    ----------
    exact
        Whether the update is the client's to rounding. Where a second defense changed it, nothing
        is read in closed form and no seed is tried.

    Raises
    ------
    BractError
        If a declared hyper-parameter is unknown or out of range, the capture's parameters are not
        those of the locked model, or the update holds what FedKL keeps at the client.
    """
    hyper = declared(FedKL, observation)
    if leaked := sorted(set(observation.update) - set(observation.parameters)):
        raise BractError(
            f"{observation.key}: the update holds {', '.join(leaked[:5])}, which was not sent to "
            "the client; under the declared FedKL nothing of the lock leaves it; correct "
            "declaration.defenses",
            code="declaration-wrong",
        )
    target_model = target_model_of(observation)
    layers = tuple((n, m.num_features) for n, m in key_locks(target_model.model).items())
    statistics, weights = statistics_to_match(observation, target_model)
    wanted = observation.gradient()
    several = not observation.law.one_step
    reading = None
    if exact and not several:
        reading = _reading(observation, target_model, relu=hyper.relu)

    def adapt(forward: ForwardModel, images: int) -> LockedClient:
        del images
        return LockedClient(
            layers=layers,
            key_length=hyper.key_length,
            relu=hyper.relu,
            rate=hyper.rate,
            training=local_training(forward),
            statistics=layers_of(statistics),
            held="nothing" if reading is None else "both",
        )

    notes: dict[str, Any] = {
        "defense": "fedkl",
        "method": "regressed gamma and beta of the locked layers together with the images",
        "locked_layers": [layer for layer, _ in layers],
        "unknowns": sum(2 * channels for _, channels in layers),
        "batch_statistics": "matched" if statistics else "not known from this capture",
    }
    if reading is not None:
        notes["method"] = "read gamma and beta of the locked layer in closed form"
        notes |= {
            "unknowns": 0,
            "lock_residual": reading.residual,
            "lock_sign": f"taken from {reading.sign}",
        }
    if several:
        notes["local_steps"] = (
            "where the steps are unrolled, gamma and beta learn along at the pace of a key of "
            "average length; elsewhere they count as constants of the round"
        )
    return Evidence(
        target={name: wanted[name] for name in observation.parameters} | statistics,
        weights=weights or None,
        adapt=adapt,
        buffers={} if reading is None else reading.coefficients,
        notes=notes,
        explain=None
        if not exact
        else partial(
            _explain,
            observation,
            seeds=known.weak_seeds,
            searched=reading is None,
            telling=target_model.traits.smooth,
            layers=layers,
            key_length=hyper.key_length,
            relu=hyper.relu,
        ),
    )


def _explain(
    observation: Observation,
    found: Mapping[str, Tensor],
    residual: float,
    *,
    seeds: SeedBudget,
    searched: bool,
    telling: bool,
    layers: Sequence[tuple[str, int]],
    key_length: int,
    relu: bool,
) -> dict[str, Any]:
    """Report whether a searched lock was found, and whether torch drew it from a seed."""
    notes = lock_seed(
        observation, found, residual, seeds, layers=layers, key_length=key_length, relu=relu
    )
    if searched:
        notes["lock_residual"] = residual
    if searched and telling:
        notes["lock_found"] = True if residual <= FOUND else False if residual > LOST else None
    return notes


def _reading(observation: Observation, target_model: TargetModel, *, relu: bool) -> Reading | None:
    if images_in(observation.declaration, 2) != 1:
        return None
    return read_lock(observation, target_model, relu=relu)
