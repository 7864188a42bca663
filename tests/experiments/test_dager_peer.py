"""The runner of DAGER's own code shows it the same model and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bract.data.tokens import ids_of
from bract.errors import BractError
from experiments.dager_peer import Published, Shown, _distinct, _options
from experiments.harness.texts import send_texts

pytest.importorskip("transformers")

DECODER = "text-decoder(width=32,depth=2,heads=2)"


def test_the_published_code_sees_the_embeddings_behind_the_gradient() -> None:
    sent = send_texts("notes", 1, seed=3, model=DECODER, tokenizer="words", split="choose")
    shown = Shown(sent)
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


def test_sequences_below_its_threshold_come_first_and_variants_once() -> None:
    found = [[1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 9], [1, 2, 3, 9]]
    chosen = _distinct(found, [0.2, 1e-5, 0.3, 0.1], _options(3))
    assert chosen == [[5, 6, 7, 8], [1, 2, 3, 9]]


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BractError, match="no clone of"):
        Published(tmp_path)
