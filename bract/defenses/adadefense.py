"""AdaDefense: upload an Adam-like defended update of the update; the moments never leave the
client."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from bract.defenses.base import DEFENSES, Defense, DefenseError, Keeps, ProtectContext, Stage
from bract.updates.update import Tensors, flatten, unflatten

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


@DEFENSES.register("adadefense")
class AdaDefense(Defense):
    """Replace the update by a defended update normalised with this client's own moments.

    For the client's r-th update g (AdaDefense, equations 1 to 5; b1, b2, eps are ``beta1``,
    ``beta2``, ``epsilon``)::

        m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
        defended update = alpha * (m / (1 - b1^r)) / sqrt(v / (1 - b2^r) + eps)

    r counts the rounds in which this client took part. A coordinate of the defended update is of
    the order of ``alpha`` whatever the size of the gradient, so alpha takes the place of the
    server's learning rate.

    The moments start at zero and are a function of earlier uploads. In a client's first round the
    map from g to the defended update is one-to-one in every coordinate, and its sign is always
    that of g: an attacker who knows the hyper-parameters can undo much of it. With
    ``secret_updates`` the moments start elsewhere, and r counts these updates too.

    Parameters
    ----------
    variant
        ``adam`` as in the paper; ``adagrad`` (v <- v + g^2) and ``yogi``
        (v <- v - (1 - b2) sign(v - g^2) g^2) as in the authors' repository, which divides every
        variant's v by 1 - b2^r. Adagrad's v has no factor 1 - b2 for that to make up for: in
        round 1 its coordinates are of the order of ``alpha`` sqrt(1 - b2), 0.03 of Adam's.
    eps_placement
        ``inside`` the root, equation 5; ``outside``, sqrt(v/(1 - b2^r)) + eps, as in Adam;
        ``uncorrected``, sqrt(v) + eps before the correction, as in the authors' repository, where
        eps weighs 32 times as much in round 1.
    bias_correction
        Whether to divide by 1 - b1^r and 1 - b2^r.
    alpha
        The learning rate of the defended update. The authors' code has 0.001, for 200 rounds.
    alpha_at
        ``client``: multiply before upload, so that any server that averages will do. ``server``:
        upload the bare defended update of equation 5; then ``strategy.server_lr`` must be
        ``alpha``.
    secret_updates
        Updates that the moments take before the client's first one and that are never sent: not
        in the paper, where there are none. They are normal numbers from the client's secret
        stream, times the root mean square of the tensor of its first update. The moments still
        hold them in later rounds, m with a factor of b1 a round.
    """

    name: ClassVar[str] = "adadefense"
    title: ClassVar[str] = "AdaDefense"
    summary: ClassVar[str] = "each coordinate normalised with this client's own running moments"
    stage: ClassVar[Stage] = Stage.TRANSFORM
    keeps: ClassVar[Keeps] = "state"

    variant: Literal["adam", "adagrad", "yogi"] = "adam"
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Annotated[float, Field(gt=0.0)] = 1e-8
    eps_placement: Literal["inside", "outside", "uncorrected"] = "inside"
    bias_correction: bool = True
    alpha: Annotated[float, Field(gt=0.0)] = 0.01
    alpha_at: Literal["client", "server"] = "client"
    secret_updates: Annotated[int, Field(ge=0, le=100)] = 0

    @property
    def server_lr(self) -> float:
        """Return ``alpha`` if the server is to apply it, otherwise 1."""
        return self.alpha if self.alpha_at == "server" else 1.0

    def protect(
        self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext
    ) -> Tensors:
        """Return the defended update and advance the moments."""
        g = flatten(update)
        layout = _layout(update)
        if not state:
            m, v, r = torch.zeros_like(g), torch.zeros_like(g), self.secret_updates + 1
            for secret in self._secrets(update, context):
                m, v = torch.lerp(m, secret, 1.0 - self.beta1), self._second_moment(v, secret)
        else:
            if int(state["layout"]) != layout:
                raise DefenseError(
                    "defense 'adadefense': the stored moments belong to a model with other "
                    "parameters; remove this client's state, or run under another name"
                )
            m, v, r = state["m"].to(g.device), state["v"].to(g.device), int(state["round"]) + 1
        m = torch.lerp(m, g, 1.0 - self.beta1)
        v = self._second_moment(v, g)
        state["m"], state["v"] = m, v
        state["round"], state["layout"] = torch.tensor(r), torch.tensor(layout)

        first, second = self._corrections(r)
        scale = (self.alpha if self.alpha_at == "client" else 1.0) / first
        if self.eps_placement == "inside":
            root = torch.mul(v, 1.0 / second).add_(self.epsilon).sqrt_()
        elif self.eps_placement == "outside":
            root = v.sqrt().mul_(second**-0.5).add_(self.epsilon)
        else:
            root = v.sqrt().add_(self.epsilon).mul_(second**-0.5)
        return unflatten(torch.div(m, root).mul_(scale), update)

    def _secrets(self, update: Mapping[str, Tensor], context: ProtectContext) -> Iterator[Tensor]:
        """Yield the secret updates, ``(D,)`` each."""
        if not self.secret_updates:
            return
        stream = context.stream("moments")
        for _ in range(self.secret_updates):
            yield flatten(
                {
                    name: stream.normal(value.shape, dtype=value.dtype).to(value.device)
                    * value.square().mean().sqrt()
                    for name, value in update.items()
                }
            )

    def _second_moment(self, v: Tensor, g: Tensor) -> Tensor:
        if self.variant == "adagrad":
            return torch.addcmul(v, g, g)
        if self.variant == "adam":
            return torch.mul(v, self.beta2).addcmul_(g, g, value=1.0 - self.beta2)
        square = g * g
        return torch.addcmul(v, torch.sign(v - square), square, value=-(1.0 - self.beta2))

    def _corrections(self, r: int) -> tuple[float, float]:
        if not self.bias_correction:
            return 1.0, 1.0
        return 1.0 - self.beta1**r, 1.0 - self.beta2**r


def _layout(update: Mapping[str, Tensor]) -> int:
    text = ";".join(f"{name}:{tuple(value.shape)}" for name, value in update.items())
    return zlib.crc32(text.encode())
