"""The schema of an app's texts, from its model, its updates and what clients kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bract.config.text import MOST_TOKENS, TextSchema
from bract.data.tokens import Tokenizer
from bract.errors import BractError
from bract.inputs.base import FILLING, what_is_audited
from bract.models.third_party_texts import longest_of, task_of

_STANDING_OUT = 0.1
"""Share of the largest row's norm above which a row of position embeddings was used, where weight
decay moved all of them."""


def text_schema_of(
    model: nn.Module,
    embedding: nn.Embedding,
    kept: Sequence[Tensor],
    update: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
) -> tuple[TextSchema, dict[str, str]]:
    """Return the schema, and the reason for each of its guesses by its key.

    Parameters
    ----------
    model
        As the clients train it, which begins with ``embedding``.
    kept
        Token ids, int64 ``(N, T)``, that clients kept; `FILLING` in the place of padding.
    update
        One client's, whose position embeddings show the longest sequence.
    tokenizer
        The clients', where it is known; it settles padding and special tokens.

    Raises
    ------
    BractError
        If nothing shows the length, or the tokenizer has more ids than the embedding rows.
    """
    reasons = {"vocabulary": "rows of the model's first embedding"}
    vocabulary = embedding.num_embeddings
    if tokenizer is not None and tokenizer.vocabulary > vocabulary:
        raise BractError(
            f"{tokenizer.source}: the tokenizer has {tokenizer.vocabulary} token ids, the model's "
            f"embedding {vocabulary} rows; name the clients' own tokenizer and model",
            code="model-mismatch",
        )
    length, reasons["length"] = _length(model, kept, update)
    padding, special = _padding(model, embedding), _special(kept)
    reasons["padding"] = "the model's configuration, or 0"
    if tokenizer is not None:
        padding, special = tokenizer.padding, tokenizer.special
        del reasons["padding"]
    elif special:
        reasons["special"] = "every text that clients kept begins or ends with them"
    task, tags = task_of(model, vocabulary=vocabulary, padding=padding)
    reasons["task"] = "what the model returns for two texts"
    if tags:
        reasons["tags"] = reasons["task"]
    schema = TextSchema(
        vocabulary=vocabulary,
        length=length,
        padding=padding,
        special=special,
        task=task,
        tags=tags,
        tokenizer="" if tokenizer is None else tokenizer.digest,
    )
    return schema, reasons


def doubt_tokenizer(
    tokenizer: Tokenizer,
    schema: TextSchema,
    kept: Sequence[Tensor],
    update: Mapping[str, Tensor],
    embedding: str | None,
) -> str | None:
    """Return why a tokenizer may be another model's; None where it has an id for every token.

    Embeddings often have more rows than the tokenizer has ids, filled up to a round number, so that
    fewer ids alone are no error. Texts that use tokens beyond them are.

    Parameters
    ----------
    kept
        Token ids, int64 ``(N, T)``, that clients kept.
    update
        One client's; where some rows of its embedding did not move, those that did are its tokens.
    embedding
        Name of the token embedding's weight; None if the model begins with none.

    Raises
    ------
    BractError
        If clients' texts hold a token id that the tokenizer lacks.
    """
    most = tokenizer.vocabulary
    if most >= schema.vocabulary:
        return None
    beyond = [int(ids.max()) for ids in kept if ids.numel() and int(ids.max()) >= most]
    if beyond:
        raise BractError(
            f"{tokenizer.source}: clients kept texts with the token id {max(beyond)}, the "
            f"tokenizer has {most} ids; set data.text.tokenizer to the clients' own",
            code="model-mismatch",
        )
    moved = update.get(embedding or "")
    if moved is not None and moved.dim() == 2 and moved.numel():
        used = moved.float().abs().amax(dim=1) > 0.0
        if not bool(used.all()) and bool(used[most:].any()):
            raise BractError(
                f"{tokenizer.source}: the update moved row {int(used.nonzero().max())} of "
                f"{embedding}, a token of the client's texts, the tokenizer has {most} ids; set "
                "data.text.tokenizer to the clients' own",
                code="model-mismatch",
            )
    return (
        f"{tokenizer.source}: the tokenizer has {most} token ids, the clients' vocabulary "
        f"{schema.vocabulary}, and the clients declare no fingerprint of theirs: if it is another "
        "model's, texts are shown in wrong words"
    )


def _length(
    model: nn.Module, kept: Sequence[Tensor], update: Mapping[str, Tensor]
) -> tuple[int, str]:
    places = [(ids != FILLING).nonzero()[:, 1] for ids in kept]
    lengths = [int(found.max()) + 1 for found in places if len(found)]
    if lengths:
        return _checked(max(lengths)), "the longest text that clients kept"
    most = longest_of(model)
    names = {n for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    for name in sorted(names):
        moved = update.get(f"{name}.weight")
        if moved is None or most is None or len(moved) != most:
            continue
        norms = moved.float().norm(dim=1)
        least = 0.0 if bool((norms == 0.0).any()) else _STANDING_OUT * float(norms.max())
        used = (norms > least).nonzero()
        if len(used):
            return _checked(int(used.max()) + 1), f"rows of {name} that the update moved"
    raise BractError(
        "bract.yaml: input.text is not given; the model's first layer shows that "
        "it begins with an embedding, so its inputs are token ids, and nothing shows how many a "
        "text has; give --set input.text.length=TOKENS with input.text.vocabulary and "
        f"input.text.padding, or name what clients kept: --truth FOLDER; {what_is_audited()}",
        code="declaration-lacks",
    )


def _checked(length: int) -> int:
    if length > MOST_TOKENS:
        raise BractError(
            f"bract.yaml: texts have {length} tokens, {MOST_TOKENS} are audited at most; truncate "
            "them in the app",
            code="declaration-wrong",
        )
    return max(2, length)


def _padding(model: nn.Module, embedding: nn.Embedding) -> int:
    named = getattr(getattr(model, "config", None), "pad_token_id", None)
    found = named if type(named) is int else embedding.padding_idx
    return found if found is not None and 0 <= found < embedding.num_embeddings else 0


def _special(kept: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the tokens with which every kept text begins, or ends."""
    texts = [row[row != FILLING] for ids in kept for row in ids]
    texts = [text for text in texts if len(text)]
    if len(texts) < 2:
        return ()
    ends = [torch.stack([text[at] for text in texts]).unique() for at in (0, -1)]
    return tuple(sorted({int(found[0]) for found in ends if len(found) == 1}))
