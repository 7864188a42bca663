"""The observations of one audit, as the attacker of its tier reads them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from bract.attacks import Engine
from bract.attacks.problem.public_prior import load_prior
from bract.attacks.task import AttackTask
from bract.audit.allowance import Allowance
from bract.audit.captures import Capture, Captures, Lazy, over_rounds, select
from bract.audit.description.check import check_upload
from bract.audit.observer import CuriousClient
from bract.audit.truth import check_truth, distinct, load_truth, run_truth
from bract.audit.uncaptured import check_at_hand
from bract.captures.observation import Observation
from bract.config import DataConfig, FederationConfig
from bract.config.audit import Tier
from bract.config.config import AuditRequest
from bract.errors import BractError
from bract.inputs import INPUTS, Truth
from bract.inputs.base import input_of
from bract.rundir import RunDirectory
from bract.schema.check import DescriptionCheck, UploadCheck
from bract.schema.description import DESCRIPTION

if TYPE_CHECKING:
    from bract.audit.collusion import Collusion
    from bract.audit.sums import MaskedSums

_log = logging.getLogger(__name__)


class Observations:
    """Chosen captures of a run, with what the attacker and the scorer hold beside them.

    Parameters
    ----------
    run
        A finished or interrupted run.
    request
        What is audited. An unknown client, round or device, a key that cannot be read, or a truth
        that is none of these clients' is an error.

    Attributes
    ----------
    chosen
        Captures under attack, by round; aggregates after single clients.
    allowance
        The time of the whole audit, where it has a budget; None where each attack has its own.
    public
        The generator trained on public images, in the surrogate tier.
    checks
        Checks of the descriptions of single clients' uploads, as far as any was made, by key.
    """

    def __init__(
        self, run: RunDirectory, request: AuditRequest, allowance: Allowance | None = None
    ) -> None:
        self.run, self.request, self.allowance = run, request, allowance
        self.config: FederationConfig = run.config()
        self.device = Engine(device=request.device).torch_device()
        self._collusion: Collusion | None = None
        self.captures = Captures.of_run(run, request.models)
        self.sums: MaskedSums | None = None
        if self.config.encryption.uses_masks and run.aggregates.is_dir():
            from bract.audit.sums import MaskedSums

            self.sums = MaskedSums(run, self.captures, request.key)
        elif request.tier == "colluding" and request.key is not None:
            # What an encrypted run keeps is read with Flower's records; no other audit needs them.
            from bract.audit.collusion import Collusion

            self._collusion = Collusion(run, request.key)
        self.public = None if request.prior is None else load_prior(request.prior)
        if (request.tier == "surrogate") != (self.public is not None):
            raise BractError(
                "the surrogate tier and a prior go together: --tier surrogate --prior FILE; "
                "`bract prior train` makes one",
                code="usage",
            )
        self.observer = None
        if request.observer is not None:
            if request.tier != "oblivious":
                raise BractError(
                    f"audit.observer goes with --tier oblivious, not with {request.tier}: what "
                    "undoes a defense or opens a ciphertext works on one client's update",
                    code="usage",
                )
            self.observer = CuriousClient(run, self.captures, request.observer)
        self.checks: dict[str, DescriptionCheck] = {}
        self.chosen = self._choose()
        self.captures.check_models(self.chosen)
        self.truth_folder = run_truth(request.truth or run.truth, self.chosen)
        if request.truth is not None:
            check_truth(request.truth, self.chosen)

    def _choose(self) -> list[Capture]:
        found = list(self.captures.index)
        if not found:
            check_at_hand(self.config, self.run.root)
        if self.observer is not None:
            found = self.observer.captures()
        summing = self._collusion or self.sums
        if summing is not None and self.observer is None:
            numbers = dict.fromkeys(capture.round for capture in found)
            found += summing.aggregates(self.captures.of_round(r) for r in numbers)
        rounds, clients = self.request.rounds, self.request.clients
        chosen = select(
            found,
            rounds=None if rounds is None else frozenset(rounds),
            clients=None if clients is None else frozenset(clients),
        )
        chosen = over_rounds(chosen, self.request.over_rounds)
        return sorted(chosen, key=lambda c: (c.round, bool(c.members)))

    @cached_property
    def data(self) -> DataConfig | None:
        """Test data that reconstructions are held against; None where none are named.

        Never downloaded: the configuration may be another party's.
        """
        named = self._named_data()
        return None if named is None else named.model_copy(update={"download": False})

    def _named_data(self) -> DataConfig | None:
        if self.run.is_configured:
            return self.config.data
        description = self.run.description()
        if description is None or description.data is None:
            return None
        declared = (c.declaration for c in self.chosen)
        shaped = next((d for d in declared if d.image_shape and d.input in INPUTS), None)
        if shaped is None:
            return description.data
        try:
            return input_of(shaped).fitted(description.data, shaped)
        except BractError as error:
            raise BractError(f"{self.run.root / DESCRIPTION}: {error}", code=error.code) from error

    @property
    def seconds(self) -> float | None:
        """Wall time of the next attack on one observation; None where time is no limit."""
        if self.allowance is not None:
            return round(self.allowance.share, 3)
        return self.request.seconds

    def open(self, capture: Capture) -> Observation:
        """Return what the attacker of this tier sees of an observation."""
        self.captures.check_model(capture)
        if self.observer is not None:
            return self.observer.open(capture)
        summing = self._collusion or self.sums
        if capture.members and summing is not None:
            return summing.aggregate(capture)
        observation = self.captures.load(capture)
        return observation if self._collusion is None else self._collusion.open(observation)

    def check(self, capture: Capture, observation: Observation) -> None:
        """Check the description of one client's upload, once for all questions and attacks."""
        if capture.key in self.checks or capture.members or self.observer is not None:
            return
        earlier = self.history(capture)
        task = AttackTask(
            tier=self.tier_of(capture),
            engine=Engine(device="cpu"),
            history=lambda _: earlier,
            public=self.public,
        )
        truth = load_truth(self.truth_folder, capture)
        found = check_upload(observation, truth, task, earlier=earlier)
        described = self.captures.description
        if described is not None and described.unsimulated and found.state == "open":
            cause = f"no attack simulates what its client does: {described.unsimulated[0]}"
            found = found.model_copy(update={"failing": [*found.failing, cause]})
        self.checks[capture.key] = found

    def check_clients(self, captures: Sequence[Capture]) -> list[UploadCheck]:
        """Check the first upload of each client, for an answer about a whole run."""
        first = {one.client: one for one in reversed(captures) if not one.members}
        found = []
        for capture in first.values():
            try:
                self.check(capture, self.open(capture))
            except BractError as error:
                _log.info("%s: description not checked: %s", capture.key, error)
            if (check := self.checks.get(capture.key)) is not None:
                about = {"round": capture.round, "client": capture.client}
                found.append(UploadCheck.model_validate(check.model_dump() | about))
        return sorted(found, key=lambda check: (check.round, check.client))

    def history(self, capture: Capture) -> Lazy:
        """Return the earlier observations of the same client, by round."""
        return Lazy(self.captures.before(capture), self.open)

    def truth(self, capture: Capture) -> Truth | None:
        """Return what was kept of every round of a capture; None where one of them lacks it."""
        if not capture.earlier:
            return load_truth(self.truth_folder, capture)
        kept = [load_truth(self.truth_folder, one) for one in reversed(capture.rounds)]
        known = [truth for truth in kept if truth is not None]
        return distinct(known) if len(known) == len(kept) else None

    def kept(self, capture: Capture | None = None) -> list[Truth]:
        """Return what any captured client kept, or those that a capture is of, in any round."""
        whose = None if capture is None else _clients(capture)
        index = self.captures.index
        found = (self.truth(one) for one in index if whose is None or _clients(one) <= whose)
        return [truth for truth in found if truth is not None]

    def tier_of(self, *captures: Capture) -> Tier:
        """Return how captures are read; what undoes a defense knows one client's update only."""
        return "oblivious" if any(c.members for c in captures) else self.request.tier


def _clients(capture: Capture) -> set[str]:
    return set(capture.members or (capture.client,))
