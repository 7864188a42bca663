"""Attackers with FedKL's key, the lock layers' weights, or both; its table VII shares gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bract.attacks.adaptive.fedkl.fedkl import CENTRE, PACE, REACH, LockedClient
from bract.attacks.base import Attack
from bract.attacks.problem.case import Case, open_case
from bract.attacks.problem.problem import Problem
from bract.attacks.result import Reconstruction, Refusal
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.task import AttackTask
from bract.errors import BractError
from bract.models.keylock import Lock
from bract.protocol.update import Tensors

What = Literal["key", "lock", "both"]


def known(using: Attack, secrets: Mapping[str, Lock], what: What = "both") -> Attack:
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

    Where gamma and beta can be read in closed form, ``key`` and ``lock`` read them as well.

    Parameters
    ----------
    secrets
        By `Observation.key`, the client's lock before it trained; see `Lock.load`.
    """
    return _Known(using=using, secrets=secrets, what=what, unroll=using.unroll)


@dataclass(frozen=True, kw_only=True)
class _Known(Attack):
    name: ClassVar[str] = "known"

    using: Attack
    secrets: Mapping[str, Lock] = field(repr=False)
    what: What

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
            raise BractError(f"{key}: declares no FedKL; there is no key to know")
        if case.forward.held == "both" and self.what != "both":
            return replace(case, evidence=replace(case.evidence, explain=None))
        return replace(
            case,
            evidence=replace(case.evidence, buffers=self._held(key), explain=None),
            forward=replace(case.forward, held=self.what),
        )

    def solve(self, problem: Problem, run: Run) -> Outcome:
        return self.using.solve(problem, run)

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
