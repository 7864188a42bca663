"""Attackers with FedKL's key, its lock layers' weights or their gradient, as its table VII has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bract.attacks.adaptive.batch_statistics import simulated_statistics
from bract.attacks.adaptive.fedkl.fedkl import CENTRE, PACE, REACH, Held, LockedClient
from bract.attacks.base import Attack
from bract.attacks.problem.case import Case, open_case
from bract.attacks.problem.client_model import loss_gradient
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.target_model import TargetModel, target_model_of
from bract.attacks.result import Reconstruction, Refusal
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.task import AttackTask
from bract.captures.observation import Observation
from bract.errors import BractError
from bract.models.keylock import Lock
from bract.updates.update import Tensors

What = Literal["key", "lock", "both", "gradient", "all"]


def known(
    using: Attack,
    secrets: Mapping[str, Lock],
    what: What = "both",
    *,
    shared: Mapping[str, Tensors] | None = None,
) -> Attack:
    """Return an attack that holds secrets of the clients, as a bound for comparison.

    For benchmarks and tests; no tier of an audit knows a client's secrets. Everything else is as in
    the adaptive tier, whatever tier is asked for.

    ``both``
        gamma and beta are known exactly, and where steps are unrolled how they learn.
    ``key``
        The key is known, the lock layers are regressed. Only their products with the key enter an
        update, so what is regressed are gamma and beta: as many numbers as without the key, and
        drawn from the same distribution. The key gives the pace at which they learn, no more.
    ``lock``
        The lock layers are known, the key is regressed, from the declared distribution. gamma and
        beta are a linear map of the key with 2 x channels rows. Up to ``key_length`` rows it
        reaches every value: the freedom stays that of 2 x channels numbers, but their expected
        values are known and their deviation about these is 1/6, against 1/3 about zero. Above
        (``blocks: every`` on a deep model) the key's own numbers are what is left.

    ``gradient``
        The lock layers are known, as the server of the paper draws them, and their gradient is
        shared and matched; the key is regressed, as with ``lock``, and nothing is read in closed
        form. This is the "lock" of the paper's table VII.
    ``all``
        As ``both``, and the lock layers' gradient is matched too: the "both" of table VII. Who has
        that gradient has the key (`key_of`), so that this is also what it gives away.

    Where gamma and beta can be read in closed form, ``key`` and ``lock`` read them as well.

    Parameters
    ----------
    secrets
        By `Observation.key`, the client's lock before it trained; see `Lock.load`.
    shared
        By `Observation.key`, the gradient of the client's lock layers (`lock_gradient`); for
        ``gradient`` and ``all``.
    """
    return _Known(using=using, secrets=secrets, what=what, shared=shared or {}, unroll=using.unroll)


def lock_gradient(observation: Observation, lock: Lock, images: Tensor, labels: Tensor) -> Tensors:
    """Return the gradient of a client's lock layers, as its first step computes it.

    Parameters
    ----------
    images, labels
        What the client trained on, ``(B, C, H, W)`` in [0, 1] and int64 ``(B,)``.

    Returns
    -------
    dict
        By name of gamma or beta, ``/weight (channels, K)`` and ``/bias (channels,)`` appended.

    Raises
    ------
    BractError
        If gamma and beta are behind a ReLU: table VII is of the printed formula.
    """
    if lock.relu:
        raise BractError(
            f"{observation.key}: the lock has a ReLU; found relu, expected none",
            code="attack-unsuited",
        )
    target_model = target_model_of(observation)
    held = {name: value[None] for name, value in lock.coefficients().items()}
    parameters = {n: observation.parameters[n][None] for n in target_model.parameter_names}
    classes = observation.declaration.classes
    assert classes is not None
    found = loss_gradient(
        target_model,
        parameters | held,
        {n: v[None] for n, v in observation.buffers.items()},
        target_model.normalise(images)[None],
        torch.nn.functional.one_hot(labels, classes).to(images)[None],
    )
    gradient: Tensors = {}
    for name in held:
        # gamma = weight @ key + bias
        gradient[f"{name}/bias"] = found[name][0]
        gradient[f"{name}/weight"] = torch.outer(found[name][0], lock.key)
    return gradient


def key_of(gradient: Tensors) -> Tensor:
    """Return the key ``(K,)`` that a lock layer's gradient gives away.

    The weight's gradient is that of gamma or beta times the key, the bias's is that of gamma or
    beta: equations 26 and 27 of the paper, which states that the reverse is not possible.
    """
    names = [name.removesuffix("/bias") for name in gradient if name.endswith("/bias")]
    along = torch.cat([gradient[f"{name}/bias"] for name in names])
    outer = torch.cat([gradient[f"{name}/weight"] for name in names])
    return (along @ outer) / (along @ along)


@dataclass(frozen=True, kw_only=True)
class _SharingClient(LockedClient):
    """A client of which the gradient by gamma and beta is simulated too."""

    def __call__(
        self,
        target_model: TargetModel,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        lock = self.coefficients(buffers, unknowns)
        fixed = {n: v for n, v in buffers.items() if n not in (PACE, CENTRE, REACH, *lock)}
        seen = simulated_statistics(target_model, parameters, fixed | lock, inputs, self.statistics)
        return loss_gradient(target_model, parameters | lock, fixed, inputs, labels) | seen


@dataclass(frozen=True, kw_only=True)
class _Known(Attack):
    name: ClassVar[str] = "known"

    using: Attack
    secrets: Mapping[str, Lock] = field(repr=False)
    what: What
    shared: Mapping[str, Tensors] = field(default_factory=dict, repr=False)

    def run(self, cases: Sequence[Case], task: AttackTask) -> list[Reconstruction | Refusal]:
        budget = task.budget
        if budget.iterations is None and budget.seconds is None:
            budget = replace(budget, iterations=self.using.iterations)
        return super().run(cases, replace(task, budget=budget))

    def prepare(self, case: Case) -> Case:
        key = case.observation.key
        if case.tier != "adaptive":
            case = open_case(
                case.observation, tier="adaptive", known=case.known, max_images=case.images
            )
        case = self.using.prepare(case)
        if not isinstance(case.forward, LockedClient):
            raise BractError(
                f"{key}: declares no FedKL; there is no key to know", code="declaration-lacks"
            )
        if self.what == "gradient" or self.what == "all":
            return self._with_gradient(case)
        if case.forward.held == "both" and self.what != "both":
            return replace(case, evidence=replace(case.evidence, explain=None))
        return replace(
            case,
            evidence=replace(case.evidence, buffers=self._held(key), explain=None),
            forward=replace(case.forward, held=self.what),
        )

    def solve(self, problem: Problem, run: Run) -> Outcome:
        return self.using.solve(problem, run)

    def _with_gradient(self, case: Case) -> Case:
        forward, evidence, key = case.forward, case.evidence, case.observation.key
        assert isinstance(forward, LockedClient)
        if forward.training is not None or forward.relu:
            raise BractError(
                f"{key}: local steps or a ReLU; the gradient is of one step without",
                code="attack-unsuited",
            )
        held: Held = "lock" if self.what == "gradient" else "both"
        lock = self.secrets[key]
        sharing = _SharingClient(
            layers=forward.layers,
            key_length=forward.key_length,
            relu=False,
            rate=forward.rate,
            statistics=forward.statistics,
            held=held,
            starts=forward.starts,
        )
        if held == "both":
            read = replace(lock, key=key_of(self.shared[key]))
            buffers = read.coefficients()
        else:
            centre, reach = reachable(lock)
            buffers = {CENTRE: centre, REACH: reach}
        matched = {name: self.shared[key][f"{name}/bias"] for name in sharing.names}
        return replace(
            case,
            evidence=replace(
                evidence, target=evidence.target | matched, buffers=buffers, explain=None
            ),
            forward=sharing,
        )

    def _held(self, observation: str) -> Tensors:
        lock = self.secrets[observation]
        pace = {PACE: 1.0 + lock.key.square().sum()}
        if self.what == "key":
            return pace
        if self.what == "both":
            return lock.coefficients() | pace
        centre, reach = reachable(lock)
        return {CENTRE: centre, REACH: reach}


def reachable(lock: Lock) -> tuple[Tensor, Tensor]:
    """Return what keys from U[0, 1) make of these lock layers, before any ReLU.

    Returns
    -------
    tuple
        ``centre (N,)`` and ``reach (N, R)``, R the smaller of N and the length of the key: gamma
        and beta of each layer in turn are ``centre + reach @ z``, where z has mean 0 and
        covariance 1 over such keys.
    """
    with torch.no_grad():
        parts = [part.cpu() for pair in lock.layers.values() for part in pair]
        weight = torch.cat([part.weight for part in parts]).double()
        bias = torch.cat([part.bias for part in parts]).double()
        left, size, _ = torch.linalg.svd(weight, full_matrices=False)
        centre = 0.5 * weight.sum(dim=1) + bias
        return centre.float(), (left * (size * 12**-0.5)).float()
