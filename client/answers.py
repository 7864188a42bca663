"""A site's record of answers: no message gets a second draw of noise, and totals hold.

A server that asks for the same round again and again averages noise away; one that asks for a score
again and again reads the images behind it. So each kind of message is answered once a round, rounds
only go forward, and what was answered is kept: per run (Flower's run id and the federation's name)
and, since a new run id costs a server nothing, in totals over all runs of the site.

The same message once more, because its reply was lost, gets the very same bytes again: that gives
the server no new information, whereas a reply computed anew would hold other noise. The last reply
of each kind is kept for that in ``state-dir``. Without that folder the record lives as long as the
SuperNode, and a repeated message is refused; two at once may both be answered, since each has a
process of its own and takes the record from before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from flwr.app import RecordDict

from bract.client.accounting import Mechanism, total_epsilon
from bract.client.answered import FIX, WHAT, Answered, Request, Run
from bract.client.guard_policy import GuardPolicy
from bract.client.policy import PolicyError, SitePolicy
from bract.client.private import ContextTexts
from bract.client.replies import pieces, unpack
from bract.client.site import UNNAMED
from bract.disk import LockedRecord, locked, read_private
from bract.disk.files import write_pieces

RECORD = "bract.answered"
"""Name of the record in Flower's client-side ``context.state``, where there is no folder."""

_log = logging.getLogger(__name__)


