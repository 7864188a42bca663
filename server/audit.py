"""The audit: attack what was captured, score it against the clients' own truth, write it down.

Every attacked observation leaves one JSON file and its pictures in ``audit/<attack>/``, of other
tiers than ``oblivious`` in ``audit/<attack>-<tier>/``. A file that is there is complete, and an
attack that runs keeps its state in ``unfinished/`` beside it, so an interrupted audit goes on
where it stopped.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bract.attacks import ATTACKS, Attacker, Budget, Engine, Reconstruction, Refusal, attack
from bract.attacks.engine import Progress
from bract.attacks.evidence import Tier, remembered_evidence
from bract.config import FederationConfig
from bract.errors import BractError
from bract.observation import Observation
from bract.rundir import RunDirectory
from bract.seeds import derive_seed
from bract.server.batches import Batch, together
from bract.server.captures import Capture, Captures, Lazy, select
from bract.server.collusion import Collusion
from bract.server.judging import Attempt, Judge
from bract.server.results import Results
from bract.server.scoring import Truth, check_truth, load_truth
from bract.strict_json import json_ready

_log = logging.getLogger(__name__)

AUDIT_SCHEMA = 1

MEAN_OF_DEFENDED = (
    "The aggregate of defended updates was attacked as it is (an oblivious reading): what undoes a "
    "defense works on one client's update."
)


@dataclass(frozen=True)
class AuditChoice:
    """What to attack, with what, and how hard; None takes every round or client.

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
    truth
        Folder that holds ``<client>/round-NNNN.safetensors`` to score with; None takes the run's.
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
    truth: Path | None = None


