"""Models of texts that other apps made, called as bract calls its own; parameters keep their names.

Models of transformers and peft take keyword arguments and return an object with ``logits``; others
take token ids and return logits.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bract.config.text import MOST_TAGS, Task, TextSchema
from bract.errors import BractError, apart, one_line


def of_texts(model: nn.Module, text: TextSchema) -> nn.Module:
    """Let a model take ids, int64 ``(B, T)`` or ``(B, T, 1, 1)`` numbers; return the model.

    It then returns logits ``(B, classes)``, or of a language model the loss of each text,
    ``(B, 1)``, and where every token has a label log-probabilities ``(B, T * tags)``. Its
    parameters that need no gradient become buffers outside of the state, as those of bract's own.

    Raises
    ------
    BractError
        If the schema has more token ids than the embedding rows, or longer texts than the model.
    """
    check_fit(model, text)
    for name in [n for n, p in _all_parameters(model) if not p.requires_grad]:
        freeze(model, name)
    names = set(inspect.signature(model.forward).parameters)
    if hasattr(model, "config"):
        deterministic_attention(model)

    def keywords(
        _: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not arguments or given:
            return arguments, given
        ids = arguments[0]
        if "input_ids" not in names:
            return arguments, given
        taken = {"input_ids": ids}
        if "attention_mask" in names:
            taken["attention_mask"] = (ids != text.padding).long()
        return (), taken

    def plain(_: nn.Module, arguments: Any, given: dict[str, Any], outputs: Any) -> Tensor:
        logits = logits_of(outputs)
        if text.task == "classification" or logits.dim() != 3:
            return logits
        if text.task == "token-classification":
            return of_tokens(logits)
        ids = given["input_ids"] if "input_ids" in given else arguments[0]
        return next_token_loss(logits, ids, (ids != text.padding).long())

    model.register_forward_pre_hook(keywords, with_kwargs=True)
    model.register_forward_hook(plain, with_kwargs=True)
    return model


def _all_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def adapter_names(model: nn.Module) -> dict[str, str]:
    """Return a model's names of adapters by those that peft's ``get_peft_model_state_dict`` gives.

    They lack the name of the active adapter: ``lora_A.weight`` for ``lora_A.default.weight``. A
    model without adapters has none.
    """
    found = {}
    for adapter in getattr(model, "peft_config", {}):
        for name, _ in model.named_parameters():
            short = name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", ".")
            if short != name:
                found[short] = name
    return found


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of what a model of texts returned."""
    found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(found, Tensor):
        raise BractError(
            f"the model returned a {one_line(type(outputs).__name__, 80)}; expected logits, or an "
            "object with logits, as models of transformers return",
            code="model-faulty",
        )
    return found


def embedding_of(model: nn.Module) -> nn.Embedding | None:
    """Return the embedding that a model begins with; None where it begins with another layer."""
    first = next((m for m in model.modules() if list(m.parameters(recurse=False))), None)
    return first if isinstance(first, nn.Embedding) else None


def longest_of(model: nn.Module) -> int | None:
    """Return the longest sequence that a model of transformers takes; None where it names none."""
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions"):
        found = getattr(config, name, None)
        if type(found) is int and found > 0:
            return found
    return None


def check_fit(model: nn.Module, text: TextSchema) -> None:
    """Refuse a schema with more ids than the embedding has rows, or longer texts than the model."""
    embedding = embedding_of(model)
    if embedding is not None and text.vocabulary > embedding.num_embeddings:
        raise BractError(
            f"the vocabulary has {text.vocabulary} token ids, the model's embedding "
            f"{embedding.num_embeddings} rows; declare the clients' own tokenizer and model",
            code="model-mismatch",
        )
    longest = longest_of(model)
    if longest is not None and text.length > longest:
        raise BractError(
            f"the declared texts have {text.length} tokens, the model's longest sequence is "
            f"{longest}; declare the length that the clients truncate to",
            code="model-mismatch",
        )


@torch.no_grad()
def task_of(model: nn.Module, *, vocabulary: int, padding: int) -> tuple[Task, int]:
    """Return the task and the number of labels of tokens, by what a model returns for two texts.

    Parameters
    ----------
    model
        Not adapted by `of_texts`.
    """
    ids = torch.arange(4).remainder(max(1, vocabulary - 1)).add(padding + 1) % vocabulary
    ids = ids.expand(2, -1).contiguous()
    training = model.training
    model.eval()
    try:
        names = inspect.signature(model.forward).parameters
        with apart():
            given = {"attention_mask": torch.ones_like(ids)} if "attention_mask" in names else {}
            outputs = model(input_ids=ids, **given) if "input_ids" in names else model(ids)
    except Exception as error:
        raise BractError(
            f"the model does not take token ids ({type(error).__name__}: "
            f"{one_line(error, 200)}); name a callable that makes a model of texts",
            code="model-unsuited",
        ) from error
    finally:
        model.train(training)
    logits = logits_of(outputs)
    if logits.dim() == 2:
        return "classification", 0
    if logits.dim() == 3 and logits.shape[-1] == vocabulary:
        return "language-model", 0
    if logits.dim() == 3 and logits.shape[:2] == ids.shape and 2 <= logits.shape[-1] <= MOST_TAGS:
        return "token-classification", int(logits.shape[-1])
    raise BractError(
        f"the model returns logits {tuple(logits.shape)} for two texts of four tokens; expected "
        "(2, classes) of a classifier, (2, 4, vocabulary) of a language model, or (2, 4, tags) "
        f"with at most {MOST_TAGS} tags of one that labels tokens",
        code="model-unsuited",
    )


def freeze(body: nn.Module, name: str, *, persistent: bool = False) -> None:
    """Turn a parameter into a buffer, which no state dict holds unless it is persistent."""
    holder = body.get_submodule(name.rpartition(".")[0])
    own = name.rpartition(".")[2]
    value = getattr(holder, own).detach()
    del holder._parameters[own]
    holder.register_buffer(own, value, persistent=persistent)


def deterministic_attention(body: nn.Module) -> None:
    """Use the attention that has a second derivative and batches over trials."""
    config: Any = body.config
    config._attn_implementation = "eager"


def of_tokens(logits: Tensor) -> Tensor:
    """Return log-probabilities ``(B, T * tags)`` of logits ``(B, T, tags)``."""
    return logits.log_softmax(dim=-1).flatten(1)


def next_token_loss(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the mean loss of each text's next tokens, ``(B, 1)``."""
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    there = mask[:, 1:].to(each)
    return ((each * there).sum(dim=1) / there.sum(dim=1).clamp_min(1.0))[:, None]
