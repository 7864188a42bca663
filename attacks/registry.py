"""Attacks by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, get_args

import torch

from bract.attacks.base import Attacker, Cost
from bract.attacks.problem.public_prior import PublicPrior
from bract.attacks.result import Budget, Reconstruction, Refusal
from bract.attacks.solve.engine import Engine
from bract.attacks.task import AttackTask, History, open_over_rounds
from bract.captures.observation import Observation
from bract.config.audit import Tier
from bract.errors import BractError
from bract.registry import Registry, named

ATTACKS: Registry[type[Attacker]] = Registry(
    "attack", group="bract.attacks", check=partial(named, Attacker)
)


def title_of(name: str) -> str:
    """Return an attack's title; the name itself where no such attack is installed."""
    known = ATTACKS.get(name)
    return (known and known.title) or name


def closed_forms() -> list[str]:
    """Return the names of the closed forms, the cheapest first."""
    found = [name for name in ATTACKS if ATTACKS[name].closed_form]
    return sorted(found, key=lambda name: get_args(Cost).index(ATTACKS[name].cost))


def families(inputs: Collection[str] | None = None) -> dict[str, list[str]]:
    """Return the names of the attacks of each family, of those for any of the inputs."""
    found: dict[str, list[str]] = {}
    for name in ATTACKS:
        other = inputs is not None and set(inputs).isdisjoint(ATTACKS[name].inputs)
        if (family := ATTACKS[name].family) and not other:
            found.setdefault(family, []).append(name)
    return found


def attacks_only_for(tier: Tier, generator: str | None = None) -> list[str]:
    """Return the names of the attacks that serve this tier alone, of those for a kind of prior."""
    found = [name for name in ATTACKS if ATTACKS[name].tiers == (tier,)]
    if generator is None:
        return found
    return [name for name in found if ATTACKS[name].generator in (None, generator)]


def attack(name: str, **settings: Any) -> Attacker:
    """Build an attack by its registered name, with some hyper-parameters changed."""
    return ATTACKS[name](**settings)


def reconstruct(
    observations: Observation | Sequence[Observation],
    using: str | Attacker = "auto",
    *,
    budget: Budget | None = None,
    seed: int = 0,
    tier: Tier = "oblivious",
    device: str = "auto",
    engine: Engine | None = None,
    history: History | None = None,
    public: PublicPrior | None = None,
) -> list[Reconstruction | Refusal]:
    """Attack observations, for notebooks and scripts.

    Parameters
    ----------
    using
        An attack or its registered name.
    device
        Ignored where ``engine`` is given.
    public
        A generator trained on public images (`bract.attacks.load_prior`).

    Returns
    -------
    list
        One entry an observation: a `Reconstruction`, or a `Refusal` with its reason.

    Examples
    --------
    >>> store = ObservationStore("runs/demo/captures")  # doctest: +SKIP
    >>> results = reconstruct(list(store), budget=Budget(restarts=2))  # doctest: +SKIP
    """
    given = [observations] if isinstance(observations, Observation) else list(observations)
    chosen = attack(using) if isinstance(using, str) else using
    task = AttackTask(
        budget=budget or Budget(),
        seed=seed,
        tier=tier,
        engine=engine or Engine(device=device),
        history=history,
        public=public,
    )
    return chosen.attack(given, task)


def reconstruct_over_rounds(
    rounds: Sequence[Observation],
    using: str | Attacker = "auto",
    *,
    budget: Budget | None = None,
    seed: int = 0,
    tier: Tier = "oblivious",
    device: str = "auto",
    engine: Engine | None = None,
    history: Sequence[Observation] = (),
    public: PublicPrior | None = None,
) -> Reconstruction:
    """Attack one client's uploads of several rounds together, as uploads of the same images.

    Each round is read by what the tier knows, with the earlier ones as its history, and matched at
    its own parameters; one set of images must explain all of them
    (`bract.attacks.problem.joint_case.join_rounds`). One round alone is attacked as `reconstruct`
    does.

    Parameters
    ----------
    rounds
        In the order of rounds; the result is named after the last one, with all of them in
        ``settings["evidence"]["rounds"]``.
    using, device, public
        As in `reconstruct`.
    history
        Uploads of the client before those, which are read and not matched.
    """
    chosen = attack(using) if isinstance(using, str) else using
    task = AttackTask(
        budget=budget or Budget(),
        seed=seed,
        tier=tier,
        engine=engine or Engine(device=device),
        history=lambda seen: [one for one in (*history, *rounds) if one.round < seen.round],
        public=public,
    )
    with torch.inference_mode(mode=False):  # a caller may have turned gradients off
        (case,), left = open_over_rounds([rounds], task, attack=chosen.name, needs=chosen.needs)
        result = case if isinstance(case, Refusal) else chosen.run([case], left)[0]
    if isinstance(result, Refusal):
        raise BractError(result.reason, code=result.code)
    return result
