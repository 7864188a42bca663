"""Against AdaDefense: replay the moments and solve every coordinate for its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bract.attacks.adaptive.declared import declared, gradient_scale
from bract.attacks.adaptive.moments import (
    UNIT,
    AdaHyper,
    Moments,
    Slopes,
    StandIn,
    largest_stand_in,
)
from bract.attacks.evidence import ADAPTIVE, Evidence
from bract.attacks.labels import last_layer
from bract.attacks.simulation import images_in
from bract.attacks.victim import victim_of
from bract.errors import BractError
from bract.observation import Observation
from bract.update import Tensors, flatten, unflatten

RESOLVED = 0.1
"""A coordinate counts as resolved where its error bound is at most this share of its size."""

TRUST = tuple(0.05 * 10.0 ** (-k / 4) for k in range(13))
"""Errors, as shares of the resolved coordinates' root mean square, that may halve the trust."""

NOISE = 3e-4
"""Error wanted in what is matched, as a share of it; chosen on images that score nothing."""

ENOUGH = 0.3
"""Fewest coordinates that must carry the match, as a share of the resolved ones; chosen alike."""

_TYPICAL = 0.15
"""Typical error as a share of its bound."""

_BALANCED = 1e-5
_UNBALANCED = 1e-4

_STRANGE = 0.05
_EDGE = 9.0


@dataclass(frozen=True)
class Inversion:
    """The update behind one stand-in, float64 ``(D,)``.

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
        """Where the bound is at most `RESOLVED` of the size; zero is resolved if exact."""
        return self.error <= RESOLVED * self.g.abs()


@ADAPTIVE.register("adadefense")
def undo_adadefense(observation: Observation, history: Sequence[Observation]) -> Evidence:
    """Recover the update behind a stand-in, with the trust that float32 leaves in it.

    The client's moments start at zero and depend on its uploads alone. In its first round the map
    is one-to-one and is inverted in closed form, for epsilon inside the root
    ``g = sign(t) sqrt(epsilon t^2 / (1 - t^2))``. In later rounds the moments are replayed from
    the earlier inversions; the map then rises to a maximum and falls to an asymptote, so up to
    two gradients fit a coordinate. Each is weighed by ``p(g) / |dt/dg|`` with a heavy-tailed
    density ``(1 + x^2)^-2`` around the last round's gradient, whose centre and spread come from
    the unambiguous coordinates of the same tensor. The error bound covers the loser too: odds of a
    thousand to one turned out wrong in several coordinates of a hundred.

    The error bound of a coordinate follows from nine float32 roundings (and from those of the
    weights, where a client returned weights instead of an update), from the bounds on the
    moments, and from the slope of the map; `trust` makes weights of the bounds.

    Where the first captured round cannot be the client's first (a stand-in above that round's
    bound), its gradient is assumed to have been constant until then, for which round 1's formula
    is exact at any round; ``notes`` says so, and the bounds then hold under that assumption only.

    Raises
    ------
    BractError
        If the stand-in exceeds what the declared hyper-parameters allow, if more than 1 in 20
        coordinates fit no gradient, if the last layer's bias tells that nothing was replaced, or
        for ``yogi`` after the first round, whose second moment
        does not determine the gradient.
    """
    hyper = declared(AdaHyper, observation)
    rounds = _rounds_of(observation, history)
    notes: dict[str, Any] = {
        "method": "inverted the stand-in per coordinate",
        "defense": "adadefense",
    }
    missing, assumed = _missing_before(hyper, rounds[0])
    notes["captured_rounds"] = [seen.round for seen in rounds]
    notes["state"] = assumed or "replayed from the client's first round"
    if hyper.variant == "yogi" and len(rounds) + missing > 1:
        raise BractError(
            f"{observation.key}: adadefense variant 'yogi' can be inverted in a client's first "
            "round only; attack that observation"
        )
    size = flatten(observation.update).numel()
    before, previous = Moments.zero(size), None
    for number, seen in enumerate(rounds):
        ahead = missing if number == 0 else 0
        inverted = invert(hyper, seen, before, previous, ahead=ahead)
        before, previous = inverted.after, inverted.g
    resolved = inverted.resolved
    notes["round_of_client"] = before.rounds
    notes["resolved"] = float(resolved.double().mean())
    notes["ambiguous"] = float(inverted.ambiguous.double().mean())
    if not bool((resolved & (inverted.g != 0)).any()):
        raise BractError(
            f"{observation.key}: float32 resolves no coordinate of this stand-in; attack this "
            "client's first round, or give the earlier observations of it"
        )
    _refuse_bare(observation, inverted)
    weights = trust(inverted)
    notes["weight"] = float(weights.mean())
    like = {name: observation.update[name] for name in observation.update}
    wanted = unflatten(inverted.g * gradient_scale(observation), like)
    trusted = unflatten(weights, like)
    return Evidence(
        target={n: wanted[n].to(observation.parameters[n].dtype) for n in observation.parameters},
        weights={n: trusted[n].to(observation.parameters[n].dtype) for n in observation.parameters},
        labels=_label(observation) if before.rounds == 1 else None,
        notes=notes,
    )


def invert(
    hyper: AdaHyper,
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

    Raises
    ------
    BractError
        If the observation does not fit the declared hyper-parameters.
    """
    alpha = hyper.alpha if hyper.alpha_at == "client" else 1.0
    t = flatten(observation.update).cpu().to(torch.float64) / alpha
    number = before.rounds + ahead + 1
    sent_error = _sending_error(observation) / alpha
    largest = largest_stand_in(hyper, number)
    excess = float((t.abs() - sent_error).max())
    if excess > largest * (1.0 + 32 * UNIT):
        raise BractError(
            f"{observation.key}: found a stand-in of {excess:.6g}, but the declared adadefense "
            f"(beta1 {hyper.beta1}, beta2 {hyper.beta2}, alpha {hyper.alpha} at the "
            f"{hyper.alpha_at}) allows {largest:.6g} in a client's round {number}; correct "
            "protocol.defenses or pass the client's earlier observations"
        )
    step = StandIn(hyper, before)
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
    # Towards the asymptote the map flattens faster than its first two derivatives say.
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


