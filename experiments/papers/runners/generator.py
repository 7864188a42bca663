"""Reconstructions by who holds a generator of public images of the clients' kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from bract.attacks import Refusal
from bract_priors.prior_training import PriorSettings, train_prior
from bract_priors.trained_prior import TrainedPrior
from experiments.harness.clients import Upload
from experiments.harness.images import ImageSet, image_set
from experiments.papers.runners.base import Context, Settings
from experiments.papers.runners.reconstruction import (
    BASELINES,
    Made,
    Positive,
    ReconstructionRunner,
    ReconstructionSettings,
    attack_all,
)

ALONE = "generator alone"


class GeneratorSettings(ReconstructionSettings):
    """As its base, and how the generator is trained.

    Attributes
    ----------
    attack
        One that searches a generator, or ``generator alone``: a random image of the right class,
        made without a gradient.
    prior_images
        Of the data set's training split, none of which is attacked, with their labels.
    prior_latent, prior_width, prior_epochs
        See `bract_priors.prior_training.PriorSettings`.
    """

    attack: str = "ggl"
    prior_images: Positive = 10_000
    prior_latent: Positive = 32
    prior_width: Positive = 24
    prior_epochs: Positive | None = None


class GeneratorRunner(ReconstructionRunner):
    """As its base, with a generator that is trained once for all rows."""

    settings: ClassVar[type[Settings]] = GeneratorSettings
    code: ClassVar[tuple[str, ...]] = (
        *ReconstructionRunner.code,
        "experiments.papers.runners.generator",
    )

    def outcomes(
        self,
        settings: ReconstructionSettings,
        captured: Sequence[Upload],
        images: ImageSet,
        clients: range,
        context: Context,
    ) -> list[Made | Refusal]:
        """Return what the attacker of a row makes of every upload."""
        assert isinstance(settings, GeneratorSettings)
        if settings.attack == ALONE:
            public = generator(settings, context)
            return [
                (public.sample(one.labels.tolist(), seed=settings.seed + client), one.labels, {})
                for client, one in zip(clients, captured, strict=True)
            ]
        if settings.attack in BASELINES:
            return super().outcomes(settings, captured, images, clients, context)
        return attack_all(settings, captured, context, public=generator(settings, context))


def generator(settings: GeneratorSettings, context: Context) -> TrainedPrior:
    """Train a row's generator, or return the one of the same settings."""
    return _trained(
        settings.data,
        settings.size,
        settings.prior_images,
        PriorSettings(
            latent=settings.prior_latent,
            width=settings.prior_width,
            epochs=settings.prior_epochs,
            device=context.device,
        ),
        context.folder,
    )


@cache
def _trained(
    data: str, size: int, count: int, settings: PriorSettings, folder: Path
) -> TrainedPrior:
    found = image_set(data, count, "choose", size=size, folder=folder)
    return train_prior(
        found.images,
        found.labels,
        settings,
        source=f"{data}, {count:,} images of the training split",
        classes=found.classes,
    )
