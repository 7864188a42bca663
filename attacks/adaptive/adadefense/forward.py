"""Compare AdaDefense's uploads as they were sent with what it would make of a candidate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bract.attacks.adaptive.adadefense.adadefense import (
    averaged,
    missing_before,
    rounds_of,
    single_label,
)
from bract.attacks.adaptive.adadefense.inversion import Inversion, invert
from bract.attacks.adaptive.adadefense.moments import DefendedUpdate, Moments
from bract.attacks.adaptive.declared import declared
from bract.attacks.adaptive.simulated_defense import Simulated
from bract.attacks.problem.client_model import DefendedForward, ForwardModel
from bract.attacks.problem.evidence import FORWARD, Evidence, Known
from bract.attacks.problem.target_model import TargetModel
from bract.captures.observation import Observation
from bract.defenses import AdaDefense
from bract.errors import BractError
from bract.updates.update import Tensors, flatten, unflatten

_CARRIED = "adadefense.carried."
_SECOND = "adadefense.second."
_SMOOTHING = 0.01
"""Mean square of a tensor's gradient, as a share, that its derivative has under the root; chosen
of 1e-12, 0.01, 0.1 and 1 on images that score nothing."""


@dataclass(frozen=True, kw_only=True)
class AdaDefenseClient(DefendedForward):
    """The client of another forward model, its gradient replaced as AdaDefense does.

    With the moments of earlier rounds known, an upload without alpha is ``(a0 + a1 g) / (sqrt(w + c
    g^2) + e)`` in every coordinate (`DefendedUpdate`); a0 and w are among the buffers.

    That is nearly a sign where w is zero: its derivative is zero but for gradients near zero, where
    it is huge. So values are those of the map, and derivatives those of the map with a small
    share of the tensor's mean square added under the root.

    Attributes
    ----------
    scale
        What gradients are divided by to be updates.
    """

    a1: float
    c: float
    e: float
    scale: float

    def __call__(
        self,
        target_model: TargetModel,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        labels: Tensor,
        unknowns: Tensors,
    ) -> Tensors:
        """Return defended updates without alpha, ``(L, ...)`` by name."""
        held = {n: v for n, v in buffers.items() if not n.startswith((_CARRIED, _SECOND))}
        sent = self.client(target_model, parameters, held, inputs, labels, unknowns)
        made = {}
        for name, gradient in sent.items():
            g = gradient / self.scale
            above = buffers[_CARRIED + name] + self.a1 * g
            square = buffers[_SECOND + name] + self.c * g.square()
            exact = above / (square.clamp_min(1e-30).sqrt() + self.e)
            if g.requires_grad:
                size = g.detach().square().flatten(1).mean(dim=1).clamp_min(1e-30)
                under = square + _SMOOTHING * self.c * size.view(-1, *[1] * (g.dim() - 1))
                smooth = above / (under.sqrt() + self.e)
                exact = exact.detach() + smooth - smooth.detach()
            made[name] = exact
        return made


@FORWARD.register("adadefense")
def simulate_adadefense(observation: Observation, known: Known) -> Evidence:
    """Apply AdaDefense to candidates, with the moments that earlier uploads leave.

    Moments are replayed from the inversions of the rounds before, as `undo_adadefense` has them;
    where float32 left a coordinate open there, the update that the round's reconstructed images
    make takes its place, or, of a round that was not reconstructed, its best reading. Where rounds
    before the first captured one are missing, gradients are taken to have been constant until then,
    for which round 1's formula is exact, and reconstructions are not used. The label of a single
    image is read off the inverted upload: in what was sent, moments of earlier images are added to
    it.
    """
    hyper = declared(AdaDefense, observation)
    rounds, earlier = rounds_of(observation, known.history), known.earlier
    if hyper.secret_updates:
        return averaged(observation, hyper, len(rounds))
    missing, assumed = missing_before(hyper, rounds[0])
    if hyper.variant == "yogi" and len(rounds) + missing > 1:
        raise BractError(
            f"{observation.key}: adadefense variant 'yogi' can be replayed in a client's first "
            "round only; attack that observation",
            code="attack-unsuited",
        )
    after, previous = Moments.zero(flatten(observation.update).numel()), None
    for number, seen in enumerate(rounds):
        before = after
        inverted = invert(hyper, seen, before, previous, ahead=0 if number else missing)
        if number < len(earlier) and not missing:
            made = flatten({n: earlier[number][n] for n in seen.update})
            inverted = completed(hyper, inverted, before, made / seen.law.to_gradient)
        after, previous = inverted.after, inverted.g
    at = simulated_at(observation, hyper, before)
    return Evidence(
        target=at.target,
        adapt=at.adapt,
        buffers=at.buffers,
        labels=single_label(observation, inverted.g),
        notes={
            "defense": "adadefense",
            "method": "applied the defense to candidates, with replayed moments",
            "captured_rounds": [seen.round for seen in rounds],
            "missing_rounds": missing,
            "state": assumed or "replayed from the client's first round",
        },
    )


def simulated_at(observation: Observation, hyper: AdaDefense, before: Moments) -> Simulated:
    """Return the upload and the simulation of the defense at given moments.

    Zero moments are those of a client's first round, and exact in any round of a gradient that was
    constant until then.
    """
    map_ = DefendedUpdate(hyper, before)
    like = {name: observation.update[name] for name in observation.update}
    alpha = hyper.alpha if hyper.alpha_at == "client" else 1.0
    size = flatten(observation.update).numel()
    carried, second = (
        unflatten(torch.as_tensor(value, dtype=torch.float64).expand(size).clone(), like)
        for value in (map_.a0, map_.w)
    )

    def adapt(client: ForwardModel, images: int) -> ForwardModel:
        del images
        return AdaDefenseClient(
            client=client,
            a1=map_.a1,
            c=map_.c,
            e=map_.e,
            scale=observation.law.to_gradient,
        )

    named = observation.parameters
    return Simulated(
        target={n: observation.update[n] / alpha for n in named},
        unit=1.0 / alpha,
        adapt=adapt,
        buffers={
            **{_CARRIED + n: carried[n].to(named[n].dtype) for n in named},
            **{_SECOND + n: second[n].to(named[n].dtype) for n in named},
        },
    )


def completed(hyper: AdaDefense, inverted: Inversion, before: Moments, made: Tensor) -> Inversion:
    """Take coordinates that float32 left open from the update of reconstructed images, ``(D,)``.

    Their error is not known, so that it is infinite, and that of the moments after them.
    """
    resolved = inverted.resolved
    g = torch.where(resolved, inverted.g, made.cpu().to(torch.float64))
    step = DefendedUpdate(hyper, before)
    m = step.beta1 * before.m + (1.0 - step.beta1) * g
    v = step.keep * before.v + step.gain * g.square()
    error, m_error, v_error = (
        torch.where(resolved, known, float("inf"))
        for known in (inverted.error, inverted.after.m_error, inverted.after.v_error)
    )
    return replace(
        inverted, g=g, error=error, after=Moments(before.rounds + 1, m, v, m_error, v_error)
    )
