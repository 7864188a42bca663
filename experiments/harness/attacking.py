"""The attacker of a tier against every upload of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from bract.attacks import Attack, Budget, Engine, PublicPrior, Reconstruction, Refusal, reconstruct
from bract.attacks.base import Attacker
from bract.captures.observation import Observation
from bract.config.audit import Tier as AttackTier
from bract.errors import BractError
from experiments.harness.bayes_reading import before_bayes
from experiments.harness.clients import Upload
from experiments.harness.known_secrets import What, known, lock_gradient

Tier = Literal[
    "plain",
    "oblivious",
    "adaptive",
    "discounting",
    "key known",
    "lock known",
    "both known",
    "lock gradient known",
    "all known",
]
"""Attackers of rows: ``plain`` sees the update without its defense; those after ``discounting``
also know a part of FedKL's secrets. Where gamma and beta are read in closed form, those with the
key or the lock are the adaptive one."""

KNOWN: dict[Tier, What] = {
    "key known": "key",
    "lock known": "lock",
    "both known": "both",
    "lock gradient known": "gradient",
    "all known": "all",
}


def attack_uploads(
    using: Attacker,
    captured: Sequence[Upload],
    tier: Tier,
    *,
    budget: Budget,
    seed: int,
    device: str,
    public: PublicPrior | None = None,
) -> tuple[list[Reconstruction | Refusal], dict[int, str]]:
    """Attack every upload, each with the client's earlier ones.

    Returns
    -------
    tuple
        One outcome an upload, and by number of the upload why the adaptive attacker could not undo
        the defense and took the upload at face value instead.

    Raises
    ------
    BractError
        If a tier with known secrets is asked of a portfolio of attacks.
    """
    earlier = {u.captured.key: u.history for u in captured}
    observations = [u.plain if tier == "plain" else u.captured for u in captured]
    if tier in KNOWN:
        if not isinstance(using, Attack):
            raise BractError(
                f"tier {tier!r} needs one attack, found a portfolio; name one", code="usage"
            )
        locks = {u.captured.key: u.lock for u in captured if u.lock is not None}
        shared = {
            u.captured.key: lock_gradient(u.captured, u.lock, u.truth, u.labels)
            for u in captured
            if u.lock is not None and KNOWN[tier] in ("gradient", "all")
        }
        using = known(using, locks, KNOWN[tier], shared=shared)
    elif tier == "discounting":
        using = before_bayes(using)

    def attempt(
        given: Sequence[Observation], assumed: AttackTier
    ) -> list[Reconstruction | Refusal]:
        return reconstruct(
            given,
            using,
            budget=budget,
            seed=seed,
            tier=assumed,
            engine=Engine(device=device),
            history=lambda observation: earlier[observation.key],
            public=public,
        )

    if tier in ("plain", "oblivious"):
        return attempt(observations, "oblivious"), {}
    outcomes = attempt(observations, "adaptive")
    refused = {i: o.reason for i, o in enumerate(outcomes) if isinstance(o, Refusal)}
    again = attempt([observations[i] for i in refused], "oblivious") if refused else []
    for index, outcome in zip(refused, again, strict=True):
        outcomes[index] = outcome
    return outcomes, refused
