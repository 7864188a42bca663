"""What an attack may spend, and what it hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bract.errors import BractError
from bract.strict_json import json_ready


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What an attack may spend on one observation.

    Attributes
    ----------
    iterations
        Optimisation steps of each restart; None leaves the attack's own default, or no limit
        where ``seconds`` is given.
    restarts
        Independent starts; the one with the lowest loss of the attacker is the blind pick.
    seconds
        Wall time for all restarts of one observation together. Results then depend on the
        machine; a budget in iterations is reproducible.
    max_images
        Most images that are reconstructed from one observation. An update of more examples is
        explained with this many.
    starts
        Numbers of the restarts to run, each of which begins at its own random point; None takes
        ``0`` to ``restarts - 1``.
    """

    iterations: int | None = None
    restarts: int = 1
    seconds: float | None = None
    max_images: int = 8
    starts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("iterations", self.iterations),
            ("restarts", self.restarts),
            ("seconds", self.seconds),
            ("max_images", self.max_images),
        ):
            if value is not None and not value > 0:
                raise BractError(f"budget.{name} is {value!r}; expected a positive number")
        if self.starts is not None and not self.starts:
            raise BractError("budget.starts is empty; expected numbers of restarts, or None")

    @property
    def chosen_starts(self) -> tuple[int, ...]:
        """Numbers of the restarts that run."""
        return tuple(range(self.restarts)) if self.starts is None else self.starts


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One start of an attack: its best iterate, by the attacker's own loss.

    Attributes
    ----------
    images
        float32 ``(B, C, H, W)`` in [0, 1].
    label_probabilities
        float32 ``(B, classes)``, rows sum to 1.
    loss
        The attacker's loss of exactly these images; infinite where no iterate was finite.
    number
        Which restart it is; the same number begins at the same point whatever the budget.
    cosine, residual
        As `Reconstruction.gradient_cosine` and ``gradient_residual``, for these images.
    loss_curve, iterations, seconds
        As those of `Reconstruction`, for this restart alone.
    """

    images: Tensor
    label_probabilities: Tensor
    loss: float
    number: int = 0
    cosine: float | None = None
    residual: float | None = None
    loss_curve: list[tuple[int, float]] = field(default_factory=list)
    iterations: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """What one attack made of one observation. All tensors are on the CPU.

    Attributes
    ----------
    attack, observation, tier, seed
        Name of the attack, key of the observation, what the adversary knew, and the seed.
    images
        float32 ``(B, C, H, W)`` in [0, 1]: the *blind* pick, chosen by the attacker's loss alone.
    label_probabilities
        float32 ``(B, classes)``, rows sum to 1; row b belongs to image b.
    final_loss
        The attacker's loss of ``images``; infinite where every restart failed.
    loss_curve
        ``(iteration, best loss so far)`` of the chosen restart, at most about 200 points.
    seconds
        Wall time of this observation's share of the work.
    iterations
        Steps that were taken.
    all_restarts
        Every restart; the *oracle* pick chooses among these with the truth in hand, and is
        reported beside the blind pick, never instead.
    gradient_cosine
        Cosine between the matched tensors and those that ``images`` produce, in [-1, 1].
    gradient_residual
        Norm of their difference over the norm of the matched tensors: 0 is a perfect match.
    settings
        The hyper-parameters and what the attack decided by itself, JSON-ready.
    """

    attack: str
    observation: str
    tier: str
    seed: int
    images: Tensor
    label_probabilities: Tensor
    final_loss: float
    loss_curve: list[tuple[int, float]]
    seconds: float
    iterations: int
    all_restarts: list[Restart]
    gradient_cosine: float | None = None
    gradient_residual: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> Tensor:
        """The likeliest label of each image, int64 ``(B,)``."""
        return self.label_probabilities.argmax(dim=1)

    @property
    def failed(self) -> bool:
        """Whether no restart ever had a finite loss. A failed trial stays in every mean."""
        return not torch.isfinite(torch.tensor(self.final_loss)).item()

    def summary(self) -> dict[str, Any]:
        """Everything but the tensors, JSON-ready; numbers that are not finite become None."""
        facts: dict[str, Any] = {
            "attack": self.attack,
            "observation": self.observation,
            "tier": self.tier,
            "seed": self.seed,
            "labels": [int(label) for label in self.labels],
            "final_loss": self.final_loss,
            "failed": self.failed,
            "restart_losses": [r.loss for r in self.all_restarts],
            "loss_curve": [[step, loss] for step, loss in self.loss_curve],
            "seconds": self.seconds,
            "iterations": self.iterations,
            "gradient_cosine": self.gradient_cosine,
            "gradient_residual": self.gradient_residual,
            "settings": self.settings,
        }
        ready: dict[str, Any] = json_ready(facts)
        return ready


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An observation that an attack could not use, and why."""

    attack: str
    observation: str
    reason: str
