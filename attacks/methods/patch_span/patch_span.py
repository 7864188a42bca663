"""Invert what entered a convolution, which its gradient tells exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from bract.attacks.methods.enlarging import EnlargingAttack
from bract.attacks.methods.inverting import InvertingAttack
from bract.attacks.methods.patch_span.activations import (
    Maps,
    entering,
    read_activations,
    steps_on_all,
)
from bract.attacks.methods.patch_span.layers import convolutions
from bract.attacks.problem.case import Case
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.site import Site
from bract.attacks.problem.visibility import smooth_images
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.errors import Errors
from bract.attacks.reading.reading import ReadingBudget
from bract.attacks.registry import ATTACKS
from bract.attacks.result import Determined
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.matching import hard_labels
from bract.attacks.solve.own_statistics import OwnStatistics
from bract.errors import BractError

INVERTED = 0.15
"""Loss below which images are taken for those whose activations were read. Chosen on images that no
benchmark scores, 200 iterations: with statistics nine of ten uploads through fresh ResNets lie
below it, at a mean of 13 to 30 dB, without them four of six of ResNet-20, at 8 to 17 dB."""

NEARER = 0.5
"""Loss below which images are kept from attacks that guess: half as far from what was read as any
unrelated image. Chosen on images that no benchmark scores: between 0.15 and 0.4 patch-span had 11
to 13 dB, where GRNN and IG had 6 to 9, the latter with better cosines."""

_REFERENCES = 8

_LEAST_GAP = 1e2
"""Least ratio of what a null space leaves out to what it holds."""


@ATTACKS.register("patch-span")
@dataclass(frozen=True, kw_only=True)
class PatchSpan(InvertingAttack, EnlargingAttack):
    """Activations off the row space of a convolution's gradient, then the images from them.

    Through a convolution with as many units as places, of all images together, every patch of what
    entered lies in the row space of the weight's gradient, and maps all of whose patches do are
    those that entered and their mixtures
    (`bract.attacks.methods.patch_span.activations.solved`), whatever follows the layer, trained or
    fresh, in training mode or not. The first such layer is taken, of a ResNet-20 and one image the
    first of the last stage: 8,192 activations of 32 pixels. Quasi-Newton descent then lowers the
    squared sine between candidates' activations and that space, plus the error of the batch
    statistics before that layer (`OwnStatistics.error`) where the capture holds them, plus total
    variation, from a quarter of the size to the whole. Nothing behind that layer is simulated,
    where a small change of the image turns the gradient of a deep network behind ReLU around. That
    spans of gradients hold what entered is the idea of DAGER (Petrov et al. 2024) and SPEAR
    (Dimitrov et al. 2024); carrying it to patches that overlap is bract's own.

    A local step of SGD on all images adds the maps that they make at the weights it finds, as other
    images would; those at the weights that were sent lie in the space with them.

    A loss is the squared sine of the image farthest from the space, as a share of that of the
    nearest of grey and smooth random images, which have nothing of the client's: activations behind
    a ReLU are alike, whatever the image. Below `INVERTED` images have the activations that were
    read, which of several is not to say that none is a mixture.
    """

    name: ClassVar[str] = "patch-span"
    title: ClassVar[str] = "Patch span"
    family: ClassVar[str] = "spans of a convolution's gradient"
    found_below: ClassVar[float | None] = INVERTED
    nearer: ClassVar[float | None] = NEARER

    def for_best(self, problem: Problem) -> Self | None:
        """Return the attack for deep models with kinks; others are solved for."""
        return self if problem.through_depth else None

    def require_model(self, case: Case) -> None:
        """Refuse models without a convolution that has as many units as places."""
        super().require_model(case)
        if not convolutions(case):
            raise BractError(
                f"{case.observation.key}: patch-span needs a convolution with at least as many "
                "units as places, and patches that overlap, and the model has none; use another "
                "attack",
                code="attack-unsuited",
            )

    def prepare(self, case: Case) -> Case:
        """Refuse what is no sum of gradients of all images."""
        case = super().prepare(case)
        steps_on_all(case)
        return case

    def entered(self, case: Case, budget: ReadingBudget) -> Entered:
        """Return the space of the maps that entered a convolution."""
        maps = read_activations(case, seconds=budget.seconds)
        site = Site(maps.layer.name)
        # Eigenvalues are squares: of the gap's root what is inside is to what is outside.
        return Entered(
            site=site,
            space=maps,
            errors=Errors.of(case, site.names),
            certificate=Determined(maps.room, maps.gap**-0.5, _LEAST_GAP**-0.5),
            component="span of patches",
        )

    def inverted(self, problem: Problem, run: Run, read: Sequence[Entered]) -> Outcome:
        """Find images from the maps that entered in each trial."""
        problem.target_model.model.to(problem.device)
        wanted = [maps_of(one).to(problem.device, problem.dtype) for one in read]
        known = OwnStatistics.of(problem)
        parts = (read[0].component, *(() if known is None else ("batch statistics",)))

        def apart(images: Tensor, labels: Tensor) -> Tensor:
            del labels
            found = []
            for trial, (distances, seen) in enumerate(_distances(problem, wanted, images)):
                total = distances.mean()
                if known is not None and (held := known.layers.keys() & seen.keys()):
                    own = {n: (seen[n][0][None], seen[n][1][None]) for n in seen if n in held}
                    total = total + known.of_trial(trial).apart(own)[0]
                found.append(total)
            return torch.stack(found)

        found = self.descend(problem, run, hard_labels(problem), apart, *parts)
        with torch.no_grad():
            found.losses = _shares(problem, wanted, found.images.to(problem.dtype))
        return found


def maps_of(read: Entered) -> Maps:
    """Return the space of maps that a reading gave."""
    assert isinstance(read.space, Maps)
    return read.space


_Seen = tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]
"""Squared sines ``(B,)`` of a trial's images, and statistics before the layer."""


def _distances(problem: Problem, wanted: list[Maps], images: Tensor) -> list[_Seen]:
    """Return what images ``(L, B, C, H, W)`` in [0, 1] leave, trial by trial."""
    problem.target_model.follow(problem.parameters)
    inputs = problem.target_model.normalise(images)
    found = []
    for trial, read in enumerate(wanted):
        state = {n: v[trial] for n, v in (problem.parameters | problem.state).items()}
        maps, seen = entering(problem.target_model, state, inputs[trial], read.layer.name)
        found.append((torch.stack([read.distance(each) for each in maps]), seen))
    return found


def _shares(problem: Problem, wanted: list[Maps], images: Tensor) -> Tensor:
    """Return the farthest image's distance as a share of the nearest unrelated one's, ``(L,)``."""
    count, *shape = problem.image_shape
    generator = torch.Generator().manual_seed(0)
    smooth = smooth_images(_REFERENCES * count, shape, generator).view(_REFERENCES, count, *shape)
    unrelated = torch.cat([torch.full_like(smooth[:1], 0.5), smooth]).to(images)
    farthest = torch.stack([own.max() for own, _ in _distances(problem, wanted, images)])
    nearest = [
        torch.stack([own.min() for own, _ in _distances(problem, wanted, each.expand_as(images))])
        for each in unrelated
    ]
    tiny = torch.finfo(images.dtype).eps
    return (farthest / torch.stack(nearest).amin(dim=0).clamp_min(tiny)).to(torch.float64)
