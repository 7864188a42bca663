"""What `token-span` reads of texts that clients sent, and its scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from bract.attacks import Budget, Reconstruction, reconstruct
from bract.attacks.methods.token_span.token_span import TokenSpan
from bract.config.text import TextSchema
from bract.data.tokens import ids_of
from bract.inputs import References
from bract.scores.base import ScoredImages
from bract.scores.text import TextScorer
from experiments.harness.command import note
from experiments.harness.result import Row, own
from experiments.harness.scores import mean
from experiments.harness.texts import SentTexts

MADE_BY = own("harness.texts", "harness.text_readings")
"""Modules that rows of texts follow from, beyond those of every attack."""

SCORES = ("precision", "rouge_1", "rouge_2", "rouge_l", "rare")
"""Scores of one text, beside the share of its tokens."""


@dataclass(frozen=True)
class Reading:
    """One client's texts, and what was read of them.

    Attributes
    ----------
    found, scored
        None where the attack refused the upload.
    nearest_public
        For each text, the share of its tokens that the nearest public text has; empty without
        public texts, and where the attack refused the upload.
    cpu_seconds
        Of the process, for the attack alone.
    """

    sent: SentTexts
    found: Reconstruction | None
    scored: ScoredImages | None
    nearest_public: tuple[float, ...]
    cpu_seconds: float


def read_texts(
    seeds: Iterable[int],
    send: Callable[[int], SentTexts],
    attack: TokenSpan,
    *,
    texts: int,
    seconds: float | None,
    tier: Literal["oblivious", "adaptive"],
    references: Callable[[TextSchema], References] | None = None,
) -> list[Reading]:
    """Attack the upload of one client a seed, which is the attacker's seed too.

    Parameters
    ----------
    send
        Makes the client of a seed and its upload.
    texts
        In each upload.
    seconds
        Wall time of the attack, with the reading of a defense; None leaves it to the attack.
    references
        Public texts of a schema, for rare tokens and the nearest text.
    """
    readings = []
    for seed in seeds:
        sent = send(seed)
        public = None if references is None else references(sent.schema)
        begun = time.process_time()
        (found,) = reconstruct(
            sent.captured,
            attack,
            budget=Budget(max_images=texts, seconds=seconds),
            seed=seed,
            tier=tier,
            history=lambda _, sent=sent: sent.history,  # type: ignore[misc]
            device="cpu",
        )
        spent = time.process_time() - begun
        if not isinstance(found, Reconstruction):
            note(found.reason)
            readings.append(Reading(sent, None, None, (), spent))
            continue
        scorer = TextScorer(sent.schema, public)
        scored = scorer.score(found.images, sent.truth)
        nearest: tuple[float, ...] = ()
        if public is not None:
            made = scorer.baselines({}, scored, sent.truth, texts)
            nearest = tuple(one.features or 0.0 for one in made["nearest_public_row"])
        readings.append(Reading(sent, found, scored, nearest, spent))
    return readings


def scores_of(readings: list[Reading]) -> Row:
    """Return the columns that every row of texts has; means over texts, seconds over clients.

    Texts of a refused upload count as nothing recovered.
    """
    recall, exact = list[float](), list[bool]()
    scores: dict[str, list[float]] = {name: [] for name in SCORES}
    for one in readings:
        if one.scored is None:
            count = len(one.sent.truth.images)
            recall += [0.0] * count
            exact += [False] * count
            for values in scores.values():
                values += [0.0] * count
            continue
        recall += [text.features or 0.0 for text in one.scored.rows]
        exact += [bool(text.exact) for text in one.scored.rows]
        for name, values in scores.items():
            values += [v for text in one.scored.rows if (v := getattr(text, name)) is not None]
    return {
        "clients": len(readings),
        "refused": sum(one.found is None for one in readings),
        "recall": mean(recall),
        "recall_least": min(recall),
        "present": mean([share_present(one) for one in readings]),
        "exact": mean([float(one) for one in exact]),
        **{name: mean(values) for name, values in scores.items()},
        "nearest_public": mean([share for one in readings for share in one.nearest_public]),
        "cpu_seconds": mean([one.cpu_seconds for one in readings]),
    }


def share_present(one: Reading) -> float:
    """Return the share of the update's distinct tokens that are in any returned text."""
    if one.found is None:
        return 0.0
    schema = one.sent.schema
    found, wanted = (
        set(ids_of(part, schema).flatten().tolist())
        for part in (one.found.images, one.sent.truth.images)
    )
    wanted = wanted - {schema.padding}
    return len(wanted & found) / len(wanted)
