"""One defended update solved for the client's update, coordinate by coordinate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.adaptive.adadefense.moments import (
    UNIT,
    DefendedUpdate,
    Moments,
    Slopes,
    largest_defended_update,
)
from bract.captures.observation import Observation
from bract.defenses import AdaDefense
from bract.errors import BractError
from bract.updates.update import Tensors, flatten

RESOLVED = 0.1
"""A coordinate counts as resolved where its error bound is at most this share of its size."""

_STRANGE = 0.05

_EDGE = 9.0


@dataclass(frozen=True)
class Inversion:
    """The update behind one defended update, float64 ``(D,)``.

    Attributes
    ----------
    g, error
        The update, and a bound on its error; infinite where float32 does not resolve it.
    ambiguous
        Where two gradients fit; the error bound then covers both.
    """

    g: Tensor
    error: Tensor
    ambiguous: Tensor
    after: Moments

    @property
    def resolved(self) -> Tensor:
        """Coordinates whose bound is at most `RESOLVED` of the size; zero is resolved if exact."""
        return self.error <= RESOLVED * self.g.abs()


def invert(
    hyper: AdaDefense,
    observation: Observation,
    before: Moments,
    previous: Tensor | None = None,
    *,
    ahead: int = 0,
) -> Inversion:
    """Solve one observation for the client's update at known moments.

    Parameters
    ----------
    previous
        The update of the round before, ``(D,)``, which helps to choose a branch.
    ahead
        Rounds that were not captured; the gradient is assumed to have been constant over them.
    """
    alpha = hyper.alpha if hyper.alpha_at == "client" else 1.0
    t = flatten(observation.update).cpu().to(torch.float64) / alpha
    number = before.rounds + ahead + 1
    sent_error = sending_error(observation) / alpha
    largest = largest_defended_update(hyper, number)
    excess = float((t.abs() - sent_error).max())
    if excess > largest * (1.0 + 32 * UNIT):
        raise BractError(
            f"{observation.key}: found a defended update of {excess:.6g}, but the declared "
            "adadefense "
            f"(beta1 {hyper.beta1}, beta2 {hyper.beta2}, alpha {hyper.alpha} at the "
            f"{hyper.alpha_at}) allows {largest:.6g} in a client's round {number}; correct "
            "declaration.defenses or pass the client's earlier observations",
            code="declaration-wrong",
        )
    step = DefendedUpdate(hyper, before)
    solvable = t
    if before.rounds == 0:
        # Saturated coordinates get the least gradient that looks like them.
        top = step.asymptote * (1.0 - 2 * _EDGE * UNIT)
        solvable = t.clamp(-top, top)
    found, valid = step.candidates(solvable)
    misfit = torch.stack([(step.slopes(f).value - t).abs() for f in found])
    misfit = torch.where(valid, misfit, misfit + 1e3)
    pick = misfit.argmin(dim=0)
    both = valid.all(dim=0) & (found[0] != found[1])
    if previous is not None and bool(both.any()):
        pick = _weigh(step, found, both, pick, previous, observation.update)
    g = found.gather(0, pick[None])[0]
    at = step.slopes(g)
    t_error = step.resolution(t, g, at) + sent_error
    error, delta = step.error(at, t_error)
    other = found.gather(0, 1 - pick[None])[0]
    across = (g - other).abs() + step.error(step.slopes(other), t_error)[0]
    error = torch.where(both, torch.maximum(error, across), error)
    # Towards the asymptote the map flattens faster than by its first two derivatives.
    flat = (t.abs() > 0.5 * step.asymptote) & (error > 0.2 * g.abs())
    error = torch.where(flat, float("inf"), error)
    if before.rounds:
        _refuse_misfit(observation, t, step, at, delta)
    else:
        error = torch.where(t.abs() + t_error >= step.asymptote, float("inf"), error)
    after = step.after(t, g, error, t_error)
    if ahead:
        after = _constant(hyper, g, error, number)
    return Inversion(g, error, both, after)


def _weigh(
    step: DefendedUpdate,
    found: Tensor,
    both: Tensor,
    pick: Tensor,
    previous: Tensor,
    layout: Tensors,
) -> Tensor:
    """Choose between branches, ``(D,)`` of 0 and 1."""
    chosen = found.gather(0, pick[None])[0]
    centre, spread = [], []
    split = [value.numel() for value in layout.values()]
    parts = zip(*(torch.split(v, split) for v in (chosen, previous, both)), strict=True)
    for g, last, open_ in parts:
        clear = ~open_
        if not bool(clear.any()):
            clear = torch.ones_like(open_)
        size = float(last[clear].square().sum())
        follow = float((g[clear] * last[clear]).sum()) / size if size else 0.0
        follow = min(max(follow, 0.0), 1.0)
        width = (g[clear] - follow * last[clear]).abs().median()
        centre.append(follow * last)
        spread.append(width.clamp_min(1e-30).expand_as(g) + 0.1 * last.abs())
    middle, width = torch.cat(centre), torch.cat(spread)
    density = torch.stack(
        [
            -2.0 * torch.log1p(((f - middle) / width).square())
            - step.slopes(f).g.abs().clamp_min(1e-300).log()
            for f in found
        ]
    )
    return torch.where(both, density.argmax(dim=0), pick)


def _refuse_misfit(
    observation: Observation, t: Tensor, step: DefendedUpdate, at: Slopes, delta: Tensor
) -> None:
    strange = ((at.value - t).abs() > 2.0 * delta + 64 * UNIT * step.bound) & delta.isfinite()
    share = float(strange.double().mean())
    if share > _STRANGE:
        raise BractError(
            f"{observation.key}: {share:.0%} of the coordinates fit no gradient at the replayed "
            "moments; either the declared adadefense is not the one in use or a round of this "
            "client was not captured; correct declaration.defenses or attack the first round",
            code="declaration-wrong",
        )


def _constant(hyper: AdaDefense, g: Tensor, error: Tensor, rounds: int) -> Moments:
    """Moments after that many rounds with the same gradient."""
    first = 1.0 - hyper.beta1**rounds
    second = float(rounds) if hyper.variant == "adagrad" else 1.0 - hyper.beta2**rounds
    return Moments(
        rounds,
        first * g,
        second * g.square(),
        first * error,
        second * (2 * g.abs() + error) * error,
    )


def sending_error(observation: Observation) -> Tensor:
    """Rounding between the defended update and what was captured, ``(D,)``.

    A client that returns weights rounds to their grid. This shows where the update is less than
    half the weight: sent minus update is then exact in every coordinate, which it is for a
    directly sent update by chance only.
    """
    update = flatten(observation.update).cpu()
    low = update.dtype if observation.rounded is None else getattr(torch, observation.rounded.dtype)
    unit = float(torch.finfo(low).eps) / 2
    error = update.to(torch.float64).abs() * (unit if unit > UNIT else 0.0)
    direct = observation.rounded is not None and observation.rounded.by == "client"
    if direct or set(observation.update) != set(observation.parameters):
        return error
    sent = flatten({n: observation.parameters[n] for n in observation.update}).cpu()
    returned = sent - update
    telling = (update != 0) & (update.abs() < 0.5 * sent.abs())
    exact = sent.to(torch.float64) - update.to(torch.float64) == returned.to(torch.float64)
    if bool(telling.any()) and bool(exact[telling].all()):
        grid = torch.nextafter(returned.abs(), torch.full_like(returned, float("inf")))
        error = (
            error
            + (grid - returned.abs()).to(torch.float64)
            + unit * update.to(torch.float64).abs()
        )
    return error
