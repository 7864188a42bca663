"""Reconstructions from captured updates: each client's own attack, scored image by image."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator
from torch import Tensor

from bract.attacks import ATTACKS, Budget, Cosine, Objective, PublicPrior, Reconstruction, Refusal
from bract.attacks.base import Attacker
from bract.attacks.problem.objectives import RelativeError, SquaredError, SquaredPlusNorm
from bract.errors import BractError
from bract.inputs import Truth
from bract.scores.image import score_images
from experiments.harness.attacking import Tier, attack_uploads
from experiments.harness.baselines import class_mean, random_image
from experiments.harness.clients import Situation, Upload, images_of, uploads
from experiments.harness.images import ImageSet
from experiments.harness.result import ATTACKED, own
from experiments.papers.recogniser import Recogniser, named
from experiments.papers.results import Sample
from experiments.papers.runners.base import Context, Measured, Runner, Settings
from experiments.papers.runners.objectives import CosineAndSquared, Norm
from experiments.papers.runners.pictures import PICTURES, picture
from experiments.papers.runners.samples import sample_values

OBJECTIVES: dict[str, Objective] = {
    "mse": SquaredError(),
    "wd": Norm(),
    "cd": Cosine(),
    "mse and wd": SquaredPlusNorm(),
    "mse and cd": CosineAndSquared(),
    "relative": RelativeError(),
}
BASELINES = ("class mean", "random image")

Positive = Annotated[int, Field(ge=1)]
Made = tuple[Tensor, Tensor | None, dict[str, float | None]]
"""Images, labels and further values of one reconstruction."""


class ReconstructionSettings(Settings):
    """What clients do in a row, and who attacks them.

    Attributes
    ----------
    tier
        ``plain`` attacks the update before the defense, ``oblivious`` takes it at face value,
        ``adaptive`` knows the defense; the others hold what FedKL's client keeps secret.
    attack, options
        Name of an attack, or ``class mean`` and ``random image``, which see no gradient; fields of
        the attack, ``objective`` by a name of `OBJECTIVES`.
    uploads, together
        Clients of the row, and how many of them are one unit.
    recogniser
        Network that is trained on other images of the data set and then names the
        reconstructions; a model's name stands for one with the defaults.
    """

    data: str = "digits"
    model: str = "lenet-strided"
    defenses: tuple[dict[str, Any], ...] = ()
    tier: Tier = "oblivious"
    attack: str = "grnn"
    options: dict[str, Any] = {}
    iterations: Positive = 1000
    restarts: Positive = 1
    batch: Positive = 1
    steps: Annotated[int, Field(ge=0)] = 0
    step_images: Annotated[int, Field(ge=0)] = 0
    round: Positive = 1
    trained: bool = False
    init: Literal["default", "uniform"] = "default"
    size: Positive = 32
    uploads: Positive = 4
    together: Positive = 16
    recogniser: Recogniser | None = None
    seed: int = 0

    @field_validator("recogniser", mode="before")
    @classmethod
    def _model(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value

    def situation(self, context: Context) -> Situation:
        """Return what the clients do."""
        return Situation(
            data=self.data,
            model=self.model,
            defenses=self.defenses,
            round=self.round,
            batch=self.batch,
            steps=self.steps,
            step_images=self.step_images,
            trained=self.trained,
            uploads=self.uploads,
            init=self.init,
            size=self.size,
            folder=context.folder,
        )


class ReconstructionRunner(Runner[ReconstructionSettings]):
    """Attacks each client's upload; a unit is some clients, a sample one image."""

    settings: ClassVar[type[Settings]] = ReconstructionSettings
    code: ClassVar[tuple[str, ...]] = (
        *ATTACKED,
        *own("papers.recogniser", "papers.runners.reconstruction", "papers.runners.objectives"),
        *own("papers.runners.pictures", "papers.runners.samples"),
    )

    def count(self, settings: ReconstructionSettings) -> int:
        """Return the number of groups of clients."""
        return -(-settings.uploads // settings.together)

    def run(self, settings: ReconstructionSettings, unit: int, context: Context) -> Measured:
        """Attack the clients of one unit and score every image."""
        situation = settings.situation(context)
        first = unit * settings.together
        clients = range(first, min(first + settings.together, settings.uploads))
        secret = secrets.randbits(256)
        images = images_of(situation, "score")
        captured = uploads(situation, split="score", secret=secret, clients=clients)
        outcomes = self.outcomes(settings, captured, images, clients, context)
        samples, refused, shown = [], [], []
        for client, outcome, upload in zip(clients, outcomes, captured, strict=True):
            if isinstance(outcome, Refusal):
                refused.append(outcome.reason)
                continue
            made, labels, values = outcome
            scored = score_images(
                made,
                Truth(upload.truth, upload.labels),
                recovered=labels,
                candidates=images.candidates,
                perceptual=settings.batch == 1,
            )
            names = None
            if settings.recogniser is not None:
                names = named(
                    settings.recogniser,
                    made[scored.order],
                    data=settings.data,
                    classes=images.classes,
                    folder=context.folder,
                    device=context.device,
                )
            found = sample_values(scored, values | {"cosine": upload.cosine})
            for number, sample in enumerate(found):
                if names is not None:
                    true = scored.labels[number]
                    for k in (1, 3, 5):
                        sample[f"reidentified{k}"] = float(true in names[number][:k])
                samples.append(
                    Sample(group=client, image=upload.source, network=upload.network, values=sample)
                )
            shown += list(zip(scored.originals, made[scored.order], strict=True))
        return Measured(
            samples,
            refused=refused,
            pictures=picture(shown[:PICTURES]) if shown and unit == 0 else None,
            secret=f"{secret:x}",
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
        if settings.attack in BASELINES:
            return _without_gradient(settings, captured, images, clients)
        return attack_all(settings, captured, context)


def attacker(settings: ReconstructionSettings) -> Attacker:
    """Return the attack of a row.

    Raises
    ------
    BractError
        If there is no such attack, or it has no such option.
    """
    kind = ATTACKS[settings.attack]
    options = dict(settings.options)
    names = {entry.name for entry in fields(kind)}
    for name in options:
        if name not in names:
            raise BractError(
                f"attack {settings.attack!r} has no option {name!r}; it has {sorted(names)}",
                code="config-key",
            )
    if isinstance(options.get("objective"), str):
        given = options["objective"]
        if given not in OBJECTIVES:
            raise BractError(
                f"objective {given!r} is none of {', '.join(OBJECTIVES)}", code="unknown-name"
            )
        options["objective"] = OBJECTIVES[given]
    return kind(**options)


def attack_all(
    settings: ReconstructionSettings,
    captured: Sequence[Upload],
    context: Context,
    *,
    public: PublicPrior | None = None,
) -> list[Made | Refusal]:
    """Run the attacker of a row on every upload, with a generator of public images or without.

    Who cannot undo a defense takes the upload at face value.
    """
    outcomes, _ = attack_uploads(
        attacker(settings),
        captured,
        settings.tier,
        budget=Budget(
            iterations=settings.iterations,
            restarts=settings.restarts,
            max_images=max(8, settings.batch),
        ),
        seed=settings.seed,
        device=context.device,
        public=public,
    )
    return [o if isinstance(o, Refusal) else _made(o) for o in outcomes]


def _made(outcome: Reconstruction) -> Made:
    values = {"residual": outcome.gradient_residual, "attack_loss": outcome.final_loss}
    return outcome.images, outcome.labels, values


def _without_gradient(
    settings: ReconstructionSettings, captured: Sequence[Upload], images: ImageSet, clients: range
) -> list[Made | Refusal]:
    made: list[Made | Refusal] = []
    for client, upload in zip(clients, captured, strict=True):
        if settings.attack == "class mean":
            found = class_mean(images.candidates, images.candidate_labels, upload.labels)
        else:
            found = random_image(images.candidates, settings.batch, seed=settings.seed + client)
        made.append((found, None, {}))
    return made
