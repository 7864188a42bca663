"""Ask whether an adversary recognises the records that a client trained on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bract.attacks import Progress
from bract.attacks.membership import MEMBERSHIP, combine
from bract.attacks.membership.shares import apart
from bract.audit.captures import Capture
from bract.audit.global_models import GlobalModels
from bract.audit.observations import Observations
from bract.audit.questions.base import QUESTIONS, Question
from bract.audit.questions.membership.blind import UNFAIR, blind_score
from bract.audit.questions.membership.candidates import (
    Candidates,
    candidates_file,
    join,
    load_candidates,
)
from bract.audit.questions.membership.influence import influences
from bract.audit.questions.membership.models import ModelScorer
from bract.audit.questions.membership.rates import RATES, found_among, needed
from bract.audit.questions.membership.rounds import Scored, Scorer
from bract.audit.questions.membership.rule import MembershipRule
from bract.audit.questions.membership.score import (
    Array,
    Flags,
    advantage_limit,
    auc,
    auc_interval,
    detectable_advantage,
    detectable_auc,
    permuted_chance,
    share_limits,
    threshold,
)
from bract.audit.results import Batch
from bract.errors import BractError, one_line
from bract.schema.membership import (
    AttackerScore,
    BlindScore,
    ClientMembership,
    Detectable,
    GroupScore,
    InfluenceScore,
    MembershipAnswer,
    Observer,
    RateScore,
    ShareScore,
)
from bract.seeds import derive_seed

LEVEL = 0.95
"""One minus the share of audits without any membership that report some."""

COMBINED = "combined"

FEWEST_OF_GROUP = 5
"""Members, and others, without which a group is not judged by itself."""

_BY_GROUP = ("stacked", "gradient-regression", "loss")
"""Attackers by which groups are judged; the first that scored, whatever the others reached."""


@QUESTIONS.register("membership")
class MembershipQuestion(MembershipRule, Question[MembershipAnswer]):
    """Whether the records that a client trained on can be told from others of the same site."""

    @classmethod
    def offered(cls, seen: Observations) -> bool:
        """Return whether any chosen client kept candidates."""
        return any(candidates_file(seen.truth_folder, c).is_file() for c in _clients(seen.chosen))

    def holds(self, captures: Sequence[Capture]) -> dict[str, str]:
        """Return what the answer depends on, the candidates included."""
        folder = self.seen.truth_folder
        paths = [candidates_file(folder, client) for client in _clients(captures)]
        found = super().holds(captures) | {"candidates": self.basis.digest(paths)}
        final = self._global_models().final(self.seen.request.final)
        return found if final is None else found | {"final": self.basis.digest([final[1]])}

    def ask(
        self, batch: Batch, progress: Callable[[Progress], None] | None = None
    ) -> Iterator[MembershipAnswer]:
        """Yield one answer about the whole run."""
        begun = time.perf_counter()
        seed = self.seen.request.seed
        left: list[str] = []
        candidates = self._candidates(batch.captures, left)
        about = MembershipAnswer(
            tier=self.seen.request.tier, input=batch.captures[0].declaration.input
        )
        if not candidates:
            yield about.model_copy(update={"refused": left[0], "left_out": left[1:]})
            return
        scorer = Scorer(self.seen, candidates, begun=begun, progress=progress)
        scored = scorer.score(batch.captures)
        of_models, shadows = self._of_models(batch.captures, candidates, scorer)
        moved = self._influence(batch.captures, candidates, scorer)
        left += scorer.left_out
        if not scored and not of_models:
            reason = left[0] if left else "no upload could be read"
            yield about.model_copy(update={"refused": reason, "left_out": left})
            return
        members = {c: one.members for c, one in scored.items()}
        for client, values in combine(
            {c: s.over_rounds for c, s in scored.items()}, members
        ).items():
            scored[client].over_rounds[COMBINED] = values
        clients = [
            _client(client, one, candidates[client], len(scored), derive_seed(seed, client))
            for client, one in scored.items()
        ]
        yield about.model_copy(
            update={
                **_judged(clients, of_models),
                "checks": self.seen.check_clients(batch.captures),
                "level": LEVEL,
                "references": len(scorer.public.states),
                "shadows": shadows,
                "influence": moved,
                "left_out": left,
                "seconds": time.perf_counter() - begun,
            }
        )

    def _of_models(
        self,
        captures: Sequence[Capture],
        candidates: Mapping[str, Candidates],
        scorer: Scorer,
    ) -> tuple[list[ClientMembership], int]:
        """Judge what the global models alone reveal, once: no tier reads more in them."""
        request = self.seen.request
        if request.tier != "oblivious" or self.seen.observer is not None:
            return [], 0
        try:
            models = ModelScorer(self.seen, candidates, scorer.public, scorer.over_budget)
        except (BractError, RuntimeError) as error:
            scorer.left_out.append(f"global models: {one_line(error, 300)}")
            return [], 0
        scored = models.score(captures)
        scorer.left_out += models.left_out
        found = [
            _client(
                client,
                one,
                models.of_client(client),
                sum(map(len, scored.values())),
                derive_seed(request.seed, client, observer),
                observer,
            )
            for observer, by_client in scored.items()
            for client, one in by_client.items()
        ]
        return found, models.shadows

    def _influence(
        self,
        captures: Sequence[Capture],
        candidates: Mapping[str, Candidates],
        scorer: Scorer,
    ) -> list[InfluenceScore]:
        """Leave each client out of the final model, once: no tier reads more in it."""
        if self.seen.request.tier != "oblivious" or self.seen.observer is not None:
            return []
        if scorer.over_budget():
            scorer.left_out.append("a client's influence: no time was left")
            return []
        return influences(self.seen, captures, candidates, scorer.left_out)

    def _global_models(self) -> GlobalModels:
        return GlobalModels(self.seen.run, self.seen.captures)

    def _candidates(self, captures: Sequence[Capture], left: list[str]) -> dict[str, Candidates]:
        found = {}
        for client, capture in {c.client: c for c in reversed(captures)}.items():
            try:
                found[client] = self._of(capture)
                left += found[client].notes
            except BractError as error:
                left.append(f"{client}: {error}")
        return dict(sorted(found.items()))

    def _of(self, capture: Capture) -> Candidates:
        """Return the candidates of a capture's client, or of all the clients of an aggregate."""
        folder = self.seen.truth_folder
        parts = [
            load_candidates(folder, client, capture.declaration)
            for client in capture.members or (capture.client,)
        ]
        return join(parts)


