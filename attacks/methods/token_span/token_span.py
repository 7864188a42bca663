"""Token ids of texts, exactly, where gradients span fewer dimensions than an embedding has."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from bract.attacks.base import Attack, Batches, Cost
from bract.attacks.methods.token_span.linking import Linked
from bract.attacks.methods.token_span.pursuit import embeddings, pursue
from bract.attacks.methods.token_span.sequences import (
    Candidates,
    Checked,
    assemble,
    candidates_of,
    extend,
    local_distances,
)
from bract.attacks.methods.token_span.span import Span, span_of
from bract.attacks.methods.token_span.stages import Layer, Stages, find_stages
from bract.attacks.problem.case import Case
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.matching import hard_labels
from bract.config.text import TextSchema
from bract.data.tokens import as_example
from bract.errors import BractError
from bract.protocol.update import Tensors

_PROBE = 12
"""Tokens of a probe, at most."""

_SECONDS = 120.0
"""Wall time of one trial where the budget names none."""

_EPSILON = 2.0**-24
"""Relative rounding of a float32 number, at most."""

_SPARE = 8
"""Tokens that a pursuit may choose beyond those that the longest sequences hold."""


@ATTACKS.register("token-span")
@dataclass(frozen=True, kw_only=True)
class TokenSpan(Attack):
    """Read token ids off the subspaces that a language model's gradients span.

    The gradient of a linear layer is ``D^T X``, so its rows are combinations of the layer's inputs
    X. While a batch has fewer tokens than an embedding has dimensions, a token at a position was in
    the batch if and only if its embedding lies in that span (DAGER, Petrov et al., NeurIPS 2024).
    Sequences follow from the spans of later layers: token by token in a causal model, by descent
    over positions in one whose tokens see each other. Layers are found by probes, not by names;
    where the gradient of an embedding has zero rows, their tokens are left out at once.

    Of a low-rank adapter the span has too few dimensions for that; there the tokens are a joint
    sparse code of its rows (`bract.attacks.methods.token_span.pursuit`).

    Parameters
    ----------
    seconds
        Wall time of one trial where the budget names no time; what was found until then is
        returned.
    """

    name: ClassVar[str] = "token-span"
    title: ClassVar[str] = "Token span"
    family: ClassVar[str] = "closed-form reconstruction"
    closed_form: ClassVar[bool] = True
    batches: ClassVar[Batches] = "any"
    inputs: ClassVar[tuple[str, ...]] = ("text",)
    cost: ClassVar[Cost] = "tens of seconds"
    competes: ClassVar[bool] = True
    iterations: ClassVar[int] = 1

    seconds: float = _SECONDS

    def prepare(self, case: Case) -> Case:
        """Refuse a declaration without a schema of texts."""
        text_schema(case)
        return super().prepare(case)

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Search each trial's texts; positions that were not found are padding."""
        schema = text_schema(problem.cases[0])
        count = problem.image_shape[0]
        found = [
            _Search(problem, trial, schema, _until(self.seconds)).texts(count)
            for trial in range(problem.trials)
        ]
        images = torch.stack([f.to(problem.device, problem.dtype) for f in found])
        run.advance(1.0, 0.0)
        labels = _labels(problem)
        simulated = problem.simulate(images, labels, problem.unknowns())
        return Outcome(
            images=images,
            labels=labels,
            losses=problem.distance(RelativeError(), simulated).detach(),
            unknowns={},
            curves=[[] for _ in range(problem.trials)],
            iterations=0,
        ).made_by("", "span of the first layers")


def _labels(problem: Problem) -> Tensor:
    """Return inferred labels; equal probabilities where the update lacks the output layer."""
    try:
        return hard_labels(problem)
    except BractError:
        shape = (problem.trials, problem.image_shape[0], problem.classes)
        return torch.full(shape, 1.0 / problem.classes, device=problem.device, dtype=problem.dtype)


