"""Against Guardian: undo its optimizer coordinate by coordinate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bract.attacks.adaptive.clipping_factor import shrinkage
from bract.attacks.adaptive.declared import declared
from bract.attacks.adaptive.guardian.guardian_clear import firm_up
from bract.attacks.adaptive.guardian.guardian_map import GuardianMap, walk
from bract.attacks.adaptive.guardian.guardian_reading import (
    Group,
    Reading,
    path_of,
    read,
    read_all,
    unscaled,
)
from bract.attacks.adaptive.guardian.guardian_settling import SETTLED, settle
from bract.attacks.problem.client_model import images_in
from bract.attacks.problem.evidence import ADAPTIVE, Evidence, Fitting, Known
from bract.attacks.problem.target_model import TargetModel, target_model_of
from bract.attacks.solve.expectation import class_gradients, likely_labels
from bract.attacks.solve.labels import last_layer
from bract.captures.observation import Observation
from bract.defenses import Guardian
from bract.errors import BractError
from bract.models.losses import loss_of
from bract.updates.step_law import StepLaw
from bract.updates.update import Tensors, flatten, unflatten

TRUST = 0.05
"""Error, as a share of the update's root mean square, that halves the trust."""

AGREED = 2e-4
"""Relative difference of the scalars that were used from those of what was read with them, up to
which readings are trusted: images were lost from 3e-4 on, and reconstructed below 1e-4."""

_STAGES = 4
_FIT_STEPS = 120
_MOST_IMAGES = 8
_STRANGE = 0.1

_SAMPLE = 300_000
"""Coordinates from which the scalars of a text's update are estimated."""

_TRIED, _HOPELESS = 30_000, 0.1
"""Coordinates of a text's update that are read first, and the relative difference of the scalars
from which on the others are not read: far above `AGREED`, below which alone images came back."""


@ADAPTIVE.register("guardian")
def undo_guardian(observation: Observation, known: Known) -> Evidence:
    """Recover the update behind Guardian's delta, up to a few readings of each coordinate.

    Given the scalars that couple coordinates (two to four a step, `GuardianMap`), each coordinate
    of delta is a known function of that of g. The function has turning points and jumps at zero,
    so that up to four or so values of g fit where ``|delta|`` is below about ten steps of ``lr``,
    one elsewhere. The scalars are those of any gradient near the true one: first the mean gradient
    of random images under the label that fits best, then that of images fitted to this evidence, a
    few times over while they grow more consistent with what they lead to; each is a stage of
    `Evidence.refine`, the first included, since inverting takes a while. What is left of their
    error moves g along a dozen known directions, in which the match is left free
    (`Evidence.nuisance`); among the readings the one nearest to what is simulated counts
    (`Evidence.alternatives`), since the gradient of an image decides better than any density.

    On a transformer the images are fitted to the coordinates that only one gradient explains
    (`bract.attacks.adaptive.guardian.guardian_clear`): those of random images are too far off.

    On another smooth model and up to 3,072 pixels a last stage settles image and readings together
    (`bract.attacks.adaptive.guardian.guardian_settling`). ``scalars_agree`` in the notes records,
    without the truth, whether the reading is consistent: of the last stage, whether image and
    readings meet, elsewhere whether the scalars do.

    Of texts only the parameters of `Known.needs` are read, and the target has these alone: texts
    have no later stages, for which the others would count. Scalars are estimated from a sample of
    the coordinates: those of random texts are farther off.

    Plain descent (``optimizer: sgd``) only scales g: then the factor is read off the last layer
    where that determines it, and left open otherwise.

    Raises
    ------
    BractError
        If delta is longer than the declared bound, or (in the first stage) more than a tenth of its
        coordinates come from no gradient: another defense, or none, is in use. Most wrong values of
        the optimizer's settings leave fewer, and pass. Scalars that do not agree are noted alone:
        an update whose coordinates are below about ten steps of ``lr`` has its own scalars only
        once the readings are the true ones, which no first estimate is near. Also if every token
        has a label.
    """
    hyper = declared(Guardian, observation)
    groups = _groups(hyper, observation)
    if hyper.optimizer == "sgd":
        return _along_the_line(hyper, observation, target_model_of(observation), groups)
    if loss_of(observation.declaration.loss).per_token:
        raise BractError(
            f"{observation.key}: how Guardian scaled an update is read by guesses of its labels, "
            "of which there are too many where every token has one; only optimizer sgd is inverted",
            code="attack-unsuited",
        )
    needs = known.needs if observation.declaration.text is not None else None
    return Evidence(target={}, refine=_Inverting(hyper, observation, needs))


