"""Find the linear layers of a language model by what enters them.

A *local* layer sees, at each position, the embedding of that position's token alone; a *contextual*
layer sees other tokens too. Both are found with probe sequences, so that names and architectures do
not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bract.attacks.problem.site import Site
from bract.errors import BractError
from bract.models import tap

CONTEXTUAL = 3
"""Contextual layers that a candidate is checked against; each costs a part of a forward pass."""

_SAME = 1e-5
"""Relative difference up to which two inputs of a layer count as equal."""

_SHORTEST = 3
"""Tokens of a probe, at least: one in the middle, one before and one after it."""


@dataclass(frozen=True)
class Stages:
    """Layers of a language model that a client trained, in the order in which they run.

    Attributes
    ----------
    local
        Groups of layers with one and the same input, each position's token alone.
    contextual
        Layers whose input at a position depends on other tokens too.
    causal
        Whether that input depends on no later token.
    """

    local: tuple[Site, ...]
    contextual: tuple[Site, ...]
    causal: bool


@torch.no_grad()
def find_stages(
    model: nn.Module, trained: Sequence[str], *, vocabulary: int, length: int
) -> Stages:
    """Probe a model for the layers whose gradients show what entered them.

    Parameters
    ----------
    model
        Maps token ids, int64 ``(B, T)``, to anything.
    trained
        Names of the parameters whose gradient is known.
    vocabulary, length
        Number of token ids, and tokens of a probe.

    Raises
    ------
    BractError
        If no trained linear layer sees single tokens, if what it sees is no finite number, or if
        texts have fewer than 3 tokens.
    """
    if length < _SHORTEST:
        raise BractError(
            f"texts have {length} tokens, expected {_SHORTEST} or more", code="attack-unsuited"
        )
    generator = torch.Generator().manual_seed(0)
    probe = torch.randint(vocabulary, (1, length), generator=generator)
    layers = _linear_layers(model, set(trained))
    middle = length // 2
    before, after = probe.clone(), probe.clone()
    before[:, middle - 1] = (probe[:, middle - 1] + 1 + vocabulary // 2) % vocabulary
    after[:, middle + 1] = (probe[:, middle + 1] + 1 + vocabulary // 2) % vocabulary
    plain, changed_before, changed_after = (
        inputs_of(model, [layer.layer for layer in layers], ids) for ids in (probe, before, after)
    )
    usable = [layer for layer in layers if layer.layer in plain]

    def differs(layer: Site, other: dict[str, Tensor]) -> bool:
        """Return whether what enters a layer in the middle is another value for another text."""
        one, two = plain[layer.layer][0, middle], other[layer.layer][0, middle]
        return bool((one - two).norm() > _SAME * one.norm())

    contextual = [
        layer for layer in usable if differs(layer, changed_before) or differs(layer, changed_after)
    ]
    local = [layer for layer in usable if layer not in contextual]
    if not local:
        raise BractError(
            "no trained linear layer sees single tokens, so what a token adds to the update cannot "
            "be separated; train or adapt the first attention layer, or take another attack",
            code="attack-unsuited",
        )
    first = plain[local[0].layer]
    if not bool(first.isfinite().all()):
        raise BractError(
            f"{local[0].weight}: what enters this layer is no finite number with the captured "
            "parameters; capture the client again, or check its training",
            code="attack-evidence",
        )
    shared = [
        layer
        for layer in local
        if plain[layer.layer].shape == first.shape
        and bool((plain[layer.layer] - first).norm() <= _SAME * first.norm())
    ]
    return Stages(
        local=tuple(shared),
        contextual=tuple(contextual),
        causal=not any(differs(layer, changed_after) for layer in contextual),
    )


def inputs_of(model: nn.Module, modules: Sequence[str], ids: Tensor) -> dict[str, Tensor]:
    """Return what enters modules, ``(B, T, width)`` by name; the model runs no further.

    A module that does not run, or whose input has another shape, is left out.
    """
    return inputs_while(lambda: model(ids), model, modules, tuple(ids.shape))


def inputs_while(
    run: Callable[[], object], model: nn.Module, modules: Sequence[str], shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """Return what enters modules while ``run`` runs the model on token ids of this shape."""

    def has_shape(value: Tensor) -> bool:
        return value.dim() == 3 and value.shape[:2] == shape

    return tap.inputs(run, model, modules, has_shape)


def _linear_layers(model: nn.Module, trained: set[str]) -> list[Site]:
    """Return modules with a trained matrix that multiplies what enters them."""
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        full = f"{name}.weight" if name else "weight"
        if full not in trained or not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        if isinstance(module, nn.Embedding):
            continue
        transposed = not isinstance(module, nn.Linear)
        found.append(Site(name, transposed=transposed))
    return found
