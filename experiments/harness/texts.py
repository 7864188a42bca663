"""Clients that hold texts, and what they send."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bract.captures.observation import ClientDeclaration, Observation
from bract.client.defenses import ProtectContext, build_defenses
from bract.client.training import planned_steps, train_locally
from bract.config.config import TrainingConfig
from bract.config.text import TextSchema
from bract.data.notes import TAGS, clinical_notes
from bract.data.spec import DataSpec
from bract.data.tokens import Tokenizer, word_tokenizer
from bract.inputs import Truth
from bract.inputs.text import KeptTexts
from bract.models import create_model
from bract.models.initialise import initialise
from bract.models.language import minilm_folder
from bract.updates.rounding import rounded, widened
from bract.updates.update import Tensors, buffers_of, parameters_of
from experiments.harness.data_folders import FOLDER
from experiments.harness.reviews import REVIEWS, SST2, made_up, sst2

CLASSES = 5
LENGTH = 32

FIRST_SEED = {"score": 200, "choose": 0}
"""Seed of each split's first client: no texts or network both choose a setting and score it."""

_NOTES = 1000
_PUBLIC = 999_983
"""Seed of public notes, which is no client's."""


@dataclass(frozen=True)
class SentTexts:
    """One client's upload of texts, and the texts.

    Attributes
    ----------
    history
        The same client's earlier uploads.
    """

    captured: Observation
    history: tuple[Observation, ...]
    truth: Truth
    schema: TextSchema


@cache
def tokenizer_named(name: str) -> Tokenizer:
    """Return the tokenizer ``minilm``, ``words`` of the embedded notes, or that of ``reviews``."""
    if name == REVIEWS:
        return word_tokenizer(sentences(REVIEWS, "public"))
    if name == "minilm":
        return Tokenizer.read(minilm_folder())
    return word_tokenizer([note.text for note in clinical_notes(3000, seed=1)])


@cache
def sentences(data: str, split: str, folder: Path = FOLDER) -> tuple[str, ...]:
    """Return texts: made-up ``notes`` or ``reviews``, ``prose`` of Python's reference, ``sst2``.

    Splits share no sentence. ``public`` is a split that no client trains on.
    """
    if data == REVIEWS:
        made = tuple(dict.fromkeys(made_up(3 * _NOTES, seed=0)))
        return made[("score", "choose", "public").index(split) :: 3]
    if data == SST2:
        return sst2(folder)[("score", "choose", "public").index(split) :: 3]
    if data == "notes":
        seed = _PUBLIC if split == "public" else FIRST_SEED[split] + 7
        return tuple(note.text for note in clinical_notes(_NOTES, seed=seed))
    from pydoc_data import topics

    whole = " ".join(" ".join(text.split()) for text in topics.topics.values())
    found = {
        one.strip()
        for one in re.split(r"(?<=[.!?]) (?=[A-Z])", whole)
        if 40 <= len(one) <= 160 and one.isascii() and one.count('"') % 2 == 0
    }
    kept = sorted(found)
    random.Random(0).shuffle(kept)
    return tuple(kept[("score", "choose", "public").index(split) :: 3])


def send_texts(
    data: str,
    texts: int,
    *,
    seed: int,
    model: str,
    tokenizer: str = "minilm",
    split: str = "score",
    task: str = "classification",
    round: int = 1,
    folder: Path = FOLDER,
    words: tuple[int, int] | None = None,
    defense: Mapping[str, Any] | None = None,
    **training: Any,
) -> SentTexts:
    """Train a client of so many texts on a fresh network; labels are drawn at random.

    Tags of tokens are those of the made-up notes.

    Parameters
    ----------
    round
        The round whose upload is captured; the client trains on the same texts in every round, and
        the server steps by what it received.
    folder
        Where ``sst2`` lies.
    words
        Fewest and most words of a text; None for any.
    defense
        An entry of the configuration's ``defenses``, or None.
    training
        Keys of the configuration's section; one gradient of all texts by default.
    """
    own = tokenizer_named(tokenizer)
    declared = TextSchema(
        vocabulary=own.vocabulary,
        length=LENGTH,
        padding=own.padding,
        special=own.special,
        task=task,  # type: ignore[arg-type]
        tags=len(TAGS) if task == "token-classification" else 0,
    )
    mean, std = declared.feature_moments()
    outputs = declared.outputs or CLASSES
    spec = DataSpec((LENGTH, 1, 1), outputs, mean, std, text=declared)
    pool = sentences(data, split, folder)
    if words is not None:
        pool = tuple(one for one in pool if words[0] <= len(one.split()) <= words[1])
    draw = random.Random(seed)
    labels: Tensor
    if task == "token-classification":
        words_of = {note.text: note for note in clinical_notes(_NOTES, seed=FIRST_SEED[split] + 7)}
        notes = [words_of[one] for one in draw.sample(pool, texts)]
        inputs, labels = own.encode_words(
            [n.words for n in notes], [n.tags for n in notes], declared
        )
    else:
        inputs = own.encode(draw.sample(pool, texts), declared)
        labels = torch.tensor([draw.randrange(CLASSES) for _ in range(texts)])
    if task == "language-model":
        labels = torch.zeros(texts)
    network = create_model(
        model, classes=outputs, channels=LENGTH, image_size=1, activation="", text=declared
    )
    initialise(network, "default", seed)
    work = TrainingConfig.model_validate(
        {"algorithm": "fedsgd", "batch_size": texts, "lr": 0.1} | training
    )
    chain = build_defenses([] if defense is None else [dict(defense)])
    network = chain.prepare_model(network)
    state: Tensors = {}
    captured: list[Observation] = []
    for number in range(1, round + 1):
        context = ProtectContext(round=number, seed=20261123 + seed)
        chain.attach(network, state, context)
        before = {n: v.clone() for n, v in parameters_of(network).items()}
        buffers = {n: v.clone() for n, v in buffers_of(network).items()}
        result = train_locally(
            network, inputs, labels, config=work, spec=spec, seed=seed, device=torch.device("cpu")
        )
        context = replace(context, model=network, images=inputs, labels=labels)
        sent = chain.protect(result.update, state, context)
        sent = widened(*rounded(sent, work.update_dtype))
        captured.append(
            Observation(
                round=number,
                client=f"client-{seed}",
                parameters=before,
                buffers=buffers,
                update=sent,
                returned_buffers={},
                declaration=ClientDeclaration(
                    algorithm=work.algorithm,
                    model=model,
                    input="text",
                    image_shape=spec.image_shape,
                    classes=spec.classes,
                    mean=spec.mean,
                    std=spec.std,
                    text=declared,
                    loss=spec.loss,
                    optimizer=work.optimizer,
                    lr=work.lr,
                    local_steps=planned_steps(work, texts),
                    batch_size=min(work.batch_size, texts),
                    num_examples=texts,
                    norm_mode="eval",
                    defenses=tuple(chain.public()),
                ),
            )
        )
        rate = 1.0 if work.algorithm == "fedavg" else work.lr
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(before[name] - rate * sent[name])
    return SentTexts(captured[-1], tuple(captured[:-1]), Truth(inputs, labels), declared)


def public_texts(data: str, tokenizer: str, schema: TextSchema, folder: Path = FOLDER) -> KeptTexts:
    """Return texts of the same kind that no client trained on."""
    encoded = tokenizer_named(tokenizer).encode(sentences(data, "public", folder), schema)
    return KeptTexts(encoded, torch.zeros(len(encoded)), 0, schema)