@dataclass(frozen=True)
class _Inverting:
    """One stage: expect a gradient, invert the optimizer at the scalars that it leads to."""

    hyper: Guardian
    observation: Observation
    needs: frozenset[str] | None = None

    @property
    def stages(self) -> int:
        return _STAGES + 1

    def __call__(self, evidence: Evidence, fit: Fitting) -> Evidence:
        hyper, observation = self.hyper, self.observation
        groups = _groups(hyper, observation, fit.device, self.needs)
        if evidence.notes.get("readings_decided") == "roughly":
            return self._settled(evidence, fit, groups)
        stage = int(evidence.notes.get("stages", 0))
        if not stage:
            labels, expected = _first_estimate(hyper, observation, groups, fit.device)
            if (firm := self._firmed(fit, groups, labels, expected)) is not None:
                return firm
            if (zeros := self._only_zeros(groups, labels, expected, fit)) is not None:
                return zeros
        else:
            labels = list(evidence.notes["labels_for_the_scalars"])
            fitted = fit(evidence, labels, _FIT_STEPS)
            expected = _flat(fitted, observation) / observation.law.to_gradient
        fit.check()
        latest = read_all(hyper, groups, expected, fit.check)
        apart = max(reading.apart for reading in latest)
        if not stage:
            _refuse_strange(observation, latest)
        elif apart >= evidence.notes["scalars_apart"]:
            return replace(evidence, notes=evidence.notes | {"readings_decided": "roughly"})
        return replace(
            _evidence(observation, groups, latest, self.needs),
            labels=torch.tensor(labels) if len(labels) == 1 else None,
            notes={
                "defense": "guardian",
                "method": "inverted the optimizer per coordinate, several readings each",
                "labels_for_the_scalars": labels,
                "stages": stage + 1,
                "readings_decided": "roughly" if stage + 1 == _STAGES else "expected",
                **_summary(latest),
            },
            # Token ids have no slope along which a text could be fitted to sharpen the scalars.
            refine=None if observation.declaration.text is not None else self,
        )

    def _firmed(
        self, fit: Fitting, groups: list[Group], labels: list[int], expected: Tensor
    ) -> Evidence | None:
        """Read a transformer's update with images that are fitted to the clear coordinates."""
        hyper, observation = self.hyper, self.observation
        target_model = target_model_of(observation)
        traits = target_model.traits
        if not (traits.smooth and traits.attends) or observation.declaration.text is not None:
            return None
        scale = observation.law.to_gradient
        firm = firm_up(
            hyper,
            groups,
            fit,
            labels,
            expected,
            flat=lambda g: _flat(g, observation) / scale,
            scale=scale,
            like={n: v.cpu().float() for n, v in observation.parameters.items()},
            unknowns=len(labels) * math.prod(target_model.image_shape),
        )
        if firm is None:
            return None
        readings = read_all(hyper, groups, firm)
        _refuse_strange(observation, readings)
        return replace(
            _evidence(observation, groups, readings),
            labels=torch.tensor(labels) if len(labels) == 1 else None,
            notes={
                "defense": "guardian",
                "method": "inverted the optimizer per coordinate, from those with one reading",
                "labels_for_the_scalars": labels,
                "stages": 1,
                "readings_decided": "expected",
                **_summary(readings),
            },
        )

    def _only_zeros(
        self, groups: list[Group], labels: list[int], expected: Tensor, fit: Fitting
    ) -> Evidence | None:
        """Return which coordinates of a text's update are zero, where a sample cannot be read.

        Scalars that are far from those of what is read with them make every reading wrong; that a
        coordinate is zero follows from none. None for images, whose scalars later stages improve.
        """
        if self.needs is None:
            return None
        hyper, observation = self.hyper, self.observation
        latest = []
        for group in groups:
            moved = group.sent.nonzero().flatten()
            drawn = moved[:: max(1, len(moved) // _TRIED)]
            path = path_of(hyper, group, expected)
            part = expected[group.part]
            reading = read(hyper, replace(group, kept=drawn), path, part, fit.check)
            each = len(moved) / len(drawn)
            used, own = (walk(g, hyper, group.epsilon, each)[1] for g in (part[drawn], reading.g))
            latest.append(replace(reading, apart=own.apart(used)))
        _refuse_strange(observation, latest)
        if max(reading.apart for reading in latest) < _HOPELESS:
            return None
        wanted = observation.gradient()
        kept = {n: wanted[n] for n in observation.parameters if n in self.needs}
        return Evidence(
            target=kept,
            weights={n: (value == 0).to(value.dtype) for n, value in kept.items()},
            labels=torch.tensor(labels) if len(labels) == 1 else None,
            notes={
                "defense": "guardian",
                "method": "read which coordinates are zero: no reading of the others agrees",
                "labels_for_the_scalars": labels,
                "stages": 1,
                **_summary(latest),
            },
        )

    def _settled(self, evidence: Evidence, fit: Fitting, groups: list[Group]) -> Evidence:
        """Decide the readings with an image that is fitted by second order, where one can be."""
        observation = self.observation
        labels = list(evidence.notes["labels_for_the_scalars"])
        found = settle(
            self.hyper,
            groups,
            evidence,
            labels,
            fit,
            flat=lambda g: _flat(g, observation) / observation.law.to_gradient,
            assemble=lambda readings: _evidence(observation, groups, readings),
            like=observation.parameters,
        )
        if found is None:
            return replace(evidence, refine=None)
        notes = _summary(found.readings) | {"readings_decided": "finely", "readings_off": found.off}
        notes["scalars_agree"] = found.off < SETTLED
        return replace(
            _evidence(observation, groups, found.readings),
            labels=evidence.labels,
            notes=evidence.notes | notes,
            refine=None,
        )


def _summary(readings: list[Reading]) -> dict[str, Any]:
    """Notes on readings, the blind signal whether to trust them included."""
    branches = torch.cat([(~r.others.isnan()).sum(dim=0) for r in readings])
    apart = max(reading.apart for reading in readings)
    return {
        "readings": float(branches.double().mean()),
        "scalars_apart": apart,
        "scalars_agree": apart < AGREED,
    }


def _groups(
    hyper: Guardian,
    observation: Observation,
    device: torch.device | None = None,
    needs: frozenset[str] | None = None,
) -> list[Group]:
    whole = flatten({n: observation.update[n] for n in observation.parameters})
    whole = whole.to(device or "cpu").double()
    parts, position = [slice(0, len(whole))], 0
    epsilon = hyper.epsilon
    if hyper.scope == "tensor":
        parts = []
        for name in observation.parameters:
            size = observation.parameters[name].numel()
            parts.append(slice(position, position + size))
            position += size
        epsilon /= math.sqrt(len(observation.update))
    groups = [Group(part, whole[part], epsilon) for part in parts]
    if needs is not None:
        # A coordinate that is zero comes from zero and needs no reading.
        wanted = _mask(observation, needs).to(whole.device) & (whole != 0)
        kept = [wanted[group.part].nonzero().flatten() for group in groups]
        groups = [
            replace(group, kept=own, stride=max(1, len(group.sent) // _SAMPLE))
            for group, own in zip(groups, kept, strict=True)
            if len(own)
        ]
        if not groups:
            raise BractError(
                f"{observation.key}: the update is zero in every parameter that the attack reads; "
                "attack another client or round",
                code="attack-evidence",
            )
    for group in groups:
        length = float(group.sent.norm())
        if hyper.length == "bound" and length > epsilon * (1.0 + 1e-4):
            raise BractError(
                f"{observation.key}: found an update of length {length:.6g}, but the declared "
                f"guardian allows at most {epsilon:.6g}; correct declaration.defenses",
                code="declaration-wrong",
            )
    return [group for group in groups if bool(group.sent.any())]


def _first_estimate(
    hyper: Guardian, observation: Observation, groups: list[Group], device: torch.device
) -> tuple[list[int], Tensor]:
    """Labels, and the mean gradient of random images under them in the update's scale."""
    target_model = target_model_of(observation)
    by_class = torch.stack(
        [_flat(g, observation) for g in class_gradients(observation, target_model, device)]
    )
    # The client defended what its optimizer followed: the gradient plus its weight decay.
    share = StepLaw.of(replace(observation.declaration, defenses=())).decayed
    held = share * _flat(observation.parameters, observation).to(by_class)
    by_class = (by_class + held) / observation.law.to_gradient
    telling = _last_layer_mask(observation, target_model).to(device)
    images = images_in(observation.declaration, _MOST_IMAGES)

    def misfit(labels: list[int]) -> float:
        expected = by_class[labels].mean(dim=0)
        total = 0.0
        for group in groups:
            inside = telling[group.part]
            if not bool(inside.any()):
                continue
            path = path_of(hyper, group, expected)
            delta = unscaled(hyper, group, path)[inside]
            g = expected[group.part][inside]
            found = GuardianMap(hyper, path).inverses(delta, 1e-5)
            near = (found - g).abs().nan_to_num(math.inf).amin(dim=0)
            near = torch.where(near.isfinite(), near, g.abs())
            total += float(near.square().sum()) / float(g.square().sum())
        return total

    labels = likely_labels(len(by_class), images, misfit)
    return labels, by_class[labels].mean(dim=0)


def _last_layer_mask(observation: Observation, target_model: TargetModel) -> Tensor:
    names = set(observation.parameters)
    with contextlib.suppress(BractError):
        names = {name for name in last_layer(target_model) if name is not None}
    return _mask(observation, names)


def _mask(observation: Observation, names: Collection[str]) -> Tensor:
    """Return whether each coordinate of the update is of these parameters, ``(D,)``."""
    return torch.cat(
        [torch.full((v.numel(),), n in names) for n, v in observation.parameters.items()]
    )


def _flat(tensors: Tensors, observation: Observation) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in observation.parameters])


def _evidence(
    observation: Observation,
    groups: list[Group],
    readings: list[Reading],
    needs: frozenset[str] | None = None,
) -> Evidence:
    every = observation.parameters
    like = {n: v.cpu().float() for n, v in every.items() if needs is None or n in needs}
    size = sum(v.numel() for v in like.values())
    scale = observation.law.to_gradient
    place = _mask(observation, like).long().cumsum(0).sub(1).to(readings[0].g.device)
    g = readings[0].g.new_zeros(size)
    error = torch.zeros_like(g)
    most = max(1, *(int((~r.others.isnan()).sum(dim=0).max()) for r in readings))
    others = g.new_full((most, size), torch.nan)
    directions = []
    for group, reading in zip(groups, readings, strict=True):
        at = place[group.places]
        g[at], error[at] = reading.g, reading.error
        # Most branches explain no given coordinate; NaN is sorted last.
        kept = reading.others.sort(dim=0).values[: len(others)]
        others[: len(kept), at] = kept
        for row in reading.directions:
            whole = torch.zeros_like(g)
            whole[at] = row
            directions.append(whole)
    others = torch.where(others.isnan(), g, others)
    size_of = TRUST * float(g.square().mean().sqrt())
    weights = 1.0 / (1.0 + (error / max(size_of, 1e-300)).square())

    def rows(matrix: Tensor) -> Tensors:
        cut = [unflatten(row, like) for row in matrix.cpu()]
        return {name: torch.stack([c[name] for c in cut]) for name in like}

    return Evidence(
        target=unflatten((g * scale).cpu(), like),
        weights=unflatten(weights.cpu(), like),
        alternatives=rows(others * scale),
        nuisance=rows(torch.stack(directions)) if directions else None,
    )


def _refuse_strange(observation: Observation, readings: list[Reading]) -> None:
    for reading in readings:
        if reading.nothing > _STRANGE:
            raise BractError(
                f"{observation.key}: {reading.nothing:.0%} of the coordinates come from no "
                f"gradient under the declared guardian, expected below {_STRANGE:.0%}; "
                "correct declaration.defenses",
                code="declaration-wrong",
            )


def _along_the_line(
    hyper: Guardian, observation: Observation, target_model: TargetModel, groups: list[Group]
) -> Evidence:
    """Plain descent from g stays on the line through it: ``delta = kappa g``."""
    shrunk = hyper.length == "bound"
    longest = 1.0 + hyper.iterations * hyper.lr if shrunk else 1.0
    wanted = {n: observation.gradient()[n] / longest for n in observation.parameters}
    notes: dict[str, Any] = {
        "defense": "guardian",
        "method": "took the update as it is: plain descent never leaves the line through it",
    }
    if not shrunk or len(groups) > 1:
        return Evidence(target=wanted, unknown_factor=shrunk, notes=notes)
    factor = shrinkage(observation, target_model, wanted)
    notes["factor"] = factor
    if factor is None:
        return Evidence(target=wanted, unknown_factor=True, notes=notes)
    return Evidence(target={n: v * factor for n, v in wanted.items()}, notes=notes)
