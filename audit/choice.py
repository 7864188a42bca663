"""Choose captures and attacks of an audit, and the budget of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bract.attacks import Tier
from bract.attacks.adaptive.weak_seeds import SeedBudget


@dataclass(frozen=True)
class AuditChoice:
    """Captures, attacks and budgets of an audit; None takes every round or client.

    Attributes
    ----------
    attacks
        Registered names; ``auto`` chooses among several for each observation, blind.
    clients
        Names of clients; ``aggregate`` is every client's mean update (colluding tier).
    iterations
        Steps a restart; None takes each attack's own default, or no limit where ``seconds`` is set.
    seconds
        Wall time for all restarts of one observation; what comes back then depends on the machine.
    repeats
        Whole attacks on each observation, each with a seed of its own and its own blind pick.
    key
        Key file of the client that takes part in the ``colluding`` tier.
    prior
        File of a generator trained on public images (`bract prior train`), for the ``surrogate``
        tier.
    truth
        Folder that holds ``<client>/round-NNNN.safetensors`` to score with; None takes the run's.
    weak_seeds
        Seeds of a torch generator that the adaptive attacker tries against one observation's noise
        (a 16th of that against a key).
    batch
        Most observations that are attacked together; None chooses by device. Where an attack
        decomposes matrices, another one changes the last bits.
    over_rounds
        Rounds of one client whose uploads are attacked together, as uploads of the same images
        (`bract.attacks.problem.joint_case.join_rounds`); its chosen rounds are taken so many at a
        time, from the last one backwards.
    observer
        Name of a client that attacks in the place of the server: it sees the global models alone
        (`bract.audit.observer`). None is the server.
    skip_hopeless
        Refuse what there is no hope for instead of attacking it.
    models
        References ``package.module:callable`` that may be imported; see `Captures`.
    """

    attacks: tuple[str, ...]
    rounds: frozenset[int] | None = None
    clients: frozenset[str] | None = None
    iterations: int | None = None
    seconds: float | None = None
    restarts: int = 1
    repeats: int = 1
    max_images: int = 8
    device: str = "auto"
    seed: int = 0
    tier: Tier = "oblivious"
    key: Path | None = None
    prior: Path | None = None
    truth: Path | None = None
    weak_seeds: int = SeedBudget().candidates
    batch: int | None = None
    over_rounds: int = 1
    observer: str | None = None
    skip_hopeless: bool = False
    models: frozenset[str] = frozenset()
