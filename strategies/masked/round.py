"""One masked sum, the server's part: gather keys and shares before training, unmask after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from bract.config.encryption import EncryptionConfig
from bract.errors import BractError, RunFailedError
from bract.masks.errors import LostSumError
from bract.masks.layout import Words
from bract.masks.party import SHARE_BYTES, Dealt, seat_context
from bract.masks.roster import Roster, Seat
from bract.masks.unmasking import Unmasked, rebuild, unmask
from bract.paillier.exchange import SEALED_BYTES, Identity, is_proven, make_identity
from bract.protocol.keyexchange import CHALLENGE_KEY, unproven
from bract.protocol.masking import (
    ADVERTISE_TYPE,
    AGREE_TYPE,
    OPEN_TYPE,
    SHARE_TYPE,
    STREAMS,
    UNMASK_TYPE,
    Advert,
    MaskedUpdate,
    mask_layout,
    masking,
    read_by_node,
    read_dealt,
    read_refused,
    write_by_node,
    write_parcels,
    write_roster,
    write_survivors,
)
from bract.protocol.node_names import ClientNames
from bract.protocol.records import CONFIG, ROUND_KEY, Failure, who_failed
from bract.strategies.encrypted.transport import Transport, unlisted

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_ATTEMPTS = 4
"""How often keys are gathered in one round: each time without those that failed before."""


class MaskedRound:
    """One round's masked sum.

    Parameters
    ----------
    config
        How updates are masked.
    transport
        How clients are reached.
    run
        Identity of the run (`bract.config.agreed.AgreedRun`), which every client computes too.
    instructions
        The config record that every message of the round carries, the round among it.
    names
        Whose names are whose.
    weigh
        Turns the clients' numbers of examples into their integer weights.

    Attributes
    ----------
    roster
        The clients of the sum.
    ready
        Those of them that hold shares, and are asked to train.
    failures
        Who was left out before training, and why.
    """

    def __init__(
        self,
        config: EncryptionConfig,
        transport: Transport,
        run: str,
        instructions: ConfigRecord,
        names: ClientNames,
        weigh: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        self.config = config
        self._transport = transport
        self._run = run
        self._instructions = instructions
        self._names = names
        self._weigh = weigh
        self._roster: Roster | None = None
        self._dealt: dict[int, Dealt] = {}
        self.ready: tuple[int, ...] = ()
        self.failures: list[Failure] = []

    @property
    def roster(self) -> Roster:
        """The clients of the sum."""
        assert self._roster is not None, "no keys were gathered"
        return self._roster

    @property
    def number(self) -> int:
        """The round."""
        number = self._instructions[ROUND_KEY]
        assert isinstance(number, int)
        return number

    def gather(self, nodes: Collection[int]) -> None:
        """Agree on the clients of the sum, and have them share the seeds of their masks.

        A client that does not share its seeds, or whose shares are wrong, is left out and the
        others begin anew: nothing was trained yet.

        Raises
        ------
        RunFailedError
            If too few clients are left for a sum.
        """
        left, cause = set(nodes), ""
        for _ in range(_ATTEMPTS):
            before = set(left)
            seats = self._advertised(left)
            left, known = set(seats), len(self.failures)
            if len(left) >= 3 and self._share(seats, left) and self._open(left):
                return
            keys = {self._names.of(node): seat.identity for node, seat in seats.items()}
            listed = bool(self.config.identities)
            cause = cause or unlisted(self.failures[known:], keys, listed=listed)
            if left == before:
                break
        who = who_failed(self.failures)
        raise RunFailedError(
            f"round {self.number}: {len(left)} clients are too few for a masked sum, which needs 3 "
            f"({who or 'too few are connected'}){cause}",
            code="clients-missing",
        )

    def unmask(self, updates: Mapping[int, MaskedUpdate]) -> tuple[dict[str, Words], list[Failure]]:
        """Return the sums of the updates, and who gave away wrong shares.

        Parameters
        ----------
        updates
            By node; all of one form.

        Raises
        ------
        LostSumError
            If the masks cannot be taken off.
        """
        survivors = tuple(sorted(updates))
        before = len(self.failures)
        revealed = self._revealed(survivors)
        # All of one form, the message that they answer among it.
        task = bytes.fromhex(next(iter(updates.values())).task)
        try:
            seeds = rebuild(self.roster, self._dealt, survivors, revealed, task)
        except LostSumError as error:
            why = who_failed(self.failures[before:])
            if error.node is not None or not why:
                raise
            raise LostSumError(f"{error} ({why})") from error
        wrong = [
            self._failure(helper, f"gave a wrong share of {self._names.of(owner)}'s seed")
            for helper, owner in seeds.wrong.items()
        ]
        return self._sums(list(updates.values()), seeds), wrong

    def _advertised(self, nodes: Collection[int]) -> dict[int, Seat]:
        """Ask for keys; return the seats of who sent usable ones, weights by examples."""
        challenge = make_identity()
        asked = ConfigRecord({**self._instructions, CHALLENGE_KEY: challenge.public.hex()})
        contents = dict.fromkeys(nodes, RecordDict({CONFIG: asked}))
        adverts = self._ask(contents, ADVERTISE_TYPE, Advert.read)
        allowed, seen = set(self.config.identities), set[bytes]()
        for node, advert in sorted(adverts.items()):
            problem = None
            if allowed and advert.identity.hex() not in allowed:
                problem = (
                    f"has the identity {advert.identity.hex()}, which is not in "
                    "encryption.identities; add it, or set identity-key in its node config"
                )
            elif not self._is_proven(node, advert, challenge):
                problem = unproven(advert.identity)
            elif advert.identity in seen:
                problem = f"has the identity {advert.identity.hex()} of another client"
            elif {advert.box_key, advert.mask_key} & seen:
                problem = "has a key of another client"
            if problem is not None:
                # Keys that a client does not prove are not taken from those that do.
                self._fail(node, problem)
                del adverts[node]
                continue
            seen |= {advert.identity, advert.box_key, advert.mask_key}
        if not adverts:
            return {}
        with masking():
            weights = self._weigh([adverts[node].examples for node in sorted(adverts)])
        return {
            node: Seat(node, a.identity, a.box_key, a.mask_key, weight)
            for (node, a), weight in zip(sorted(adverts.items()), weights, strict=True)
        }

    def _is_proven(self, node: int, advert: Advert, challenge: Identity) -> bool:
        keys = [advert.identity, advert.box_key, advert.mask_key]
        context = seat_context(self._run, self.number, node)
        return is_proven(advert.proof, keys, challenge, context)

    def _share(self, seats: Mapping[int, Seat], left: set[int]) -> bool:
        """Send the roster and keep what each client shares; drop from ``left`` who does not."""
        neighbours, threshold = self.config.mask_plan(len(seats))
        with masking():
            roster = Roster(self._run, self.number, threshold, neighbours, tuple(seats.values()))
        dealt = self._ask(dict.fromkeys(seats, write_roster(roster)), SHARE_TYPE, read_dealt)
        for node, found in tuple(dealt.items()):
            if set(found.parcels) != set(roster.holders_of(node)):
                self._fail(node, "shared its seeds with others than its neighbours")
                del dealt[node]
        left &= set(dealt)
        self._roster, self._dealt = roster, dealt
        return len(dealt) == len(seats)

    def _open(self, left: set[int]) -> bool:
        """Deliver the shares; drop from ``left`` whose shares too many clients call wrong.

        A client that does not answer has shared its seeds, so it drops out like one that does not
        answer with an update.
        """
        roster = self.roster
        contents = {
            node: write_parcels(
                {n: self._dealt[n].parcels[node] for n in roster.neighbours_of(node)}
            )
            for node in roster.by_node
        }
        refused = self._ask(contents, OPEN_TYPE, read_refused)
        holding = dict.fromkeys(roster.by_node, 1)
        for node, wrong in refused.items():
            for owner in roster.neighbours_of(node):
                holding[owner] += owner not in wrong
        for owner, holders in holding.items():
            complaints = {n: w[owner] for n, w in refused.items() if owner in w}
            for node, why in complaints.items():
                _log.error(
                    "round %d: %s refused the shares of %s: %s",
                    self.number,
                    self._names.of(node),
                    self._names.of(owner),
                    why,
                )
            if complaints and holders < roster.threshold:
                who = ", ".join(self._names.of(node) for node in complaints)
                self._fail(owner, f"sent wrong shares of its seeds to {who}")
                left.discard(owner)
        self.ready = tuple(sorted(set(refused) & left))
        return left == set(roster.by_node)

    def _revealed(self, survivors: tuple[int, ...]) -> dict[int, dict[int, bytes]]:
        named = write_survivors(survivors)
        if not self.config.consistency:
            return self._ask(dict.fromkeys(survivors, named), UNMASK_TYPE, _shares)
        sealed = self._ask(dict.fromkeys(survivors, named), AGREE_TYPE, _seals)
        contents = {
            node: write_by_node({s: boxes[node] for s, boxes in sealed.items() if node in boxes})
            for node in sealed
        }
        return self._ask(contents, UNMASK_TYPE, _shares)

    def _sums(self, updates: Sequence[MaskedUpdate], seeds: Unmasked) -> dict[str, Words]:
        sums = {}
        for part in updates[0].parts:
            shapes = updates[0].shapes[part]
            layout = mask_layout(self.config, part, sum(_size(shape) for _, shape in shapes))
            total = np.zeros(layout.length, dtype=layout.dtype)
            for update in updates:
                with masking():
                    total += layout.from_bytes(update.parts[part])
            unmask(total, seeds, STREAMS[part])
            sums[part] = layout.reduce(total)
        return sums

    def _ask(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        read: Callable[[RecordDict], _T],
    ) -> dict[int, _T]:
        """Ask clients and read their answers; whose cannot be read is noted as failed."""
        messages = {
            node: RecordDict({CONFIG: self._instructions, **content})
            for node, content in contents.items()
        }
        answers, failures = self._transport.ask(messages, kind)
        found = {}
        for node, message in answers.items():
            try:
                found[node] = read(message.content)
            except BractError as error:
                failures.append(self._failure(node, str(error)))
        for failure in failures:
            _log.error("round %d: %s, %s: %s", self.number, failure.client, kind, failure.reason)
        self.failures += failures
        return found

    def _fail(self, node: int, reason: str) -> None:
        self.failures.append(self._failure(node, reason))

    def _failure(self, node: int, reason: str) -> Failure:
        return Failure(node, self._names.of(node), reason)


def _shares(content: RecordDict) -> dict[int, bytes]:
    return read_by_node(content, "shares", SHARE_BYTES)


def _seals(content: RecordDict) -> dict[int, bytes]:
    return read_by_node(content, "seals of who answered", SEALED_BYTES)


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))
