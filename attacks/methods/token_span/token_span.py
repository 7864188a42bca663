"""Token ids of texts, exactly, where gradients span fewer dimensions than an embedding has."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from bract.attacks.base import Batches, Cost
from bract.attacks.methods.inverting import InvertingAttack
from bract.attacks.methods.token_span.causal_texts import CausalTexts
from bract.attacks.methods.token_span.encoder_texts import EncoderTexts, after
from bract.attacks.methods.token_span.pursuit import adapter_texts
from bract.attacks.methods.token_span.stages import CONTEXTUAL, find_stages
from bract.attacks.methods.token_span.tags import infer_tags, known_rows
from bract.attacks.methods.token_span.text_labels import labels_of_texts
from bract.attacks.methods.token_span.text_reading import EnteredTexts, read_texts
from bract.attacks.methods.token_span.text_update import PROBE
from bract.attacks.options import Rate
from bract.attacks.problem.case import Case, text_schema
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.target_model import target_model_of
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.reading import ReadingBudget
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Recipe, Run
from bract.attacks.solve.labels import last_layer
from bract.attacks.solve.matching import hard_labels
from bract.captures.observation import Observation
from bract.config.text import TextSchema
from bract.data.tokens import as_example
from bract.errors import BractError
from bract.process import clock

_SECONDS = 120.0
"""Wall time of one trial where the budget names none."""

_ROWS = "rows of the embedding"
"""What is recorded in the place of a span where only the set of tokens is read."""


@ATTACKS.register("token-span")
@dataclass(frozen=True, kw_only=True)
class TokenSpan(InvertingAttack):
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
    relax
        Whether texts of an encoder are also searched by descent on mixtures of tokens, by the
        objective of TIGER (2606.18312), where changes of one token lead nowhere.
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
    per_token: ClassVar[bool] = True

    relax: bool = True
    seconds: Rate = _SECONDS

    def needs(self, observation: Observation) -> frozenset[str] | None:
        """Return the token embedding, the first layers and those that texts are checked against.

        The output layer, which shows labels, is among them. None where a model shows no stages.
        """
        schema = observation.declaration.text
        if schema is None:
            return None
        target_model = target_model_of(observation)
        model, names = target_model.model, list(observation.parameters)
        length = min(PROBE, schema.length)
        try:
            stages = find_stages(model, names, vocabulary=schema.vocabulary, length=length)
            per_token = target_model.loss.per_token
            wanted = _last_linear(model) if per_token else set(last_layer(target_model))
        except BractError:
            return None
        wanted |= {layer.weight for layer in (*stages.local, *stages.contextual[:CONTEXTUAL])}
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and len(module.weight) >= schema.vocabulary:
                wanted.add(f"{name}.weight")
        return frozenset(name for name in names if name in wanted)

    def require_model(self, case: Case) -> None:
        """Refuse a declaration without a schema of texts, and an update without the layers."""
        schema = text_schema(case)
        model = copy.deepcopy(case.target_model.model).cpu().float().eval()
        length = min(PROBE, schema.length)
        trained = [name for name in case.evidence.target if name in case.observation.parameters]
        try:
            find_stages(model, trained, vocabulary=schema.vocabulary, length=length)
        except BractError as error:
            raise BractError(
                f"{case.observation.key}: {self.name}: {error}", code=error.code
            ) from None
        super().require_model(case)

    def entered(self, case: Case, budget: ReadingBudget) -> EnteredTexts:
        """Return the space of what entered the first layers, or tokens of the embedding's rows."""
        del budget
        return read_texts(case)

    def inverted(self, problem: Problem, run: Run, read: Sequence[Entered]) -> Outcome:
        """Search each trial's texts; positions that were not found are padding."""
        schema = text_schema(problem.cases[0])
        count = problem.image_shape[0]
        each = self.seconds if run.seconds is None else run.seconds / problem.trials
        texts = []
        for trial, entered in enumerate(read):
            assert isinstance(entered, EnteredTexts)
            ends = clock.now() + min(each, self.seconds)
            texts.append(self._texts(problem, trial, entered, ends))
        found = [as_example(one.filled(count, schema), schema) for one in texts]
        images = torch.stack([f.to(problem.device, problem.dtype) for f in found])
        run.advance(1.0, 0.0)
        labels = _labels(problem, images, [one.labels for one in texts])
        unknowns = problem.unknowns()
        return Outcome(
            images=images,
            labels=labels,
            losses=problem.residuals(images, labels, unknowns),
            unknowns=unknowns,
            curves=[[] for _ in range(problem.trials)],
            iterations=0,
            recipes=[Recipe(components=(one.component,)) for one in texts],
        )

    @torch.no_grad()
    def _texts(self, problem: Problem, trial: int, read: EnteredTexts, ends: float) -> Texts:
        """Find a trial's texts, by how the tokens of its model see each other.

        Raises
        ------
        BractError
            If no token is known.
        """
        update, count = read.update, problem.image_shape[0]
        generator = torch.Generator().manual_seed(problem.seeds[trial])
        labels: list[Tensor] = []
        try:
            if update.low_rank:
                assert read.space is not None
                found = adapter_texts(update, read.space, count, generator, after(ends))
            elif update.stages.causal:
                found = CausalTexts(
                    update=update, count=count, classes=problem.classes, stop=after(ends)
                ).found()
            else:
                found, labels = EncoderTexts(
                    update=update,
                    count=count,
                    classes=problem.classes,
                    ends=ends,
                    generator=generator,
                    relax=self.relax,
                ).found()
        except BractError:
            if update.low_rank or update.output is not None or not update.tokens_known:
                raise
            found = []
        shown = update.tokens_known and (count == 1 or update.output is None)
        texts = Texts(found, labels).with_present(update.tokens if shown else None, count)
        if not texts.sequences:
            raise update.no_token()
        return texts