def _clients(captures: Sequence[Capture]) -> list[str]:
    return list(dict.fromkeys(c for one in captures for c in one.members or (one.client,)))


def _client(
    client: str,
    scored: Scored,
    candidates: Candidates,
    clients: int,
    seed: int,
    observer: Observer = "server",
) -> ClientMembership:
    """Put figures to one client's scores; ``clients`` and attackers share the level."""
    members = scored.members
    count, rest = int(members.sum()), int((~members).sum())
    seen = candidates.images if candidates.features is None else candidates.features
    blind = blind_score(seen, candidates.labels, members, seed=seed)
    enough = [rate for rate in RATES if rest >= needed(rate)]
    tests = clients * max(1, len(scored.over_rounds)) * max(1, len(enough))
    tail = (1.0 - LEVEL) / tests
    each = [
        _score(name, number, values, candidates.members_by(number).numpy(), tail)
        for number, found in scored.rounds.items()
        for name, values in found.items()
    ]
    unfair = None
    if blind.chance < UNFAIR:
        unfair = (
            f"a classifier that sees no model tells members from held-out records (area under the "
            f"curve {blind.auc:.2f}): they were drawn differently; hold records out at random "
            "before training"
        )
    over = [
        _score(name, None, values, members, tail) for name, values in scored.over_rounds.items()
    ]
    return ClientMembership(
        client=client,
        observer=observer,
        members=count,
        non_members=rest,
        rounds=sorted(scored.rounds),
        chance=None
        if unfair
        else permuted_chance(list(scored.over_rounds.values()), members, enough, seed=seed),
        blind=BlindScore(auc=blind.auc, chance=blind.chance),
        unfair=unfair,
        detectable=Detectable(
            auc=detectable_auc(count, rest),
            advantage={f"{100 * r:g}": detectable_advantage(count, r) for r in enough},
        ),
        scores=[*over, *each],
        shares=[_share(name, found, scored, candidates) for name, found in scored.shares.items()],
        groups=[] if unfair or observer == "server" else _groups(scored, candidates),
    )


