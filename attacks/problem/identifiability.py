"""How near to its images an upload can be expected to lead, estimated before an attack."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bract.attacks.problem.case import Case
from bract.attacks.problem.likelihoods import LaplaceLikelihood
from bract.attacks.problem.over_rounds import round_names
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.visibility import smooth_images
from bract.defenses.entries import read_settings
from bract.defenses.noise import Noise
from bract.errors import BractError
from bract.models.losses import label_rows
from bract.updates.update import Tensors

PIXEL_VARIANCE = 1.0 / 12.0
"""Of a pixel of which only [0, 1] is known."""

NEIGHBOURS = 0.07
"""Root mean squared difference of neighbouring pixels; see `bract.attacks.solve.regularizers`."""

CENTRES = 4
"""Made-up images over which the information is averaged."""

_DIRECTIONS = 96
_FEWEST = 2
_WORK = 96 * 300_000
"""Most axes times images times coordinates that are looked at, but for `_FEWEST` a plane."""

_TOGETHER = 16
_STEP = 1e-5
_ROUNDING = 2.0**-24

_HELD = 1 << 27
"""Most numbers of a Jacobian that are held; of larger models a random share of coordinates."""


@dataclass(frozen=True)
class Identifiability:
    """How far an upload determines its images, near images that were made up for the purpose.

    Attributes
    ----------
    psnr
        dB that the best estimator of the assumed prior expects; an estimate, and no upper bound.
    prior_psnr
        dB of the prior's mean, which takes no upload.
    numbers
        Coordinates of the upload that carry information.
    pixels
        Numbers of the images.
    """

    psnr: float
    prior_psnr: float
    numbers: int
    pixels: int


def identifiability(case: Case, *, labels: Tensor | None = None, seed: int = 0) -> Identifiability:
    """Estimate what an attack can expect from an upload, by its local information.

    Two limits are taken, and the lower one returned. That of counting: N numbers settle no more
    than N axes of the prior, at best those of largest variance. And where noise of known deviation
    was added (`Evidence.likelihood`, or declared, for every tier) or coordinates are known within
    bounds only, the Bayesian Cramer-Rao expression (Van Trees 1968, section 2.4.3): with J the
    Jacobian of what the client would have sent by the pixels, sigma the deviation of a coordinate's
    noise and K the prior covariance, ``tr (E[J^T J] / sigma^2 + K^-1)^-1`` over the number of
    pixels.

    It bounds no attack, for three reasons. The expectation is over `CENTRES` smooth images that are
    made up, not over images like the client's. Real images do not follow the prior: an attacker
    with a nearer one guesses better, with the upload and without. And the prior is Gaussian, while
    pixels end at 0 and 1, which an attacker can use. How far attacks exceed the estimate is
    measured (``experiments/identifiability.py``; docs/guide/attacks/scoring.md), so that it may
    explain a result and must not decide whether an upload is attacked.

    K is that of a stationary field: variance `PIXEL_VARIANCE`, falling exponentially over rows and
    columns so that neighbours differ by `NEIGHBOURS`; channels and images are independent. J is
    taken by central differences in float64 along the principal axes of K of largest variance,
    `_DIRECTIONS` over all images and channels, fewer of large models; pixels along the others count
    as known, as do unknowns of the client's defense. A bound on a coordinate counts as a uniform
    error.

    Parameters
    ----------
    case
        As an attack gets it.
    labels
        int64 ``(B,)``, as inferred from the upload; None takes the evidence's, or where it has none
        other random ones with each image that is made up. The label of a prediction that is nearly
        certain leaves almost no gradient, so that a random label misjudges an upload.
    seed
        Of the images that are made up.
    """
    problem = Problem.stack([(case, 0)], seed=seed, device=torch.device("cpu"), dtype=torch.float64)
    count, channels, height, width = problem.image_shape
    planes = count * channels
    pixels = planes * height * width
    axes = _PrincipalAxes.of(height, width)
    seen = _seen(problem)
    numbers = int(seen.sum())
    # Of every plane as many axes as of the others, the largest first.
    error = float(axes.variances.repeat_interleave(planes)[numbers:].sum()) / pixels
    noise = _noise(case)
    if noise is not None and numbers:
        affordable = min(_DIRECTIONS, _WORK // (count * numbers)) // planes
        kept = min(height * width, max(_FEWEST, affordable))
        heard = _mean_information(problem, axes.first(kept), noise, seen, labels, seed)
        precision = heard + torch.diag(1.0 / axes.variances[:kept].repeat(planes))
        error = max(error, float(torch.linalg.inv(precision).trace()) / pixels)
    return Identifiability(
        psnr=_decibels(error), prior_psnr=_decibels(PIXEL_VARIANCE), numbers=numbers, pixels=pixels
    )


def _seen(problem: Problem) -> Tensor:
    """Return which coordinates of the target carry information, flat over all names."""
    weights = problem.weights or {}
    parts = []
    for name, value in problem.target.items():
        trusted = weights[name][0] > 0.0 if name in weights else torch.ones_like(value[0])
        known = value[0] != 0.0
        if problem.bounds is not None and name in problem.bounds:
            known |= problem.bounds[name][0] > 0.0
        parts.append((trusted.bool() & known).flatten())
    return torch.cat(parts)


@dataclass(frozen=True)
class _PrincipalAxes:
    """The prior's axes, those of a row times those of a column, and variances, largest first."""

    variances: Tensor
    order: Tensor
    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, height: int, width: int) -> _PrincipalAxes:
        correlation = 1.0 - NEIGHBOURS**2 / (2.0 * PIXEL_VARIANCE)

        def along(side: int) -> tuple[Tensor, Tensor]:
            at = torch.arange(side, dtype=torch.float64)
            values, vectors = torch.linalg.eigh(correlation ** (at[:, None] - at[None]).abs())
            return values, vectors

        (rows, row_axes), (columns, column_axes) = along(height), along(width)
        variances = (PIXEL_VARIANCE * rows[:, None] * columns[None]).flatten()
        order = variances.argsort(descending=True)
        return cls(variances[order], order, row_axes, column_axes)

    def first(self, count: int) -> Tensor:
        """Return the axes of largest variance, ``(count, H, W)``, of length 1."""
        width = len(self.columns)
        row, column = self.order[:count] // width, self.order[:count] % width
        return torch.einsum("ia,ja->aij", self.rows[:, row], self.columns[:, column])


