"""Words read by a federation of two unlike clients, plain and encrypted: seeds are units."""

from __future__ import annotations

import statistics
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from bract.config.encryption import EncryptionConfig
from bract.errors import BractError
from bract.seeds import derive_seed
from bract.strategies import FedAvg, FedBoosting
from bract.updates.update import Tensors
from experiments.harness.crnn import Architecture, first
from experiments.harness.data_folders import SCENE_TEXT, Need
from experiments.harness.readers import Reader, Reading, Training, Words, WordSet, read
from experiments.harness.result import own
from experiments.harness.simulation import simulate
from experiments.harness.words import CHARACTERS, STYLES, word_set
from experiments.papers.results import Sample
from experiments.papers.runners.base import Context, Measured, Runner, Settings
from experiments.papers.runners.read_words import picture
from experiments.papers.text_sets import TESTS, TRAINING, missing_text, open_text

RENDERED = "words"
"""The data set that is rendered on the fly, by `experiments.harness.words`."""

SHOWN = 12
"""Words of a row's picture."""

Positive = Annotated[int, Field(ge=1)]


class TextSettings(Settings):
    """One federation of two clients that read words.

    Attributes
    ----------
    data
        ``words``: rendered, the first client's clean and the second's scene-like.
        ``scene-text``: Synth90K at the first client, SynthText at the second, by path.
    characters, longest, words, test_words
        Of ``words`` alone: different characters, characters of the longest word, words of a client
        (a tenth validates) and of each test set.
    height, width, channels, hidden
        See `Architecture`.
    strategy
        ``fedavg`` averages uniformly.
    p_hat, weighting, training_scores
        Of ``fedboosting``, see there. ``p_hat`` of 1 fuses nothing.
    encrypted
        Whether all sums are of ciphertexts under a key of ``key_bits``, values of ``bits`` within
        ``clip``, and integer weights that sum to ``weight_sum`` at most (P of the thesis).
    judged
        Last rounds whose accuracy is averaged.
    watched
        Rounds after which accuracy and first weight are kept as ``accuracy@ROUND`` and
        ``weight0@ROUND``.
    """

    data: Literal["words", "scene-text"] = "words"
    characters: Annotated[int, Field(ge=2, le=len(CHARACTERS))] = 36
    longest: Annotated[int, Field(ge=3)] = 10
    words: Annotated[int, Field(ge=20)] = 1000
    test_words: Positive = 300
    height: Literal[8, 16, 32, 64] = 32
    width: Annotated[int, Field(ge=8)] = 100
    channels: Positive = 64
    hidden: Positive = 256
    strategy: Literal["fedavg", "fedboosting"] = "fedavg"
    p_hat: Annotated[float, Field(gt=0.5, le=1.0)] = 0.9
    weighting: Literal["softmax", "proportional"] = "softmax"
    training_scores: bool = True
    encrypted: bool = False
    key_bits: Literal[2048, 3072] = 2048
    bits: Annotated[int, Field(ge=2, le=32)] = 16
    clip: Annotated[float, Field(gt=0.0)] = 1.0
    weight_sum: Positive = 100
    optimizer: Literal["adam", "adadelta"] = "adadelta"
    lr: Annotated[float, Field(gt=0.0)] = 0.05
    batch: Positive = 800
    epochs: Positive = 1
    rounds: Positive = 30
    judged: Positive = 5
    watched: tuple[Positive, ...] = ()
    seeds: Positive = 5

    @property
    def architecture(self) -> Architecture:
        """Return the network's sizes."""
        characters = self.characters if self.data == RENDERED else len(CHARACTERS)
        return Architecture(self.height, self.width, characters, self.channels, self.hidden)

    @property
    def training(self) -> Training:
        """Return how a client trains."""
        return Training(self.batch, self.epochs, self.optimizer, self.lr)


class TextRunner(Runner[TextSettings]):
    """Trains one federation a seed; the sample of a unit is the seed.

    ``accuracy`` is the share of words read without a mistake, the mean over test sets and over the
    last rounds; ``accuracy_SET`` that of one test set; ``character_errors`` is edits over written
    characters after the last round; ``diverged`` is 1 where training ended in values that are not
    finite; ``trained`` is the mean over clients of the training words that their own models read
    after the last round's training; ``weight0`` is the mean weight of the first client.
    """

    settings: ClassVar[type[Settings]] = TextSettings
    code: ClassVar[tuple[str, ...]] = (
        "bract.strategies",
        *own("harness.words", "harness.crnn", "harness.readers", "harness.simulation"),
        *own("papers.text_sets", "papers.sealed"),
        *own("papers.runners.text", "papers.runners.read_words"),
    )

    def count(self, settings: TextSettings) -> int:
        """Return the number of seeds."""
        return settings.seeds

    def missing(self, settings: TextSettings, context: Context) -> Need | None:
        """Say which text set is not there."""
        return missing_text(context.folder) if settings.data == SCENE_TEXT else None

    def run(self, settings: TextSettings, unit: int, context: Context) -> Measured:
        """Train under one seed and judge after every round."""
        clients = [
            Reader(
                settings.architecture,
                words,
                settings.training,
                seed=derive_seed(unit, "client"),
                device=context.device,
            )
            for words in training_sets(settings, unit, context)
        ]
        judge = Judge(settings, test_sets(settings, unit, context), context.device)
        start = first(settings.architecture, derive_seed(unit, "model"))
        strategy = strategy_of(settings, len(clients))
        rows = simulate(strategy, clients, start, settings.rounds, judge)
        values = _values(settings, judge, rows)
        values["trained"] = statistics.fmean(client.trained for client in clients)
        clipped = getattr(strategy, "clipped", None)
        if clipped is not None:
            values["clipped"] = float(clipped)
        shown = None
        if unit == 0 and judge.readings:
            shown = picture(judge.sets, judge.readings[-1], SHOWN)
        return Measured([Sample(group=unit, values=values)], pictures=shown)


