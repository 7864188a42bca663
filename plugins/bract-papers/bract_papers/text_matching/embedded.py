"""A text problem whose candidates are embeddings in the place of token ids."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bract.attacks import Problem
from bract.attacks.problem.target_model import TargetModel
from bract.config.text import TextSchema
from bract.errors import BractError
from bract.models.tap import leaving
from bract.updates.update import Tensors


class _Given:
    """Hooks by which a model reads embeddings ``(B, T, width, 1)`` instead of token ids.

    Parameters
    ----------
    stand_in
        Token id that the rest of the model sees at every position; no padding, so that attention
        reaches all of them.
    """

    def __init__(self, stand_in: int) -> None:
        self.stand_in = stand_in
        self.embeddings: Tensor | None = None

    def read(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep the embeddings, and pass on ids in their place."""
        self.embeddings = inputs[0].squeeze(-1)
        ids = torch.full(self.embeddings.shape[:2], self.stand_in, device=self.embeddings.device)
        return (ids, *inputs[1:])

    def put(self, _: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the kept embeddings as the output of the token embedding."""
        assert self.embeddings is not None
        return self.embeddings.to(output.dtype)


@dataclass(frozen=True)
class EmbeddedProblem:
    """Matching over embeddings.

    Attributes
    ----------
    problem
        Takes embeddings ``(L, B, T, width, 1)`` where the problem of texts takes ids, and matches
        everything but the token embedding, whose gradient needs ids. With tied weights the output
        layer is left out with it.
    table
        The vocabulary's embeddings ``(L, V, width)``.
    length
        Tokens of the longest text, as far as the gradient of positions tells.
    """

    problem: Problem
    table: Tensor
    length: int

    def nearest(self, embeddings: Tensor, schema: TextSchema) -> Tensor:
        """Return the ids ``(L, B, T)`` of the largest cosine; none is padding."""
        unit = nn.functional.normalize(self.table, dim=-1)
        cosines = torch.einsum("lbtw,lvw->lbtv", nn.functional.normalize(embeddings, dim=-1), unit)
        cosines[..., schema.padding] = -2.0
        return cosines.argmax(dim=-1)


def embedded(problem: Problem, schema: TextSchema) -> EmbeddedProblem:
    """Return the problem over embeddings.

    Raises
    ------
    BractError
        If the model has no embedding of the vocabulary.
    """
    model = problem.target_model.model
    name, layer = token_embedding(model, schema)
    hooked = copy.deepcopy(model)
    given = _Given(next(i for i in range(schema.vocabulary) if i != schema.padding))
    hooked.register_forward_pre_hook(given.read, prepend=True)
    hooked.get_submodule(name).register_forward_hook(given.put)
    # Token ids are numbers in [0, 1] that are normalised; embeddings are taken as they are.
    declaration = replace(problem.target_model.declaration, mean=None, std=None)
    target = TargetModel(hooked, declaration)
    # Hooks are copied with the model, and each copy's share their state.
    own = f"{name}.weight"
    cases = tuple(
        replace(case, target_model=target, evidence=replace(case.evidence, likelihood=None))
        for case in problem.cases
    )
    table = problem.parameters.get(own, layer.weight.detach()[None].to(problem.device))
    return EmbeddedProblem(
        problem=replace(
            problem,
            cases=cases,
            target=_without(problem.target, own),
            weights=problem.weights and _without(problem.weights, own),
            alternatives=problem.alternatives and _without(problem.alternatives, own),
            nuisance=problem.nuisance and _without(problem.nuisance, own),
            bounds=problem.bounds and _without(problem.bounds, own),
        ),
        table=table.expand(problem.trials, -1, -1)[:, : schema.vocabulary].to(problem.dtype),
        length=_longest(problem, model, schema),
    )


def token_embedding(model: nn.Module, schema: TextSchema) -> tuple[str, nn.Embedding]:
    """Return the first embedding that is called with the ids of a text."""
    seen: list[str] = []
    wide = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings >= schema.vocabulary
    ]
    with leaving(model, wide, lambda name, _: seen.append(name)), torch.no_grad():
        device = next(model.parameters()).device
        model(torch.full((1, min(schema.length, 4)), 1, device=device))
    if not seen:
        raise BractError(
            f"the model has no embedding of {schema.vocabulary} tokens; texts are not matched",
            code="attack-unsuited",
        )
    found: Any = model.get_submodule(seen[0])
    return seen[0], found


def _longest(problem: Problem, model: nn.Module, schema: TextSchema) -> int:
    """Return the number of positions with a gradient of their own; the length if unknown."""
    for name, module in model.named_modules():
        gradient = problem.target.get(f"{name}.weight")
        if not isinstance(module, nn.Embedding) or gradient is None:
            continue
        if schema.length <= module.num_embeddings < schema.vocabulary:
            rows = gradient[:, : schema.length].abs().amax(dim=(0, 2))
            held = (rows > 0.0).nonzero().flatten()
            if len(held):
                return max(2, int(held[-1]) + 1)
    return schema.length


def _without(tensors: Tensors, name: str) -> Tensors:
    return {n: v for n, v in tensors.items() if n != name}


class EmbeddingSearch:
    """Free embeddings of L trials, with known labels.

    Parameters
    ----------
    start
        ``(L, B, T, width)``.
    labels
        ``(L, B, classes)``.
    """

    components = ("embeddings", "labels analytic")

    def __init__(self, start: Tensor, labels: Tensor) -> None:
        self.embeddings = start.detach().clone().requires_grad_()
        self.variables: Tensors = {"embeddings": self.embeddings}
        self._labels = labels

    def decode(self) -> tuple[Tensor, Tensor]:
        """Return embeddings ``(L, B, T, width, 1)`` and labels."""
        return self.embeddings[..., None], self._labels
