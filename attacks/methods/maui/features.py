"""Read the features of each image off the gradient of a trained head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.func import jacfwd

from bract.attacks.methods.maui.head import Head, probe_inputs
from bract.attacks.methods.spear.factor_reading import read_sparse
from bract.attacks.methods.spear.slope_labels import nearest_class, repeated
from bract.attacks.problem.case import Case
from bract.attacks.problem.certificate import rounding
from bract.attacks.problem.linear_layers import has_relu_behind
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.errors import Errors, require_exact, require_one_gradient
from bract.attacks.reading.reading import ReadingBudget
from bract.attacks.reading.spectrum import Spectrum
from bract.attacks.result import Determined
from bract.attacks.solve.labels import infer_labels, last_layer
from bract.errors import BractError
from bract.process import clock

EXPLAINED = 4.0
"""Relative residual of the head's gradient, as a multiple of what rounding may leave
(`bract.attacks.problem.certificate.rounding`), above which features are taken for not found. True
features leave an eighth of that rounding or less, local minima ten thousand times it."""

_PROBED = 2
"""Images that the backbone runs on where features are put in the place of theirs; of one image a
normalisation by the batch may have a single value a channel, which training refuses."""

_MOST_UNKNOWNS = 1024
_EVALUATIONS = 200
_SPARSE_ROUNDS = 200
_PRESENT = 1e-6


class _TimeOverError(Exception):
    """The time of a reading is over."""


def read_features(
    case: Case, head: Head, *, starts: int, seed: int, until: float | None = None
) -> Entered:
    """Read features and labels off the gradient of the head's first layer.

    That gradient is ``L^T H`` for the features H ``(B, n)`` and the loss' gradient L ``(B, m)`` of
    what leaves the layer. One image: each row of it is a multiple of the features, and the bias'
    gradient gives the factors. Several images behind a ReLU: the rows of L are sparse, and are
    found as `Spear` does, also for more images than classes. Else H is ``A V`` with V the row space
    and A ``(B, B)`` unknown; A is fitted so that the features make the gradient, from ``starts``
    starts. That takes at least as many units of the layer as images, and more where the units are
    the classes, whose gradients add up to zero. No fit goes on after the reading of `clock.now`
    passed ``until``.

    Raises
    ------
    BractError
        If the gradient does not determine as many features, or none of the starts explains it.
    """
    require_exact(case, head.site.names, "maui")
    if case.images == 1:
        return _of_one(case, head)
    require_one_gradient(case, "maui")
    if not has_relu_behind(case.target_model, case.observation, head.layer):
        return _fitted(case, head, starts=starts, seed=seed, until=until)
    try:
        return _sparse(case, head, seed)
    except BractError as error:
        sparse = str(error).removeprefix(f"{case.observation.key}: ")
    try:
        return _fitted(case, head, starts=starts, seed=seed, until=until)
    except BractError as error:
        raise BractError(
            f"{error}. Its sparse factors were not found either: {sparse}", code=error.code
        ) from error


def _entered(
    case: Case, head: Head, values: Tensor, labels: Tensor, residual: float, component: str
) -> Entered:
    return Entered(
        site=head.site,
        values=values,
        labels=labels,
        errors=Errors.of(case, head.site.names),
        certificate=Determined(
            values.numel(), residual, EXPLAINED * rounding(case, head.site.weight)
        ),
        component=component,
    )


def gradient_residual(case: Case, head: Head, features: Tensor, labels: Tensor) -> float:
    """Return the relative residual of the head's first layer for features and int64 labels."""
    state = case.target_model.captured(case.observation, torch.float64)
    rows = _one_hot(labels, case).to(features)
    made = head.gradient(state, probe_inputs(case, _PROBED, 0).double(), features, rows)
    wanted = _wanted(case, head)
    apart = sum(float((m - w).square().sum()) for m, w in zip(made, wanted, strict=True))
    size = sum(float(w.square().sum()) for w in wanted)
    return float(np.sqrt(apart / size)) if size else float("inf")


def _of_one(case: Case, head: Head) -> Entered:
    rows, slope = _wanted(case, head)
    values = (slope @ rows / slope.square().sum().clamp_min(1e-300))[None]
    labels = infer_labels(case).labels.cpu()
    # Local steps and clipping change the factors of the rows, not the features.
    left = rows - slope[:, None] * values
    residual = float(left.norm() / rows.norm().clamp_min(1e-300))
    return _entered(case, head, values, labels, residual, "features of one image")


