"""Labels of texts, recovered with them."""

from functools import partial
from typing import Literal

import pytest
import torch

from bract.attacks import Problem
from bract.attacks.methods.token_span import token_span
from bract.attacks.methods.token_span.token_span import TokenSpan
from bract.attacks.solve.labels import _round_counts
from bract.data.tokens import ids_of
from experiments.harness.text_readings import read_texts
from experiments.harness.texts import SentTexts, send_texts

pytest.importorskip("transformers")

DECODER = "text-decoder(width=128,depth=2,heads=2)"
ENCODER = "text-encoder(width=128,depth=2,heads=2)"
NOISE = {"name": "noise", "std": 1e-6, "clip": 1.0}


@pytest.mark.parametrize(
    ("model", "defense"),
    [
        (DECODER, None),
        pytest.param(DECODER, NOISE, marks=pytest.mark.slow),
        (ENCODER, None),
    ],
)
def test_every_text_comes_with_its_own_label(model: str, defense: dict[str, object] | None) -> None:
    def send(seed: int) -> SentTexts:
        return send_texts(
            "notes",
            4,
            seed=seed,
            model=model,
            tokenizer="words",
            split="choose",
            defense=defense,
        )

    tier: Literal["oblivious", "adaptive"] = "adaptive" if defense else "oblivious"
    (one,) = read_texts([1000], send, TokenSpan(), texts=4, seconds=None, tier=tier)
    assert one.found is not None
    found = ids_of(one.found.images, one.sent.schema)
    wanted = ids_of(one.sent.truth.images, one.sent.schema)
    assert len(set(one.sent.truth.labels.tolist())) > 1
    for ids, label in zip(found, one.found.labels, strict=True):
        place = int((wanted == ids).sum(dim=1).argmax())
        assert int(label) == int(one.sent.truth.labels[place])


def test_labels_of_texts_that_were_read_are_not_inferred_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def inferred(_: Problem) -> torch.Tensor:
        raise AssertionError("the texts show their labels")

    monkeypatch.setattr(token_span, "hard_labels", inferred)
    send = partial(send_texts, "notes", 1, model=DECODER, tokenizer="words", split="choose")
    (one,) = read_texts(
        [3], lambda seed: send(seed=seed), TokenSpan(), texts=1, seconds=None, tier="oblivious"
    )
    assert one.found is not None
    assert one.found.labels.tolist() == one.sent.truth.labels.tolist()


def test_counts_of_which_nothing_is_known_are_still_as_many_as_there_are_texts() -> None:
    assert _round_counts(torch.zeros(2), 4).tolist() == [0, 0, 1, 1]