def _mean_information(
    problem: Problem,
    axes: Tensor,
    noise: Tensors,
    seen: Tensor,
    labels: Tensor | None,
    seed: int,
) -> Tensor:
    """Return ``E[J^T J] / sigma^2`` over made-up images."""
    known = problem.cases[0].evidence.labels if labels is None else labels
    generator = torch.Generator().manual_seed(seed)
    count, *shape = problem.image_shape
    parts = []
    for _ in range(CENTRES):
        centre = smooth_images(count, shape, generator).double()
        drawn = torch.randint(problem.classes, (count,), generator=generator)
        picked = drawn if known is None else known.cpu()
        rows = label_rows(picked, problem.classes, problem.target_model.loss)
        parts.append(_information(problem, axes, noise, seen, centre, rows.double(), seed))
    return torch.stack(parts).mean(dim=0)


def _information(
    problem: Problem,
    axes: Tensor,
    noise: Tensors,
    seen: Tensor,
    centre: Tensor,
    labels: Tensor,
    seed: int,
) -> Tensor:
    """Return ``J^T J / sigma^2`` over the axes of each plane, an axis faster than a plane."""
    count, channels, height, width = problem.image_shape
    planes = count * channels
    directions = torch.einsum("pq,aij->paqij", torch.eye(planes, dtype=torch.float64), axes)
    moved = directions.reshape(-1, count, channels, height, width)
    share = min(1.0, _HELD / (len(moved) * len(seen)))
    drawn = torch.rand(len(seen), generator=torch.Generator().manual_seed(seed))
    picked = seen & (drawn < share)
    deviations = torch.cat([noise[name].flatten() for name in problem.target])[picked]
    begun = problem.unknowns()

    def sent(images: Tensor) -> Tensor:
        trials = len(images)
        unknowns = {n: v.detach().expand(trials, *v.shape[1:]) for n, v in begun.items()}
        at = problem.select([0] * trials)
        found = at.simulate(images, labels.expand(trials, *labels.shape), unknowns)
        flat = torch.cat([found[name].detach().flatten(1) for name in problem.target], dim=1)
        return flat[:, picked]

    together = max(1, min(_TOGETHER, _HELD // (4 * len(seen))))
    jacobian = torch.cat(
        [
            (sent(centre + _STEP * part) - sent(centre - _STEP * part)) / (2.0 * _STEP)
            for part in moved.split(together)
        ]
    )
    jacobian /= deviations
    return jacobian @ jacobian.T / share


def _noise(case: Case) -> Tensors | None:
    """Return the deviation of each coordinate's error, never 0; None where it is unknown."""
    if case.rounds:
        by_round = [_noise(one) for one in case.rounds]
        if any(noise is None for noise in by_round):
            return None
        return {
            joint: value
            for names, noise in zip(round_names(case), by_round, strict=True)
            for joint, value in zip(names, (noise or {}).values(), strict=True)
        }
    likelihood, bounds = case.evidence.likelihood, case.evidence.bounds
    known = case.evidence.deviation
    if known is None:
        known, laplace = _declared(case)
    else:
        laplace = isinstance(likelihood, LaplaceLikelihood)
    if not known and bounds is None:
        return None
    if laplace:
        # Laplace noise of deviation s informs as Gaussian noise of s / sqrt(2) does.
        known /= math.sqrt(2.0)
    found = {}
    for name, value in case.evidence.target.items():
        square = torch.full(value.shape, known**2, dtype=torch.float64)
        if bounds is not None:
            square += (_ROUNDING * max(_root_mean_square(value), 1e-30)) ** 2
        if bounds is not None and name in bounds:
            # Anywhere within the bound: the variance of a uniform number.
            square += bounds[name].double().cpu().square() / 3.0
        found[name] = square.sqrt()
    return found


def _declared(case: Case) -> tuple[float, bool]:
    """Return the deviation of noise that this attacker ignores, and whether it is Laplace's."""
    declaration = case.observation.declaration
    if case.tier != "oblivious":
        return 0.0, False
    for entry in declaration.defenses:
        if entry.get("name") == Noise.name:
            try:
                noise = read_settings(Noise, entry)
                return noise.deviation * case.law.to_gradient, noise.kind == "laplace"
            except BractError:
                break
    return 0.0, False


def _root_mean_square(value: Tensor) -> float:
    return math.sqrt(float(value.double().square().mean()))


def _decibels(error: float) -> float:
    return min(100.0, -10.0 * math.log10(max(error, 1e-10)))
