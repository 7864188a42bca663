"""Guardian's own optimisation on one batch's gradient: its metrics after some steps."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from bract.defenses.base import cosine_and_ratio
from bract.defenses.guardian import Guardian
from bract.seeds import derive_seed
from bract.updates.update import flatten
from experiments.harness.clients import Situation, uploads
from experiments.harness.result import ATTACKED, own
from experiments.papers.results import Sample
from experiments.papers.runners.base import Context, Measured, Runner, Settings

Positive = Annotated[int, Field(ge=1)]


class StepsSettings(Settings):
    """Guardian on the gradients of some clients.

    Attributes
    ----------
    guardian
        Fields of `bract.defenses.guardian.Guardian`.
    start
        ``gradient``, the paper's own, or ``random``: a normal vector of the gradient's norm.
    scaled
        Whether the gradient is divided by its norm first, so that it fits epsilon 1.
    """

    data: str = "digits"
    model: str = "lenet-strided"
    guardian: dict[str, Any] = {}
    start: Literal["gradient", "random"] = "gradient"
    scaled: bool = True
    batch: Positive = 1
    uploads: Positive = 16


class StepsRunner(Runner[StepsSettings]):
    """A unit is all clients; values are ``pmm``, ``ppm``, their weighted sum, cosine and norm."""

    settings: ClassVar[type[Settings]] = StepsSettings
    code: ClassVar[tuple[str, ...]] = (
        *ATTACKED,
        *own("papers.runners.guardian_steps"),
    )

    def count(self, settings: StepsSettings) -> int:
        """Return 1: all clients together."""
        del settings
        return 1

    def run(self, settings: StepsSettings, unit: int, context: Context) -> Measured:
        """Take the steps on every client's gradient."""
        del unit
        situation = Situation(
            data=settings.data,
            model=settings.model,
            batch=settings.batch,
            uploads=settings.uploads,
            folder=context.folder,
        )
        guardian = Guardian(**{"length": "bound", **settings.guardian})
        samples = []
        for client, upload in enumerate(uploads(situation, split="score", secret=0)):
            g = flatten(upload.plain.update)
            if settings.scaled:
                g = g / g.norm()
            start = None
            if settings.start == "random":
                generator = torch.Generator().manual_seed(derive_seed(0, "start", client))
                start = torch.randn(g.shape, generator=generator)
                start *= g.norm() / start.norm()
            delta = guardian.solve(g, guardian.epsilon, start=start)
            cosine, ratio = cosine_and_ratio(g, delta)
            pmm = abs(guardian.epsilon * float(g.norm()) - float(g.dot(delta)))
            values: dict[str, float | None] = {
                "pmm": pmm,
                "ppm": abs(cosine),
                "loss": pmm + guardian.beta * abs(cosine),
                "cosine": cosine,
                "norm_ratio": ratio,
                "angle": math.degrees(math.acos(max(-1.0, min(1.0, cosine)))),
            }
            samples.append(
                Sample(group=client, image=upload.source, network=upload.network, values=values)
            )
        return Measured(samples)
