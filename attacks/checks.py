"""The contract of every attack, as checks that an attack of another package passes as well."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bract.attacks.base import Attacker
from bract.attacks.problem.public_prior import PublicPrior
from bract.attacks.registry import ATTACKS
from bract.attacks.result import Budget, Reconstruction, Refusal, SeedBudget
from bract.attacks.solve.engine import Engine
from bract.attacks.task import AttackTask
from bract.captures.observation import ClientDeclaration, Observation
from bract.config.audit import Tier
from bract.errors import BractError
from bract.models import create_model
from bract.models.losses import loss_of
from bract.updates.update import buffers_of, parameters_of

NEAR = 1e-3
"""Largest difference of a value that companions may make, of values in [0, 1]."""

_SIDE, _CLASSES = 8, 10


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An attack, the upload that it is checked on, and what a run may cost.

    Attributes
    ----------
    attack
        The attack.
    upload
        The observation.
    public
        A generator trained on public images, for attacks that search one.
    iterations
        Steps of each run.
    """

    attack: Attacker
    upload: Observation
    public: PublicPrior | None = None
    iterations: int = 5

    @cached_property
    def found(self) -> Reconstruction | Refusal:
        """The result on the upload alone, under seed 0."""
        (found,) = self.run()
        return found

    @property
    def tier(self) -> Tier:
        """The surrogate tier for attacks that serve no other, else the adaptive one."""
        return "surrogate" if self.attack.tiers == ("surrogate",) else "adaptive"

    def run(
        self, *observations: Observation, seed: int = 0, **budget: Any
    ) -> list[Reconstruction | Refusal]:
        """Attack the upload, or other observations, on the CPU."""
        limits: dict[str, Any] = {"weak_seeds": SeedBudget(candidates=0)}
        limits |= budget or {"iterations": self.iterations}
        task = AttackTask(
            budget=Budget(**limits),
            seed=seed,
            tier=self.tier,
            engine=Engine(device="cpu"),
            public=self.public,
        )
        return self.attack.attack(observations or [self.upload], task)


Check = Callable[[Trial], None]


def check_attack(
    attack: str | Attacker,
    observations: Sequence[Observation] = (),
    *,
    public: PublicPrior | None = None,
    iterations: int = 5,
) -> None:
    """Check that an attack keeps the contract of `bract.attacks.Attacker`.

    Parameters
    ----------
    attack
        An attack, or its registered name.
    observations
        Uploads to check it on, such as those of ``ObservationStore("runs/NAME/captures")``. An
        attack that handles images has a made-up upload as well.
    public
        A generator trained on public images, for an attack of the surrogate tier alone.
    iterations
        Steps of each run.

    Raises
    ------
    AssertionError
        If a check fails; it names the attack, the upload, and the difference.
    BractError
        If there is no upload of an input that the attack handles.

    Examples
    --------
    >>> check_attack("ig")
    """
    checked = ATTACKS[attack]() if isinstance(attack, str) else attack
    uploads = [one for one in observations if one.declaration.input in checked.inputs]
    if "image" in checked.inputs:
        uploads.append(made_up_upload())
    if not uploads:
        raise BractError(
            f"attack {checked.name} handles the input {', '.join(checked.inputs)}; pass "
            "observations of it, such as those that ObservationStore reads",
            code="data-empty",
        )
    for upload in uploads:
        trial = Trial(attack=checked, upload=upload, public=public, iterations=iterations)
        for check in CHECKS:
            check(trial)