def _groups(scored: Scored, candidates: Candidates) -> list[GroupScore]:
    """Put figures to each group of enough records, by one attacker that is chosen beforehand."""
    name = next((n for n in _BY_GROUP if n in scored.over_rounds), None)
    if name is None:
        return []
    values, members = scored.over_rounds[name], scored.members
    found = []
    for attribute, groups in candidates.groups.items():
        for group in groups.unique().tolist():
            mine = (groups == group).numpy()
            yes, no = values[mine & members], values[mine & ~members]
            if min(len(yes), len(no)) >= FEWEST_OF_GROUP:
                found.append((attribute, int(group), yes, no))
    level = 1.0 - (1.0 - LEVEL) / max(1, len(found))
    scores = []
    for attribute, group, yes, no in found:
        low, high = auc_interval(yes, no, level)
        scores.append(
            GroupScore(
                attribute=attribute,
                group=group,
                members=len(yes),
                non_members=len(no),
                attacker=name,
                auc=auc(yes, no),
                auc_low=low,
                auc_high=high,
            )
        )
    return scores


def _share(name: str, found: Sequence[Array], scored: Scored, candidates: Candidates) -> ShareScore:
    """Hold the mean of the rounds' estimates, and the held-out records' shares, to the truth."""
    groups = candidates.groups[name]
    count = int(groups.max()) + 1

    def shares_of(chosen: Tensor) -> Tensor:
        counts = torch.bincount(groups[chosen], minlength=count).double()
        return counts / counts.sum()

    truth = shares_of(torch.from_numpy(scored.members))
    estimated = torch.from_numpy(np.mean(found, axis=0))
    return ShareScore(
        attribute=name,
        groups=count,
        error=apart(estimated, truth),
        prior_error=apart(shares_of(candidates.first_round == 0), truth),
        shares=truth.tolist(),
        estimated=estimated.tolist(),
    )


def _score(
    name: str, number: int | None, values: Array, members: Flags, tail: float
) -> AttackerScore:
    title = "Combination, fitted on other clients"
    if name != COMBINED:
        title = MEMBERSHIP[name].title
    yes, no = values[members], values[~members]
    if not len(yes) or not len(no):
        return AttackerScore(attacker=name, title=title, round=number)
    low, high = auc_interval(yes, no)
    return AttackerScore(
        attacker=name,
        title=title,
        round=number,
        auc=auc(yes, no),
        auc_low=low,
        auc_high=high,
        rates=[_rate(yes, no, rate, tail, limits=number is None) for rate in RATES],
    )


def _rate(yes: Array, no: Array, rate: float, tail: float, *, limits: bool) -> RateScore:
    at = threshold(no, rate)
    if at is None:
        return RateScore(rate=rate)
    found = int((yes > at[0]).sum())
    low, high = share_limits(found, len(yes), 0.025)
    return RateScore(
        rate=rate,
        true_positives=found / len(yes),
        low=low,
        high=high,
        advantage_low=advantage_limit(yes, no, rate, tail) if limits else None,
    )


def _judged(
    clients: Sequence[ClientMembership], models: Sequence[ClientMembership]
) -> dict[str, list[ClientMembership]]:
    """Say which chances are too small, beside those of all clients and observers."""
    every = {f"{position}": c.chance for position, c in enumerate([*clients, *models])}
    found = found_among({name: c for name, c in every.items() if c is not None}, LEVEL)
    marked = [
        c.model_copy(update={"found": f"{position}" in found})
        for position, c in enumerate([*clients, *models])
    ]
    return {"clients": marked[: len(clients)], "models": marked[len(clients) :]}
