"""Compare AdaDefense's uploads as they were sent with what it would make of a candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.adaptive.adadefense.adadefense import missing_before, rounds_of
from bract.attacks.adaptive.adadefense.inversion import invert
from bract.attacks.adaptive.adadefense.moments import DefendedUpdate, Moments
from bract.attacks.adaptive.declared import declared, gradient_scale
from bract.attacks.problem.client_model import ForwardModel, LocalTraining, local_training
from bract.attacks.problem.evidence import FORWARD, Evidence
from bract.attacks.problem.target_model import TargetModel
from bract.defenses import AdaDefense
from bract.errors import BractError
from bract.protocol.observation import Observation
from bract.protocol.update import Tensors, flatten, unflatten

_CARRIED = "adadefense.carried."
_SECOND = "adadefense.second."


@dataclass(frozen=True, kw_only=True)
class AdaDefenseClient:
    """The client of another forward model, its gradient replaced as AdaDefense does.

    With the moments of earlier rounds known, an upload without alpha is
    ``(a0 + a1 g) / (sqrt(w + c g^2) + e)`` in every coordinate (`DefendedUpdate`); a0 and w stand
    among the buffers.

    Attributes
    ----------
    scale
        What gradients are divided by to be updates.
    """

    client: ForwardModel
    a1: float
    c: float
    e: float
    scale: float

    @property
    def training(self) -> LocalTraining | None:
        """The local steps that are unrolled; None for a gradient."""
        return local_training(self.client)

    def unknowns(
        self, target_model: TargetModel, trials: int, generators: list[torch.Generator]
    ) -> Tensors:
        """Those of the client."""
        return self.client.unknowns(target_model, trials, generators)

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
            root = (buffers[_SECOND + name] + self.c * g.square()).clamp_min(1e-30).sqrt()
            made[name] = (buffers[_CARRIED + name] + self.a1 * g) / (root + self.e)
        return made


@FORWARD.register("adadefense")
def simulate_adadefense(observation: Observation, history: Sequence[Observation]) -> Evidence:
    """Apply AdaDefense to candidates, with the moments that earlier uploads leave.

    Moments are replayed from the inversions of the rounds before, as `undo_adadefense` has them;
    where float32 left a coordinate open there, they are its best reading. Where rounds before the
    first captured one are missing, gradients are taken to have been constant until then, for which
    round 1's formula is exact.

    Raises
    ------
    BractError
        As `undo_adadefense`.
    """
    hyper = declared(AdaDefense, observation)
    rounds = rounds_of(observation, history)
    missing, assumed = missing_before(hyper, rounds[0])
    if hyper.variant == "yogi" and len(rounds) + missing > 1:
        raise BractError(
            f"{observation.key}: adadefense variant 'yogi' can be replayed in a client's first "
            "round only; attack that observation"
        )
    before, previous = Moments.zero(flatten(observation.update).numel()), None
    for number, seen in enumerate(rounds[:-1]):
        inverted = invert(hyper, seen, before, previous, ahead=0 if number else missing)
        before, previous = inverted.after, inverted.g
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
            scale=gradient_scale(observation),
        )

    named = observation.parameters
    return Evidence(
        target={n: observation.update[n] / alpha for n in named},
        adapt=adapt,
        buffers={
            **{_CARRIED + n: carried[n].to(named[n].dtype) for n in named},
            **{_SECOND + n: second[n].to(named[n].dtype) for n in named},
        },
        notes={
            "defense": "adadefense",
            "method": "applied the defense to candidates, with replayed moments",
            "captured_rounds": [seen.round for seen in rounds],
            "state": assumed or "replayed from the client's first round",
        },
    )