def trust(inverted: Inversion) -> Tensor:
    """Weights in [0, 1] from error bounds, ``(D,)``.

    With s the root mean square of the resolved coordinates and q of `TRUST`, the weight is
    ``1 / (1 + (error / (q s))^2)``, and 0 where the bound is no less than half the coordinate and
    above ``q s``. A large q lets noise in, a small one leaves too few coordinates to find an image
    by: q is the largest at which the typical error is `NOISE` of what is matched, but no smaller
    than leaves ``(sum w)^2 / sum w^2`` at `ENOUGH` of the resolved coordinates.
    """
    resolved = inverted.resolved & (inverted.g != 0)
    size = float(inverted.g[resolved].square().mean().sqrt()) if resolved.any() else 0.0
    weights = _weights(inverted, TRUST[0] * size)
    for share in TRUST[1:]:
        kept = weights > 0
        noise = (weights * (_TYPICAL * inverted.error).square())[kept].sum()
        if float(noise) <= NOISE**2 * float((weights * inverted.g.square())[kept].sum()):
            break
        fewer = _weights(inverted, share * size)
        if float(fewer.sum()) ** 2 < ENOUGH * int(resolved.sum()) * float(fewer.square().sum()):
            break
        weights = fewer
    return weights


def _weights(inverted: Inversion, scale: float) -> Tensor:
    weight = 1.0 / (1.0 + (inverted.error / max(scale, 1e-300)).square())
    lost = (inverted.error >= 0.5 * inverted.g.abs()) & (inverted.error > scale)
    return torch.where(lost, 0.0, weight)


def _weigh(
    step: StandIn,
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
    observation: Observation, t: Tensor, step: StandIn, at: Slopes, delta: Tensor
) -> None:
    strange = ((at.value - t).abs() > 2.0 * delta + 64 * UNIT * step.bound) & delta.isfinite()
    share = float(strange.double().mean())
    if share > _STRANGE:
        raise BractError(
            f"{observation.key}: {share:.0%} of the coordinates fit no gradient at the replayed "
            "moments; either the declared adadefense is not the one in use or a round of this "
            "client was not captured; correct protocol.defenses or attack the first round"
        )


