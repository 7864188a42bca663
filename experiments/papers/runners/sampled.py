"""Reconstructions from sampled gradients: the victim is one of several clients with one class."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from bract.attacks import Budget, Case, Engine, Evidence, Known, Refusal, reconstruct
from bract.attacks.problem.case import open_case
from bract.captures.observation import ClientDeclaration, Observation
from bract.inputs import Truth
from bract.models import MODELS
from bract.scores.image import score_images
from bract.updates.update import flatten, unflatten
from bract_papers.dlg import DLG
from experiments.harness.data_folders import Split
from experiments.harness.result import ATTACKED, own
from experiments.papers.minmax import glaus, readings, sample, times_drawn
from experiments.papers.results import Sample
from experiments.papers.runners.base import Context, Measured, Runner, Settings
from experiments.papers.runners.pictures import PICTURES, picture
from experiments.papers.runners.samples import sample_values
from experiments.papers.same_class import CLASSES, Federation, federation, images_of_one_class

NETWORKS = 4
"""Networks of a row; victims take turns."""

_FIRST_SEED = {"test": 0, "train": 1000}
_CANDIDATES = 100

Positive = Annotated[int, Field(ge=1)]


@MODELS.register("glaus-cnn")
def mnist_cnn(**_: Any) -> nn.Module:
    """Return GLAUS's network for 28 pixels: 5x5 convolutions of 10, 20 and 10 channels, sigmoids.

    One linear layer follows; 35,900 parameters.
    """
    return nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.Sigmoid(),
        nn.Conv2d(10, 20, 5),
        nn.Sigmoid(),
        nn.Conv2d(20, 10, 5),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(2560, CLASSES),
    )


class SampledSettings(Settings):
    """A federation of clients that hold one image each, all of one class, and who attacks it.

    Attributes
    ----------
    model
        A name of the zoo or ``package.module:callable``; drawn from U(-0.5, 0.5).
    knows
        ``gradient``: what the victim's defense let out, not sampled. ``glaus``: ``samplings``
        samplings of it, the mean over clients, and an own gradient. ``one upload``: one sampling.
    ratio
        Share of the coordinates that are drawn.
    clients
        Of each victim's federation, the victim and the attacker included.
    uploads, together
        Victims of the row, and how many of them are one unit.
    """

    data: str = "digits"
    model: str = "glaus-cnn"
    size: Positive = 28
    defenses: tuple[dict[str, Any], ...] = ()
    knows: Literal["gradient", "glaus", "one upload"] = "glaus"
    ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05
    samplings: Positive = 1000
    clients: Annotated[int, Field(ge=2)] = 10
    iterations: Positive = 480
    restarts: Positive = 1
    line_search: bool = True
    uploads: Positive = 8
    together: Positive = 16
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class OneUpload(DLG):
    """DLG on the coordinates of one sampled upload as they most likely were.

    What MinMax sampling sends is undone (`minmax.readings`); coordinates that were not drawn count
    nothing.
    """

    name: ClassVar[str] = "one sampled upload"

    def prepare(self, case: Case) -> Case:
        """Undo the sampling, as far as it is known."""
        return open_case(
            case.observation,
            tier=case.tier,
            max_images=case.images,
            unroll=self.unroll,
            view=_view,
        )


def _view(observation: Observation, known: Known) -> Evidence:
    del known
    given = {n: observation.gradient()[n] for n in observation.parameters}
    values, trust = readings(flatten(given))
    return Evidence(target=unflatten(values, given), weights=unflatten(trust, given))


class SampledRunner(Runner[SampledSettings]):
    """A unit is some victims, a sample one image."""

    settings: ClassVar[type[Settings]] = SampledSettings
    code: ClassVar[tuple[str, ...]] = (
        *ATTACKED,
        *own("papers.minmax", "papers.same_class", "papers.runners.sampled"),
        *own("papers.runners.pictures", "papers.runners.samples"),
    )

    def count(self, settings: SampledSettings) -> int:
        """Return the number of groups of victims."""
        return -(-settings.uploads // settings.together)

    def run(
        self, settings: SampledSettings, unit: int, context: Context, *, split: Split = "test"
    ) -> Measured:
        """Attack the victims of one unit and score every image.

        ``split`` is that of the images, of which ``train`` is for settings to be chosen on.
        """
        first = unit * settings.together
        victims = range(first, min(first + settings.together, settings.uploads))
        secret = secrets.randbits(256)
        source, taken = images_of_one_class(
            settings.data, context.folder, split, settings.uploads, settings.clients
        )
        federations = [
            federation(
                source,
                taken[i],
                model=settings.model,
                size=settings.size,
                defenses=settings.defenses,
                seed=_FIRST_SEED[split] + i % NETWORKS,
                secret=f"{secret} {i}",
            )
            for i in victims
        ]
        rest = sorted(set(range(len(source.labels))) - {i for row in taken for i in row})
        candidates = source.images(rest[-_CANDIDATES:], channels=1, size=settings.size)
        seen = [
            _seen(settings, one, victim, secret)
            for victim, one in zip(victims, federations, strict=True)
        ]
        outcomes = reconstruct(
            [
                _observation(settings, one, found, victim)
                for victim, one, found in zip(victims, federations, seen, strict=True)
            ],
            (OneUpload if settings.knows == "one upload" else DLG)(
                line_search=settings.line_search
            ),
            budget=Budget(iterations=settings.iterations, restarts=settings.restarts),
            seed=settings.seed,
            engine=Engine(device=context.device),
        )
        samples, refused, shown = [], [], []
        for victim, one, found, outcome in zip(victims, federations, seen, outcomes, strict=True):
            if isinstance(outcome, Refusal):
                refused.append(outcome.reason)
                continue
            scored = score_images(
                outcome.images,
                Truth(one.truth, one.label),
                recovered=outcome.labels,
                candidates=candidates,
            )
            values = {
                "residual": outcome.gradient_residual,
                "attack_loss": outcome.final_loss,
                "cosine": float(F.cosine_similarity(found, one.gradient, dim=0)),
            }
            network = _FIRST_SEED[split] + victim % NETWORKS
            samples += [
                Sample(group=victim, image=victim, network=network, values=v)
                for v in sample_values(scored, values)
            ]
            shown += list(zip(scored.originals, outcome.images[scored.order], strict=True))
        return Measured(
            samples,
            refused=refused,
            pictures=picture(shown[:PICTURES]) if shown and unit == 0 else None,
            secret=f"{secret:x}",
        )


def _seen(settings: SampledSettings, one: Federation, victim: int, secret: int) -> Tensor:
    """Return the flat vector that an attacker with the knowledge of a row matches."""
    sent = one.sent[0]
    if settings.knows == "gradient":
        return sent
    drawn = sha256(f"{secret} {victim} sampling".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(drawn[:6]))
    count = max(1, int(settings.ratio * len(sent)))
    if settings.knows == "one upload":
        return sample(sent, count, generator).values
    times = times_drawn(sent, count, settings.samplings, generator)
    return glaus(times, sent.sign(), one.sent[-1], torch.stack(one.sent).mean(dim=0))


def _observation(
    settings: SampledSettings, one: Federation, seen: Tensor, victim: int
) -> Observation:
    return Observation(
        round=1,
        client=f"client-{victim}",
        parameters=one.parameters,
        buffers={},
        update=unflatten(seen, one.parameters),
        declaration=ClientDeclaration(
            algorithm="fedsgd",
            model=settings.model,
            image_shape=(1, settings.size, settings.size),
            classes=CLASSES,
            mean=(0.0,),
            std=(1.0,),
            batch_size=1,
            num_examples=1,
        ),
    )