class Answers:
    """One site's record of its answers.

    Parameters
    ----------
    record
        ``context.state`` of the running message.
    directory
        The site's own folder (``state-dir``), or None.
    site
        Name of the site, which names the files.
    policy
        The site's policy.
    """

    def __init__(
        self, record: RecordDict, *, directory: Path | None, site: str, policy: SitePolicy
    ) -> None:
        self._directory = directory
        self._policy = policy
        self._name = plain_name(site)
        self._record = LockedRecord(
            Answered,
            None if directory is None else directory / f"{self._name}-answered.json",
            ContextTexts(record, RECORD),
            "answered",
            what=WHAT,
            fix=FIX,
            adopt=self._adopt,
        )
        if directory is None and policy.needs_record:
            raise PolicyError(
                f"this site's policy sets {policy.needs_record}, which needs a record that "
                "outlives a restart; set state-dir in the node config"
            )

    def admit(
        self, request: Request, mechanism: Mechanism | None = None, *, charged: bool = True
    ) -> RecordDict | None:
        """Refuse a message that must not be answered.

        Parameters
        ----------
        mechanism
            The noise on the update that a ``train`` message asks for; None where it has none.
        charged
            False where the noise is not known yet, and `charge` counts it.

        Returns
        -------
        RecordDict or None
            The reply of before, where this is the last message of its kind once more.

        Raises
        ------
        PolicyError
            If the round was answered, is not declared, or a limit is reached.
        """
        answered = self._record.load()
        if request.key not in answered.runs:
            _log.info(
                "run %d is given %s; a policy file changes that (policy in the node config)",
                request.run,
                self._policy.caps(request.last_round),
            )
            self._warn(self._policy)
        last = answered.last(request)
        if last is not None and last.digest == request.digest and request.once:
            kept = self._kept(request)
            if kept is not None:
                _log.warning("%s: the same message again; it gets the same reply", request.kind)
                return kept
        self._check(answered, request)
        if charged:
            self._check_epsilon(answered, request, mechanism)
        return None

    def commit(
        self, request: Request, mechanism: Mechanism | None = None, *, charged: bool = True
    ) -> None:
        """Count a message as answered, before this site's data is touched for it.

        Whatever becomes of the answer then costs its round: an error is an answer, too.

        Raises
        ------
        PolicyError
            If the message was answered in the meantime.
        BractError
            If the record cannot be written.
        """
        with self._record.changing() as answered:
            self._check(answered, request)
            if charged:
                self._check_epsilon(answered, request, mechanism)
            answered.add(request)
            if charged:
                answered.charge(request, mechanism)

    def commit_scores(self, request: Request) -> None:
        """Count the scores in an app's answer to a query; one that names no round takes the next.

        Raises
        ------
        PolicyError
            If the round has had scores of this kind, is not declared, or a limit is reached.
        """
        with self._record.changing() as answered:
            if request.server_round is None:
                last = answered.last(request)
                request = replace(request, server_round=1 if last is None else last.round + 1)
            self._check(answered, request)
            answered.add(request)

    def charge(
        self, request: Request, mechanism: Mechanism | None, *, limited: bool = True
    ) -> None:
        """Count the noise of an update whose message `commit` counted without it.

        Parameters
        ----------
        limited
            False counts it even beyond ``max_epsilon``: for an update that failed.

        Raises
        ------
        PolicyError
            If the site would have spent more than its policy's ``max_epsilon``.
        """
        with self._record.changing() as answered:
            if limited:
                self._check_epsilon(answered, request, mechanism)
            answered.charge(request, mechanism)

    def keep(self, request: Request, reply: RecordDict) -> None:
        """Keep the reply of a message that was counted, for the same message once more."""
        path = self._reply_path(request.kind)
        if path is not None:
            kept = list(pieces(reply, f"{request.key}/{request.digest}"))
            write_pieces(path, kept, private=True)

    def note_start(self, request: Request) -> None:
        """Note that this site has compared the model that the run began with."""
        with self._record.changing() as answered:
            run = answered.runs.setdefault(request.key, Run(config=request.config))
            run.kept, run.start_known = request.kept, True

    def knows_start(self, request: Request) -> bool:
        """Return whether this site compared the start of the request's run, or of one it resumes.

        A resumed run has another id, and the same configuration but for `FREE_ON_RESUME`.
        """
        return any(
            run.start_known and run.kept == request.kept
            for run in self._record.load().runs.values()
        )

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Let one update of the site at a time pass its guard.

        An update counts as stopped until it has passed. One that comes at the same time is not to
        be refused for that, so it waits, and its attacks are left their time of the processor.
        Without a folder each process has a record of its own.
        """
        if self._directory is None:
            yield
            return
        with locked(self._directory / f".{self._name}-guarding.lock"):
            yield

    def check_guard(self, request: Request, guard: GuardPolicy) -> None:
        """Refuse a training message once the guard has stopped as many updates as it may.

        It waits for the update that the guard is at, since that counts as stopped until then.

        Raises
        ------
        PolicyError
            Its text stays at the site: what the guard stopped follows from the data.
        """
        with self.guarding():
            answered = self._record.load()
        _check_stops(guard, request, answered.stops)
        if self._policy.guard is None and request.key not in answered.runs:
            self._warn(guard)  # the app's own, of which the policy says nothing

    def begin_guard(self, request: Request, guard: GuardPolicy) -> int:
        """Return the step of the ladder to begin at: that of the run's last update.

        It is the highest step, whatever the update, once the guard has climbed as often as it may.
        The update counts as stopped, and as a climb where it can be one; `end_guard` takes back
        what it was not. Call both within `guarding`.

        Raises
        ------
        PolicyError
            As `check_guard`: updates since then share the bound.
        """
        with self._record.changing() as answered:
            _check_stops(guard, request, answered.stops)
            answered.stops += 1
            if guard.max_climbs is not None and answered.climbs >= guard.max_climbs:
                return guard.highest
            run = answered.runs.get(request.key)
            level = min(0 if run is None else run.guard, guard.highest)
            answered.climbs += level < guard.highest
            return level

    def end_guard(
        self, request: Request, guard: GuardPolicy, begun: int, ended: int, *, stopped: bool
    ) -> None:
        """Note the step of an update that `begin_guard` counted, and if nothing of it left."""
        with self._record.changing() as answered:
            run = answered.runs.setdefault(request.key, Run(config=request.config))
            run.guard = max(run.guard, ended)
            answered.stops -= not stopped
            climbed = ended > begun and not stopped
            answered.climbs -= begun < guard.highest and not climbed

    def epsilon(self) -> float:
        """Return what all updates that had a guarantee spent together, at the policy's delta."""
        return total_epsilon(self._record.load().spent(), self._policy.delta)

    def _warn(self, policy: SitePolicy | GuardPolicy) -> None:
        for caution in policy.cautions(recorded=self._directory is not None):
            _log.warning("this site's policy: %s", caution)

    def _check(self, answered: Answered, request: Request) -> None:
        policy, kind, number = self._policy, request.kind, request.server_round
        # By Flower's run id alone: the federation's name is part of the configuration.
        if answered.configurations(request) - {(request.key, request.config)}:
            raise PolicyError(
                f"run {request.run} has another configuration than when this site first answered "
                "it; a run keeps its configuration, start a new one"
            )
        last = answered.last(request)
        if number is None and request.once and policy.max_rounds_per_run is None:
            raise PolicyError(
                f"a {kind} message names no round (server-round in its config, an integer), so a "
                "repeated one is not recognised; let the strategy send it, as Flower's own do, or "
                "set max_rounds_per_run in the site's policy"
            )
        first = int(request.trains)
        if number is None and request.once:
            # It is the next round's, so that no run gets more answers than it declares.
            number = first if last is None else last.round + 1
        if number is not None and request.once and last is not None and number <= last.round:
            raise PolicyError(
                f"{kind} of round {number} was asked for, but round {last.round} of this run was "
                "answered; a second answer would let the server average noise away. Go on with "
                f"round {last.round + 1}, or start a new run (bract run --resume)"
            )
        if (
            number is not None
            and request.once
            and (number < first or (request.last_round is not None and number > request.last_round))
        ):
            raise PolicyError(
                f"{kind} of round {number} was asked for, the run declares rounds {first} to "
                f"{request.last_round}; raise rounds in the federation's configuration"
            )
        for found, limit, where in (
            (
                answered.count_in_run(request),
                policy.most_rounds(request.last_round),
                "max_rounds_per_run",
            ),
            (answered.count_in_all(request), policy.max_rounds_total, "max_rounds_total"),
        ):
            if limit is not None and found >= limit:
                undeclared = request.last_round is None and policy.max_rounds_per_run is None
                declare = "declare num-server-rounds in the run config, or "
                raise PolicyError(
                    f"this site answered {found} {kind} messages, and its policy allows {where}: "
                    f"{limit}; {declare if undeclared else ''}ask the site"
                )

    def _check_epsilon(
        self, answered: Answered, request: Request, mechanism: Mechanism | None
    ) -> None:
        limit = self._policy.max_epsilon
        if limit is None or not request.trains:
            return
        if mechanism is None:
            raise PolicyError(
                f"this site's policy sets max_epsilon: {limit}, but the run's updates have no "
                "guarantee; end its defenses with noise that has clip, and std (gaussian) or "
                "epsilon, and put what needs the model, images or labels before it"
            )
        if answered.without_guarantee:
            _log.warning(
                "%d earlier updates of this site left without a guarantee; max_epsilon counts "
                "the others",
                answered.without_guarantee,
            )
        counts = answered.spent()
        counts[mechanism] = counts.get(mechanism, 0) + 1
        spent = total_epsilon(counts, self._policy.delta)
        if spent > limit:
            raise PolicyError(
                f"with this update the site would have spent epsilon {spent:.4g} at delta "
                f"{self._policy.delta:g}, and its policy allows max_epsilon: {limit:g}; stronger "
                "noise allows more rounds"
            )

    def _kept(self, request: Request) -> RecordDict | None:
        path = self._reply_path(request.kind)
        data = None if path is None else read_private(path)
        return None if data is None else unpack(data, f"{request.key}/{request.digest}")

    def _reply_path(self, kind: str) -> Path | None:
        if self._directory is None:
            return None
        return self._directory / f"{self._name}-{plain_name(kind)}.reply"

    def _adopt(self, answered: Answered) -> list[Path]:
        """Add what releases before 0.6 recorded of this site under another name.

        `DefenseMod` named the record by the partition alone, or by the node, whose id is another
        one after each restart.
        """
        folder = self._directory
        if folder is None:
            return []
        partition = re.fullmatch(r"client-(\d+)", self._name)
        pattern = "node-*" if self._name == UNNAMED else partition and partition[1]
        found = sorted(folder.glob(f"{pattern}-answered.json")) if pattern else []
        for path in found:
            data = read_private(path, links=False)
            if data is not None:
                answered.add_all(Answered.parse(data, source=str(path)))
        return found


def _check_stops(guard: GuardPolicy, request: Request, stops: int) -> None:
    if request.trains and guard.max_stops is not None and stops >= guard.max_stops:
        raise PolicyError(
            f"the guard of this site stopped {stops} updates, and its policy allows "
            f"guard.max_stops: {guard.max_stops}; raise it to take part again"
        )


def plain_name(name: str) -> str:
    """Return a site's or a message's name as a part of a file's name, in no other folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)