class Judge:
    """What a model reads of every test set; `readings` has each round's by set."""

    def __init__(self, settings: TextSettings, sets: dict[str, WordSet], device: str) -> None:
        self.architecture, self.device, self.sets = settings.architecture, device, sets
        self.readings: list[dict[str, Reading]] = []

    def __call__(self, arrays: Tensors) -> float:
        """Return the mean accuracy over the test sets."""
        found = {
            name: read(self.architecture, arrays, words, self.device)
            for name, words in self.sets.items()
        }
        self.readings.append(found)
        return statistics.fmean(reading.accuracy for reading in found.values())


def strategy_of(settings: TextSettings, clients: int) -> FedAvg:
    """Return the strategy that settings describe, over ciphertexts where they say so."""
    options: dict[str, Any] = {"weighting": "uniform"}
    if settings.strategy == "fedboosting":
        options = {
            "weighting": settings.weighting,
            "p_hat": settings.p_hat,
            "training_scores": settings.training_scores,
        }
    if not settings.encrypted:
        kind = FedBoosting if settings.strategy == "fedboosting" else FedAvg
        return kind(min_nodes=clients, **options)
    # gmpy2 is loaded by encrypted rows alone.
    from experiments.papers.sealed import SealedFedAvg, SealedFedBoosting

    encryption = EncryptionConfig(
        scheme="paillier",
        key_bits=settings.key_bits,
        bits=settings.bits,
        clip=settings.clip,
        max_weight_sum=settings.weight_sum,
    )
    problem = encryption.problem(clients, options.get("p_hat"))
    if problem is not None:
        raise BractError(problem, code="file-missing")
    sealed = SealedFedBoosting if settings.strategy == "fedboosting" else SealedFedAvg
    return sealed(encryption=encryption, min_nodes=clients, **options)


def training_sets(settings: TextSettings, seed: int, context: Context) -> list[WordSet]:
    """Return the words of each client."""
    if settings.data == SCENE_TEXT:
        return [
            open_text(context.folder, name, settings.height, settings.width) for name in TRAINING
        ]
    return [_rendered(settings, style, settings.words, seed, "train") for style in STYLES]


def test_sets(settings: TextSettings, seed: int, context: Context) -> dict[str, WordSet]:
    """Return the words that judge, by the name of their set."""
    if settings.data == SCENE_TEXT:
        return {
            name: open_text(context.folder, name, settings.height, settings.width) for name in TESTS
        }
    return {
        style: _rendered(settings, style, settings.test_words, seed, "test") for style in STYLES
    }


def _rendered(settings: TextSettings, style: str, count: int, seed: int, split: str) -> Words:
    return Words(
        *word_set(
            style,
            count,
            seed=derive_seed(seed, "words", style, split),
            height=settings.height,
            width=settings.width,
            characters=settings.characters,
            longest=settings.longest,
        )
    )


def _values(
    settings: TextSettings, judge: Judge, rows: list[dict[str, Any]]
) -> dict[str, float | None]:
    diverged = any("diverged" in row for row in rows)
    reached = dict(enumerate(judge.readings, 1))
    weights = {row["round"]: row["weights"][0] for row in rows if row["weights"]}
    last = range(max(1, settings.rounds - settings.judged + 1), settings.rounds + 1)

    def accuracy(number: int, name: str) -> float:
        return reached[number][name].accuracy if number in reached else 0.0

    values: dict[str, float | None] = {"diverged": float(diverged)}
    for name in judge.sets:
        values[f"accuracy_{name}"] = statistics.fmean(accuracy(n, name) for n in last)
    values["accuracy"] = statistics.fmean(values[f"accuracy_{s}"] or 0.0 for s in judge.sets)
    if settings.rounds in reached:
        values["character_errors"] = statistics.fmean(
            reading.character_errors for reading in reached[settings.rounds].values()
        )
    if weights:
        values["weight0"] = statistics.fmean(weights.values())
    for number in settings.watched:
        if number <= settings.rounds:
            values[f"accuracy@{number}"] = statistics.fmean(
                accuracy(number, name) for name in judge.sets
            )
            if number in weights:
                values[f"weight0@{number}"] = weights[number]
    return values
