"""Prefixes that grow token by token, with the keys and values of a causal model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bract.attacks.methods.token_span.stages import inputs_of, inputs_while

_AT_ONCE = 1 << 15
"""Tokens whose keys and values are held in one pass, at least those of one prefix."""

_SAME = 1e-4
"""Relative difference up to which inputs by kept keys count as those of whole sequences."""


class Prefixes:
    """Sequences that grow by one token at a time.

    Only the last token of each is computed: what earlier tokens passed on is kept where the model
    takes kept keys and values (``past_key_values`` of transformers); of other models every
    sequence is computed anew.

    Parameters
    ----------
    model
        Causal, of token ids ``(B, T)``.
    modules
        Names of the modules whose inputs are wanted.

    Attributes
    ----------
    ids
        Token ids of the prefixes, int64 ``(N, T)``; at first the empty one.
    features
        What enters the modules at the last token of each prefix, ``(N, width)`` for each.
    """

    def __init__(self, model: nn.Module, modules: Sequence[str]) -> None:
        self.model, self.modules = model, tuple(modules)
        self.ids = torch.empty(1, 0, dtype=torch.int64)
        self._cached = _takes_keys(model, self.modules)
        self._keys: Any = None
        self.features: list[Tensor] = []

    def followed_by(self, tokens: Tensor) -> Iterator[list[Tensor]]:
        """Yield what enters the modules at the last token of each prefix with each token.

        The prefixes come in parts; of each, inputs ``(n * len(tokens), width)`` for each module,
        the tokens of one prefix next to each other.
        """
        each = max(1, _AT_ONCE // ((self.ids.shape[1] + 1) * max(1, len(tokens))))
        for part in torch.arange(len(self.ids)).split(each):
            parents = part.repeat_interleave(len(tokens))
            last = tokens.repeat(len(part))
            if self._cached:
                seen, _ = self._last(parents, last)
            else:
                longer = torch.cat([self.ids[parents], last[:, None]], dim=1)
                whole = inputs_of(self.model, self.modules, longer)
                seen = {name: value[:, -1:] for name, value in whole.items()}
            yield [seen[name][:, -1] for name in self.modules]

    def keep(self, parents: Tensor, tokens: Tensor) -> None:
        """Keep prefixes ``parents``, each with one more token, both int64 ``(M,)``."""
        longer = torch.cat([self.ids[parents], tokens[:, None]], dim=1)
        if self._cached and len(parents):
            seen, self._keys = self._last(parents, tokens)
        elif len(parents):
            seen = inputs_of(self.model, self.modules, longer)
        self.features = [seen[name][:, -1] for name in self.modules] if len(parents) else []
        self.ids = longer

    def _last(self, parents: Tensor, tokens: Tensor) -> tuple[dict[str, Tensor], Any]:
        from transformers import DynamicCache

        keys: Any = DynamicCache()
        for number, layer in enumerate(self._keys.layers if self._keys is not None else ()):
            keys.update(layer.keys[parents], layer.values[parents], number)
        ids = torch.cat([self.ids[parents], tokens[:, None]], dim=1)
        return _run_last(self.model, self.modules, ids, keys), keys


def _run_last(
    model: nn.Module, modules: Sequence[str], ids: Tensor, keys: Any
) -> dict[str, Tensor]:
    """Run a model on the last of ids ``(N, T)`` after ``keys`` of the others, which grow."""
    own: Any = model
    mask = (ids != own.schema.padding).long()
    return inputs_while(
        lambda: own.body(
            input_ids=ids[:, -1:], attention_mask=mask, past_key_values=keys, use_cache=True
        ),
        model,
        modules,
        (len(ids), 1),
    )


def _takes_keys(model: nn.Module, modules: Sequence[str]) -> bool:
    """Return whether kept keys give a probe the inputs that the whole sequence gives."""
    from transformers import DynamicCache, PreTrainedModel

    body = getattr(model, "body", None)
    body = getattr(getattr(body, "base_model", None), "model", body)
    if not isinstance(body, PreTrainedModel) or getattr(model, "schema", None) is None:
        return False
    own: Any = model
    ids = torch.arange(own.schema.vocabulary)
    ids = ids[ids != own.schema.padding][-3:][None]
    whole, keys = inputs_of(model, modules, ids), DynamicCache()
    for end in range(1, ids.shape[1] + 1):
        seen = _run_last(model, modules, ids[:, :end], keys)
        for name in modules:
            if name not in seen or name not in whole:
                return False
            wanted = whole[name][:, end - 1]
            if bool((seen[name][:, -1] - wanted).norm() > _SAME * wanted.norm()):
                return False
    return True
