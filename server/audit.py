"""The audit: attack what was captured, score it against the clients' own truth, write it down.

Every attacked observation leaves one JSON file and its pictures in ``audit/<attack>/``, of other
tiers than ``oblivious`` in ``audit/<attack>-<tier>/``. A file that is there is complete, and an
attack that runs keeps its state in ``unfinished/`` beside it, so an interrupted audit goes on
where it stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bract.attacks import ATTACKS, Attacker, Budget, Engine, Reconstruction, Refusal, attack
from bract.attacks.engine import Progress
from bract.attacks.evidence import Tier
from bract.config import FederationConfig
from bract.errors import BractError
from bract.observation import Observation
from bract.rundir import RunDirectory, write_text
from bract.seeds import derive_seed
from bract.server.captures import Capture, Captures, Lazy
from bract.server.collusion import Collusion
from bract.server.judging import Attempt, Judge
from bract.server.scoring import load_truth

AUDIT_SCHEMA = 1

BATCH = 16
"""Most observations whose tensors are in memory at once."""


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


@dataclass(frozen=True)
class Batch:
    """What runs together: one attack, with one seed, on captures of one round."""

    attack: str
    repeat: int
    captures: tuple[Capture, ...]


class Audit:
    """One audit of a run.

    Parameters
    ----------
    run
        A finished or interrupted run.
    choice
        What to attack.
    resume
        Skip observations that an earlier audit with the same choice has done; otherwise the
        chosen attacks' earlier results are removed.
    """

    def __init__(self, run: RunDirectory, choice: AuditChoice, *, resume: bool = False) -> None:
        self.run = run
        self.choice = choice
        self.config: FederationConfig = run.config()
        self.attacks: dict[str, Attacker] = {name: attack(name) for name in choice.attacks}
        if not resume:
            for name in self.attacks:
                shutil.rmtree(self._folder(name), ignore_errors=True)
        self._collusion: Collusion | None = None
        if choice.tier == "colluding" and choice.key is not None:
            self._collusion = Collusion(run, choice.key)
        self._captures = Captures(run.captures)
        self._judge = Judge(self.config.data, choice.seed, choice.device, choice.max_images)

    def plan(self) -> list[Batch]:
        """Return what is to be done, one round at a time, without what is done.

        Raises
        ------
        BractError
            If there is nothing to attack, or the chosen truth is none of the attacked clients'.
        """
        chosen = self._chosen()
        if not chosen:
            raise BractError(
                f"{self.run.captures}: no capture to attack among the chosen rounds and clients; "
                "was capture.enabled on, and did a round finish?"
            )
        self._check_truth(chosen)
        batches = []
        for name in self.attacks:
            for repeat in range(self.choice.repeats):
                left = [c for c in chosen if not self._path(name, c, repeat).exists()]
                for together in _together(left):
                    batches.append(Batch(name, repeat, tuple(together)))
        return batches

    def results(self) -> list[dict[str, Any]]:
        """Read what was written for the chosen observations, by this audit or earlier ones."""
        return [
            json.loads(path.read_text())
            for name in self.attacks
            for capture in self._chosen()
            for repeat in range(self.choice.repeats)
            if (path := self._path(name, capture, repeat)).is_file()
        ]

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
            unfinished = self._folder(batch.attack) / "unfinished"
            engine = Engine(device=self.choice.device, progress=progress, checkpoint=unfinished)
            opened: list[tuple[Capture, Observation]] = []
            for capture in batch.captures:
                try:
                    opened.append((capture, self._open(capture)))
                except BractError as error:
                    refusal = Refusal(
                        attack=batch.attack, observation=capture.key, reason=str(error)
                    )
                    yield self._record(batch, capture, refusal, engine)
            if not opened:
                continue
            captures = {observation.key: capture for capture, observation in opened}
            results = self.attacks[batch.attack].run(
                [observation for _, observation in opened],
                budget=budget,
                seed=self._seed(batch),
                tier=self._tier(batch),
                engine=engine,
                history=lambda observation: self._history(captures[observation.key]),  # noqa: B023
            )
            for (capture, observation), result in zip(opened, results, strict=True):
                yield self._record(batch, capture, result, engine, observation)
            shutil.rmtree(unfinished, ignore_errors=True)

    def _check_truth(self, chosen: Sequence[Capture]) -> None:
        folder = self.choice.truth
        clients = sorted({client for c in chosen for client in c.members or (c.client,)})
        if folder is not None and not any((folder / client).is_dir() for client in clients):
            raise BractError(
                f"{folder}: holds none of the folders {', '.join(clients)}; the truth of a client "
                "lies in a folder of its name, which is the truth-dir of its node config"
            )

    def _seed(self, batch: Batch) -> int:
        repeats = (batch.repeat,) if batch.repeat else ()
        return derive_seed(self.choice.seed, "audit", batch.attack, *repeats)

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

    def _chosen(self) -> list[Capture]:
        found = list(self._captures.index)
        if self._collusion is not None:
            rounds = dict.fromkeys(capture.round for capture in found)
            found += self._collusion.aggregates(self._captures.of_round(r) for r in rounds)
        rounds_chosen, clients = self.choice.rounds, self.choice.clients
        return sorted(
            (
                c
                for c in found
                if (rounds_chosen is None or c.round in rounds_chosen)
                and (clients is None or c.client in clients)
            ),
            key=lambda c: (c.round, bool(c.members)),
        )

    def _path(self, name: str, capture: Capture, repeat: int) -> Path:
        stem = capture.key.replace("/", "--")
        again = f"--repeat-{repeat}" if repeat else ""
        return self._folder(name) / f"{stem}{again}.json"

    def _folder(self, name: str) -> Path:
        """Return where an attack's results of this tier lie; those of the others stay."""
        tier = "" if self.choice.tier == "oblivious" else f"-{self.choice.tier}"
        return self.run.audit / f"{name}{tier}"

    def _record(
        self,
        batch: Batch,
        capture: Capture,
        result: Reconstruction | Refusal,
        engine: Engine,
        observation: Observation | None = None,
    ) -> dict[str, Any]:
        name = batch.attack
        path = self._path(name, capture, batch.repeat)
        path.parent.mkdir(parents=True, exist_ok=True)
        facts: dict[str, Any] = {
            "schema": AUDIT_SCHEMA,
            "round": capture.round,
            "client": capture.client,
            "members": list(capture.members),
            "attack": name,
            "tier": self.choice.tier,
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
            history = self._history(capture)
            attempt = Attempt(name, observation, result, tier, history)
            folder = self.choice.truth or self.run.truth
            truth = load_truth(folder, capture) if self.run.is_configured else None
            facts |= self._judge.judge(attempt, truth, path)
            facts["budget"] = self._budget(attempt.method)
        write_text(path, json.dumps(facts, indent=1))
        path.chmod(0o600)
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


def _together(captures: Sequence[Capture]) -> Iterator[list[Capture]]:
    """Yield captures that may run as one batch: of one round, no aggregate among clients."""
    kinds: dict[tuple[int, bool], list[Capture]] = {}
    for capture in captures:
        kinds.setdefault((capture.round, bool(capture.members)), []).append(capture)
    for group in kinds.values():
        for at in range(0, len(group), BATCH):
            yield group[at : at + BATCH]
