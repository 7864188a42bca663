"""The runner of DAGER's own code shows it the same model and gradients."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused

from bract.data.tokens import ids_of
from experiments import dager_peer
from experiments.dager_peer import client_of, compared, row_of
from experiments.harness.dager import (
    MOST_ORDERS,
    Options,
    Published,
    ShownDecoder,
    ShownEncoder,
    distinct,
    shown_of,
)
from experiments.harness.texts import public_texts, send_texts

pytest.importorskip("transformers")

DECODER = "text-decoder(width=32,depth=2,heads=2)"
ENCODER = "text-encoder(width=64,depth=3,heads=2)"


def test_the_published_code_sees_the_embeddings_behind_the_gradient() -> None:
    sent = send_texts("notes", 1, seed=3, model=DECODER, tokenizer="words", split="choose")
    shown = shown_of(sent)
    assert isinstance(shown, ShownDecoder)
    (ids,) = ids_of(sent.truth.images, sent.schema)
    gradient = shown.gradients[0].double()
    _, values, basis = torch.linalg.svd(gradient, full_matrices=False)
    basis = basis[values > 1e-8 * values[0]]
    for position in range(3):
        given = shown.embeddings(position)[0, ids[position]].double()
        outside = given - (given @ basis.T) @ basis
        assert float(outside.norm() / given.norm()) < 1e-3
    (second,) = shown.get_layer_inputs(ids[None])
    assert second.shape == (1, sent.schema.length, 32)


def test_the_published_code_sees_an_encoders_layers_as_the_client_ran_them() -> None:
    sent = send_texts("notes", 1, seed=3, model=ENCODER, tokenizer="words", split="choose")
    shown = shown_of(sent)
    assert isinstance(shown, ShownEncoder) and shown.is_bert()
    (ids,) = ids_of(sent.truth.images, sent.schema)
    text = ids[: int((ids != shown.pad_token).sum())]
    assert (text[0], text[-1]) == (shown.start_token, shown.eos_token)
    inside = []
    for gradient in shown.gradients:
        _, values, basis = torch.linalg.svd(gradient.double(), full_matrices=False)
        inside.append(basis[values > 1e-8 * values[0]].float())
    for position in range(3):
        entering = shown.embeddings(position)
        assert entering.shape == (1, sent.schema.vocabulary, 2, 64)
        given = entering[0, text[position], 0]
        assert float((given - given @ inside[0].T @ inside[0]).norm() / given.norm()) < 0.02
    (second,) = shown.get_layer_inputs(text[None], torch.zeros_like(text)[None])
    outside = (second - second @ inside[1].T @ inside[1]).norm(dim=-1) / second.norm(dim=-1)
    assert float(outside.max()) < 0.02 and shown.tried == 1


def test_orders_of_an_encoder_end_with_the_share_of_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [5.0]
    monkeypatch.setattr("experiments.harness.dager.time.process_time", lambda: now[0])
    options = Options(4, 1e-5, 9.0)
    options.share(3)
    now[0] = 7.9
    assert options.maxC == MOST_ORDERS
    now[0] = 8.1
    assert options.maxC == 0
    options.share(2)
    now[0] = 11.0
    assert options.maxC == MOST_ORDERS


def test_sequences_below_its_threshold_come_first_and_variants_once() -> None:
    found = [[1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 9], [1, 2, 3, 9]]
    chosen = distinct(found, [0.2, 1e-5, 0.3, 0.1], Options(3, 1e-5, 9.0))
    assert chosen == [[5, 6, 7, 8], [1, 2, 3, 9]]


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with refused("file-missing", tmp_path):
        Published(tmp_path)


def row(tool: str, settings: str | None, each: list[float]) -> dict[str, Any]:
    return {
        "tool": tool,
        "settings": settings,
        "clients": len(each),
        "rouge_1_each": each,
        "rouge_1": sum(each) / len(each),
    }


def test_a_row_is_compared_with_the_better_settings_of_the_published_code() -> None:
    worse, better = row("DAGER", "scripts", [0.0, 0.2]), row("DAGER", "chosen", [0.5, 0.7])
    first, second, own = compared([worse, better, row("bract", None, [1.0, 0.6])])
    assert "over_dager" not in first | second
    assert own["over_dager"] == pytest.approx(0.2)
    assert own["over_dager_low"] < 0.2 < own["over_dager_high"]


def test_a_row_of_other_clients_is_not_compared() -> None:
    peer = row("DAGER", "chosen", [0.5, 0.7, 0.9])
    assert "over_dager" not in compared([peer, row("bract", None, [1.0, 0.6])])[1]


def test_six_clients_ahead_by_a_whole_text_leave_zero_out_and_four_do_not() -> None:
    def low(clients: int) -> float:
        peer = row("DAGER", "chosen", [0.0] * clients)
        found = compared([peer, row("bract", None, [1.0] * clients)])[1]
        return float(found["over_dager_low"])

    assert low(6) > 0.0 > low(4)


def test_a_refused_upload_counts_as_nothing_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = send_texts("reviews", 2, seed=3, model=DECODER, tokenizer="reviews", split="choose")
    public = partial(public_texts, "reviews", "reviews")
    monkeypatch.setattr(dager_peer, "public_texts", lambda _, __, schema: public(schema))
    refused = client_of(sent, 3, lambda *_: (None, 0), "reviews")
    whole = client_of(sent, 3, lambda *_: (sent.truth.images, 6), "reviews")
    found = row_of([refused, whole])
    assert (found["clients"], found["refused"], found["orders"]) == (2, 1, 3)
    assert found["exact_each"] == found["rouge_2_each"] == [0.0, 1.0]
    assert found["exact_low"] < 0.5 < found["exact_high"]


def test_every_row_has_the_published_code_beside_token_span() -> None:
    for model, _, batch in dager_peer.PLAN:
        tools = [(one.tool, one.attack) for one in dager_peer.tools_of(model, batch)]
        assert ("DAGER", "DAGER") in tools and ("bract", "token-span") in tools
