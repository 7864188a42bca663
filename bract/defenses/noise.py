"""Clipping and noise: the local differential privacy baseline, with its accounting."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from bract.crypto.randomness import SecretStream
from bract.defenses.accountants import spent_by
from bract.defenses.base import DEFENSES, Defense, DefenseError, Keeps, ProtectContext, Stage
from bract.updates.update import Tensors, flatten, unflatten

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

    The mechanism works on whole numbers: the clipped update is cut to multiples of `grid` (a power
    of two, 2^-30 of the deviation or a little less), towards zero, so that no norm grows and two
    updates still differ by at most 2 ``clip``. The noise is that multiple of the discrete Gaussian
    or Laplace distribution, drawn exactly from a cipher (`bract.crypto.randomness`), for which the
    same rho and the same epsilon hold (Canonne, Kamath and Steinke 2020, theorem 14; the Renyi
    divergences are at most the Gaussian's, so Opacus' account holds too). What is sent is the sum,
    rounded to the update's dtype: its bits reveal nothing beyond the sum (Mironov 2012).

    Flower's `flwr.clientapp.mod.LocalDpMod` clips as this does, but it calibrates one round with
    the classical Gaussian bound (proved for epsilon below 1 only), composes nothing over rounds
    and noises integer buffers too, so it is not used here. Opacus' optimizer is made for
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
    title: ClassVar[str] = "{kind} noise"
    summary: ClassVar[str] = "the update, clipped, plus Gaussian or Laplace noise"
    stage: ClassVar[Stage] = Stage.NOISE
    keeps: ClassVar[Keeps] = "state"

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
        if self.clip is not None and self.deviation < self.clip * 2.0**-64:
            raise ValueError(
                f"noise of deviation {self.deviation:.3g} is nothing beside clip {self.clip:.3g}"
            )
        if self.clip is not None and self.clip < self.deviation * 2.0**-64:
            raise ValueError(
                f"clip {self.clip:.3g} is nothing beside noise of deviation {self.deviation:.3g}"
            )
        return self

    def check_installed(self) -> None:
        """Refuse Opacus' accountant where Opacus is not installed."""
        if self.accountant == "opacus" and importlib.util.find_spec("opacus") is None:
            raise DefenseError(
                "defense 'noise': accountant: opacus needs Opacus at every client: "
                "pip install 'bract[opacus]'",
                code="package-missing",
            )

    @property
    def deviation(self) -> float:
        """Return the standard deviation of the noise on one coordinate."""
        if self.std is not None:
            return self.std
        assert self.epsilon is not None and self.clip is not None
        if self.kind == "laplace":
            return math.sqrt(2.0) * 2.0 * self.clip / self.epsilon
        return 2.0 * self.clip / math.sqrt(2.0 * _rho(self.epsilon, self.delta))

    @property
    def grid(self) -> float | None:
        """Return the step of which every value sent is a multiple; None without ``clip``.

        A power of two. Very small noise with a large ``clip`` has fewer than 2^30 steps to its
        deviation, so that the clipped values fit 64-bit whole numbers.
        """
        return None if self.clip is None else _grid(self.deviation, self.clip)

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
            # Every round sees the whole update: no subsampling amplifies.
            multiplier = self.deviation / (2.0 * self.clip)
            return spent_by([(multiplier, 1.0, rounds)], self.delta).epsilon
        rho = rounds * (2.0 * self.clip / self.deviation) ** 2 / 2.0
        return rho + 2.0 * math.sqrt(rho * math.log(1.0 / self.delta))

    def spent_in_sums(self, rounds: int, clients: int, fraction: float = 1.0) -> float | None:
        """Return a client's epsilon to whom only sums of updates are known; None if not Gaussian.

        Who sees the sum of ``clients`` noisy updates, as the server of masked sums or the users of
        a model, faces the noise of all of them: deviation ``std sqrt(clients)`` on a sum that one
        client moves by at most ``clip``. Where each client takes part in a round with probability
        ``fraction``, and who did is not known, subsampling amplifies (Opacus' Renyi accountant).
        The server knows who took part: to it ``fraction`` is 1. It rests on the noise of clients
        that do not collude, and on equal weights.
        """
        if self.clip is None or self.kind != "gaussian":
            return None
        multiplier = self.deviation * math.sqrt(clients) / self.clip
        return spent_by([(multiplier, fraction, rounds)], self.delta).epsilon

    def at_least(self, other: Defense) -> bool:
        """Compare noise of one kind, by its deviation and by its share of the longest update."""
        if not isinstance(other, Noise) or self._norm != other._norm:
            return False
        mine, theirs = (noise.deviation / (noise.clip or math.inf) for noise in (self, other))
        return self.deviation >= other.deviation and mine >= theirs

    @property
    def _norm(self) -> tuple[str, int]:
        """Return the kind, and the order of the norm that is clipped."""
        return self.kind, 1 if self.kind == "laplace" and self.epsilon is not None else 2

    def protect(
        self, update: Mapping[str, Tensor], state: Tensors, context: ProtectContext
    ) -> Tensors:
        """Return the clipped and noisy update; `report` gives the epsilon spent so far."""
        vector = flatten(update)
        values = vector.detach().cpu().to(torch.float64)
        # Without a bound there is no guarantee to lose by a grid that depends on the values.
        bound = float(values.abs().max()) if self.clip is None and len(values) else self.clip
        grid = _grid(self.deviation, bound or self.deviation)
        steps = _clipped_steps(values, grid, self.clip, self._norm[1])
        steps += self._noise(len(values), grid, context.stream("noise"))
        sent = (steps.to(torch.float64) * grid).to(vector)
        rounds = int(state.get("rounds", torch.tensor(0))) + 1
        state["rounds"] = torch.tensor(rounds)
        spent = self.spent(rounds)
        figures = {} if spent is None else {"epsilon_spent": spent}
        self.note(deviation=self.deviation, **figures)
        return unflatten(sent, update)

    def _noise(self, count: int, grid: float, stream: SecretStream) -> Tensor:
        """Return int64 ``(count,)``, in steps of the grid."""
        if self.kind == "gaussian":
            return stream.discrete_gaussian(count, self.deviation / grid)
        return stream.discrete_laplace(count, self.deviation / math.sqrt(2.0) / grid)