def _refuse_bare(observation: Observation, inverted: Inversion) -> None:
    """Refuse what has a cross entropy's balance now and would lose it if it were undone.

    The gradients of the last layer's bias sum to zero, whatever the images.
    """
    try:
        _, bias = last_layer(victim_of(observation))
    except BractError:
        return
    if bias is None:
        return
    raw = observation.update[bias].cpu().to(torch.float64)
    like = observation.update
    undone, error = (unflatten(v, like)[bias] for v in (inverted.g, inverted.error))
    slack = float(error.sum()) + _UNBALANCED * float(undone.abs().sum())
    balanced = float(raw.sum().abs()) <= _BALANCED * float(raw.abs().sum())
    if balanced and float(undone.sum().abs()) > slack:
        raise BractError(
            f"{observation.key}: found {bias} in balance (its sum is {float(raw.sum()):.2g}), as "
            "gradients of a cross entropy are and stand-ins are not; the declared adadefense is "
            "not in use; correct protocol.defenses"
        )


def _constant(hyper: AdaHyper, g: Tensor, error: Tensor, rounds: int) -> Moments:
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


def _sending_error(observation: Observation) -> Tensor:
    """Rounding between the stand-in and what was captured, ``(D,)``.

    A client that returns weights rounds to their grid. This shows where the update is less than
    half the weight: sent minus update is then exact in every coordinate, which it is for a
    directly sent update by chance only.
    """
    update = flatten(observation.update).cpu()
    unit = float(torch.finfo(update.dtype).eps) / 2
    error = update.to(torch.float64).abs() * (unit if unit > UNIT else 0.0)
    if set(observation.update) != set(observation.parameters):
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


def _rounds_of(observation: Observation, history: Sequence[Observation]) -> list[Observation]:
    """Earlier observations and this one, by round, checked to belong together."""
    earlier = sorted(history, key=lambda seen: seen.round)
    for seen in earlier:
        if seen.client != observation.client or seen.round >= observation.round:
            raise BractError(
                f"{observation.key}: {seen.key} is no earlier observation of the same client"
            )
        if seen.protocol.defenses != observation.protocol.defenses:
            raise BractError(
                f"{observation.key}: {seen.key} declares other defenses; the moments cannot be "
                "replayed across a change"
            )
        shapes = {n: v.shape for n, v in seen.update.items()}
        if shapes != {n: v.shape for n, v in observation.update.items()}:
            raise BractError(f"{observation.key}: {seen.key} has other parameters")
    return [*earlier, observation]


def _missing_before(hyper: AdaHyper, first: Observation) -> tuple[int, str]:
    """How many rounds of the client were not captured before the first, and what was assumed."""
    if first.round == 1:
        return 0, ""
    alpha = hyper.alpha if hyper.alpha_at == "client" else 1.0
    t = flatten(first.update).cpu().to(torch.float64) / alpha
    excess = float((t.abs() - _sending_error(first) / alpha).max())
    if excess <= largest_stand_in(hyper, 1) * (1.0 + 32 * UNIT):
        return 0, (
            f"assumed: the client took part first in round {first.round}; no stand-in is above "
            "the bound of a first round"
        )
    return first.round - 1, (
        f"estimated: rounds before {first.round} were not captured; their gradient is taken to "
        "equal that round's, and error bounds do not cover the difference"
    )


def _label(observation: Observation) -> Tensor | None:
    """The label of a single example: the one negative coordinate of the last layer's bias.

    The first round's stand-in has the signs of the gradient (iDLG, Zhao et al. 2020).
    """
    try:
        if images_in(observation.protocol, 2) != 1:
            return None
        _, bias = last_layer(victim_of(observation))
    except BractError:
        return None
    if bias is None:
        return None
    negative = (observation.update[bias] < 0).nonzero().flatten()
    return negative.cpu() if len(negative) == 1 else None