class Audit:
    """One audit of a run.

    Parameters
    ----------
    run
        A finished or interrupted run.
    choice
        What to attack.
    resume
        Skip observations that an earlier audit of the same settings has done. Otherwise every
        chosen one is attacked, and its earlier results are removed when the first attack begins;
        those of other clients, rounds, attacks and tiers stay.

    Raises
    ------
    BractError
        If an attack, client or device is unknown, no capture is of the chosen rounds and clients,
        the chosen truth is none of these clients', or the key cannot be read. Nothing has been
        removed then.
    """

    def __init__(self, run: RunDirectory, choice: AuditChoice, *, resume: bool = False) -> None:
        self.run = run
        self.choice = choice
        self.resume = resume
        self.config: FederationConfig = run.config()
        self.attacks: dict[str, Attacker] = {name: attack(name) for name in choice.attacks}
        self._device = Engine(device=choice.device).torch_device().type
        self._collusion: Collusion | None = None
        if choice.tier == "colluding" and choice.key is not None:
            self._collusion = Collusion(run, choice.key)
        self._captures = Captures(run.captures)
        self._chosen = self._choose()
        if choice.truth is not None:
            check_truth(choice.truth, self._chosen)
        self._judge = Judge(self.config.data, choice.seed, choice.device, choice.max_images)
        self._files = Results(run.audit, choice.tier)
        self._begun = False

    def plan(self) -> list[Batch]:
        """Return what is to be done; with ``resume`` without what is done."""
        batches: list[Batch] = []
        for name in self.attacks:
            for repeat in range(self.choice.repeats):
                due = [c for c in self._chosen if self._due(name, c, repeat)]
                groups = together(due, device=self._device, max_images=self.choice.max_images)
                batches += [Batch(name, repeat, captures) for captures in groups]
        return batches

    def results(self) -> list[dict[str, Any]]:
        """Read what was written for the chosen observations, by this audit or earlier ones."""
        return [
            facts
            for name in self.attacks
            for capture in self._chosen
            for repeat in range(self.choice.repeats)
            if (facts := self._files.read(name, capture, repeat)) is not None
        ]

    def _due(self, name: str, capture: Capture, repeat: int) -> bool:
        """Say whether there is no result of these settings, or more can be had now.

        A refusal is tried again, and what was unscored where the truth is there by now.
        """
        facts = self._files.read(name, capture, repeat) if self.resume else None
        if facts is None or facts.get("refused"):
            return True
        if not facts.get("scored") and self._truth(capture) is not None:
            return True
        method = facts.get("method", name)
        found = [facts.get(key) for key in ("schema", "tier", "seed", "budget")]
        return method not in ATTACKS or found != [
            AUDIT_SCHEMA,
            self.choice.tier,
            self._seed(name, repeat),
            self._budget(method),
        ]

    def _begin(self) -> None:
        """Remove what the chosen observations' new results take the place of."""
        if self._begun:
            return
        self._begun = True
        stale = 0
        for name in self.attacks:
            if not self.resume:
                self._files.forget(name)
            for capture in self._chosen:
                if not self.resume:
                    self._files.remove(name, capture)
                    continue
                for repeat in range(self.choice.repeats):
                    if self._due(name, capture, repeat):
                        stale += self._files.path(name, capture, repeat).exists()
                        self._files.remove(name, capture, repeat)
        if stale:
            _log.info("%d earlier results were refused or of other settings: attacked again", stale)

    def execute(
        self, batches: Iterable[Batch], progress: Callable[[Progress], None] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Run the batches; yield what is written for each observation as soon as it is."""
        budget = Budget(
            iterations=self.choice.iterations,
            seconds=self.choice.seconds,
            restarts=self.choice.restarts,
            max_images=self.choice.max_images,
        )
        for batch in batches:
            self._begin()
            with remembered_evidence():
                yield from self._attack(batch, budget, progress)
            self._files.forget(batch.attack)
            # Errors that were caught hold on to what a batch read, by their tracebacks.
            gc.collect()

    def _attack(
        self, batch: Batch, budget: Budget, progress: Callable[[Progress], None] | None
    ) -> Iterator[dict[str, Any]]:
        unfinished = self._files.unfinished(batch.attack)
        engine = Engine(device=self.choice.device, progress=progress, checkpoint=unfinished)
        opened: list[tuple[Capture, Observation]] = []
        for capture in batch.captures:
            try:
                opened.append((capture, self._open(capture)))
            except BractError as error:
                refusal = Refusal(attack=batch.attack, observation=capture.key, reason=str(error))
                yield self._record(batch, capture, refusal, engine)
        if not opened:
            return
        earlier = {observation.key: self._history(capture) for capture, observation in opened}
        results = self.attacks[batch.attack].run(
            [observation for _, observation in opened],
            budget=budget,
            seed=self._seed(batch.attack, batch.repeat),
            tier=self._tier(batch),
            engine=engine,
            history=lambda observation: earlier[observation.key],
        )
        for (capture, observation), result in zip(opened, results, strict=True):
            history = earlier[observation.key]
            yield self._record(batch, capture, result, engine, observation, history)

    def _seed(self, name: str, repeat: int) -> int:
        return derive_seed(self.choice.seed, "audit", name, *((repeat,) if repeat else ()))

    def _truth(self, capture: Capture) -> Truth | None:
        folder = self.choice.truth or self.run.truth
        return load_truth(folder, capture) if self.run.is_configured else None

    def _tier(self, batch: Batch) -> Tier:
        """Return what the attacker knows; what undoes a defense knows one client's update only."""
        if any(capture.members for capture in batch.captures):
            return "oblivious"
        return self.choice.tier

    def _open(self, capture: Capture) -> Observation:
        """Return what the attacker of this tier sees of an observation."""
        if capture.members and self._collusion is not None:
            return self._collusion.aggregate(capture)
        observation = self._captures.load(capture)
        return observation if self._collusion is None else self._collusion.open(observation)

    def _history(self, capture: Capture) -> Lazy:
        """Return the earlier observations of the same client, by round."""
        return Lazy(self._captures.before(capture), self._open)

    def _choose(self) -> list[Capture]:
        found = list(self._captures.index)
        if self._collusion is not None:
            numbers = dict.fromkeys(capture.round for capture in found)
            found += self._collusion.aggregates(self._captures.of_round(r) for r in numbers)
        chosen = select(found, rounds=self.choice.rounds, clients=self.choice.clients)
        return sorted(chosen, key=lambda c: (c.round, bool(c.members)))

    def _record(
        self,
        batch: Batch,
        capture: Capture,
        result: Reconstruction | Refusal,
        engine: Engine,
        observation: Observation | None = None,
        history: Sequence[Observation] = (),
    ) -> dict[str, Any]:
        name = batch.attack
        path = self._files.path(name, capture, batch.repeat)
        path.parent.mkdir(parents=True, exist_ok=True)
        facts: dict[str, Any] = {
            "schema": AUDIT_SCHEMA,
            "round": capture.round,
            "client": capture.client,
            "members": list(capture.members),
            "attack": name,
            "tier": self.choice.tier,
            "read_as": self._tier(batch),
            "defenses": [d.get("name") for d in capture.protocol.defenses],
            "encryption": capture.protocol.encryption,
            "num_examples": capture.protocol.num_examples,
            "local_steps": capture.protocol.local_steps,
            "seed": self.choice.seed,
            "repeat": batch.repeat,
            "device": str(engine.torch_device()),
            "selection": "blind",
        }
        if isinstance(result, Refusal) or observation is None:
            reason = result.reason if isinstance(result, Refusal) else None
            facts |= {"refused": reason, "scored": False, "images": [], "notes": []}
            facts["budget"] = self._budget(name)
        else:
            facts |= {"refused": None, **result.summary(), "attack": name}
            facts["tier"] = self.choice.tier
            tier = self._tier(batch)
            attempt = Attempt(name, observation, result, tier, history)
            facts |= self._judge.judge(attempt, self._truth(capture), path)
            facts["budget"] = self._budget(attempt.method)
            if facts["defenses"] and tier != self.choice.tier:
                facts["notes"] = [*facts["notes"], MEAN_OF_DEFENDED]
        facts = json_ready(facts)
        self._files.write(name, capture, batch.repeat, facts)
        return facts

    def _budget(self, method: str) -> dict[str, Any]:
        """Return what one restart of the attack that made the images was allowed."""
        iterations = self.choice.iterations
        if iterations is None and self.choice.seconds is None:
            iterations = ATTACKS[method].iterations
        return {
            "iterations": iterations,
            "seconds": self.choice.seconds,
            "restarts": self.choice.restarts,
            "max_images": self.choice.max_images,
        }
