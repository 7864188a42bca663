"""Describe an attack task, and open its observations once, whichever attacks run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bract.attacks.problem.case import Case, open_case
from bract.attacks.problem.evidence import Evidence, Known, read_evidence
from bract.attacks.problem.joint_case import join_rounds
from bract.attacks.problem.public_prior import PublicPrior
from bract.attacks.problem.target_model import TargetModel, target_model_of
from bract.attacks.result import Budget, Refusal, SeedBudget
from bract.attacks.solve.engine import Engine
from bract.captures.observation import Observation
from bract.config.audit import Tier
from bract.errors import BractError
from bract.process import clock

REFINEMENT_SHARE = 0.3
"""Most of a budget in seconds that refining an evidence may take, but for its first stage."""

_LEAST_LEFT = 0.1
_BAR_SHARE = 0.2
OF_ONE_CASE = (BractError, RuntimeError, ValueError)
"""Errors that the numbers of one observation can raise, `torch.linalg.LinAlgError` among them."""

History = Callable[[Observation], Sequence[Observation]]
"""Earlier observations of the same client, for adaptive attackers."""


@dataclass(frozen=True, kw_only=True)
class AttackTask:
    """Settings of a run over observations that do not depend on the attack.

    Attributes
    ----------
    budget
        What one observation may cost.
    seed
        Everything random follows from it, the key of an observation and the number of a restart.
    tier
        What the adversary knows.
    engine
        Where and how the attack runs.
    history
        Returns the earlier observations of an observation's client; None where there are none.
    public
        A generator trained on public images, where the adversary has one.
    """

    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    tier: Tier = "oblivious"
    engine: Engine = field(default_factory=Engine)
    history: History | None = None
    public: PublicPrior | None = None


Needs = Callable[[Observation], frozenset[str] | None]
"""Names of the parameters whose gradients an attack reads; None for all."""


def open_cases(
    observations: Sequence[Observation],
    task: AttackTask,
    *,
    attack: str,
    needs: Needs = lambda _: None,
) -> tuple[list[Case | Refusal], AttackTask]:
    """Open each observation once: read its evidence, and refine it on the task's engine.

    Parameters
    ----------
    needs
        As `bract.attacks.base.Attacker.needs`.

    Returns
    -------
    tuple
        One case an observation, in order, or a `Refusal` in the name of ``attack``; and the task
        that is left: its seconds less those that refinement took, in the mean over observations,
        and its progress the rest of the bar.
    """
    begun = clock.now()
    opened: list[Case | Refusal] = []
    refining: list[_Refining] = []
    for number, observation in enumerate(observations):
        low, high = (_BAR_SHARE * (number + n) / len(observations) for n in (0, 1))
        refine = _Refining(replace(task, engine=task.engine.within(low, high, begun)))
        refining.append(refine)
        started = clock.now()
        try:
            refine.needs = needs(observation)
            case = open_case(
                observation,
                tier=task.tier,
                known=Known(
                    history=task.history(observation) if task.history else (),
                    weak_seeds=task.budget.weak_seeds,
                    needs=refine.needs,
                ),
                max_images=task.budget.max_images,
                refine=refine,
                public=task.public,
            )
        except OF_ONE_CASE as error:
            opened.append(refusal(attack, observation, error))
            continue
        opened.append(replace(case, seconds=clock.now() - started))
    spent = sum(refine.seconds for refine in refining)
    if not spent:
        return opened, task
    budget = task.budget
    if budget.seconds is not None:
        left = budget.seconds - spent / len(observations)
        budget = replace(budget, seconds=max(left, _LEAST_LEFT * budget.seconds))
    return opened, replace(task, budget=budget, engine=task.engine.within(_BAR_SHARE, 1.0, begun))


def open_over_rounds(
    clients: Sequence[Sequence[Observation]],
    task: AttackTask,
    *,
    attack: str,
    needs: Needs = lambda _: None,
) -> tuple[list[Case | Refusal], AttackTask]:
    """Open several rounds' uploads of each client as one case; see `join_rounds`.

    A round that cannot be opened is left out, and the reason is in the evidence's notes as
    ``left_out``. The task's history gives what was seen before each round.

    Parameters
    ----------
    clients
        Uploads by client, each in the order of rounds.
    needs
        As in `open_cases`.

    Returns
    -------
    tuple
        As `open_cases`: one case a client, or a `Refusal`.
    """
    flat = [seen for rounds in clients for seen in rounds]
    opened, left = open_cases(flat, task, attack=attack, needs=needs)
    found: list[Case | Refusal] = []
    for rounds in clients:
        own, opened = opened[: len(rounds)], opened[len(rounds) :]
        usable = [case for case in own if isinstance(case, Case)]
        if own and not usable:
            found.append(own[-1])
            continue
        try:
            joint = join_rounds(usable)
        except OF_ONE_CASE as error:
            last = rounds[-1] if rounds else None
            if last is None:
                raise
            found.append(refusal(attack, last, error))
            continue
        reasons = [case.reason for case in own if isinstance(case, Refusal)]
        if reasons:
            notes = joint.evidence.notes | {"left_out": reasons}
            joint = replace(joint, evidence=replace(joint.evidence, notes=notes))
        found.append(joint)
    return found, left


@dataclass
class _Refining:
    """Refines the evidence of one observation and takes the time."""

    task: AttackTask
    seconds: float = 0.0
    needs: frozenset[str] | None = None

    def __call__(
        self, observation: Observation, target_model: TargetModel, evidence: Evidence
    ) -> Evidence:
        most = self.task.budget.seconds
        begun = clock.now()
        try:
            return self.task.engine.refine(
                observation,
                target_model,
                evidence,
                seconds=None if most is None else REFINEMENT_SHARE * most,
                latest=most,
                tier=self.task.tier,
                needs=self.needs,
            )
        finally:
            self.seconds = clock.now() - begun


def evidence_for(
    observation: Observation,
    tier: Tier = "oblivious",
    history: Sequence[Observation] = (),
    weak_seeds: SeedBudget | None = None,
) -> Evidence:
    """Return what an adversary of this tier makes of an observation, refined to the end.

    Parameters
    ----------
    history
        Earlier observations of the same client, by round; adaptive attackers may need them.
    """
    observation.check()
    known = Known(history=history, weak_seeds=weak_seeds or SeedBudget())
    evidence = read_evidence(observation, tier, known)
    if evidence.refine is None:
        return evidence
    target_model = target_model_of(observation)
    return Engine().refine(observation, target_model, evidence, tier=tier)


def refusal(attack: str, observation: Observation, error: Exception) -> Refusal:
    """Put in words why an attack could not use an observation."""
    reason, code = str(error), "attack-unsuited"
    if isinstance(error, BractError):
        code = error.code
    else:
        reason = (
            f"{observation.key}: {attack} broke off on these tensors "
            f"({type(error).__name__}: {reason}); try another attack"
        )
    return Refusal(attack=attack, observation=observation.key, reason=reason, code=code)
