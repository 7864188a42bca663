"""Clipping and noise: the local differential privacy baseline, with its accounting."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from bract.client.defenses.base import DEFENSES, Defense, ProtectContext, Stage
from bract.update import Tensors, flatten, unflatten

_Positive = Annotated[float, Field(gt=0.0)]


@DEFENSES.register("noise")
class Noise(Defense):
    """Clip the update to a norm, then add Gaussian or Laplace noise to every coordinate.

    Give the noise either by ``std``, as the leakage literature does (1e-4 to 1e-1), or by
    ``epsilon``: then one round is (epsilon, delta)-locally differentially private for the whole
    update, because two clipped updates differ by at most 2 ``clip``. Gaussian noise is calibrated
    through zero-concentrated privacy (rho = (2 clip)^2 / (2 std^2); Bun and Steinke 2016,
    proposition 1.3), which also composes over rounds: see `spent`. Laplace noise has the scale
    2 ``clip`` / epsilon and clips in the 1-norm, to which its guarantee belongs.

    Flower's `flwr.clientapp.mod.LocalDpMod` clips as this does, but it calibrates one round with
    the classical Gaussian bound (proved for epsilon below 1 only), composes nothing over rounds
    and noises integer buffers too, so it is not what stands here. Opacus' optimizer is made for
    noise on per-sample gradients; its accountant is used on request.

    Parameters
    ----------
    kind
        ``gaussian`` or ``laplace``.
    clip
        Largest norm that the update keeps: 2-norm, or 1-norm for Laplace noise with ``epsilon``.
        None leaves the update as it is, and is refused with ``epsilon``.
    std
        Standard deviation of the noise.
    epsilon, delta
        Privacy of one round; ``delta`` is for Gaussian noise.
    accountant
        What adds rounds of Gaussian noise up: ``zcdp`` as above, or ``opacus``, the Renyi
        accountant of Opacus (``pip install 'bract[opacus]'``), whose conversion is tighter.
    """

    name: ClassVar[str] = "noise"
    stage: ClassVar[Stage] = Stage.NOISE

    kind: Literal["gaussian", "laplace"] = "gaussian"
    clip: _Positive | None = 1.0
    std: _Positive | None = None
    epsilon: _Positive | None = None
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    accountant: Literal["zcdp", "opacus"] = "zcdp"

    @model_validator(mode="after")
    def _one_measure(self) -> Noise:
        if (self.std is None) == (self.epsilon is None):
            raise ValueError("give either std or epsilon, not both and not neither")
        if self.epsilon is not None and self.clip is None:
            raise ValueError("epsilon needs clip: without a bound there is no privacy guarantee")
        if self.accountant == "opacus" and importlib.util.find_spec("opacus") is None:
            raise ValueError(
                "accountant: opacus needs Opacus at every client: pip install 'bract[opacus]'"
            )
        return self

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the noise on one coordinate."""
        if self.std is not None:
            return self.std
        assert self.epsilon is not None and self.clip is not None
        if self.kind == "laplace":
            return math.sqrt(2.0) * 2.0 * self.clip / self.epsilon
        return 2.0 * self.clip / math.sqrt(2.0 * _rho(self.epsilon, self.delta))

    def spent(self, rounds: int) -> float | None:
        """Return epsilon after ``rounds`` uploads at the same delta; None without a guarantee.

        Gaussian: rho adds up, epsilon = rho + 2 sqrt(rho ln(1/delta)), or Opacus' figure.
        Laplace: epsilon adds up; with ``std`` it is known only for the 1-norm clip of ``epsilon``,
        so None.
        """
        if self.clip is None or (self.kind == "laplace" and self.epsilon is None):
            return None
        if self.kind == "laplace":
            assert self.epsilon is not None
            return rounds * self.epsilon
        if self.accountant == "opacus":
            return _opacus_epsilon(self.deviation / (2.0 * self.clip), rounds, self.delta)
        rho = rounds * (2.0 * self.clip / self.deviation) ** 2 / 2.0
        return rho + 2.0 * math.sqrt(rho * math.log(1.0 / self.delta))

    def protect(
        self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext
    ) -> Tensors:
        """Return the clipped and noisy update; `report` gives the epsilon spent so far."""
        vector = flatten(update)
        if self.clip is not None:
            order = 1 if self.kind == "laplace" and self.epsilon is not None else 2
            norm = float(torch.linalg.vector_norm(vector, ord=order))
            vector = vector * min(1.0, self.clip / norm) if norm else vector
        generator = context.generator("noise")
        size = vector.shape
        if self.kind == "gaussian":
            noise = torch.randn(size, generator=generator, dtype=torch.float64)
        else:
            uniform = torch.rand(size, generator=generator, dtype=torch.float64) - 0.5
            noise = -torch.sign(uniform) * torch.log1p(-2.0 * uniform.abs()) / math.sqrt(2.0)
        rounds = int(state.get("rounds", torch.tensor(0))) + 1
        state["rounds"] = torch.tensor(rounds)
        spent = self.spent(rounds)
        self._report.clear()
        self._report["deviation"] = self.deviation
        if spent is not None:
            self._report["epsilon_spent"] = spent
        return unflatten(vector + (noise * self.deviation).to(vector), update)


def _opacus_epsilon(multiplier: float, rounds: int, delta: float) -> float:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    # Every round sees the whole update: no subsampling amplifies.
    accountant.history = [(multiplier, 1.0, rounds)]
    return float(accountant.get_epsilon(delta))


def _rho(epsilon: float, delta: float) -> float:
    """Return the rho for which rho + 2 sqrt(rho ln(1/delta)) is ``epsilon``."""
    log = math.log(1.0 / delta)
    return (math.sqrt(log + epsilon) - math.sqrt(log)) ** 2
