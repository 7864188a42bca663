"""The audit: attack what was captured, score it against the clients' own truth, write it down.

Every attacked observation leaves one JSON file and its pictures in ``audit/<attack>/``, of other
tiers than ``oblivious`` in ``audit/<attack>-<tier>/``. A file that is there is complete, and an
attack that runs keeps its state in ``unfinished/`` beside it, so an interrupted audit goes on
where it stopped.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bract.attacks import Attack, Budget, Engine, Reconstruction, Refusal, attack
from bract.attacks.baselines import class_mean, prior_only, random_image
from bract.attacks.engine import Progress
from bract.attacks.metrics import oracle, score
from bract.config import FederationConfig
from bract.data import test_data
from bract.errors import BractError
from bract.observation import Observation, ObservationStore
from bract.rundir import RunDirectory, write_text
from bract.seeds import derive_seed
from bract.server.collusion import Collusion
from bract.server.pictures import save_picture
from bract.server.scoring import Truth, load_truth, lpips_notes, score_images

_log = logging.getLogger(__name__)

AUDIT_SCHEMA = 1
PRIOR_ITERATIONS = 200
"""Steps of the prior-only baseline: with no gradient to match, it settles early."""

CANDIDATES = 99
"""Reference images among which an original must be retrieved, beside itself."""


@dataclass(frozen=True)
class AuditChoice:
    """What to attack, with what, and how hard; None takes every round or client.

    Attributes
    ----------
    iterations
        Steps a restart; None takes each attack's own default, or no limit where ``seconds`` is set.
    seconds
        Wall time for all restarts of one observation; what comes back then depends on the machine.
    key
        Key file of the client that takes part in the ``colluding`` tier.
    """

    attacks: tuple[str, ...]
    rounds: frozenset[int] | None = None
    clients: frozenset[str] | None = None
    iterations: int | None = None
    seconds: float | None = None
    restarts: int = 1
    max_images: int = 8
    device: str = "auto"
    seed: int = 0
    tier: str = "oblivious"
    key: Path | None = None


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
        self.attacks = {name: attack(name) for name in choice.attacks}
        if not resume:
            for name in self.attacks:
                shutil.rmtree(self._folder(name), ignore_errors=True)
        self._collusion: Collusion | None = None
        if choice.tier == "colluding" and choice.key is not None:
            self._collusion = Collusion(run, choice.key)
        self._all: list[Observation] | None = None
        self._reference: tuple[Tensor, Tensor] | None = None
        self._prior_images: dict[tuple[str, int], Tensor | None] = {}

    def plan(self) -> list[tuple[str, list[Observation]]]:
        """Return batches of attack and observations, one round each, without what is done."""
        observations = self._chosen()
        if not observations:
            raise BractError(
                f"{self.run.captures}: no capture to attack among the chosen rounds and clients; "
                "was capture.enabled on, and did a round finish?"
            )
        batches = []
        for name in self.attacks:
            for number in sorted({o.round for o in observations}):
                left = [
                    o
                    for o in observations
                    if o.round == number and not self._path(name, o).exists()
                ]
                if left:
                    batches.append((name, left))
        return batches

    def results(self) -> list[dict[str, Any]]:
        """Read what was written for the chosen observations, by this audit or earlier ones."""
        return [
            json.loads(path.read_text())
            for name in self.attacks
            for observation in self._chosen()
            if (path := self._path(name, observation)).is_file()
        ]

    def execute(
        self,
        batches: Sequence[tuple[str, list[Observation]]],
        progress: Callable[[Progress], None] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Run the batches; yield what is written for each observation as soon as it is."""
        budget = Budget(
            iterations=self.choice.iterations,
            seconds=self.choice.seconds,
            restarts=self.choice.restarts,
            max_images=self.choice.max_images,
        )
        for name, captured in batches:
            unfinished = self._folder(name) / "unfinished"
            engine = Engine(device=self.choice.device, progress=progress, checkpoint=unfinished)
            observations = []
            for observation in captured:
                try:
                    observations.append(self._opened(observation))
                except BractError as error:
                    refusal = Refusal(attack=name, observation=observation.key, reason=str(error))
                    yield self._record(name, observation, refusal, engine)
            if not observations:
                continue
            results = self.attacks[name].run(
                observations,
                budget=budget,
                seed=derive_seed(self.choice.seed, "audit", name),
                tier=self.choice.tier,  # type: ignore[arg-type]
                engine=engine,
                history=self._history,
            )
            for observation, result in zip(observations, results, strict=True):
                yield self._record(name, observation, result, engine)
            shutil.rmtree(unfinished, ignore_errors=True)

    def _opened(self, observation: Observation) -> Observation:
        """Return what the attacker of this tier sees of an observation."""
        return observation if self._collusion is None else self._collusion.open(observation)

    def _chosen(self) -> list[Observation]:
        return [o for o in self._captured() if self._is_chosen(o)]

    def _captured(self) -> list[Observation]:
        if self._all is None:
            self._all = list(ObservationStore(self.run.captures))
        return self._all

    def _history(self, observation: Observation) -> list[Observation]:
        """Return the earlier observations of the same client, by round."""
        of_client = [o for o in self._captured() if o.client == observation.client]
        return sorted((o for o in of_client if o.round < observation.round), key=lambda o: o.round)

    def _is_chosen(self, observation: Observation) -> bool:
        rounds, clients = self.choice.rounds, self.choice.clients
        return (rounds is None or observation.round in rounds) and (
            clients is None or observation.client in clients
        )

    def _iterations(self, name: str) -> int | None:
        if self.choice.iterations is None and self.choice.seconds is None:
            return self.attacks[name].iterations
        return self.choice.iterations

    def _path(self, name: str, observation: Observation) -> Path:
        stem = observation.key.replace("/", "--")
        return self._folder(name) / f"{stem}.json"

    def _folder(self, name: str) -> Path:
        """Return where an attack's results of this tier lie; those of the others stay."""
        tier = "" if self.choice.tier == "oblivious" else f"-{self.choice.tier}"
        return self.run.audit / f"{name}{tier}"

    def _record(
        self, name: str, observation: Observation, result: Reconstruction | Refusal, engine: Engine
    ) -> dict[str, Any]:
        path = self._path(name, observation)
        path.parent.mkdir(parents=True, exist_ok=True)
        facts: dict[str, Any] = {
            "schema": AUDIT_SCHEMA,
            "round": observation.round,
            "client": observation.client,
            "attack": name,
            "tier": self.choice.tier,
            "defenses": [d.get("name") for d in observation.protocol.defenses],
            "encryption": observation.protocol.encryption,
            "num_examples": observation.protocol.num_examples,
            "local_steps": observation.protocol.local_steps,
            "budget": {
                "iterations": self._iterations(name),
                "seconds": self.choice.seconds,
                "restarts": self.choice.restarts,
                "max_images": self.choice.max_images,
            },
            "seed": self.choice.seed,
            "device": str(engine.torch_device()),
            "selection": "blind",
        }
        if isinstance(result, Refusal):
            facts |= {"refused": result.reason, "scored": False, "images": [], "notes": []}
        else:
            facts |= {"refused": None, **result.summary(), "attack": name}
            facts |= self._judge(name, observation, result, path)
        write_text(path, json.dumps(facts, indent=1))
        path.chmod(0o600)
        return facts

    def _judge(
        self, name: str, observation: Observation, result: Reconstruction, path: Path
    ) -> dict[str, Any]:
        """Save the pictures of one reconstruction; score it where the client kept the truth."""
        truth = load_truth(self.run.truth, observation) if self.run.is_configured else None
        images = result.images
        originals: Tensor | None = None
        true_labels: list[int] | None = None
        judged: dict[str, Any] = {"scored": truth is not None, "notes": lpips_notes()}
        blind = best = None
        if truth is not None:
            scored = score_images(images, result.labels, truth, self._candidates())
            blind, originals, order = scored.rows, scored.originals, scored.order
            images, true_labels = images[order], scored.labels
            judged |= {
                "label_accuracy": scored.label_accuracy,
                "candidates": scored.candidates,
                "intervals": scored.intervals,
                "baselines": self._baselines(name, observation, truth, len(images)),
            }
            pick = oracle([r.images for r in result.all_restarts], originals)
            chosen = result.all_restarts[pick]
            guessed = chosen.label_probabilities.argmax(1)
            best = score_images(chosen.images, guessed, truth, self._candidates()).rows
        else:
            order = torch.arange(len(images))
        probabilities = result.label_probabilities[order]
        judged["images"] = [
            {
                "index": i,
                "label": int(probabilities[i].argmax()),
                "label_confidence": float(probabilities[i].max()),
                "true_label": None if true_labels is None else true_labels[i],
                "reconstruction": save_picture(images[i], path, i, "reconstruction"),
                "original": None
                if originals is None
                else save_picture(originals[i], path, i, "original"),
                "scores": None if blind is None else blind[i],
                "oracle": None if best is None else best[i],
            }
            for i in range(len(images))
        ]
        return judged

    def _baselines(
        self, name: str, observation: Observation, truth: Truth, count: int
    ) -> dict[str, dict[str, float]]:
        """Score what needs no gradient, matched and scored the same way as the attack."""
        images, labels = self._reference_data()
        guesses: dict[str, Tensor | None] = {
            "class_mean": class_mean(images, labels, truth.labels[:count]),
            "random_image": random_image(
                images, count, seed=derive_seed(self.choice.seed, "baseline", observation.key)
            ),
            "prior_only": self._prior(name, observation, count),
        }
        means = {}
        for baseline, guess in guesses.items():
            if guess is None:
                continue
            scores = score(guess, truth.images)
            means[baseline] = {
                "mse": fmean(scores.mse),
                "psnr": fmean(scores.psnr),
                "ssim": fmean(scores.ssim),
            }
        return means

    def _prior(self, name: str, observation: Observation, count: int) -> Tensor | None:
        """Return what the attack makes without a gradient to match; the same for every client."""
        if (name, count) not in self._prior_images:
            try:
                without: Attack = prior_only(self.attacks[name])
                result = without(
                    observation,
                    budget=Budget(iterations=PRIOR_ITERATIONS, max_images=self.choice.max_images),
                    seed=derive_seed(self.choice.seed, "prior", name),
                    device=self.choice.device,
                )
                self._prior_images[name, count] = result.images
            except BractError as error:
                _log.info("%s: no prior-only baseline: %s", name, error)
                self._prior_images[name, count] = None
        return self._prior_images[name, count]

    def _candidates(self) -> Tensor:
        return self._reference_data()[0][:CANDIDATES]

    def _reference_data(self) -> tuple[Tensor, Tensor]:
        if self._reference is None:
            self._reference = test_data(self.config.data)
        return self._reference
