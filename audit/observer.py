"""A curious client in the place of the server: it sees the global models, and its own update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bract.attacks.problem.global_models import joint_declaration, observe_global_models
from bract.audit.captures import Capture, Captures
from bract.audit.global_models import GlobalModels
from bract.captures.observation import Observation
from bract.config.client_names import AGGREGATE
from bract.config.config import FedAvgConfig, FedProxConfig
from bract.errors import BractError
from bract.rundir import RunDirectory
from bract.updates.shares import example_shares

KNOWN_STRATEGIES = ("fedavg", "fedprox")
"""Strategies of which a client knows how the global model follows from the updates."""


class CuriousClient:
    """One client of a run, which learns every round's global model and knows what it sent itself.

    The run's captures tell what was sent in a round; the model after the last captured round is
    that of ``models/``. Who took part with which weight is taken for known: it is what
    ``metrics.jsonl`` holds, or the number of examples, of a configured run no more than its
    ``strategy.max_share``.

    Parameters
    ----------
    name
        The client.
    """

    def __init__(self, run: RunDirectory, captures: Captures, name: str) -> None:
        self._run, self._captures, self.name = run, captures, name
        self._models = GlobalModels(run, captures)
        strategy = run.config().strategy
        clients = sorted({c.client for c in captures.index})
        if name not in clients:
            raise BractError(
                f"audit.observer {name}: no capture is of this client; "
                f"there are {', '.join(clients)}",
                code="unknown-name",
            )
        if any(c.declaration.encryption != "none" for c in captures.index):
            raise BractError(
                f"audit.observer {name}: the run is encrypted; what one client reads of the "
                "aggregate is the colluding tier: bract audit RUN --tier colluding --clients "
                "aggregate",
                code="capture-encrypted",
            )
        if (
            not isinstance(strategy, FedAvgConfig | FedProxConfig)
            or strategy.name not in KNOWN_STRATEGIES
        ):
            raise BractError(
                f"audit.observer {name}: strategy {strategy.name} makes the global model otherwise "
                f"than by a mean with known weights; expected {' or '.join(KNOWN_STRATEGIES)}",
                code="attack-unsuited",
            )
        self._lr, self._weighting = strategy.server_lr, strategy.weighting
        # Somebody's own app weighs as Flower's FedAvg does: every claim is taken at its word.
        self._max_share = strategy.max_share if run.is_configured else 1.0
        self._weights = {
            row.round: {client: described.weight for client, described in row.clients.items()}
            for row in run.metrics()
        }

    def captures(self) -> list[Capture]:
        """Return one capture a round in which others took part and whose next model is known."""
        found = []
        for number in sorted({c.round for c in self._captures.index}):
            of_round = self._captures.of_round(number)
            others = [c for c in of_round if c.client != self.name]
            if others and self.files(number):
                found.append(
                    Capture(
                        number,
                        AGGREGATE,
                        joint_declaration([c.declaration for c in others]),
                        members=tuple(c.client for c in others),
                    )
                )
        if not found:
            raise BractError(
                f"audit.observer {self.name}: in no captured round did another client take part "
                "whose "
                "next global model was kept, in the next round's capture or below models/; "
                "expected captures of at least two clients in one round",
                code="config-conflict",
            )
        return found

    def files(self, number: int) -> list[Path]:
        """Return the files that hold the global model after a round; none where it was not kept."""
        return self._models.files(number)

    def described(self, number: int) -> str:
        """Return what the mean of a round is taken apart with, beside files that `files` names."""
        weights = sorted(self._weights.get(number, {}).items())
        return f"{self._lr} {self._weighting} {self._max_share} {weights}"

    def open(self, capture: Capture) -> Observation:
        """Return the mean of the other clients' updates, as this client computes it."""
        of_round = self._captures.of_round(capture.round)
        sent = self._captures.load(of_round[0])
        weights = self._weights_of(of_round, capture.round)
        own = [self._captures.load(c) for c in of_round if c.client == self.name]
        return observe_global_models(
            sent.parameters,
            self._models.after(capture.round),
            [c.declaration for c in of_round if c.client != self.name],
            number=capture.round,
            client=capture.client,
            server_lr=self._lr,
            buffers=sent.buffers,
            known=[(weights[seen.client], seen.update) for seen in own],
        )

    def _weights_of(self, captures: Sequence[Capture], number: int) -> dict[str, float]:
        described = self._weights.get(number, {})
        if described and set(described) != {c.client for c in captures}:
            raise BractError(
                f"round-{number:04d}: {', '.join(sorted(described))} took part, captured were "
                f"{', '.join(c.client for c in captures)}; the mean of a round is attacked where "
                "every upload of it was captured, since the scores need every client's images",
                code="capture-lacks",
            )
        if described and all(weight is not None for weight in described.values()):
            weights = {client: float(weight or 0.0) for client, weight in described.items()}
            total = sum(weights.values())
            if min(weights.values()) < 0.0 or not math.isclose(total, 1.0, rel_tol=1e-6):
                listed = ", ".join(f"{client} {weight:g}" for client, weight in weights.items())
                raise BractError(
                    f"{self._run.metrics_path}: round {number} has the weights {listed}; expected "
                    "shares of at least 0 that sum to 1; restore the file as the run wrote it",
                    code="file-damaged",
                )
            return weights
        if self._weighting != "examples":
            raise BractError(
                f"{self._run.metrics_path}: it tells no weight of each client in round {number}, "
                f"and strategy.weighting is {self._weighting}; restore the file as the run "
                "wrote it",
                code="file-damaged",
            )
        examples = {c.client: c.declaration.num_examples for c in captures}
        if missing := sorted(client for client, count in examples.items() if not count):
            raise BractError(
                f"round-{number:04d}/{missing[0]}: its weight in the mean is not known: neither "
                "metrics.jsonl nor its declaration (num_examples) tells it",
                code="capture-lacks",
            )
        shares = example_shares([count or 0 for count in examples.values()], self._max_share)
        return dict(zip(examples, shares, strict=True))
