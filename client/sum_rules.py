"""Decide which masked sums a site joins: by its policy, the configuration, and earlier sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bract.client.encrypted.pins import Pins
from bract.client.policy import PolicyError, SitePolicy
from bract.client.sums import Sums
from bract.config import FederationConfig
from bract.errors import BractError, one_line
from bract.masks.party import Party
from bract.masks.roster import Roster, Seat
from bract.paillier.weights import allows
from bract.updates.shares import SMALLEST_SUM, counted, largest_share, sufficient_share

FEWEST = 3
"""Clients of a sum before anyone drops out: of two each knows the other's update."""


@dataclass(frozen=True)
class SumRules:
    """Rules by which one client refuses a round's sum.

    Attributes
    ----------
    session, number
        Identity of the run, and the round that the message names.
    sums
        The record of the sums that this site was in.
    """

    config: FederationConfig
    policy: SitePolicy
    pins: Pins
    sums: Sums
    node_id: int
    session: str
    number: int

    def check_planned(self, party: Party, roster: Roster, *, masks: bool = False) -> None:
        """Refuse, while nothing is masked, a sum that this site would not help to unmask."""
        if self.policy.fixed_members:
            self._check_all_members(roster)
        connected = party.part(roster.by_node)
        if self.policy.fixed_members and connected != set(roster.by_node):
            unproven = ", ".join(str(node) for node in sorted(set(roster.by_node) - connected))
            raise PolicyError(
                f"holds no shares of clients {one_line(unproven, 200)}, whose boxes did not open, "
                "and this site's policy sets fixed_members; nothing was masked in this round"
            )
        seats = [roster.by_node[node] for node in connected]
        self.sums.check(self.weights(seats), masks=masks)

    def _check_all_members(self, roster: Roster) -> None:
        """Refuse a sum over other members than all that this site pins.

        So no sum of fewer is opened first, and one member that comes late binds none of the others.
        """
        own = roster.by_node[self.node_id].identity
        others = {seat.identity for seat in roster.seats} - {own}
        pinned = (self.pins.peers or frozenset()) - {own}  # one file may serve all members
        if others != pinned:
            raise PolicyError(
                f"was asked for a sum of {len(others) + 1} clients, and this site's policy sets "
                f"fixed_members: it masks for all {len(pinned) + 1} whose identities its peers "
                "file pins, itself included, and for no others; nothing was masked in this round"
            )

    def weights(self, seats: Iterable[Seat]) -> dict[str, int]:
        """Return weights by identity where this site pins its peers, else by node id."""
        pinned = self.pins.peers is not None
        return {s.identity.hex() if pinned else str(s.node): s.weight for s in seats}

    def least(self, roster: Roster | None) -> int:
        """Return the fewest clients in a sum: the site's own bound, and the roster's threshold."""
        whole = roster is not None and roster.neighbours >= len(roster.seats) - 1
        threshold = roster.threshold if whole and roster is not None else 2
        return max(self.policy.min_summed_clients, threshold)

    def check_roster(self, roster: Roster) -> None:
        """Refuse a roster of another round or run, or by which one update would show."""
        clients, section = len(roster.seats), self.config.encryption
        if roster.session != self.session:
            raise BractError(
                f"was sent the clients of run {one_line(roster.session, 16)}, this client's is "
                f"{self.session[:16]}: its clients are in another run, or have another "
                "configuration; start them all in one run",
                code="request-refused",
            )
        if roster.number != self.number:
            raise BractError(
                f"was sent the clients of round {roster.number} with a message of round "
                f"{self.number}: masks of another round",
                code="round-mismatch",
            )
        least = max(FEWEST, self.policy.min_summed_clients)
        if clients < least:
            raise BractError(
                f"was asked to join a sum of {clients} clients, and this site joins those of "
                f"{least} or more (min_summed_clients in its policy, and never fewer than "
                f"{FEWEST})",
                code="policy-refused",
            )
        planned = section.mask_plan(clients)
        if (roster.neighbours, roster.threshold) != planned:
            raise BractError(
                f"was asked to share with {roster.neighbours} neighbours and threshold "
                f"{roster.threshold}, the configuration plans {planned[0]} and {planned[1]} for "
                f"{clients} clients",
                code="request-refused",
            )
        holders = min(roster.neighbours, clients - 1) + 1
        if section.consistency and 2 * roster.threshold <= holders:
            raise BractError(
                f"was asked to share with {holders - 1} neighbours and threshold "
                f"{roster.threshold}: a server could name other survivors to one half than to the "
                f"other, and find helpers for both; raise encryption.threshold to "
                f"{holders // 2 + 1}, or leave it out",
                code="request-refused",
            )
        self.pins.check_peers(s.identity for s in roster.seats if s.node != self.node_id)
        if roster.weight > section.max_weight_sum:
            raise BractError(
                f"was sent weights that sum to {roster.weight}, encryption.max_weight_sum is "
                f"{section.max_weight_sum}",
                code="request-refused",
            )
        self.check_weights(roster.seats)
        self.sums.check(self.weights(roster.seats))

    def check_weights(self, seats: Sequence[Seat]) -> None:
        """Refuse a sum that is mostly one client's update, as planned and as it is unmasked."""
        total = sum(seat.weight for seat in seats)
        heaviest = max(seats, key=lambda seat: seat.weight)
        strategy = self.config.strategy
        # FedBoosting, which has no such bound, is never masked.
        most = largest_share(len(seats), getattr(strategy, "max_share", 1.0))
        if strategy.weighting == "uniform":
            most = 1.0 / len(seats)
        if not allows(heaviest.weight, total, most):
            raise BractError(
                f"was sent weight {heaviest.weight} of {total} for client {heaviest.node}, so that "
                f"the sum is mostly its update; strategy.weighting: {strategy.weighting} allows a "
                f"share of {most:.4g}",
                code="request-refused",
            )
        # What the configuration allows is the server's word; this is the site's own bound.
        found, least = counted([seat.weight for seat in seats]), self.policy.least_counted
        if found < least:
            share = sufficient_share(len(seats), least)
            raise PolicyError(
                f"was sent weight {heaviest.weight} of {total} for client {heaviest.node}, so that "
                f"the sum of {len(seats)} counts as {float(found):.3g} clients, and this site "
                f"joins those that count as {least:g} or more (min_summed_clients in its policy; "
                f"{SMALLEST_SUM:g} where it has none); set strategy.weighting: uniform, or "
                f"strategy.max_share: {math.floor(share * 1000) / 1000:g}, or ask the site to "
                "lower min_summed_clients or to leave it out"
            )