def text_schema(case: Case) -> TextSchema:
    """Return the declared schema of the texts."""
    schema = case.observation.declaration.text
    if schema is None:
        raise BractError(
            f"{case.observation.key}: no schema of texts is declared; its vocabulary and length "
            "are needed (data.text)"
        )
    return schema


def _until(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


class _Search:
    """The search for one trial's texts."""

    def __init__(
        self, problem: Problem, trial: int, schema: TextSchema, stop: Callable[[], bool]
    ) -> None:
        self.schema, self.stop = schema, stop
        self.key = problem.cases[trial].observation.key
        self.generator = torch.Generator().manual_seed(problem.seeds[trial])
        self.batch = problem.image_shape[0]
        own = {n: v[trial].detach().cpu().float() for n, v in problem.parameters.items()}
        target = {n: v[trial].detach().cpu().float() for n, v in problem.target.items()}
        self.model = _with_parameters(problem.target_model.model, own)
        self.gradients = {name: value for name, value in target.items() if name in own}
        self.rounding = _rounding(problem.cases[trial], own)

    @cached_property
    def stages(self) -> Stages:
        """Layers by what enters them."""
        length = min(_PROBE, self.schema.length)
        return find_stages(
            self.model, list(self.gradients), vocabulary=self.schema.vocabulary, length=length
        )

    @cached_property
    def span(self) -> Span:
        """Span of the first layers' inputs."""
        return self._span_of(self.stages.local)

    def _span_of(self, layers: Sequence[Layer]) -> Span:
        return span_of(
            [layer.rows(self.gradients[layer.name]) for layer in layers],
            [self.rounding[layer.name] for layer in layers],
        )

    @cached_property
    def tokens(self) -> Tensor:
        """Token ids that may be in the batch: all, or those with a gradient of their own."""
        for name, module in self.model.named_modules():
            weight = self.gradients.get(f"{name}.weight")
            if not isinstance(module, nn.Embedding) or weight is None:
                continue
            if weight.shape[0] != module.num_embeddings or weight.shape[0] < self.schema.vocabulary:
                continue
            rows = weight[: self.schema.vocabulary].norm(dim=1)
            present: Tensor = (rows > 0.0).nonzero().flatten()
            if 0 < len(present) < self.schema.vocabulary // 2:
                return present
        return torch.arange(self.schema.vocabulary)

    def texts(self, count: int) -> Tensor:
        """Return examples ``(count, length, 1, 1)``."""
        with torch.no_grad():
            low_rank = min(
                len(self.gradients[layer.name]) for layer in self.stages.local
            ) < self.span.basis.shape[1] // 4 and all(
                not layer.transposed for layer in self.stages.local
            )
            sequences = self._pursued(count) if low_rank else self._spanned(count)
            if count == 1:
                sequences = self._at_least_present(sequences)
        if not sequences:
            raise BractError(
                f"{self.key}: no token stands out of the span of the first layers: noise, a "
                "defense, or more tokens than dimensions"
            )
        ids = torch.full((count, self.schema.length), self.schema.padding)
        for row, sequence in zip(ids, sequences[:count], strict=False):
            row[: len(sequence)] = sequence
        return as_example(ids, self.schema)

    def _at_least_present(self, sequences: list[Tensor]) -> list[Tensor]:
        """Return one text, or the tokens with rows of the embedding's gradient, in any order."""
        found = sequences[0] if sequences else torch.empty(0, dtype=torch.int64)
        present = self.tokens if len(self.tokens) < self.schema.vocabulary // 2 else found
        lacking = present[~torch.isin(present, found)]
        if 2 * len(lacking) <= len(present):
            return sequences
        return [torch.cat([found, lacking])[: self.schema.length]]

    def _spanned(self, count: int) -> list[Tensor]:
        layer = self.stages.local[0]
        apart = local_distances(self.model, layer, self.span, self.tokens, self.schema.length)
        given = candidates_of(apart, self.tokens, self.span.rank)
        if given is None:
            return []
        checked = self._checked()
        if checked is None:
            return _apart(given, count)
        if self.stages.causal:
            return extend(self.model, checked, given, self.stop)
        return assemble(
            self.model,
            checked,
            given,
            linked=self._linked(given),
            ends=self._ends(given),
            special=torch.tensor(self.schema.special, dtype=torch.int64),
            count=count,
            generator=self.generator,
            stop=self.stop,
        )

    def _linked(self, given: Candidates) -> Linked:
        """Return the tokens of all positions with their slopes."""
        tokens = torch.cat(given.tokens)
        counts = torch.tensor([len(part) for part in given.tokens])
        positions = torch.arange(len(given.tokens)).repeat_interleave(counts)
        local = self.stages.local
        distinct, places = tokens.unique(return_inverse=True)
        inputs = embeddings(self.model, local[0], distinct, self.schema.length)[places, positions]
        gradients = [layer.rows(self.gradients[layer.name]) for layer in local]
        return Linked.of(tokens, positions, inputs, gradients)

    def _checked(self) -> Checked | None:
        layers, spans = [], []
        for layer in self.stages.contextual:
            try:
                span = self._span_of([layer])
            except BractError:
                continue
            if not span.full:
                layers.append(layer)
                spans.append(span)
        # Inputs that hardly differ from token to token, as those of even attention, leave a span of
        # fewer dimensions, in which no text lies.
        most = max((span.rank for span in spans), default=0)
        pairs = zip(layers, spans, strict=True)
        kept = [(layer, span) for layer, span in pairs if span.rank == most]
        return Checked(*zip(*kept, strict=True)) if kept else None

    def _ends(self, given: Candidates) -> Tensor:
        """Return the lengths at which a special token may end a sequence, or the longest one."""
        longest = next((i for i, t in enumerate(given.tokens) if not len(t)), len(given.tokens))
        special = torch.tensor(self.schema.special or (-1,))
        ends = [
            i + 1
            for i, tokens in enumerate(given.tokens[:longest])
            if i > 0 and bool(torch.isin(tokens, special).any())
        ]
        return torch.tensor(ends or [longest])

    def _pursued(self, count: int) -> list[Tensor]:
        """Return tokens of an adapter's gradient by position; of several texts, in any text."""
        most = count * self.schema.length + _SPARE
        found = pursue(
            self.model,
            self.stages.local[0],
            self.span,
            self.tokens,
            length=self.schema.length,
            most=min(most, self.span.basis.shape[1] - 1),
            one_each=count == 1,
            stop=self.stop,
        )
        texts = torch.full((count, self.schema.length), self.schema.padding)
        filled = [0] * self.schema.length
        for token, position in zip(found.tokens.tolist(), found.positions.tolist(), strict=True):
            if filled[position] < count:
                texts[filled[position], position] = token
                filled[position] += 1
        return list(texts)


def _apart(given: Candidates, count: int) -> list[Tensor]:
    """Return the tokens nearest to the span at each position, one sequence below the other."""
    longest = next((i for i, t in enumerate(given.tokens) if not len(t)), len(given.tokens))
    return [
        torch.stack([tokens[min(row, len(tokens) - 1)] for tokens in given.tokens[:longest]])
        for row in range(count)
        if longest
    ]


def _rounding(case: Case, own: Tensors) -> dict[str, float]:
    """Return the deviation that float32 weights leave in a gradient read off their difference."""
    declared = case.observation.declaration
    if declared.algorithm == "fedsgd" or not declared.lr:
        return dict.fromkeys(own, 0.0)
    scale = _EPSILON / (declared.lr * max(1, declared.local_steps or 1))
    return {name: scale * float(value.square().mean().sqrt()) for name, value in own.items()}


def _with_parameters(model: nn.Module, own: Tensors) -> nn.Module:
    """Return a copy of the network with these parameters."""
    found = copy.deepcopy(model).cpu().float().eval()
    with torch.no_grad():
        for name, value in found.named_parameters():
            value.copy_(own[name])
    return found
