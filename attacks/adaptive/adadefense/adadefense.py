"""Against AdaDefense: replay the moments and solve every coordinate for its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bract.attacks.adaptive.adadefense.inversion import Inversion, invert, sending_error
from bract.attacks.adaptive.adadefense.keyed import expected
from bract.attacks.adaptive.adadefense.moments import (
    UNIT,
    Moments,
    largest_defended_update,
)
from bract.attacks.adaptive.adadefense.trust import trust
from bract.attacks.adaptive.declared import declared
from bract.attacks.problem.client_model import images_in
from bract.attacks.problem.evidence import ADAPTIVE, Evidence, Known
from bract.attacks.problem.target_model import target_model_of
from bract.attacks.solve.labels import last_layer
from bract.captures.observation import Observation
from bract.defenses import AdaDefense
from bract.errors import BractError
from bract.updates.update import flatten, unflatten

_BALANCED = 1e-5
_UNBALANCED = 1e-4


@ADAPTIVE.register("adadefense")
def undo_adadefense(observation: Observation, known: Known) -> Evidence:
    """Recover the update behind a defended update, with the trust that float32 leaves in it.

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

    Where the first captured round cannot be the client's first (a defended update above that
    round's bound), its gradient is assumed to have been constant until then, for which round 1's
    formula is exact at any round; ``notes`` records it, and the bounds then hold under that
    assumption only.

    With secret first updates no coordinate can be solved for: see `bract.attacks.adaptive.
    adadefense.keyed`.

    Raises
    ------
    BractError
        If the defended update exceeds what the declared hyper-parameters allow, if more than 1 in
        20 coordinates fit no gradient, if the last layer's bias shows that nothing was replaced, or
        for ``yogi`` after the first round, whose second moment does not determine the gradient.
    """
    hyper = declared(AdaDefense, observation)
    rounds = rounds_of(observation, known.history)
    if hyper.secret_updates:
        return averaged(observation, hyper, len(rounds))
    notes: dict[str, Any] = {
        "method": "inverted the defended update per coordinate",
        "defense": "adadefense",
    }
    missing, assumed = missing_before(hyper, rounds[0])
    notes["captured_rounds"] = [seen.round for seen in rounds]
    notes["state"] = assumed or "replayed from the client's first round"
    if hyper.variant == "yogi" and len(rounds) + missing > 1:
        raise BractError(
            f"{observation.key}: adadefense variant 'yogi' can be inverted in a client's first "
            "round only; attack that observation",
            code="attack-unsuited",
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
            f"{observation.key}: float32 resolves no coordinate of this defended update; attack "
            "this "
            "client's first round, or give the earlier observations of it",
            code="attack-evidence",
        )
    _refuse_bare(observation, inverted)
    weights = trust(inverted)
    notes["weight"] = float(weights.mean())
    like = {name: observation.update[name] for name in observation.update}
    wanted = unflatten(inverted.g * observation.law.to_gradient, like)
    trusted = unflatten(weights, like)
    errors = unflatten(inverted.error * observation.law.to_gradient, like)
    return Evidence(
        target={n: wanted[n].to(observation.parameters[n].dtype) for n in observation.parameters},
        weights={n: trusted[n].to(observation.parameters[n].dtype) for n in observation.parameters},
        errors={n: errors[n] for n in observation.parameters},
        labels=single_label(observation, flatten(observation.update))
        if before.rounds == 1
        else None,
        notes=notes,
    )


def averaged(observation: Observation, hyper: AdaDefense, rounds: int) -> Evidence:
    """Return how to match an upload of a client with secret first updates."""
    found = expected(observation, hyper, rounds)
    return Evidence(target=found.target, adapt=found.adapt, notes=found.notes)


def _refuse_bare(observation: Observation, inverted: Inversion) -> None:
    """Refuse what has a cross entropy's balance now and would lose it if it were undone.

    The gradients of the last layer's bias sum to zero, whatever the images.
    """
    try:
        _, bias = last_layer(target_model_of(observation))
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
            "gradients of a cross entropy are and defended updates are not; the declared "
            "adadefense is "
            "not in use; correct declaration.defenses",
            code="declaration-wrong",
        )


def rounds_of(observation: Observation, history: Sequence[Observation]) -> list[Observation]:
    """Return earlier observations and this one, by round, checked to belong together."""
    earlier = sorted(history, key=lambda seen: seen.round)
    for seen in earlier:
        if seen.client != observation.client or seen.round >= observation.round:
            raise BractError(
                f"{observation.key}: {seen.key} is no earlier observation of the same client",
                code="attack-unsuited",
            )
        if seen.declaration.defenses != observation.declaration.defenses:
            raise BractError(
                f"{observation.key}: {seen.key} declares other defenses; the moments cannot be "
                "replayed across a change",
                code="attack-unsuited",
            )
        shapes = {n: v.shape for n, v in seen.update.items()}
        if shapes != {n: v.shape for n, v in observation.update.items()}:
            raise BractError(
                f"{observation.key}: {seen.key} has other parameters", code="attack-unsuited"
            )
    return [*earlier, observation]


def missing_before(hyper: AdaDefense, first: Observation) -> tuple[int, str]:
    """Count the rounds not captured before the client's first; record what was assumed of them."""
    if first.round == 1:
        return 0, ""
    alpha = hyper.alpha if hyper.alpha_at == "client" else 1.0
    t = flatten(first.update).cpu().to(torch.float64) / alpha
    excess = float((t.abs() - sending_error(first) / alpha).max())
    if excess <= largest_defended_update(hyper, 1) * (1.0 + 32 * UNIT):
        return 0, (
            f"assumed: the client took part first in round {first.round}; no defended update is "
            "above "
            "the bound of a first round"
        )
    return first.round - 1, (
        f"estimated: rounds before {first.round} were not captured; their gradient is taken to "
        "equal that round's, and error bounds do not cover the difference"
    )


def single_label(observation: Observation, gradient: Tensor) -> Tensor | None:
    """The label of a single example: the one negative coordinate of the last layer's bias.

    That holds for every cross entropy (iDLG, Zhao et al. 2020). In the first round the defended
    update has the signs of the gradient.

    Parameters
    ----------
    gradient
        All coordinates in the order of the update, ``(D,)``, or what has their signs.

    Returns
    -------
    Tensor or None
        int64 ``(1,)``; None for a batch, without such a bias, or with another number of negative
        coordinates.
    """
    try:
        if images_in(observation.declaration, 2) != 1:
            return None
        _, bias = last_layer(target_model_of(observation))
    except BractError:
        return None
    if bias is None:
        return None
    like = {name: observation.update[name] for name in observation.update}
    negative = (unflatten(gradient, like)[bias] < 0).nonzero().flatten()
    return negative.cpu() if len(negative) == 1 else None