@dataclass(frozen=True)
class Texts:
    """Texts that were read off one update.

    Attributes
    ----------
    sequences
        Token ids, int64 ``(T,)`` each.
    labels
        Of the first ones, which were taken out of the update.
    component
        What is recorded as read.
    """

    sequences: list[Tensor]
    labels: list[Tensor] = field(default_factory=list)
    component: str = "span of the first layers"

    def with_present(self, present: Tensor | None, count: int) -> Texts:
        """Add the tokens that the texts lack, where these are most of them.

        They are shared out, in the order of their ids, among the texts that were not found: the
        set of them is read, nothing else. One text is made longer.

        Parameters
        ----------
        present
            Tokens with rows of the embedding's gradient; None where it does not show them.
        count
            Texts of the update.
        """
        if present is None:
            return self
        sequences = self.sequences[:1] if count == 1 else self.sequences
        found = torch.cat([torch.empty(0, dtype=torch.int64), *sequences])
        lacking = present[~torch.isin(present, found)]
        if 2 * len(lacking) <= len(present):
            return self
        component = self.component if len(found) else _ROWS
        if count == 1:
            whole = torch.cat([found, lacking])
            return replace(self, sequences=[whole], component=component)
        free = count - len(self.sequences)
        if free < 1:
            return self
        parts = lacking.tensor_split(free)
        return replace(self, sequences=[*self.sequences, *parts], component=component)

    def filled(self, count: int, schema: TextSchema) -> Tensor:
        """Return ids ``(count, length)``; positions that were not found are padding."""
        ids = torch.full((count, schema.length), schema.padding)
        for row, sequence in zip(ids, self.sequences[:count], strict=False):
            row[: len(sequence)] = sequence[: schema.length]
        return ids


def _last_linear(model: nn.Module) -> set[str]:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {f"{names[-1]}.weight", f"{names[-1]}.bias"} if names else set()


def _labels(problem: Problem, texts: Tensor, certain: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return inferred labels; where the update does not show them, equal probabilities.

    Labels of tokens follow from the tokens; where they do not, every token has none.

    Parameters
    ----------
    certain
        By trial, the labels of the first texts, which were taken out of the update.
    """
    shape = (problem.trials, problem.image_shape[0], problem.classes)
    if problem.target_model.loss.per_token:
        try:
            return infer_tags(problem, texts, certain)
        except BractError:
            found = torch.zeros(shape, device=problem.device, dtype=problem.dtype)
            for rows, known in zip(found, certain, strict=True):
                rows[: len(known)] = known_rows(known, texts.shape[2], problem).to(rows)
            return found
    read: list[Tensor | None] = [None] * problem.trials
    if text_schema(problem.cases[0]).task == "classification":
        read = [labels_of_texts(problem, trial, texts[trial]) for trial in range(problem.trials)]
    labels = torch.full(shape, 1.0 / problem.classes, device=problem.device, dtype=problem.dtype)
    if any(one is None for one in read):  # inferring labels without the texts costs far more
        with suppress(BractError):
            labels = hard_labels(problem)
    for trial, one in enumerate(read):
        if one is not None:
            labels[trial] = nn.functional.one_hot(one, problem.classes).to(labels)
    return labels
