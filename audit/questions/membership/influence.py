"""The influence of one client: the final model with its updates on and off.

The server holds all updates of a round, so it can leave one client's out of every round's sum. The
updates of the others stay as they were sent, so nothing is trained again. Records that the client
trained on lose more by that than records that it held out. Few clients' models are held at once,
however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from bract.attacks.membership import LocalModel, global_model, logits_of, losses
from bract.audit.captures import Capture
from bract.audit.global_models import GlobalModels
from bract.audit.observations import Observations
from bract.audit.questions.membership.candidates import Candidates
from bract.audit.questions.membership.score import Array, auc, auc_interval, permuted_chance
from bract.errors import BractError, one_line
from bract.schema.membership import InfluenceScore
from bract.seeds import derive_seed
from bract.updates.update import Tensors

DRAWN = 20_000
"""Coordinates by which the weights of a round's sum are found."""

HELD = 4
"""Clients whose models are held at once: each block of them reads the run's uploads again."""

EXACT = 1e-3
"""Relative residual above which a round's step is no weighted sum of its uploads."""


def influences(
    seen: Observations,
    captures: Sequence[Capture],
    candidates: Mapping[str, Candidates],
    left_out: list[str],
) -> list[InfluenceScore]:
    """Return what each client's updates changed for its candidates in the final model.

    Parameters
    ----------
    captures
        Of single clients.
    candidates
        By client; every attacker that scores them needs members and held-out records.
    left_out
        Takes the rounds and clients that could not be used, and why.
    """
    models = GlobalModels(seen.run, seen.captures)
    numbers = sorted({c.round for c in captures if not c.members})
    try:
        last = next((n for n in reversed(numbers) if models.files(n)), None)
        if last is None:
            left_out.append("a client's influence: no global model after a round was kept")
            return []
        first = next(c for c in captures if c.round == last)
        final = global_model(seen.captures.load(first), dict(models.after(last)))
    except (BractError, RuntimeError, ValueError, KeyError) as error:
        left_out.append(f"a client's influence: {one_line(error, 300)}")
        return []
    rounds = []
    for number in numbers:
        if number <= last:
            try:
                if models.files(number):
                    rounds.append(_Round(seen, models, number))
            except _NoWeightsError as error:
                left_out.append(f"a client's influence, round {number}: {error}")
            except (BractError, RuntimeError, ValueError, KeyError) as error:
                left_out.append(f"a client's influence, round {number}: {one_line(error, 300)}")
    names, found = list(candidates), list[InfluenceScore]()
    for start in range(0, len(names), HELD):
        held = {name: candidates[name] for name in names[start : start + HELD]}
        found += _of_some(final, rounds, held, seen.request.seed, left_out)
    return found


def _of_some(
    final: LocalModel,
    rounds: Sequence[_Round],
    held: Mapping[str, Candidates],
    seed: int,
    left_out: list[str],
) -> list[InfluenceScore]:
    """Return the influence of as many clients as are held at once."""
    off = {client: _Removed(final.update) for client in held}
    for one in rounds:
        try:
            one.leave_out(off)
        except (BractError, RuntimeError, ValueError, KeyError) as error:
            left_out.append(f"a client's influence, round {one.number}: {one_line(error, 300)}")
    found = []
    kind = final.target.declaration.loss
    for client, own in held.items():
        removed = off.pop(client)
        if not removed.rounds:
            continue
        inputs = final.target.normalise(own.images)
        without = final.local | {n: final.local[n] + v for n, v in removed.change.items()}
        on, without_it = (
            losses(logits_of(final.model, state, inputs), own.labels, kind)
            for state in (final.local, without)
        )
        moved = (without_it - on).double().numpy()
        if np.isfinite(moved).all():
            found.append(_scored(client, removed.rounds, moved, own, seed))
        else:
            left_out.append(f"a client's influence, {client}: losses without it are not finite")
    return found


class _Removed:
    """Change of the final model without one client, ``w_off - w_on``, by parameter."""

    def __init__(self, names: Iterable[str]) -> None:
        self.change: Tensors = dict.fromkeys(names, torch.zeros(()))
        self.rounds = list[int]()

    def add(self, number: int, change: Tensors) -> None:
        self.change = {n: value + change[n] for n, value in self.change.items()}
        self.rounds.append(number)


