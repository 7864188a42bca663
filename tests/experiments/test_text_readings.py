"""What is read of texts that clients sent, and how rows score it."""

import pytest

from bract.attacks.methods.token_span.token_span import TokenSpan
from experiments.harness.text_readings import read_texts, scores_of
from experiments.harness.texts import SentTexts, public_texts, send_texts

pytest.importorskip("transformers")

MODEL = "text-decoder(width=64,depth=2,heads=2)"


def send(seed: int) -> SentTexts:
    """One text of a client; that of an odd seed sends adapters whose gradient is zero."""
    lora = MODEL.replace(")", ",lora=4)")
    model = lora if seed % 2 else MODEL
    return send_texts("notes", 1, seed=seed, model=model, tokenizer="words", split="choose")


def test_texts_of_a_refused_upload_count_as_nothing_recovered() -> None:
    readings = read_texts(
        (2, 3),
        send,
        TokenSpan(),
        texts=1,
        seconds=None,
        tier="oblivious",
        references=lambda schema: public_texts("notes", "words", schema),
    )
    assert [one.found is None for one in readings] == [False, True]
    read = scores_of(readings[:1])
    assert read["recall"] == read["exact"] == read["present"] == 1.0 and read["refused"] == 0
    both = scores_of(readings)
    assert both["clients"] == 2 and both["refused"] == 1
    assert both["recall"] == both["exact"] == both["present"] == both["precision"] == 0.5
    assert both["recall_least"] == 0.0 and both["nearest_public"] == read["nearest_public"]