def made_up_upload() -> Observation:
    """Return the gradient of one random 8-pixel image through a strided LeNet."""
    generator = torch.Generator().manual_seed(0)
    model = create_model("lenet-strided", classes=_CLASSES, channels=1, image_size=_SIDE)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.rand(value.shape, generator=generator) - 0.5)
    image = torch.rand(1, 1, _SIDE, _SIDE, generator=generator)
    loss = torch.nn.functional.cross_entropy(model((image - 0.5) / 0.5), torch.tensor([3]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    sent = parameters_of(model)
    return Observation(
        round=1,
        client="made-up",
        parameters=sent,
        buffers=buffers_of(model),
        update=dict(zip(sent, gradients, strict=True)),
        declaration=ClientDeclaration(
            algorithm="fedsgd",
            model="lenet-strided",
            image_shape=(1, _SIDE, _SIDE),
            classes=_CLASSES,
            mean=(0.5,),
            std=(0.5,),
            batch_size=1,
            num_examples=1,
        ),
    )


def reconstructs_or_refuses(trial: Trial) -> None:
    """Return images of the declared shape, or a refusal that names the attack's reason."""
    before = {name: value.clone() for name, value in trial.upload.update.items()}
    found = trial.found
    for name, value in before.items():
        _require(torch.equal(value, trial.upload.update[name]), trial, f"it changed {name}")
    _require(found.observation == trial.upload.key, trial, f"it returned {found.observation}")
    if isinstance(found, Refusal):
        _require(bool(found.reason.strip()), trial, "its refusal gives no reason")
        return
    images, labels = found.images, found.label_probabilities
    declared = trial.upload.declaration
    _require(found.attack == trial.attack.name, trial, f"the result is named {found.attack}")
    _require(images.dtype == torch.float32, trial, f"images are {images.dtype}")
    _require(
        tuple(images.shape[1:]) == declared.image_shape, trial, f"images are {tuple(images.shape)}"
    )
    _require(len(images) <= (declared.num_examples or 1), trial, f"{len(images)} images")
    _require(bool(images.isfinite().all()), trial, "images are not finite")
    if declared.input == "image":
        inside = bool(((images >= 0) & (images <= 1)).all())
        _require(inside, trial, "images leave [0, 1]")
    _require(len(labels) == len(images), trial, f"{len(labels)} rows of labels")
    if declared.input != "text" and loss_of(declared.loss).of_classes:
        sums = labels.sum(dim=1)
        _require(bool((sums - 1).abs().max() < NEAR), trial, f"labels sum to {sums.tolist()}")


def keeps_a_budget_of_iterations(trial: Trial) -> None:
    """Take at most the steps of the budget, and those of the attack's own ``polish_steps``."""
    found = trial.found
    if isinstance(found, Reconstruction):
        taken = found.iterations
        most = trial.iterations + getattr(trial.attack, "polish_steps", 0)
        _require(taken <= most, trial, f"{taken} iterations of a budget of {most}")


def keeps_a_budget_of_seconds(trial: Trial) -> None:
    """Stop when the clock, which goes on by a second whenever it is read, is past the budget."""
    seconds = 6
    with _ticking():
        (found,) = trial.run(seconds=float(seconds))
    if isinstance(found, Reconstruction):
        taken = found.iterations
        _require(taken <= seconds, trial, f"{taken} iterations in {seconds} readings of the clock")


def repeats_under_a_seed(trial: Trial) -> None:
    """Return the same images and labels from the same seed."""
    one, (two,) = trial.found, trial.run()
    _require(type(one) is type(two), trial, "a second run under the same seed was refused")
    if isinstance(one, Reconstruction) and isinstance(two, Reconstruction):
        for what, first, second in (
            ("images", one.images, two.images),
            ("labels", one.label_probabilities, two.label_probabilities),
        ):
            _require(torch.equal(first, second), trial, f"a second run returned other {what}")


def does_not_depend_on_companions(trial: Trial) -> None:
    """Return the same result for an upload alone, and behind another one of its shape."""
    update = {name: -0.5 * value for name, value in trial.upload.update.items()}
    other = replace(trial.upload, client="companion", update=update)
    found = trial.run(other, trial.upload)
    keys = [each.observation for each in found]
    _require(keys == [other.key, trial.upload.key], trial, f"results are of {', '.join(keys)}")
    alone, beside = trial.found, found[1]
    _require(type(alone) is type(beside), trial, "a companion decides whether it is refused")
    if isinstance(alone, Reconstruction) and isinstance(beside, Reconstruction):
        apart = _apart(alone.images, beside.images)
        _require(apart <= NEAR, trial, f"companions change its images by {apart:g}")


def refuses_values_that_are_not_finite(trial: Trial) -> None:
    """Refuse an update that holds NaN by the tensor's name."""
    name, value = next(iter(trial.upload.update.items()))
    spoiled = value.clone()
    spoiled.view(-1)[0] = float("nan")
    (found,) = trial.run(replace(trial.upload, update=trial.upload.update | {name: spoiled}))
    _require(isinstance(found, Refusal), trial, "it attacked an update that holds NaN")
    if isinstance(found, Refusal):
        _require(name in found.reason, trial, f"its refusal does not name {name}")


CHECKS: tuple[Check, ...] = (
    reconstructs_or_refuses,
    keeps_a_budget_of_iterations,
    keeps_a_budget_of_seconds,
    repeats_under_a_seed,
    does_not_depend_on_companions,
    refuses_values_that_are_not_finite,
)
"""Every check of the contract."""


@contextmanager
def _ticking() -> Iterator[None]:
    seconds = itertools.count()

    def read() -> float:
        return float(next(seconds))

    with mock.patch.object(time, "perf_counter", read), mock.patch.object(time, "monotonic", read):
        yield


def _require(kept: bool, trial: Trial, found: str) -> None:
    if not kept:
        raise AssertionError(f"attack {trial.attack.name} on {trial.upload.key}: {found}")


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) if one.shape == other.shape else float("inf")