class _Round:
    """A round whose weights are known; its models and updates are read when they are needed.

    Raises
    ------
    _NoWeightsError
        If its sum has no weights.
    """

    def __init__(self, seen: Observations, models: GlobalModels, number: int) -> None:
        self.seen, self.models, self.number = seen, models, number
        captures = [c for c in seen.captures.of_round(number) if not c.members]
        if len(captures) < 2:
            raise _NoWeightsError("one client alone was summed")
        self.captures = captures
        updates = (seen.captures.load(capture).update for capture in captures)
        examples = [capture.declaration.num_examples for capture in captures]
        self.weights = weights_of(self._step(), updates, examples)

    def _step(self) -> Tensors:
        sent = self.seen.captures.load(self.captures[0]).parameters
        after = self.models.after(self.number)
        return {name: value - after[name] for name, value in sent.items()}

    def leave_out(self, off: Mapping[str, _Removed]) -> None:
        """Add what each of these clients' updates did to the sum."""
        total = sum(self.weights)
        mine = [
            (capture, weight)
            for capture, weight in zip(self.captures, self.weights, strict=True)
            if capture.client in off and weight < total
        ]
        if not mine:
            return
        step = self._step()
        for capture, weight in mine:
            update = self.seen.captures.load(capture).update
            off[capture.client].add(self.number, change_without(step, update, weight, total))


class _NoWeightsError(Exception):
    """The uploads of a round do not tell the weights of its sum; the text says why."""


def weights_of(
    step: Tensors, updates: Iterable[Tensors], examples: Sequence[int | None]
) -> list[float]:
    """Return the weights by which a round's step is the sum of updates, server rate included.

    Shares of the declared examples are taken where they explain the step on some coordinates, else
    least squares, where the updates are independent. An update of zeros has no other weight than
    its declared one.

    Parameters
    ----------
    step
        ``w_sent - w_next``, by parameter.
    updates
        Of all clients, one after another.
    examples
        Declared by each.

    Raises
    ------
    _NoWeightsError
        If an upload is not finite, the step is no such sum, or several weights explain it.
    """
    total = sum(value.numel() for value in step.values())
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(total, generator=generator)[:DRAWN]

    def drawn(tensors: Tensors) -> Tensor:
        return torch.cat([tensors[name].flatten() for name in step])[chosen].double()

    rows = torch.stack([drawn(update) for update in updates])
    wanted = drawn(step)
    if not (rows.isfinite().all() and wanted.isfinite().all()):
        raise _NoWeightsError("an upload or the global model is not finite")

    def explain(weights: Tensor) -> bool:
        residual = float((rows.T @ weights - wanted).norm())
        return residual <= EXACT * float(wanted.norm()) and float(weights.sum()) > 0.0

    shares = torch.tensor([float(count or 0) for count in examples], dtype=torch.float64)
    mean = rows.T @ shares
    if shares.min() > 0.0 and float(mean.norm()) > 0.0:
        declared = shares * float(wanted @ mean / mean.square().sum())
        if explain(declared):
            return [float(weight) for weight in declared]
    weights = torch.linalg.lstsq(rows.T, wanted[:, None], driver="gelsd").solution[:, 0]
    if not explain(weights):
        raise _NoWeightsError(
            "the step of the global model is no weighted sum of the captured uploads"
        )
    lengths = rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    if int(torch.linalg.matrix_rank(rows / lengths, rtol=1e-6)) < len(rows):
        raise _NoWeightsError("several weights explain the step of the global model")
    return [float(weight) for weight in weights]


def change_without(step: Tensors, update: Tensors, weight: float, total: float) -> Tensors:
    """Return ``w_off - w_on`` of one round: the others' weights take the place of the client's."""
    scale = total / (total - weight)
    return {n: value - scale * (value - weight * update[n]) for n, value in step.items()}


def _scored(
    client: str, rounds: list[int], moved: Array, candidates: Candidates, seed: int
) -> InfluenceScore:
    inside = candidates.first_round.numpy() > 0
    yes, no = moved[inside], moved[~inside]
    low, high = auc_interval(yes, no)
    return InfluenceScore(
        client=client,
        rounds=rounds,
        members=len(yes),
        non_members=len(no),
        moved_members=float(yes.mean()),
        moved_others=float(no.mean()),
        auc=auc(yes, no),
        auc_low=low,
        auc_high=high,
        chance=permuted_chance([moved], inside, [], seed=derive_seed(seed, client, "influence")),
    )
