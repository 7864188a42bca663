"""Score every client's candidates round by round, from its uploads and the others'."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from bract.attacks import Engine, Progress
from bract.attacks.membership import (
    MEMBERSHIP,
    LocalModel,
    MembershipAttacker,
    RoundView,
    ShadowAttacker,
    local_model,
    logits_of,
)
from bract.attacks.membership.measuring import alignments, coefficients, gradients_on_the_way
from bract.attacks.membership.shares import group_shares
from bract.attacks.result import SeedBudget
from bract.audit.captures import Capture
from bract.audit.observations import Observations
from bract.audit.questions.membership.candidates import Candidates
from bract.audit.questions.membership.public import PublicModels
from bract.audit.questions.membership.score import Array, Flags
from bract.errors import BractError, one_line

MOST_OTHERS = 16
"""Most other clients whose models are a null distribution."""


@dataclass
class Scored:
    """Scores of one client's candidates, higher for members.

    Attributes
    ----------
    members
        bool ``(N,)``, by the last scored round; what scores are held against.
    rounds
        float64 ``(N,)`` by round and attacker.
    over_rounds
        The same by attacker, from all rounds together.
    shares
        Estimated shares of groups in the client's data by attribute, one ``(groups,)`` a round.
    """

    members: Flags
    rounds: dict[int, dict[str, Array]] = field(default_factory=dict)
    over_rounds: dict[str, Array] = field(default_factory=dict)
    shares: dict[str, list[Array]] = field(default_factory=dict)

    def join(self, candidates: Candidates, attackers: Mapping[str, MembershipAttacker]) -> None:
        """Set ``over_rounds`` of attackers that scored every round, and who is a member by then."""
        self.members = candidates.members_by(max(self.rounds)).numpy()
        names = set.intersection(*(set(found) for found in self.rounds.values()))
        for name in sorted(names):
            rounds = [torch.from_numpy(found[name]) for found in self.rounds.values()]
            self.over_rounds[name] = attackers[name].over_rounds(rounds).numpy()

    @property
    def judged(self) -> bool:
        """Tell if there are both members and others."""
        return bool(self.members.any() and not self.members.all())


class Scorer:
    """Scores candidates by every registered attacker, within the request's budget.

    Parameters
    ----------
    seen
        The observations, as the tier's attacker reads them.
    candidates
        By client.
    begun
        When the question was asked, by `time.perf_counter`; the request's seconds count from it.
    progress
        Called after each upload.
    attackers
        Names of those that score; None takes every one that needs no shadow models, of which one
        upload has none.

    Attributes
    ----------
    left_out
        What could not be used, and why.
    public
        Reference models.
    """

    def __init__(
        self,
        seen: Observations,
        candidates: Mapping[str, Candidates],
        *,
        begun: float,
        progress: Callable[[Progress], None] | None = None,
        attackers: Sequence[str] | None = None,
    ) -> None:
        self._seen, self._candidates = seen, candidates
        self._begun, self._progress = begun, progress
        self._attackers = {name: MEMBERSHIP[name]() for name in attackers or without_shadows()}
        self.left_out: list[str] = []
        self.public = PublicModels(seen, self.left_out)
        self._engine = Engine(device=seen.request.device)

    def score(self, captures: Sequence[Capture]) -> dict[str, Scored]:
        """Return what was scored, by client."""
        flat = sorted(
            {(c.round, c.client): c for one in captures for c in one.rounds}.values(),
            key=lambda c: (c.round, bool(c.members), c.client),
        )
        scored: dict[str, Scored] = {}
        done = 0
        for number, group in groupby(flat, key=lambda c: c.round):
            of_round = list(group)
            if scored and self.over_budget():
                self.left_out.append(
                    f"round {number} and later: not scored, the budget of "
                    f"{self._seen.request.seconds:g} s was spent"
                )
                break
            self._round(number, of_round, len({c.round for c in flat}), scored)
            done += len(of_round)
            self._report(done / len(flat))
        for client, one in scored.items():
            one.join(self._candidates[client], self._attackers)
        return {c: s for c, s in scored.items() if s.judged}

    def _round(
        self, number: int, captures: Sequence[Capture], rounds: int, scored: dict[str, Scored]
    ) -> None:
        models: dict[str, LocalModel] = {}
        for capture in captures:
            try:
                models[capture.client] = self._open(capture)
            except (BractError, RuntimeError, ValueError) as error:
                self.left_out.append(f"{capture.key}: {one_line(error, 300)}")
        for capture in captures:
            if capture.client not in models or capture.client not in self._candidates:
                continue
            if {"lira", "rmia"} & self._attackers.keys():
                self.public.train(models[capture.client], capture.declaration, rounds)
            others = [
                model
                for other, model in models.items()
                if other != capture.client
                and not capture.members
                and model.model.state_dict().keys()
                == models[capture.client].model.state_dict().keys()
            ][:MOST_OTHERS]
            candidates = self._candidates[capture.client]
            own = models[capture.client]
            inputs = own.target.normalise(candidates.images)
            rows, update = gradients_on_the_way(
                own, inputs, candidates.labels, seed=self._seen.request.seed
            )
            view = self._view(own, others, candidates, coefficients(rows, update))
            held = scored.setdefault(capture.client, Scored(np.zeros(0, dtype=bool)))
            found = {}
            for name, attacker in self._attackers.items():
                lacking = attacker.lacks(view)
                if lacking is None:
                    found[name] = attacker.score(view).numpy()
                elif (note := f"{name}: not run, it needs {lacking}") not in self.left_out:
                    self.left_out.append(note)
            if all(np.isfinite(values).all() for values in found.values()):
                held.rounds[number] = found
            else:
                self.left_out.append(f"{capture.key}: a score is not finite")
            if not held.rounds:
                del scored[capture.client]
                continue
            known = candidates.first_round == 0
            for name, groups in candidates.groups.items():
                estimated = group_shares(rows[known], groups[known], int(groups.max()) + 1, update)
                held.shares.setdefault(name, []).append(estimated.numpy())

    def _open(self, capture: Capture) -> LocalModel:
        return local_model(
            self._seen.open(capture),
            tier=self._seen.tier_of(capture),
            history=[] if capture.members else self._seen.history(capture),
            engine=self._engine,
            weak_seeds=SeedBudget(candidates=self._seen.request.weak_seeds),
        )

    def _view(
        self,
        own: LocalModel,
        others: Sequence[LocalModel],
        candidates: Candidates,
        shares: Tensor,
    ) -> RoundView:
        return round_view(own, others, candidates, shares, self.public)

    def over_budget(self) -> bool:
        """Return whether the request's time is spent."""
        limit = self._seen.request.seconds
        return limit is not None and time.perf_counter() - self._begun > limit

    def _report(self, share: float) -> None:
        if self._progress is not None:
            spent = time.perf_counter() - self._begun
            self._progress(Progress(share, spent, spent * (1 - share) / share, 0.0))


def without_shadows() -> list[str]:
    """Return the names of attackers that need no shadow models."""
    return [name for name in MEMBERSHIP if not issubclass(MEMBERSHIP[name], ShadowAttacker)]


def round_view(
    own: LocalModel,
    others: Sequence[LocalModel],
    candidates: Candidates,
    shares: Tensor,
    public: PublicModels,
) -> RoundView:
    """Return what the models of one round make of candidates.

    Parameters
    ----------
    others
        Other clients' of the same round.
    shares
        The coefficients of the candidates' gradients in the update, ``(N,)``.
    """
    inputs, labels = own.target.normalise(candidates.images), candidates.labels
    cosines = alignments(own, inputs, labels, [own.update, *(o.update for o in others)])
    measured = public.of_model(own, inputs, labels)
    each = [logits_of(o.model, o.local, inputs) for o in others]
    return RoundView(
        **{f.name: getattr(measured, f.name) for f in fields(measured)},
        sent=logits_of(own.model, own.sent, inputs),
        others=torch.stack(each) if each else measured.local.new_empty(0, *measured.local.shape),
        alignment=cosines[0],
        others_alignment=cosines[1:],
        coefficients=shares,
    )
