"""Score every client's candidates round by round, from its uploads and the others'."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from bract.attacks import Engine, Progress
from bract.attacks.membership import (
    MEMBERSHIP,
    LocalModel,
    RoundView,
    Training,
    local_model,
    logits_of,
    train_references,
)
from bract.attacks.membership.measuring import alignments, coefficients, gradients_on_the_way
from bract.attacks.membership.shares import group_shares
from bract.attacks.result import SeedBudget
from bract.audit.captures import Capture
from bract.audit.observations import Observations
from bract.audit.questions.membership.candidates import Candidates
from bract.audit.questions.membership.score import Array, Flags
from bract.data.views import test_data
from bract.errors import BractError, one_line
from bract.seeds import derive_seed

REFERENCES = 4
"""Reference models."""

POPULATION = 500
"""Most public records that RMIA compares a candidate with."""

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


@dataclass(frozen=True)
class _Public:
    """Reference models, and public records that none of them saw."""

    states: list[dict[str, Tensor]]
    inputs: Tensor
    labels: Tensor
    logits: Tensor


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
        Names of those that score; None takes every registered one.

    Attributes
    ----------
    left_out
        What could not be used, and why.
    references
        How many reference models were trained.
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
        self._attackers = {name: MEMBERSHIP[name]() for name in attackers or MEMBERSHIP}
        self._public: _Public | None = None
        self._engine = Engine(device=seen.request.device)
        self.left_out: list[str] = []

    @property
    def references(self) -> int:
        """Number of reference models."""
        return 0 if self._public is None else len(self._public.states)

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
            if scored and self._over_budget():
                self.left_out.append(
                    f"round {number} and later: not scored, the budget of "
                    f"{self._seen.request.seconds:g} s was spent"
                )
                break
            self._round(number, of_round, len({c.round for c in flat}), scored)
            done += len(of_round)
            self._report(done / len(flat))
        for client, one in scored.items():
            last = max(one.rounds)
            one.members = self._candidates[client].members_by(last).numpy()
            names = set.intersection(*(set(found) for found in one.rounds.values()))
            for name in sorted(names):
                rounds = [torch.from_numpy(found[name]) for found in one.rounds.values()]
                one.over_rounds[name] = self._attackers[name].over_rounds(rounds).numpy()
        return {c: s for c, s in scored.items() if s.members.any() and not s.members.all()}

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
            if self._public is None:
                self._train(models[capture.client], capture, rounds)
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

    def _train(self, found: LocalModel, capture: Capture, rounds: int) -> None:
        """Train the reference models once, where public data are at hand."""
        nothing = torch.empty(0)
        self._public = _Public([], nothing, nothing.long(), nothing)
        data = self._seen.data
        if data is None or not {"lira", "rmia"} & self._attackers.keys():
            return
        try:
            images, labels = test_data(data)
            if tuple(images.shape[1:]) != capture.declaration.image_shape:
                raise BractError(
                    f"public images are {tuple(images.shape[1:])}, the client's "
                    f"{capture.declaration.image_shape}",
                    code="data-shape",
                )
        except (BractError, OSError) as error:
            self.left_out.append(f"reference models: {one_line(error, 300)}")
            return
        seed = derive_seed(self._seen.request.seed, "reference models")
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        half = len(order) // 2
        fitted, apart = order[:half], order[half : half + POPULATION]
        inputs = found.target.normalise(images)
        states = list(
            train_references(
                found.model,
                found.sent,
                inputs[fitted],
                labels[fitted],
                Training.declared(capture.declaration, rounds),
                count=REFERENCES,
                seed=seed,
            )
        )
        logits = torch.stack([logits_of(found.model, s, inputs[apart]) for s in states])
        self._public = _Public(states, inputs[apart], labels[apart], logits)

    def _view(
        self,
        own: LocalModel,
        others: Sequence[LocalModel],
        candidates: Candidates,
        shares: Tensor,
    ) -> RoundView:
        public = self._public
        assert public is not None
        inputs, labels = own.target.normalise(candidates.images), candidates.labels
        local = logits_of(own.model, own.local, inputs)
        cosines = alignments(own, inputs, labels, [own.update, *(o.update for o in others)])
        none = local.new_empty(0, *local.shape)
        return RoundView(
            kind=own.target.declaration.loss,
            labels=labels,
            sent=logits_of(own.model, own.sent, inputs),
            local=local,
            others=torch.stack([logits_of(o.model, o.local, inputs) for o in others])
            if others
            else none,
            alignment=cosines[0],
            others_alignment=cosines[1:],
            coefficients=shares,
            references=torch.stack([logits_of(own.model, s, inputs) for s in public.states])
            if public.states
            else none,
            population=logits_of(own.model, own.local, public.inputs) if public.states else none,
            population_references=public.logits,
            population_labels=public.labels,
        )

    def _over_budget(self) -> bool:
        limit = self._seen.request.seconds
        return limit is not None and time.perf_counter() - self._begun > limit

    def _report(self, share: float) -> None:
        if self._progress is not None:
            spent = time.perf_counter() - self._begun
            self._progress(Progress(share, spent, spent * (1 - share) / share, 0.0))
