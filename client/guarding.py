"""The guard around one update of bract's own ClientApp."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from bract.captures.observation import ClientDeclaration, Observation
from bract.client.answered import Request
from bract.client.answers import Answers
from bract.client.defending import Defending
from bract.client.defenses import ProtectContext
from bract.client.guard import Candidate, Finding, Ladder, Passed, send_or_refuse
from bract.client.guard_policy import GuardPolicy, Step
from bract.client.policy import PolicyError, SitePolicy
from bract.client.training import LocalResult
from bract.data.views import ClientData
from bract.errors import BractError
from bract.inputs import Truth
from bract.updates.update import Tensors

PACKAGES = ("scipy", "skimage")
"""Packages that attacks and scores import, and a site without a guard does without."""


@dataclass(frozen=True)
class Outgoing:
    """The reply to one round's training.

    Attributes
    ----------
    update
        The defended update.
    result
        The training that it comes from.
    batch_size
        Examples of a batch.
    """

    update: Tensors
    result: LocalResult
    batch_size: int


@dataclass(frozen=True)
class RunLedger:
    """The site's record, for one run's guard."""

    answers: Answers
    request: Request
    policy: GuardPolicy

    def guarding(self) -> AbstractContextManager[None]:
        """Let one update of the site at a time pass its guard."""
        return self.answers.guarding()

    def begin_guard(self) -> int:
        """Count the update as stopped and climbed; return the step to begin at."""
        return self.answers.begin_guard(self.request, self.policy)

    def end_guard(self, begun: int, ended: int, *, stopped: bool) -> None:
        """Note the step, and whether nothing of the data left."""
        self.answers.end_guard(self.request, self.policy, begun, ended, stopped=stopped)


def check_guard_installed() -> None:
    """Refuse to work without the packages that a guard's attacks need."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise BractError(
            f"this site's policy sets guard, whose attacks need {', '.join(missing)}; "
            "pip install 'bract[audit]' at the site",
            code="package-missing",
        )


def check_sums(policy: SitePolicy) -> None:
    """Refuse a sum, in which a guard rests, at a site that did not say of whom it may be.

    The server chooses who takes part: one client of its own leaves an update alone in the sum.
    """
    if policy.guard is not None and not (policy.bounds_sums or policy.fixed_members):
        raise PolicyError(
            "the run seals updates, whose guard rests since the server reads sums alone, and this "
            "site's policy does not say of whom; set min_summed_clients or fixed_members beside "
            "guard"
        )


def guarded(
    first: Outgoing,
    again: Callable[[int], Outgoing | None],
    *,
    policy: GuardPolicy,
    sent: Observation,
    data: ClientData,
    defending: Defending,
    device: torch.device,
    ledger: RunLedger,
    folder: Path | None,
) -> Outgoing:
    """Return what the guard lets leave of one update.

    Parameters
    ----------
    first
        What the run's own defenses leave.
    again
        Trains on batches of a size, and defends the update; None where that is not possible.
    sent
        What the server holds of this client before its reply (`sent_to`).
    folder
        Where the site's log is; None keeps it in the log of its process.

    Raises
    ------
    PolicyError
        If nothing may leave; its text stays at the site.
    """
    # Attacks are imported here, where a guard is set, and nowhere else in a client.
    from bract.client.guard_attack import Inspection

    made: dict[int | None, Outgoing] = {None: first}

    def make(step: Step) -> Candidate | None:
        if step.batch is not None and step.batch not in made:
            larger = again(step.batch)
            if larger is None:
                return None
            made[step.batch] = larger
        return _candidate(made[step.batch], step, sent, data, defending.context)

    @cache
    def inspection() -> Inspection:
        return Inspection(
            policy,
            sent,
            known=_known(data),
            defenses=defending.chain.public(),
            seed=sent.round,
            device=str(device),
        )

    def inspect(candidate: Candidate, step: Step, seconds: float) -> Finding:
        return inspection()(candidate, step, seconds)

    about: dict[str, object] = {"run": ledger.request.run, "round": sent.round}
    ladder = Ladder(policy, inspect, make)
    passed = send_or_refuse(ladder, ledger, about, folder, sent.client)
    return _outgoing(passed, made[passed.step.batch], sent)


def _outgoing(passed: Passed, of: Outgoing, sent: Observation) -> Outgoing:
    buffers = sent.buffers if passed.skipped else of.result.buffers
    return replace(of, update=passed.candidate.update, result=replace(of.result, buffers=buffers))


def _candidate(
    of: Outgoing, step: Step, sent: Observation, data: ClientData, context: ProtectContext
) -> Candidate:
    update, buffers = of.update, of.result.buffers
    if step.skips:
        update = {name: torch.zeros_like(value) for name, value in update.items()}
        buffers = sent.buffers
    elif len(step.chain):
        update = step.chain.protect(update, {}, apart(context, step))
    return Candidate(
        update=update,
        buffers=buffers,
        examples=of.result.trained_on(data.images),
        labels=data.labels[of.result.used],
        batch_size=of.batch_size,
    )


def apart(context: ProtectContext, step: Step) -> ProtectContext:
    """Return a context whose secrets are none that the run's own defenses drew."""
    if context.seed is None:
        return ProtectContext(round=context.round)
    words = context.stream(f"guard {step.name}").words(4)
    seed = sum(int(word) << (64 * place) for place, word in enumerate(words))
    return ProtectContext(round=context.round, seed=seed)


def sent_to(
    client: str,
    server_round: int,
    received: Tensors,
    update: Tensors,
    declaration: ClientDeclaration,
) -> Observation:
    """Return what the server holds of a client before its reply.

    Parameters
    ----------
    received
        Parameters and buffers that the server sent.
    update
        Names the parameters.
    """
    return Observation(
        round=max(1, server_round),
        client=client,
        parameters={name: received[name].clone() for name in update},
        update={},
        buffers={n: value.clone() for n, value in received.items() if n not in update},
        declaration=declaration,
    )


def _known(data: ClientData) -> Truth:
    """Return all examples of the site, by which a copy is told from chance."""
    return Truth(
        torch.cat([data.images, data.validation_images]),
        torch.cat([data.labels, data.validation_labels]),
    )