def _sparse(case: Case, head: Head, seed: int) -> Entered:
    """Factor the gradient behind a ReLU."""
    budget = ReadingBudget(iterations=_SPARSE_ROUNDS, seed=seed)
    read = read_sparse(case, head.site, budget)
    assert read.values is not None and read.slopes is not None
    state = case.target_model.captured(case.observation, torch.float64)
    inputs = probe_inputs(case, _PROBED, 0).double()
    classes = torch.eye(case.target_model.classes).double()
    chosen, shares = [], []
    for feature, slope in zip(read.values, read.slopes, strict=True):
        alone = torch.stack(
            [head.gradient(state, inputs, feature[None], one[None])[1] for one in classes]
        )
        best, share = nearest_class(alone, slope)
        chosen.append(best)
        shares.append(share)
    order = repeated(torch.tensor(shares, dtype=torch.float64), case.images)
    values, labels = read.values[order], torch.tensor(chosen)[order]
    residual = gradient_residual(case, head, values, labels)
    return _entered(case, head, values, labels, residual, "sparse factors of the head")


def _fitted(case: Case, head: Head, *, starts: int, seed: int, until: float | None) -> Entered:
    """Fit mixtures of the row space to the gradient."""
    key, images = case.observation.key, case.images
    units = case.evidence.target[head.site.weight].shape[0]
    last = units == case.target_model.classes
    if images > units - last or images**2 > _MOST_UNKNOWNS:
        limit = min(units - last, int(_MOST_UNKNOWNS**0.5))
        raise BractError(
            f"{key}: {images} images through a head whose first layer, {head.layer}, has {units} "
            f"units: their features are not determined (at most {limit} are, or more behind a "
            "layer with a ReLU)",
            code="attack-unsuited",
        )
    rows, slope = _wanted(case, head)
    candidates = _label_candidates(case)
    most = EXPLAINED * rounding(case, head.site.weight)
    basis = Spectrum.of(rows).right[:images]
    state = case.target_model.captured(case.observation, torch.float64)
    inputs = probe_inputs(case, _PROBED, 0).double()
    size = torch.cat([rows.flatten(), slope]).norm().clamp_min(1e-300)

    def error(labels: Tensor, mixing: Tensor) -> Tensor:
        if until is not None and clock.now() > until:
            raise _TimeOverError
        features = mixing.view(images, images) @ basis
        targets = _one_hot(labels, case).double()
        weight, bias = head.gradient(state, inputs, features, targets)
        apart: Tensor = torch.cat([((weight - rows) @ basis.T).flatten(), bias - slope]) / size
        return apart

    best, chosen, least = None, candidates[0], float("inf")
    for start in range(starts):
        own = partial(error, candidates[start % len(candidates)])
        first = head.features(state, probe_inputs(case, images, seed + start).double()).detach()
        try:
            found = _least_squares(own, first @ basis.T)
            value = float(own(found).norm())
        except _TimeOverError:
            starts = start
            break
        if value < least:
            best, chosen, least = found, candidates[start % len(candidates)], value
        if least < most:
            break
    if best is None or least > most:
        raise BractError(
            f"{key}: no features of {images} images explain the gradient of {head.layer} (residual "
            f"{least:.1e} of {starts} starts, at most {most:.0e} is rounding): loss or number of "
            "images are not those declared, or more starts are needed",
            code="attack-unsolved",
        )
    values = best.view(images, images) @ basis
    return _entered(case, head, values, chosen, least, "mixtures of the head's row space")


def _label_candidates(case: Case) -> list[Tensor]:
    """Return sets of labels, int64 ``(B,)`` each, the inferred one first.

    The last bias' gradient is ``mean_b (p_b - y_b)``, negative at no class that is absent. Classes
    where it is negative beyond rounding are present, whatever the network predicts; where they are
    all but one, the last image's label is tried.
    """
    inferred = infer_labels(case).labels.cpu()
    name = last_layer(case.target_model)[1]
    slope = None if name is None else case.evidence.target.get(name)
    if case.evidence.labels is not None or slope is None:
        return [inferred]
    present = (slope < -_PRESENT * slope.abs().max()).nonzero().flatten().tolist()
    if len(present) == case.images:
        sets = [present]
    elif len(present) == case.images - 1:
        others = [label for label in range(case.target_model.classes) if label not in present]
        sets = [[*present, label] for label in (*present, *others)]
    else:
        sets = []
    made = [torch.tensor(sorted(labels)) for labels in sets]
    return [inferred, *(labels for labels in made if not torch.equal(labels, inferred))]


def _least_squares(error: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return where `error` of a flat float64 tensor is least, from a start."""
    from scipy.optimize import least_squares

    jacobian = jacfwd(error)

    def at(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Tensor:
        made: Tensor = torch.from_numpy(values).double()
        return made

    result = least_squares(
        lambda v: error(at(v)).detach().numpy(),
        start.flatten().numpy(),
        jac=lambda v: jacobian(at(v)).detach().numpy(),
        method="lm",
        max_nfev=_EVALUATIONS,
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
    )
    return at(result.x)


def _wanted(case: Case, head: Head) -> tuple[Tensor, Tensor]:
    target = case.evidence.target
    return target[head.site.weight].cpu().double(), target[head.site.bias].cpu().double()


def _one_hot(labels: Tensor, case: Case) -> Tensor:
    return torch.nn.functional.one_hot(labels, case.target_model.classes)
