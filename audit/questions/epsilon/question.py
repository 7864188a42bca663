"""Ask how large epsilon is at least, by canaries, and hold it against the account."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from bract.attacks import Progress
from bract.attacks.adaptive.declared import declared
from bract.audit.captures import Capture
from bract.audit.observations import Observations
from bract.audit.questions.base import QUESTIONS, Question
from bract.audit.questions.epsilon.bound import (
    Array,
    Bound,
    Flags,
    Guesses,
    best_bound,
    epsilon_bound,
    gaussian_bound,
    one_shot_estimate,
)
from bract.audit.questions.epsilon.coins import Coins, canaries_file, load_coins, project
from bract.audit.questions.epsilon.gaussian import gaussian_epsilon
from bract.audit.questions.epsilon.rule import EpsilonRule
from bract.audit.questions.membership.candidates import Candidates
from bract.audit.questions.membership.rounds import Scorer
from bract.audit.results import Batch
from bract.defenses.noise import Noise
from bract.defenses.per_example import PerExample
from bract.errors import BractError
from bract.schema.epsilon import ClientEpsilon, EpsilonAnswer
from bract.updates.step_law import StepLaw

LEVEL = 0.95

DELTA = 1e-5
"""Of clients that declare no noise with a delta of its own."""

CLAIMED = 0.5
"""Part of the error that the bound for noise claimed to be Gaussian takes; the bound for any
mechanism has the rest."""

SCORINGS = ("gradient-regression", "alignment", "loss-drop")
"""Membership attackers that score canary records; chosen before any coin is read."""


@QUESTIONS.register("epsilon")
class EpsilonQuestion(EpsilonRule, Question[EpsilonAnswer]):
    """How much the uploads reveal, at least by canaries and at most by the account."""

    @classmethod
    def offered(cls, seen: Observations) -> bool:
        """Return whether any chosen client kept canaries."""
        return any(canaries_file(seen.truth_folder, c).is_file() for c in _clients(seen.chosen))

    def holds(self, captures: Sequence[Capture]) -> dict[str, str]:
        """Return what the answer depends on, the canaries included."""
        folder = self.seen.truth_folder
        paths = [canaries_file(folder, client) for client in _clients(captures)]
        return super().holds(captures) | {"canaries": self.basis.digest(paths)}

    def ask(
        self, batch: Batch, progress: Callable[[Progress], None] | None = None
    ) -> Iterator[EpsilonAnswer]:
        """Yield one answer about the whole run."""
        clients = _clients(batch.captures)
        left: list[str] = []
        found = [
            self._client(
                client,
                [one for c in batch.captures if c.client == client for one in c.rounds],
                (1.0 - LEVEL) / max(1, len(clients)),
                left,
                progress,
            )
            for client in clients
        ]
        measured = [one for one in found if one.refused is None]
        about = EpsilonAnswer(
            tier=self.seen.request.tier,
            input=batch.captures[0].declaration.input,
            delta=_delta(self.seen, batch.captures),
            level=LEVEL,
            clients=found,
            left_out=left,
            checks=self.seen.check_clients(batch.captures) if measured else [],
        )
        if not measured:
            reason = found[0].refused if found else "no single client's upload is chosen"
            about = about.model_copy(update={"refused": reason})
        yield about

    def _client(
        self,
        client: str,
        captures: Sequence[Capture],
        tail: float,
        left: list[str],
        progress: Callable[[Progress], None] | None,
    ) -> ClientEpsilon:
        try:
            coins = load_coins(self.seen.truth_folder, client, captures[0].declaration)
            noise = _noise(self.seen, captures[0])
            if coins.kind == "update":
                return self._updates(client, captures, coins, noise, tail)
            return self._records(client, captures, coins, noise, tail, left, progress)
        except BractError as error:
            left.append(f"{client}: {error}")
            return ClientEpsilon(client=client, refused=str(error))

    def _updates(
        self,
        client: str,
        captures: Sequence[Capture],
        coins: Coins,
        noise: Noise | PerExample | None,
        tail: float,
    ) -> ClientEpsilon:
        """Measure the noise on whole updates, by canary updates; a coin is of one round."""
        found = project(self.seen, captures, coins)
        delta = DELTA if noise is None else noise.delta
        scorings = [found.plain, found.differences]
        gaussian, high = None, None
        claimed = 0.0
        if isinstance(noise, Noise) and noise.clip is not None:
            if noise.kind == "gaussian":
                claimed = CLAIMED * tail
                gaussian = max(
                    gaussian_bound(one, found.included, delta, claimed / len(scorings))
                    for one in scorings
                )
                # Of m orthogonal directions, a coin moves one by the m-th part of the square.
                moved = 2.0 * noise.clip / coins.included.shape[1] ** 0.5
                high = gaussian_epsilon(moved / noise.deviation, delta)
            else:
                high = noise.epsilon
        bound = best_bound(scorings, found.included, delta, 1.0 - (tail - claimed))
        return _judged(
            client,
            coins,
            bound,
            high=high,
            gaussian=gaussian,
            estimate=_estimate(found.cosines, found.included, delta),
            estimate_last=_estimate(found.last, found.included[: len(found.last)], delta),
            rounds=found.rounds,
            last=max(c.round for c in captures),
        )

    def _records(
        self,
        client: str,
        captures: Sequence[Capture],
        coins: Coins,
        noise: Noise | PerExample | None,
        tail: float,
        left: list[str],
        progress: Callable[[Progress], None] | None,
    ) -> ClientEpsilon:
        """Measure what single records change, by the attackers that score candidates."""
        candidates = Candidates(coins.images, coins.labels, coins.included.long())
        scorer = Scorer(
            self.seen,
            {client: candidates},
            begun=time.perf_counter(),
            progress=progress,
            attackers=SCORINGS,
        )
        scored = scorer.score(captures)
        left += scorer.left_out
        if client not in scored:
            raise BractError(
                scorer.left_out[0]
                if scorer.left_out
                else "all coins fell alike, or no upload could be read",
                code="attack-evidence",
            )
        values = list(scored[client].over_rounds.values())
        rounds = len(scored[client].rounds)
        delta = DELTA if noise is None else noise.delta
        bound = best_bound(values, coins.included.numpy(), delta, 1.0 - tail)
        last = max(c.round for c in captures)
        included = int(coins.included.sum())
        high = None if noise is None else _spent(noise, captures[0], last, included)
        return _judged(client, coins, bound, high=high, rounds=rounds, last=last)


def _judged(
    client: str,
    coins: Coins,
    bound: Bound,
    *,
    high: float | None,
    rounds: int,
    last: int,
    gaussian: float | None = None,
    estimate: float | None = None,
    estimate_last: float | None = None,
) -> ClientEpsilon:
    measured = max(bound.epsilon, gaussian or 0.0)
    return ClientEpsilon(
        client=client,
        kind=coins.kind,
        canaries=bound.guesses.canaries,
        guesses=bound.guesses.made,
        right=bound.guesses.right,
        rounds=rounds,
        last_round=last,
        low=bound.epsilon,
        low_gaussian=gaussian,
        estimate=estimate,
        estimate_last=estimate_last,
        high=high,
        most=most_shown(bound.guesses.canaries),
        alarm=high is not None and measured > high,
    )


def _estimate(cosines: Array, included: Flags, delta: float) -> float | None:
    """Return the one-shot estimate; None where fewer than two coins fell either way."""
    if min(int(included.sum()), int((~included).sum())) < 2:
        return None
    return one_shot_estimate(cosines[included], cosines[~included], delta)


def most_shown(canaries: int) -> float:
    """Return the bound that so many canaries give if every guess is right: none gives more."""
    return epsilon_bound(Guesses(canaries, canaries, canaries), DELTA, 1.0 - LEVEL)


def _noise(seen: Observations, capture: Capture) -> Noise | PerExample | None:
    """Return the declared noise: of the last defense, else of the steps; None without one."""
    defenses = capture.declaration.defenses
    observation = seen.open(capture)
    if defenses and defenses[-1].get("name") == Noise.name:
        last = replace(observation.declaration, defenses=defenses[-1:])
        return declared(Noise, replace(observation, declaration=last))
    if defenses and defenses[0].get("name") == PerExample.name:
        first = replace(observation.declaration, defenses=defenses[:1])
        return declared(PerExample, replace(observation, declaration=first))
    return None


def _spent(noise: Noise | PerExample, capture: Capture, rounds: int, canaries: int) -> float | None:
    """Return the account's epsilon of one record after so many rounds; None without an account.

    Parameters
    ----------
    canaries
        Records among the declared examples that were included as canaries: the client's account
        is that of its own records.
    """
    if isinstance(noise, Noise):
        return noise.spent(rounds)
    p, steps = capture.declaration, StepLaw.of(capture.declaration).steps
    if not p.batch_size or not p.num_examples or not steps:
        return None
    rate = min(1.0, p.batch_size / max(1, p.num_examples - canaries))
    return noise.spent(rounds * steps, rate)


def _delta(seen: Observations, captures: Sequence[Capture]) -> float:
    """Return the delta of the first client that declares one."""
    for capture in captures:
        try:
            if (noise := _noise(seen, capture)) is not None:
                return noise.delta
        except BractError:
            continue
    return DELTA


def _clients(captures: Sequence[Capture]) -> list[str]:
    """Return who sent single uploads: an aggregate has no canaries of its own."""
    return sorted({c.client for c in captures if not c.members})
