"""Sentences reconstructed from the update of a language model's client, scored by its words."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from bract.attacks import ATTACKS, Budget, Refusal, reconstruct
from bract.attacks.problem.objectives import SquaredError
from bract.audit.questions.reconstruction.scores.text import TextScorer
from experiments.harness.data_folders import Need
from experiments.harness.result import ATTACKED, own
from experiments.harness.reviews import SST2, missing_sst2
from experiments.harness.texts import FIRST_SEED, public_texts, send_texts
from experiments.papers.results import Sample
from experiments.papers.runners.base import Context, Measured, Runner, Settings

Positive = Annotated[int, Field(ge=1)]


class SentenceSettings(Settings):
    """What clients train on in a row, and who attacks them.

    Attributes
    ----------
    data
        ``reviews``: made-up sentences; ``sst2``: by path.
    tokenizer
        ``reviews``: the words of public made-up sentences; ``minilm``: WordPieces of BERT.
    attack
        ``frequent words`` sees no update: the most frequent token at each position of public
        sentences.
    objective
        ``squared error`` in the place of the attack's own matching loss.
    tier
        ``oblivious`` takes the update at face value, ``adaptive`` knows the defense.
    batch
        Sentences of an update.
    words
        Fewest and most words of a sentence; None for any.
    uploads
        Clients of the row, each with a sentence and a network of its own.
    """

    data: Literal["reviews", "sst2"] = "reviews"
    tokenizer: Literal["reviews", "minilm"] = "reviews"
    model: str = "text-encoder(width=128,depth=2,heads=2)"
    attack: str = "sim"
    objective: Literal["squared error"] | None = None
    defense: dict[str, Any] | None = None
    tier: Literal["oblivious", "adaptive"] = "oblivious"
    iterations: Positive = 300
    restarts: Positive = 1
    batch: Positive = 1
    words: tuple[Positive, Positive] | None = None
    uploads: Positive = 8
    split: Literal["score", "choose"] = "score"


class SentencesRunner(Runner[SentenceSettings]):
    """Attacks one client's update; a unit is one client, a sample one sentence."""

    settings: ClassVar[type[Settings]] = SentenceSettings
    code: ClassVar[tuple[str, ...]] = (
        *ATTACKED,
        *own("harness.texts", "harness.reviews", "papers.runners.sentences"),
    )

    def missing(self, settings: SentenceSettings, context: Context) -> Need | None:
        """Return what lacks of SST-2 where it is asked for."""
        return missing_sst2(context.folder) if settings.data == SST2 else None

    def count(self, settings: SentenceSettings) -> int:
        """Return the number of clients."""
        return settings.uploads

    def run(self, settings: SentenceSettings, unit: int, context: Context) -> Measured:
        """Attack one client and score every sentence; F1 is the mean of the other two, as printed.

        Sentences of a refused update have no sample.
        """
        sent = send_texts(
            settings.data,
            settings.batch,
            seed=FIRST_SEED[settings.split] + unit,
            model=settings.model,
            tokenizer=settings.tokenizer,
            split=settings.split,
            folder=context.folder,
            words=settings.words,
            defense=settings.defense,
        )
        references = public_texts(settings.data, settings.tokenizer, sent.schema, context.folder)
        if settings.attack == "frequent words":
            made = references.baselines(sent.truth.labels, settings.batch, seed=unit)
            images = made["frequent_tokens"]
        else:
            options: dict[str, Any] = {}
            if settings.objective is not None:
                options["objective"] = SquaredError()
            (found,) = reconstruct(
                sent.captured,
                ATTACKS[settings.attack](**options),
                budget=Budget(
                    iterations=settings.iterations,
                    restarts=settings.restarts,
                    max_images=settings.batch,
                ),
                seed=unit,
                tier=settings.tier,
                device=context.device,
            )
            if isinstance(found, Refusal):
                return Measured([], refused=[found.reason])
            images = found.images.cpu()
        scored = TextScorer(sent.schema, references).score(images, sent.truth)
        samples = []
        for row in scored.rows:
            recall, precision = row.features or 0.0, row.precision or 0.0
            values = {
                "f1": (precision + recall) / 2,
                "precision": precision,
                "recall": recall,
                "rouge_l": row.rouge_l,
            }
            samples.append(Sample(group=unit, values=values))
        return Measured(samples)