def _grid(deviation: float, bound: float) -> float:
    """Return the power of two that is 2^-31 to 2^-30 of the deviation, or 2^-60 of the bound."""
    return 2.0 ** max(math.frexp(deviation)[1] - 31, math.frexp(bound)[1] - 61)


def _clipped_steps(values: Tensor, grid: float, clip: float | None, order: int) -> Tensor:
    """Return float64 values as whole steps of the grid, their norm at most ``clip``.

    Cutting towards zero lengthens nothing. The norm of the result is computed in float64, whose
    sum of D terms is off by less than D 2^-52 of itself, and held below the bound by that much.
    """
    if clip is None:
        return (values / grid).trunc().to(torch.int64)
    limit = (clip / grid) ** order * (1.0 - (len(values) + 8) * 2.0**-52)
    norm = float(torch.linalg.vector_norm(values, ord=order))
    factor = min(1.0, clip / norm) if norm else 1.0
    while True:
        steps = (values * (factor / grid)).trunc()
        total = float((steps.abs() if order == 1 else steps.square()).sum())
        if total <= limit:
            return steps.to(torch.int64)
        factor *= (limit / total) ** (1.0 / order) * (1.0 - 2.0**-40)


def _rho(epsilon: float, delta: float) -> float:
    """Return the rho for which rho + 2 sqrt(rho ln(1/delta)) is ``epsilon``."""
    log = math.log(1.0 / delta)
    return (math.sqrt(log + epsilon) - math.sqrt(log)) ** 2
