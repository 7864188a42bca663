"""Guardian: turn the update away from the gradient while keeping its use for training.

With g the update and delta what is uploaded, PMM is ``| epsilon |g| - g.delta |`` (equation 3; 0 is
no loss of use) and PPM ``| g.delta | / (|g| |delta|)`` (equation 4; 0 is orthogonal).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from bract.defenses.base import (
    DEFENSES,
    Defense,
    ProtectContext,
    Stage,
    cosine_and_ratio,
)
from bract.updates.update import Tensors, flatten, unflatten

_log = logging.getLogger(__name__)

_ADAM_BETA1, _ADAM_BETA2, _ADAM_EPS = 0.9, 0.999, 1e-8

COSINE_WARNING = 0.95
"""Above this cosine with the true update the defense has hardly changed it."""


@DEFENSES.register("guardian")
class Guardian(Defense):
    """Upload delta, a few steps down ``PMM + beta PPM`` from delta = g (Guardian, equation 5).

    After every step delta is put back to a cosine of at least ``min_cosine`` with g and to
    \\|delta\\| <= ``epsilon``.

    Both metrics depend on delta through g.delta and \\|delta\\| only, so their gradient from
    delta = g is on the line through g and plain projected descent (``optimizer: sgd``) never
    turns: its cosine stays 1, which is no protection. Adam divides by each coordinate's own root
    mean square, so its steps leave that line; the optimizer is part of the method. Ten steps of
    1e-3 move small coordinates by about 0.01 * sign(g), and the result is close to a sign vector:
    a server that knows the hyper-parameters can use the signs, or undo the step.

    Parameters
    ----------
    beta
        Weight of the privacy metric; the paper searches 0.1 to 1000 and keeps 10.
    epsilon
        Bound on \\|delta\\|; the paper sets 1, in line with a clipping norm.
    iterations, lr
        Steps and step size. The optimum of equation 5 for beta > epsilon \\|g\\| is orthogonal to
        g: stopping early is what keeps the update useful.
    optimizer
        ``adam`` or ``sgd``.
    scope
        ``whole``: one problem for all parameters. ``tensor``: one for each of the T tensors, each
        with the bound epsilon / sqrt(T), so that the whole still keeps epsilon.
    min_cosine
        Least cosine with g. 0 is the paper's g.delta >= 0 (theorem 4.2), under which ten steps
        end anywhere between 0 and 0.9, depending on the ratio of a coordinate of g to ``lr``
        and of \\|g\\| to ``beta``; at 0 the update is of no use, and a local update is easily that
        small. For one cosine whatever the update: ``beta`` 1000 and ``lr`` 3e-3, which end here.
    length
        ``gradient``: send the direction of delta with the length of g. ``epsilon`` is made for
        one batch's gradient; a local update may be ten times shorter, so that training would never
        settle, or longer, so that it would crawl. ``bound``: send delta as in the paper.
    """

    name: ClassVar[str] = "guardian"
    title: ClassVar[str] = "Guardian"
    summary: ClassVar[str] = "the update turned away from itself, to a cosine of at least 0.3"
    stage: ClassVar[Stage] = Stage.TRANSFORM

    beta: Annotated[float, Field(ge=0.0)] = 10.0
    epsilon: Annotated[float, Field(gt=0.0)] = 1.0
    iterations: Annotated[int, Field(ge=1, le=10_000)] = 10
    lr: Annotated[float, Field(gt=0.0)] = 1e-3
    optimizer: Literal["adam", "sgd"] = "adam"
    scope: Literal["whole", "tensor"] = "whole"
    min_cosine: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.3
    length: Literal["gradient", "bound"] = "gradient"

    def protect(
        self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext
    ) -> Tensors:
        """Return the transformed update; `report` gives its cosine and norm ratio to g."""
        del state
        whole = flatten(update)
        if self.scope == "whole":
            delta = self.solve(whole, self.epsilon)
        else:
            bound = self.epsilon / math.sqrt(len(update))
            delta = torch.cat([self.solve(v.reshape(-1), bound) for v in update.values()])
        cosine, ratio = cosine_and_ratio(whole, delta)
        self.note(cosine=cosine, norm_ratio=ratio)
        if cosine > COSINE_WARNING:
            _log.warning(
                "guardian: round %d sends an update with cosine %.3f to the true one, which hardly "
                "protects; use optimizer: adam, more iterations or a larger lr",
                context.round,
                cosine,
            )
        return unflatten(delta, update)

    def solve(self, g: Tensor, epsilon: float, *, start: Tensor | None = None) -> Tensor:
        """Return delta for one update vector ``(D,)``; g itself where g is zero.

        It starts at ``start``, at g without one: section 4.3 compares random starts.

        The gradient of equation 5 is the combination ``a g + c delta`` of two vectors with scalars
        that follow from s = g.delta and n = \\|delta\\|, so a step costs a few passes over D values
        and no differentiation.
        """
        G = float(g.norm())
        if G == 0.0:
            return g.clone()
        delta = g.clone() if start is None else start.clone()
        s, n = (G * G, G) if start is None else (float(g.dot(delta)), float(delta.norm()))
        m, v = torch.zeros_like(g), torch.zeros_like(g)
        step, root = torch.empty_like(g), torch.empty_like(g)
        for k in range(1, self.iterations + 1):
            a = -_sign(epsilon * G - s) + self.beta * _sign(s) / (G * n) if n else -1.0
            c = -self.beta * abs(s) / (G * n**3) if n else 0.0
            torch.mul(g, a, out=step).add_(delta, alpha=c)
            if self.optimizer == "adam":
                m.lerp_(step, 1.0 - _ADAM_BETA1)
                v.mul_(_ADAM_BETA2).addcmul_(step, step, value=1.0 - _ADAM_BETA2)
                correction = math.sqrt(1.0 - _ADAM_BETA2**k)
                torch.sqrt(v, out=root).add_(_ADAM_EPS * correction)
                delta.addcdiv_(m, root, value=-self.lr * correction / (1.0 - _ADAM_BETA1**k))
            else:
                delta.add_(step, alpha=-self.lr)
            s, n = float(g.dot(delta)), float(delta.norm())
            if s < self.min_cosine * G * n:
                # Keep the part of delta across g, and set the part along g.
                across = math.sqrt(max(n * n - (s / G) ** 2, 0.0))
                along = across * self.min_cosine / math.sqrt(1.0 - self.min_cosine**2)
                delta.add_(g, alpha=(along - s / G) / G)
                s, n = along * G, math.hypot(across, along)
            if n > epsilon:
                delta.mul_(epsilon / n)
                s, n = s * epsilon / n, epsilon
        return delta.mul_(G / n) if self.length == "gradient" and n else delta


def _sign(value: float) -> float:
    return math.copysign(1.0, value) if value else 0.0
