"""Estimate images from the features that enter a trained network's last layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks.base import Cost
from bract.attacks.methods.inverting import InvertingAttack
from bract.attacks.methods.maui.features import read_features
from bract.attacks.methods.maui.head import Head, probe_inputs
from bract.attacks.options import Count
from bract.attacks.problem.case import Case
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.target_model import NORMS, target_model_of
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.reading import ReadingBudget
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Recipe, Run
from bract.attacks.solve.labels import last_layer
from bract.attacks.solve.local_statistics import local_statistics
from bract.errors import BractError
from bract.models import tap
from bract.process import clock

NEARER = 0.5
"""Share of the variance of drawn images that their features leave open, below which images come
before those of attacks that guess. Chosen on photographs that no benchmark scores: through fresh
ResNet-20s, where 0.11 to 0.17 is left, batches of four came to 17 dB, those of attacks that guess
to 10."""

_GRID = 8
"""Pixels a side of what is estimated; finer ones are not seen through a deep network."""

_STARTS = 16
"""Most starts of the fit of features: most end in local minima."""

_RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_HELD_OUT = 0.2
_TOGETHER = 64
"""Most images that pass the network at once."""

_MOST_PIXELS = 2**26
"""Most numbers of all drawn images together; of 224 pixels a side 445 images."""

_MOST_AT_ONCE = 2**24
"""Most numbers of the images that pass the network at once, but for a single one."""

_SIDE = 224
"""Most pixels a side of a drawn image, which is enlarged to a larger one."""

_LEAST_SPREAD = 1e-3
"""Least deviation of a feature over drawn images, as a share of the mean one: some never vary."""

_ZERO = 0.05


@ATTACKS.register("feature-regression")
@dataclass(frozen=True, kw_only=True)
class FeatureRegression(InvertingAttack):
    """Colours and coarse shapes of a batch's images, from the features of its last layer.

    The gradient of the last layer tells the features of every image of a batch with fewer images
    than classes, exactly and image by image (`read_features`), whatever is trained before it. To
    search for images with these features fails behind ReLU: a grey image with a pattern that is not
    seen has them too. So they are estimated: drawn images with the spectra of natural ones go
    through the network, and a ridge regression from their features to their pixels, eight a side,
    is evaluated at the features that were read. Nothing is searched, and no public image is needed.

    A network that normalises by its batch does so with the statistics of the client's own, which
    the returned buffers tell, so that every image has its features alone.

    A loss is the larger of two shares: of the variance of drawn images that the regression leaves
    open, on those that its ridge was chosen by, and how far the features of what was estimated are
    from those that were read, 1 for two drawn images that have nothing to do with each other. The
    second is large for images that drawn ones do not resemble, such as strokes.

    Attributes
    ----------
    samples
        Images that are drawn.
    """

    name: ClassVar[str] = "feature-regression"
    title: ClassVar[str] = "Feature regression"
    family: ClassVar[str] = "regression from features"
    cost: ClassVar[Cost] = "seconds"
    found_below: ClassVar[float | None] = 0.0  # An estimate is no image of the client's.
    nearer: ClassVar[float | None] = NEARER

    samples: Count = 4000

    def for_best(self, problem: Problem) -> Self | None:
        """Return the attack for batches of deep models that normalise by them, with kinks."""
        several, deep = problem.image_shape[0] > 1, problem.through_depth
        return self if several and deep and _by_batch(problem.cases[0]) else None

    def require_model(self, case: Case) -> None:
        """Refuse models whose last layer has no bias, whose gradient fixes the features' scale."""
        super().require_model(case)
        _head(case)

    def prepare(self, case: Case) -> Case:
        """Refuse a batch normalisation whose statistics the capture does not hold."""
        case = super().prepare(case)
        if _by_batch(case):
            _statistics(case)
        return case

    def entered(self, case: Case, budget: ReadingBudget) -> Entered:
        """Return the features of each image and its label."""
        until = None if budget.seconds is None else clock.now() + budget.seconds
        read = read_features(
            case, _head(case), starts=_STARTS, seed=budget.seed % 2**31, until=until
        )
        assert read.values is not None
        # A reading of a map certifies its equations an image.
        known = replace(read.certificate, equations=read.values.shape[1])
        return replace(read, certificate=known)

    def inverted(self, problem: Problem, run: Run, read: Sequence[Entered]) -> Outcome:
        """Estimate the images of each trial by a regression of its own network."""
        count = problem.image_shape[0]
        images = torch.full((problem.trials, *problem.image_shape), 0.5)
        labels = torch.full((problem.trials, count, problem.classes), 1.0 / problem.classes)
        losses: list[float] = []
        done: dict[int, tuple[Tensor, float]] = {}
        begun = clock.now()
        for trial, (case, found) in enumerate(zip(problem.cases, read, strict=True)):
            assert found.values is not None and found.labels is not None
            if id(found) not in done:
                until = run.seconds and begun + run.seconds * (trial + 1) / problem.trials
                done[id(found)] = self._estimated(case, found.values, problem.device, until)
            made, left = done[id(found)]
            images[trial, : len(made)] = made
            rows = F.one_hot(found.labels, problem.classes)
            labels[trial, : len(rows)] = rows.to(labels)
            losses.append(left)
            run.advance((trial + 1) / problem.trials, left)
        problem.target_model.model.to(problem.device, problem.dtype)
        parts = (read[0].component, "ridge regression", "drawn images")
        return Outcome(
            images=images.to(problem.device, problem.dtype),
            labels=labels.to(problem.device, problem.dtype),
            losses=torch.tensor(losses, dtype=torch.float64),
            recipes=[Recipe("", parts)] * problem.trials,
        )

    def _estimated(
        self, case: Case, read: Tensor, device: torch.device, until: float | None
    ) -> tuple[Tensor, float]:
        """Return images ``(N, C, H, W)`` of features ``(N, n)``, and their loss.

        Fewer images are drawn where they are large, or where the reading of `clock.now` passes
        ``until``.
        """
        shape = case.target_model.image_shape
        sides = (min(_GRID, shape[1]), min(_GRID, shape[2]))
        small = (shape[0], min(_SIDE, shape[1]), min(_SIDE, shape[2]))
        count = min(self.samples, _MOST_PIXELS // math.prod(small))
        drawn = drawn_images(count, small, torch.Generator().manual_seed(0))
        features = _features(case, drawn, device, until)
        pixels = F.adaptive_avg_pool2d(drawn[: len(features)], sides).flatten(1)
        fit = Regression.of(features, pixels)
        coarse = fit(read).view(-1, shape[0], *sides).float()
        made = F.interpolate(coarse, size=shape[1:], mode="bicubic").clamp(0.0, 1.0)
        spread = features.std(dim=0)
        spread = spread.clamp_min(_LEAST_SPREAD * float(spread.mean()))
        apart = (_features(case, made, device) - read.float()) / spread
        return made, max(fit.left, float(apart.square().mean() / 2.0))


def drawn_images(count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw images ``(count, C, H, W)`` in [0, 1] with spectra as natural ones have them.

    Amplitudes fall with the frequency to a power of 1 to 2.5 (Field 1987 has 1 on average for
    photographs; pictures of few edges fall faster), contrasts are log-uniform from 0.02 to 0.3,
    channels share a part of their pattern, and mean colours scatter around a uniform grey.
    """
    channels, height, width = shape

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(count, 1, 1, 1).uniform_(low, high, generator=generator)

    down, across = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    frequency = (down**2 + across**2).sqrt()
    frequency[0, 0] = 1.0
    parts = torch.randn(count, channels, *frequency.shape, 2, generator=generator)
    spectrum = torch.view_as_complex(parts) * frequency ** -uniform(1.0, 2.5)
    spectrum[:, :, 0, 0] = 0.0
    own = torch.fft.irfft2(spectrum, s=(height, width))
    pattern = own[:, :1] + 0.5 * uniform(0.0, 1.0) * own
    pattern = pattern / pattern.std(dim=(1, 2, 3), keepdim=True)
    grey = uniform(0.0, 1.0)
    colour = grey + 0.25 * torch.randn(count, channels, 1, 1, generator=generator)
    contrast = uniform(math.log(0.02), math.log(0.3)).exp()
    made: Tensor = (colour.clamp(0.0, 1.0) + contrast * pattern).clamp(0.0, 1.0)
    return made


class Regression(NamedTuple):
    """Ridge regression from features to pixels.

    Features enter as they are, by their roots and by their logarithms: what a deep network makes of
    brightness is none of these alone.

    Attributes
    ----------
    size, centre, spread
        Root mean square of each feature, mean and deviation of what is made of them.
    slope, mean
        Of the regression, and of the pixels.
    left
        Share of the pixels' variance that is left on pairs that it was not fitted to.
    """

    size: Tensor
    centre: Tensor
    spread: Tensor
    slope: Tensor
    mean: Tensor
    left: float

    @classmethod
    def of(cls, features: Tensor, pixels: Tensor) -> Regression:
        """Fit pairs ``(N, n)`` and ``(N, p)``; the ridge is the best on a part that is held out."""
        features, pixels = features.double(), pixels.double()
        size = features.square().mean(dim=0).sqrt().clamp_min(1e-12)
        made = _bent(features / size)
        centre, spread = made.mean(dim=0), made.std(dim=0).clamp_min(1e-9)
        rows, mean = (made - centre) / spread, pixels.mean(dim=0)
        wanted, kept = pixels - mean, round(len(rows) * (1.0 - _HELD_OUT))
        held = wanted[kept:].square().sum().clamp_min(1e-300)
        fitted, few = rows[:kept], kept < rows.shape[1]
        # Of the two Gram matrices the smaller one: both give the same slope.
        values, vectors = torch.linalg.eigh(fitted @ fitted.T if few else fitted.T @ fitted)
        right = vectors.T @ (wanted[:kept] if few else fitted.T @ wanted[:kept])
        left_of = fitted.T @ vectors if few else vectors
        best, least = torch.zeros_like(pixels[:1]), math.inf
        for ridge in _RIDGES:
            slope = left_of @ (right / (values.clamp_min(0.0) + ridge * kept)[:, None])
            left = float((rows[kept:] @ slope - wanted[kept:]).square().sum() / held)
            if left < least:
                best, least = slope, left
        if not math.isfinite(least):
            raise BractError("features of drawn images are not finite", code="attack-unsolved")
        return cls(size, centre, spread, best, mean, least)

    def __call__(self, features: Tensor) -> Tensor:
        """Return pixels ``(N, p)``."""
        made = (_bent(features.double() / self.size) - self.centre) / self.spread
        pixels: Tensor = made @ self.slope + self.mean
        return pixels


def _bent(features: Tensor) -> Tensor:
    size = features.abs()
    return torch.cat([features, features.sign() * size.sqrt(), (size + _ZERO).log()], dim=1)


def _features(
    case: Case, images: Tensor, device: torch.device, until: float | None = None
) -> Tensor:
    """Return the features ``(N, n)`` of images ``(N, C, H, W)``, each by itself, until a time."""
    seen, head = case.observation, _head(case)
    model = case.target_model
    if _by_batch(case):
        declaration = replace(seen.declaration, norm_mode="eval")
        buffers = seen.buffers | _statistics(case)
        seen = replace(seen, declaration=declaration, buffers=buffers)
        model = target_model_of(seen)
    state = {name: value.to(device) for name, value in model.captured(seen).items()}
    model.model.to(device)
    own, found = Head(model, head.layer, head.trained), list[Tensor]()
    with torch.no_grad():
        size = case.target_model.image_shape
        together = max(1, min(_TOGETHER, _MOST_AT_ONCE // math.prod(size)))
        for some in images.split(together):
            whole = some.to(device)
            if whole.shape[1:] != size:
                whole = F.interpolate(whole, size=size[1:], mode="bilinear")
            found.append(own.features(state, model.normalise(whole)).cpu())
            if until is not None and clock.now() > until:
                break
    return torch.cat(found)


def _by_batch(case: Case) -> bool:
    """Return whether the model normalises by the batch."""
    model, declared = case.target_model.model, case.observation.declaration
    return declared.norm_mode == "train" and any(isinstance(m, NORMS) for m in model.modules())


def _statistics(case: Case) -> dict[str, Tensor]:
    """Return running statistics by which a model normalises as it did by the client's batch.

    Raises
    ------
    BractError
        If the capture does not hold those of one step.
    """
    model = case.target_model
    known = local_statistics(case.observation, model)
    if known is None or known.steps > 1:
        raise BractError(
            f"{case.observation.key}: the buffers do not give the statistics of one batch; that "
            "takes batch normalisation in norm_mode 'train', one local step, and buffers that are "
            "returned with their counts; use another attack",
            code="attack-evidence",
        )
    counts: dict[str, int] = {}

    def note(name: str, value: Tensor) -> None:
        counts[name] = value.numel() // value.shape[1]

    state = model.captured(case.observation)
    with tap.entering(model.model, tap.named(model.model, *NORMS), note), torch.no_grad():
        torch.func.functional_call(model.model, state, (probe_inputs(case, case.images, 0),))
    found = {}
    for name, (mean, variance) in known.layers.items():
        # Buffers hold the unbiased variance, and layers divide by the other one.
        found[f"{name}.running_mean"] = mean.float()
        found[f"{name}.running_var"] = (variance * (1.0 - 1.0 / counts[name])).float()
    return found


def _head(case: Case) -> Head:
    """Return the last layer, which the features of whole images enter.

    Raises
    ------
    BractError
        If it has no bias, or is not called once with one row an image.
    """
    model = case.target_model
    weight, bias = last_layer(model)
    name = weight.rpartition(".")[0]
    shapes: list[int] = []
    with tap.entering(model.model, [name], lambda _, value: shapes.append(value.dim())):
        state = model.captured(case.observation)
        with torch.no_grad():
            torch.func.functional_call(model.model, state, (probe_inputs(case, 2, 0),))
    layer = model.model.get_submodule(name)
    if bias is None or shapes != [2] or not isinstance(layer, nn.Linear):
        raise BractError(
            f"{case.observation.key}: feature-regression needs a last layer with a bias, called "
            f"once on one row an image, and {name or 'the last layer'} is not; use another attack",
            code="attack-unsuited",
        )
    return Head(model, name, model.parameter_names)
