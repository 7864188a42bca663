"""Read the canaries that a consenting client kept, and score them from its uploads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bract.attacks.result import SeedBudget
from bract.attacks.task import evidence_for
from bract.audit.captures import Capture
from bract.audit.observations import Observations
from bract.audit.questions.epsilon.bound import Array, Flags
from bract.config.client_names import check_name
from bract.errors import BractError, one_line
from bract.inputs.base import input_of
from bract.schema import ClientDeclaration
from bract.updates.canaries import canary_directions, canary_projections
from bract.updates.update import flatten

CANARIES = "canaries.safetensors"
"""In a client's truth folder; see `bract.client.canaries`."""

KINDS = ("mislabelled", "random", "crafted", "update")


@dataclass(frozen=True)
class Coins:
    """A client's canaries: the coins, and the records where they are records.

    Attributes
    ----------
    included
        bool ``(m,)``, of canary updates ``(rounds, m)``.
    """

    kind: str
    included: Tensor
    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Projections:
    """Scores of the signs of canary updates, for every captured round and direction.

    Attributes
    ----------
    plain, differences
        Inner products of a direction with the round's update, and with what changed since the
        upload before, ``(m,)``.
    cosines
        Cosines of a direction and the round's update, ``(m,)``.
    last
        Cosines of a direction and what the last captured global model has gained on the first:
        what is seen without any upload. ``(k,)``, of the k first of the m: rounds before the last.
    """

    plain: Array
    differences: Array
    included: Flags
    cosines: Array
    last: Array
    rounds: int


def canaries_file(folder: Path, client: str) -> Path:
    """Return where the canaries of a client are."""
    return folder / check_name(client) / CANARIES


def load_coins(folder: Path, client: str, declaration: ClientDeclaration) -> Coins:
    """Read and check one client's canaries.

    Raises
    ------
    BractError
        In one line, if it took no part or the file is not readable.
    """
    path = canaries_file(folder, client)
    if not path.is_file():
        raise BractError(
            f"{path}: not there, so the client's canaries took no part; it includes them where its "
            "policy sets canaries, its truth-dir is set and the run has canaries.count",
            code="truth-lacking",
        )
    try:
        with safe_open(str(path), framework="pt") as file:
            kind = (file.metadata() or {}).get("kind", "")
            held = {name: file.get_tensor(name) for name in set(file.keys())}
        included = held["included"].bool()
        if kind not in KINDS or included.dim() != (2 if kind == "update" else 1):
            raise BractError(
                f"{kind or 'no kind'} with coins {tuple(included.shape)}", code="truth-unusable"
            )
        if kind == "update":
            return Coins(kind, included, torch.empty(0), torch.empty(0, dtype=torch.int64))
        truth = input_of(declaration).read(held, declaration)
        if included.shape != truth.labels.shape:
            raise BractError(
                f"{len(included)} coins for {len(truth.labels)} records", code="truth-unusable"
            )
    except (OSError, KeyError, TypeError, ValueError, BractError, SafetensorError) as error:
        raise BractError(
            f"{path}: not readable ({one_line(error, 200)})", code="truth-unusable"
        ) from error
    return Coins(kind, included, truth.images, truth.labels)


def project(seen: Observations, captures: Sequence[Capture], coins: Coins) -> Projections:
    """Score the signs of one client's canary updates in its captured rounds.

    Raises
    ------
    BractError
        If no captured round has coins, or an upload cannot be read.
    """
    count, seed = coins.included.shape[1], seen.config.seed
    scores: list[NDArray[np.float64]] = []
    changed: list[NDArray[np.float64]] = []
    cosines: list[NDArray[np.float64]] = []
    flags = []
    before: Tensor | None = None
    chosen = sorted(
        (c for c in captures if 1 <= c.round <= len(coins.included)), key=lambda c: c.round
    )
    for capture in chosen:
        vector = _read(seen, capture)

        def of(number: int, what: Tensor, capture: Capture = capture) -> Array:
            directions = canary_directions(
                what.numel(), count, seed=seed, client=capture.client, number=number
            )
            found: Array = canary_projections(directions, what, count).numpy()
            return found

        own = coins.included[capture.round - 1].numpy()
        scores.append(of(capture.round, vector))
        changed.append(of(capture.round, vector if before is None else vector - before))
        cosines.append(scores[-1] / max(float(vector.norm()), 1e-30))
        flags.append(own)
        before = vector
    if not flags:
        raise BractError("no captured round has canary updates", code="capture-lacks")
    return Projections(
        np.concatenate(scores),
        np.concatenate(changed),
        np.concatenate(flags),
        np.concatenate(cosines),
        _of_last(seen, chosen, count),
        len(flags),
    )


def _of_last(seen: Observations, captures: Sequence[Capture], count: int) -> Array:
    """Return the cosines of directions and the change of the global model over all rounds."""
    first, last = seen.open(captures[0]), seen.open(captures[-1])
    vector = flatten(
        {
            name: (first.parameters[name] - last.parameters[name]).to(torch.float64)
            if name in first.parameters and name in last.parameters
            else torch.zeros_like(value, dtype=torch.float64)
            for name, value in first.update.items()
        }
    )
    norm = float(vector.norm())
    found: list[NDArray[np.float64]] = [np.empty(0)]
    for capture in captures:
        if capture.round < last.round and norm > 0.0:
            directions = canary_directions(
                vector.numel(),
                count,
                seed=seen.config.seed,
                client=capture.client,
                number=capture.round,
            )
            found.append(canary_projections(directions, vector, count).numpy() / norm)
    return np.concatenate(found)


def _read(seen: Observations, capture: Capture) -> Tensor:
    """Return the update as the tier reads it, in the order of what the client sent."""
    observation = seen.open(capture)
    evidence = evidence_for(
        observation,
        seen.tier_of(capture),
        seen.history(capture),
        weak_seeds=SeedBudget(candidates=seen.request.weak_seeds),
    )
    scale = observation.law.to_gradient
    read = {
        name: evidence.target[name].to(torch.float64) / scale if name in evidence.target else value
        for name, value in observation.update.items()
    }
    return flatten({name: value.to(torch.float64) for name, value in read.items()})
