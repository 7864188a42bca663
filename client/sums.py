"""A site's record of the masked sums that it helped to unmask.

The difference of two sums of one model, with and without a client, is that client's update. So a
second sum of the same model is refused unless clients, weights and settings are the same; a site
whose policy sets ``min_summed_clients`` refuses sums that can be combined to one that counts as
fewer clients by its weights (`bract.updates.shares.counted`).

A site sees the sums that it is in. Those of the others, without it, it cannot refuse; where all
set ``fixed_members``, each of them does, since every sum is over one set of clients and weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

import torch
from flwr.app import RecordDict
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from bract.client.policy import PolicyError, SitePolicy
from bract.client.private import ContextTexts
from bract.disk import LockedRecord
from bract.errors import one_line
from bract.updates.shares import counted

RECORD = "bract.sums"
"""Name of the record in Flower's client-side ``context.state``, where there is no folder."""


class Sum(BaseModel):
    """One sum: digests of its roster, model and configuration, and the place of its weights."""

    model_config = ConfigDict(extra="forbid", strict=True)
    roster: str
    model: str
    config: str
    weights: int = Field(ge=0)


class _Sums(BaseModel):
    """All sums; ``weights`` holds each sum's clients and weights once, in lowest terms.

    Under ``fixed_members`` those too for which this site has masked an update.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: Literal[1] = 1
    weights: list[dict[str, int]] = Field(default_factory=list)
    sums: list[Sum] = Field(default_factory=list)


class Sums:
    """The masked sums of one site, over all runs.

    Parameters
    ----------
    record
        ``context.state`` of the running message.
    directory
        The site's own folder (``state-dir``), or None.
    site
        Name of the site, which names the file.
    policy
        The site's policy.
    """

    def __init__(
        self, record: RecordDict, *, directory: Path | None, site: str, policy: SitePolicy
    ) -> None:
        self._policy = policy
        self._record = LockedRecord(
            _Sums,
            None if directory is None else directory / f"{site}-sums.json",
            ContextTexts(record, RECORD),
            "sums",
            what="the record of masked sums",
            fix="restore it",
        )

    def check(self, weights: Mapping[str, int], *, masks: bool = False) -> None:
        """Refuse to mask for clients of whose sum this site would not help to take off the masks.

        Parameters
        ----------
        weights
            The integer weight of each client of the sum as planned, as `add` has it.
        masks
            Whether an update is masked next: under ``fixed_members`` these are the members then.

        Raises
        ------
        PolicyError
            If they are other clients or weights than before, or no sum over them, whoever of them
            leaves, is one of before or could be combined with these to that of enough clients.
        """
        found = _lowest_terms(weights)
        with self._record.changing() as known:
            if self._policy.fixed_members:
                self._check_members(known.weights, found)
                if masks and found not in known.weights:
                    known.weights.append(found)
            elif self._policy.bounds_sums and not any(
                _leaves(found, earlier) for earlier in known.weights
            ):
                self._check_groups([*known.weights, found])

    def add(
        self,
        roster: str,
        weights: Mapping[str, int],
        *,
        model: str,
        config: str,
        lost: Collection[str] = (),
    ) -> None:
        """Record a sum before this site helps to unmask it.

        Parameters
        ----------
        roster
            Digest of the sum's roster.
        weights
            The integer weight of each client that is in one sum with this one, by its identity
            where the site pins its peers, else by the server's node id.
        model, config
            Digests of the received model and of the run's configuration.
        lost
            Rosters of sums that the server states it could not unmask. Its word counts only where
            the policy sets no ``min_summed_clients``.

        Raises
        ------
        PolicyError
            If this sum and earlier ones could be combined to that of too few clients.
        """
        found = _lowest_terms(weights)
        with self._record.changing() as known:
            if any(earlier.roster == roster for earlier in known.sums):
                return  # of one roster a client takes one list of survivors, whatever it is sent
            if self._policy.fixed_members:
                self._check_members(known.weights, found)
            strict = self._policy.bounds_sums or self._policy.fixed_members
            for earlier in known.sums:
                same = known.weights[earlier.weights] == found and earlier.config == config
                passed_over = earlier.roster in lost and not strict
                if earlier.model == model and not same and not passed_over:
                    raise PolicyError(
                        "was asked for a second sum of the same model, with other clients, weights "
                        "or settings; the difference of both could be one client's update. Start "
                        "from another model (seed), or go on with the clients of before"
                    )
            if found not in known.weights:
                known.weights.append(found)
            if self._policy.bounds_sums:
                self._check_groups(known.weights)
            place = known.weights.index(found)
            known.sums.append(Sum(roster=roster, model=model, config=config, weights=place))

    def amend(self, roster: str, weights: Mapping[str, int]) -> None:
        """Count more clients in a sum that was added: those of whom it shows later that they are.

        Raises
        ------
        PolicyError
            If it could be combined with the others to that of too few clients then.
        """
        found = _lowest_terms(weights)
        with self._record.changing() as known:
            rows = [found if s.roster == roster else known.weights[s.weights] for s in known.sums]
            known.weights = [row for i, row in enumerate(rows) if row not in rows[:i]]
            if self._policy.bounds_sums:
                self._check_groups(known.weights)
            known.sums = [
                s.model_copy(update={"weights": known.weights.index(row)})
                for s, row in zip(known.sums, rows, strict=True)
            ]

    @staticmethod
    def _check_members(known: Sequence[Mapping[str, int]], found: Mapping[str, int]) -> None:
        for earlier in known:
            if earlier == found:
                continue
            gone, new = sorted(earlier.keys() - found), sorted(found.keys() - earlier)
            how = [f"without {one_line(', '.join(gone), 200)}"] if gone else []
            how += [f"with {one_line(', '.join(new), 200)} besides"] if new else []
            raise PolicyError(
                f"was asked for a sum of {len(found)} clients, "
                f"{' and '.join(how) or 'of other weights'}, and this site's policy sets "
                f"fixed_members: it has masked an update for {len(earlier)} and masks for no "
                "others. Go on with the same clients under the same weights (strategy.weighting: "
                "uniform), or have all sites agree to begin anew with other members and remove "
                "their record of masked sums (NAME-sums.json in state-dir)"
            )

    def _check_groups(self, sums: Sequence[Mapping[str, int]]) -> None:
        least = self._policy.min_summed_clients
        smallest = min(separable(sums), key=lambda group: counted([*group.values()]))
        found = counted([*smallest.values()])
        if found < least:
            raise PolicyError(
                f"was asked for a sum that could be combined with earlier ones to that of "
                f"{len(smallest)} clients, which counts as {float(found):.3g} by its weights, and "
                f"this site's policy sets min_summed_clients: {least}; sum the same clients under "
                f"the same weights, or {least} more or fewer of one weight"
            )


def separable(sums: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Return the smallest groups of clients that no combination of weighted sums can divide.

    Two clients are in one group if their weights have one ratio in all sums: then every linear
    combination holds either both of them or none. So it is a sum over whole groups, and counts as
    no fewer clients (`bract.updates.shares.counted`) than one of them.

    Parameters
    ----------
    sums
        Integer weights by client; one that is not named has weight 0.

    Returns
    -------
    list of dict
        The weights of each group, in the first sum that holds it.
    """
    groups: dict[tuple[Fraction, ...], dict[str, int]] = {}
    for client in sorted({client for weights in sums for client in weights}):
        column = [weights.get(client, 0) for weights in sums]
        first = next(weight for weight in column if weight)
        groups.setdefault(tuple(Fraction(w, first) for w in column), {})[client] = first
    return list(groups.values())


def _leaves(planned: Mapping[str, int], earlier: Mapping[str, int]) -> bool:
    """Return whether an earlier sum is what is left of a planned one if others drop out of it."""
    left = {client: weight for client, weight in planned.items() if client in earlier}
    return left.keys() == earlier.keys() and _lowest_terms(left) == earlier


def model_digest(model: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the parameters that training started from.

    Buffers, and the dtype in which a parameter was sent, change no update and do not count.

    Parameters
    ----------
    model
        The tensors as the server sent them.
    update
        The update, which has the parameters' names and the dtype that they are trained in.
    """
    found = hashlib.sha256()
    for name in sorted(update):
        value = model[name].detach().cpu().to(update[name].dtype)
        # Zero has two signs in floating point, and is one number.
        plain = (value + 0).contiguous()
        found.update(f"{name}:{plain.dtype}:{tuple(plain.shape)}:".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _lowest_terms(weights: Mapping[str, int]) -> dict[str, int]:
    common = math.gcd(*weights.values())
    return {client: weight // common for client, weight in sorted(weights.items())}
