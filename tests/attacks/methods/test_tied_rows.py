"""Rows of a tied embedding's gradient, made by hand: a softmax's share, next tokens, inputs."""

import torch
from torch import Tensor

from bract.attacks.methods.token_span.tied_rows import (
    NextTokens,
    rows_of_other_sign,
    rows_of_other_size,
    softmax_share,
    tokens_of_tied_rows,
)

VOCABULARY, WIDTH, NEXT, FIRST = 400, 24, (5, 40, 41), 7


def gradient(*, predicted: int | None = None) -> Tensor:
    """The mean cross entropy's gradient at three positions, plus the slopes of the inputs.

    ``predicted`` is likely at every position, as a trained model predicts a frequent token.
    """
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(WIDTH, generator=generator)
    features = shared + 0.4 * torch.randn(3, WIDTH, generator=generator)
    logits = 0.1 * torch.randn(3, VOCABULARY, generator=generator)
    if predicted is not None:
        logits[:, predicted] = 8.0
    slopes = logits.softmax(dim=1)
    slopes[torch.arange(3), torch.tensor(NEXT)] -= 1.0
    found = slopes.T @ features / 3
    inputs = torch.tensor([FIRST, *NEXT[:2]])
    return found.index_add(0, inputs, 0.2 * torch.randn(3, WIDTH, generator=generator))


def test_most_rows_are_along_the_softmaxs_share() -> None:
    rows = torch.nn.functional.normalize(gradient().double(), dim=1)
    along = rows @ softmax_share(gradient())
    others = [v for v in range(VOCABULARY) if v not in (*NEXT, FIRST)]
    assert float(along[others].min()) > 0.9 and float(along[list(NEXT)].max()) < 0.0


def test_next_tokens_have_another_sign() -> None:
    assert set(NEXT) <= set(rows_of_other_sign(gradient()).tolist()) <= {*NEXT, FIRST}


def test_a_token_that_only_begins_texts_shows_by_its_size() -> None:
    assert FIRST in rows_of_other_size(gradient()).tolist()
    assert set(tokens_of_tied_rows(gradient()).tolist()) == {*NEXT, FIRST}


def test_a_token_that_is_predicted_everywhere_shows_by_its_size_alone() -> None:
    seen = gradient(predicted=NEXT[0])
    assert NEXT[0] not in rows_of_other_sign(seen).tolist()
    assert NEXT[0] in tokens_of_tied_rows(seen).tolist()


def test_a_higher_threshold_keeps_fewer_rows() -> None:
    few, many = (rows_of_other_size(gradient(), size=size).tolist() for size in (20.0, 2.0))
    assert set(few) < set(many)


def test_a_next_token_scores_most_until_it_is_taken_out() -> None:
    features = torch.linalg.qr(torch.randn(WIDTH, 3, generator=torch.Generator().manual_seed(0)))[0]
    features, weight = features.T + 0.5, 0.25
    slopes = torch.full((3, VOCABULARY), 1.0 / VOCABULARY)
    slopes[torch.arange(3), torch.tensor(NEXT)] -= 1.0
    next_tokens = NextTokens(weight * slopes.T @ features)
    tokens = torch.arange(VOCABULARY)
    scores = next_tokens.scores(features, tokens, weight=weight)
    assert scores.argmax(dim=1).tolist() == list(NEXT)
    next_tokens.remove(features[:1], torch.tensor(NEXT[:1]), weight=weight)
    left = next_tokens.scores(features, tokens, weight=weight)
    assert float(left[0, NEXT[0]]) < 0.5 * float(scores[0, NEXT[0]])
    torch.testing.assert_close(left[1, NEXT[1]], scores[1, NEXT[1]])
