"""Token ids of texts, exactly, where gradients span fewer dimensions than an embedding has."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from bract.attacks.base import Attack, Batches, Cost
from bract.attacks.methods.token_span.bags import bags_of
from bract.attacks.methods.token_span.beam_search import likeliest_texts
from bract.attacks.methods.token_span.deflating import deflate
from bract.attacks.methods.token_span.noise import deviations_of, rows_that_stand_out
from bract.attacks.methods.token_span.orders import Ordered, assemble, at_places, with_all
from bract.attacks.methods.token_span.pursuit import embeddings, pursue
from bract.attacks.methods.token_span.relaxed import relax
from bract.attacks.methods.token_span.sequences import (
    Candidates,
    Checked,
    candidates_of,
    extend,
    grow,
    local_distances,
)
from bract.attacks.methods.token_span.stages import CONTEXTUAL, Layer, Stages, find_stages
from bract.attacks.methods.token_span.subtraction import subtracted
from bract.attacks.methods.token_span.tags import infer_tags, known_rows, tags_of_text
from bract.attacks.methods.token_span.text_labels import labels_of_texts
from bract.attacks.methods.token_span.tied_rows import NextTokens, tokens_of_tied_rows
from bract.attacks.methods.token_span.token_positions import positions_of
from bract.attacks.options import Rate
from bract.attacks.problem.case import Case, text_schema
from bract.attacks.problem.objectives import RelativeError
from bract.attacks.problem.problem import Problem
from bract.attacks.problem.target_model import target_model_of
from bract.attacks.reading.span import Span, span_of, span_of_rounds
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Recipe, Run
from bract.attacks.solve.labels import last_layer
from bract.attacks.solve.matching import hard_labels
from bract.config.text import TextSchema
from bract.data.tokens import as_example
from bract.errors import BractError
from bract.models.losses import loss_of
from bract.protocol.observation import Observation
from bract.protocol.update import Tensors

_PROBE = 12
"""Tokens of a probe, at most."""

_SECONDS = 120.0
"""Wall time of one trial where the budget names none."""

_ROWS = "rows of the embedding"
"""What is recorded in the place of a span where only the set of tokens is read."""

_REST = 0.2
"""Share of the time that a search for several texts leaves for those that others hide."""

_CANDIDATES, _LABELS = 16, 64
"""Texts that may be taken out of a blurred update next, and labels that are tried with each."""

_SPARE = 8
"""Tokens that a pursuit may choose beyond those that the longest sequences hold."""

_BLURRED = 0.01
"""Share of the sharpest subspace's gap below which another one counts as blurred; chosen on texts
that score nothing."""


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
        length = min(_PROBE, schema.length)
        try:
            stages = find_stages(model, names, vocabulary=schema.vocabulary, length=length)
            per_token = target_model.loss.per_token
            wanted = _last_linear(model) if per_token else set(last_layer(target_model))
        except BractError:
            return None
        wanted |= {layer.name for layer in (*stages.local, *stages.contextual[:CONTEXTUAL])}
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and len(module.weight) >= schema.vocabulary:
                wanted.add(f"{name}.weight")
        return frozenset(name for name in names if name in wanted)

    def require_model(self, case: Case) -> None:
        """Refuse a declaration without a schema of texts, and an update without the layers."""
        schema = text_schema(case)
        model = copy.deepcopy(case.target_model.model).cpu().float().eval()
        length = min(_PROBE, schema.length)
        trained = [name for name in case.evidence.target if name in case.observation.parameters]
        try:
            find_stages(model, trained, vocabulary=schema.vocabulary, length=length)
        except BractError as error:
            raise BractError(
                f"{case.observation.key}: {self.name}: {error}", code=error.code
            ) from None
        super().require_model(case)

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Search each trial's texts; positions that were not found are padding."""
        schema = text_schema(problem.cases[0])
        count = problem.image_shape[0]
        each = self.seconds if run.seconds is None else run.seconds / problem.trials
        searches, found, certain = [], [], []
        for trial in range(problem.trials):
            ends = time.monotonic() + min(each, self.seconds)
            searches.append(_Search(problem, trial, schema, ends, relax=self.relax))
            found.append(searches[-1].texts(count))
            certain.append(searches[-1].certain)
        images = torch.stack([f.to(problem.device, problem.dtype) for f in found])
        run.advance(1.0, 0.0)
        labels = _labels(problem, images, certain)
        unknowns = problem.unknowns()
        simulated = problem.simulate(images, labels, unknowns)
        return Outcome(
            images=images,
            labels=labels,
            losses=problem.distance(RelativeError(), simulated).detach(),
            unknowns=unknowns,
            curves=[[] for _ in range(problem.trials)],
            iterations=0,
            recipes=[Recipe(components=(search.read,)) for search in searches],
        )


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
    try:
        labels = hard_labels(problem)
    except BractError:
        labels = torch.full(
            shape, 1.0 / problem.classes, device=problem.device, dtype=problem.dtype
        )
    if text_schema(problem.cases[0]).task == "classification":
        for trial in range(problem.trials):
            read = labels_of_texts(problem, trial, texts[trial])
            if read is not None:
                labels[trial] = nn.functional.one_hot(read, problem.classes).to(labels)
    return labels


def _after(ends: float) -> Callable[[], bool]:
    return lambda: time.monotonic() > ends


class _Search:
    """The search for one trial's texts."""

    def __init__(
        self,
        problem: Problem,
        trial: int,
        schema: TextSchema,
        ends: float,
        *,
        relax: bool,
    ) -> None:
        self.schema, self.ends, self.relax = schema, ends, relax
        self.stop = _after(ends)
        self.case = problem.cases[trial]
        self.key = self.case.observation.key
        self.generator = torch.Generator().manual_seed(problem.seeds[trial])
        self.batch, self.classes = problem.image_shape[0], problem.classes
        own = {n: v[trial].detach().cpu().float() for n, v in problem.parameters.items()}
        target = {n: v[trial].detach().cpu().float() for n, v in problem.target.items()}
        self.model = _with_parameters(problem.target_model.model, own)
        self.gradients = {name: value for name, value in target.items() if name in own}
        self.deviations = deviations_of(self.case, own)
        self.read = "span of the first layers"
        self.certain: list[Tensor] = []

    @cached_property
    def stages(self) -> Stages:
        """Layers by what enters them."""
        length = min(_PROBE, self.schema.length)
        names, vocabulary = list(self.gradients), self.schema.vocabulary
        try:
            return find_stages(self.model, names, vocabulary=vocabulary, length=length)
        except BractError as error:
            raise BractError(f"{self.key}: {error}", code=error.code) from None

    @cached_property
    def span(self) -> Span:
        """Span of the first layers' inputs."""
        return self._span_of(self.stages.local)

    def _span_of(self, layers: Sequence[Layer]) -> Span:
        try:
            return span_of(
                [layer.rows(self.gradients[layer.name]) for layer in layers],
                [self._deviation(layer) for layer in layers],
                relative=self._inverted,
            )
        except BractError as error:
            raise BractError(f"{self.key}: {error}", code=error.code) from None

    @property
    def _inverted(self) -> bool:
        """Return whether the gradients are a defense's, inverted as far as float32 resolves it."""
        return (self.case.read or self.case.evidence).weights is not None

    def _deviation(self, layer: Layer) -> Tensor | None:
        """Return the noise in each row of a layer's gradient."""
        each = self.deviations.get(layer.name)
        return None if each is None else layer.rows(each).double().square().mean(dim=1).sqrt()

    @cached_property
    def embedding(self) -> str | None:
        """Name of the token embedding's weight, whose gradient is known; None if it is not."""
        for name, module in self.model.named_modules():
            weight = self.gradients.get(f"{name}.weight")
            if not isinstance(module, nn.Embedding) or weight is None:
                continue
            if weight.shape[0] != module.num_embeddings or weight.shape[0] < self.schema.vocabulary:
                continue
            return f"{name}.weight"
        return None

    @cached_property
    def output(self) -> str | None:
        """Name of the output layer that shares the embedding; None if none does."""
        if self.embedding is None:
            return None
        weight = self.model.get_parameter(self.embedding)
        layers = [n for n, m in self.model.named_modules() if isinstance(m, nn.Linear)]
        return next((n for n in layers if self.model.get_submodule(n).weight is weight), None)

    @cached_property
    def tokens(self) -> Tensor:
        """Token ids that may be in the batch: all, or those with a gradient of their own."""
        if self.embedding is not None:
            weight = self.gradients[self.embedding][: self.schema.vocabulary]
            present = rows_that_stand_out(weight)
            if 0 < len(present) < self.schema.vocabulary // 2:
                return present
        every = torch.arange(self.schema.vocabulary)
        return every[every != self.schema.padding]

    def texts(self, count: int) -> Tensor:
        """Return examples ``(count, length, 1, 1)``.

        Where spans give few of the tokens with rows of the embedding's gradient, the others are
        shared out among the texts that were not found in the order of their ids: the set of them
        is read, nothing else.
        """
        with torch.no_grad():
            shapes = [layer.rows(self.gradients[layer.name]).shape for layer in self.stages.local]
            low_rank = min(rows for rows, _ in shapes) < shapes[0][1] // 4
            try:
                sequences = self._pursued(count) if low_rank else self._spanned(count)
            except BractError:
                if low_rank or not self._rows_known:
                    raise
                sequences = []
            if count == 1:
                sequences = self._at_least_present(sequences)
            else:
                sequences = self._with_present(sequences, count)
        if not sequences:
            raise BractError(
                f"{self.key}: no token stands out of the span of the first layers: noise, a "
                "defense, or more tokens than dimensions",
                code="attack-unsolved",
            )
        ids = torch.full((count, self.schema.length), self.schema.padding)
        for row, sequence in zip(ids, sequences[:count], strict=False):
            row[: len(sequence)] = sequence[: self.schema.length]
        return as_example(ids, self.schema)

    def _at_least_present(self, sequences: list[Tensor]) -> list[Tensor]:
        """Return one text, or the tokens with rows of the embedding's gradient, in any order."""
        found = sequences[0] if sequences else torch.empty(0, dtype=torch.int64)
        present = self.tokens if len(self.tokens) < self.schema.vocabulary // 2 else found
        lacking = present[~torch.isin(present, found)]
        if 2 * len(lacking) <= len(present):
            return sequences
        self.read = self.read if len(found) else _ROWS
        return [torch.cat([found, lacking])[: self.schema.length]]

    def _with_present(self, sequences: list[Tensor], count: int) -> list[Tensor]:
        """Return texts, and in place of those that were not found the tokens that lack."""
        free = count - len(sequences)
        found = torch.cat([torch.empty(0, dtype=torch.int64), *sequences])
        lacking = self.tokens[~torch.isin(self.tokens, found)]
        if free < 1 or not self._rows_known or 2 * len(lacking) <= len(self.tokens):
            return sequences
        self.read = self.read if sequences else _ROWS
        return [*sequences, *lacking.tensor_split(free)]

    @property
    def _rows_known(self) -> bool:
        """Return whether zero rows of an embedding that is not shared leave most tokens out."""
        return self.output is None and len(self.tokens) < self.schema.vocabulary // 2

    def _spanned(self, count: int) -> list[Tensor]:
        layer, special = self.stages.local[0], torch.tensor(self.schema.special, dtype=torch.int64)
        if not self.stages.causal:
            return self._separated(count, special)
        if self.output is not None and self._saturated():
            return self._followed(self.output, count, special)
        apart = local_distances(self.model, layer, self.span, self.tokens, self.schema.length)
        given = candidates_of(apart, self.tokens, self.span.rank)
        checked = self._checked()
        certain = self.span.clean and (checked is None or all(s.clean for s in checked.spans))
        if checked is not None and not (certain and given is not None):
            return self._blurred(count, special)
        if given is None:
            return []
        if checked is None:
            return _apart(given, count)
        found = extend(self.model, checked, given, self.stop)
        return found or self._nearest(torch.cat(given.tokens).unique(), count, special)

    def _blurred(self, count: int, special: Tensor) -> list[Tensor]:
        """Return the texts of subspaces that noise, pruning or rounding blurs.

        The text that explains most of the update is taken out of it, and the others are read off
        what is left.
        """
        found, others, search = list[Tensor](), list[Tensor](), self
        while len(found) < count and not self.stop():
            try:
                span, checked = search.span, search._checked()
            except BractError:
                break
            if checked is None:
                break
            layer, tokens = self.stages.local[0], search.tokens
            others = grow(
                self.model,
                checked,
                local_distances(self.model, layer, span, tokens, self.schema.length),
                tokens,
                special=special,
                count=count,
                stop=self.stop,
                candidates=None if count == 1 else _CANDIDATES,
            )
            rest = search._deflated(others, special) if count > 1 else None
            if rest is None:
                break
            text, search = rest
            found.append(text)
        for text in others:
            if len(found) < count and not any(torch.equal(text, one) for one in found):
                found.append(text)
        return found

    def _deflated(self, texts: Sequence[Tensor], special: Tensor) -> tuple[Tensor, _Search] | None:
        """Return the text that explains most of the update, and the search without it."""
        name, known = self.embedding, self.schema.task == "classification" and not self._inverted
        if name is None or not known or self.classes > _LABELS:
            return None
        rest = deflate(
            self.model,
            self.gradients,
            texts,
            embedding=name,
            special=special,
            loss=loss_of(self.schema.objective),
            labels=range(self.classes),
        )
        return None if rest is None else (rest[0], self._of(rest[1]))

    def _of(self, gradients: Tensors) -> _Search:
        """Return the search in other gradients of the same case."""
        found = copy.copy(self)
        for cached in ("span", "tokens"):
            found.__dict__.pop(cached, None)
        found.gradients = gradients
        return found

    def _saturated(self) -> bool:
        """Return whether later layers' gradients have as many dimensions as they can have.

        A normalisation takes one of them. Where the last values of one layer fall too slowly to
        tell rounding from noise, the next layer tells.
        """
        for layer in self.stages.contextual[:CONTEXTUAL]:
            try:
                span = self._span_of([layer])
            except BractError:
                return True
            if span.clean:
                return span.rank >= min(layer.rows(self.gradients[layer.name]).shape) - 1
        return False

    def _followed(self, output: str, count: int, special: Tensor) -> list[Tensor]:
        """Return the texts of a language model whose output layer shares the embedding."""
        assert self.embedding is not None
        rows = self.gradients[self.embedding][: self.schema.vocabulary]
        tokens = tokens_of_tied_rows(rows)
        tokens = tokens[tokens != self.schema.padding]
        if not len(tokens):
            raise BractError(
                f"{self.key}: no row of the gradient of {self.embedding}, which the output layer "
                "shares, stands out from the others, so no token is known: noise, a defense, or "
                "no text",
                code="attack-unsolved",
            )
        given, length = self._given(), self.schema.length
        at = [] if given is None else [i for i, here in enumerate(given.tokens) if len(here)]
        return likeliest_texts(
            self.model,
            output,
            NextTokens(rows),
            tokens,
            length=min(max(at) + 2, length) if at else length,  # the last is no input
            special=special,
            count=count,
            stop=self.stop,
        )

    def _nearest(self, tokens: Tensor, count: int, special: Tensor) -> list[Tensor]:
        """Return texts of an update with more tokens than a later layer's gradient has rows.

        No input then lies in what the rows span. Those of layers that are wider than an embedding
        still lie nearer to it where they were in the update.
        """
        wide = [
            layer
            for layer in self.stages.contextual
            if (shape := layer.rows(self.gradients[layer.name]).shape)[1] > shape[0]
        ]
        checked = self._checked(wide)
        if checked is None:
            return []
        return grow(
            self.model,
            checked,
            torch.zeros(len(tokens), self.schema.length),
            tokens,
            special=special,
            count=count,
            stop=self.stop,
        )

    def _separated(self, count: int, special: Tensor) -> list[Tensor]:
        """Return the texts of a model whose tokens see each other.

        Texts that explain the rows of their own tokens are taken out of the update, and the others
        read off what is left, in the time that is kept for that.
        """
        found: list[Tensor] = []
        search = self
        while True:
            left = self.ends - time.monotonic()
            several = count - len(found) > 1
            search.stop = _after(self.ends - (_REST * max(left, 0.0) if several else 0.0))
            ordered = search._ordered(count - len(found), special)
            rest, kept = search, list[Tensor]()
            for text in ordered.texts:
                other = rest._subtracted(text)
                if other is None:
                    kept.append(text)
                else:
                    rest, label = other
                    found.append(text)
                    self.certain.append(label)
            if rest is search or len(found) == count or time.monotonic() > self.ends:
                return found + kept
            search = rest

    def _subtracted(self, text: Tensor) -> tuple[_Search, Tensor] | None:
        """Return the search for the other texts, and the label; None if it was not in an update."""
        name = self.embedding
        if name is None or self.schema.task == "language-model":
            return None
        if not 0 < len(text) <= self.schema.length:
            return None
        labels: Iterable[Tensor] = (torch.tensor([own]) for own in range(self.classes))
        if self.schema.tags:
            labels = [
                tags_of_text(
                    self.model, self.gradients, text, embedding=name, tags=self.schema.tags
                )
            ]
        left = subtracted(
            self.model,
            self.gradients,
            text,
            embedding=name,
            weight=1.0 / self.batch,
            loss=loss_of(self.schema.objective),
            labels=labels,
        )
        return None if left is None else (self._of(left[0]), left[1])

    def _ordered(self, count: int, special: Tensor) -> Ordered:
        """Return the texts of an update: separated, then ordered."""
        given = self._given()
        known = len(self.tokens) < self.schema.vocabulary // 2
        if not known and given is None:
            return Ordered([], 0)
        tokens = self.tokens if given is None else torch.cat(given.tokens).unique()
        places = self._places() if known else {}
        layer = max(self.stages.local, key=lambda one: float(self.gradients[one.name].norm()))
        bags = bags_of(
            tokens,
            embeddings(self.model, layer, tokens, self.schema.length),
            layer.rows(self.gradients[layer.name]),
            count=count,
            special=special,
            generator=self.generator,
            places=places,
        )
        if count == 1:
            bags = [replace(bag, tokens=tokens[~torch.isin(tokens, special)]) for bag in bags]
        checked = self._checked()
        if checked is None:
            return Ordered([with_all(special[:0], bag.tokens, special) for bag in bags], 0)
        ends = special[:0] if given is None else self._ends(given)
        found = assemble(
            self.model,
            checked,
            at_places(given, tokens, places, self.schema.length),
            bags,
            ends=ends,
            special=special[torch.isin(special, tokens)],
            generator=self.generator,
            stop=self.stop,
            padding=self.schema.padding,
            places=places,
            relaxed=self._relaxed(checked),
            enough=count > 1,
        )
        own = tokens[~torch.isin(tokens, special)]
        there = torch.cat([special[:0], *(one[: self.schema.length] for one in found.texts)])
        lacking = own[~torch.isin(own, there)]
        if known and 2 * len(lacking) > len(own):
            # The later layers' subspaces are those of no text, as after a step of Adam, which
            # keeps the signs alone; which tokens are there shows nevertheless.
            return Ordered([with_all(special[:0], bag.tokens, special) for bag in bags], 0)
        return found

    def _relaxed(
        self, checked: Checked
    ) -> Callable[[Candidates, Mapping[int, int]], Tensor] | None:
        name = self.embedding
        if name is None or not self.relax:
            return None
        return partial(relax, self.model, checked, embedding=name, generator=self.generator)

    def _places(self) -> dict[int, int]:
        if self.embedding is None:
            return {}
        weight = self.model.get_parameter(self.embedding)
        gradient = self.gradients[self.embedding]
        return positions_of(self.model, weight, gradient, self.tokens, self.schema.length)

    def _given(self) -> Candidates | None:
        """Return the tokens at each position that the first layers admit; None if they do all."""
        try:
            span = self.span
        except BractError:
            return None
        if not span.clean and len(self.tokens) < self.schema.vocabulary // 2:
            return None  # which tokens are there is known better than what noise leaves of a span
        layer = self.stages.local[0]
        apart = local_distances(self.model, layer, span, self.tokens, self.schema.length)
        return candidates_of(apart, self.tokens, span.rank)

    def _checked(self, among: Sequence[Layer] | None = None) -> Checked | None:
        given = self.stages.contextual if among is None else among
        sharpest = self._sharpest(given) if self._inverted else None
        layers, spans = sharpest or self._open_spans(given[:CONTEXTUAL])
        if not self.stages.causal and any(span.clean for span in spans):
            # A span that noise cuts short leaves every text outside of it.
            layers = [layer for layer, span in zip(layers, spans, strict=True) if span.clean]
            spans = [span for span in spans if span.clean]
        # Inputs that hardly differ from token to token, as those of even attention, leave a span of
        # fewer dimensions, in which no text lies.
        most = max((span.rank for span in spans), default=0)
        pairs = zip(layers, spans, strict=True)
        kept = [(layer, span) for layer, span in pairs if span.rank == most or not span.clean]
        return Checked(*zip(*kept, strict=True)) if kept else None

    def _sharpest(self, layers: Sequence[Layer]) -> tuple[list[Layer], list[Span]] | None:
        """Return the layers whose subspaces stand out most of what an inversion left unknown.

        It resolves small coordinates, as those of keys and queries are, in whichever block; None
        if no layer has enough of them.
        """
        pairs = list(zip(*self._open_spans(layers), strict=True))
        pairs = [(layer, span) for layer, span in pairs if span.clean and math.isfinite(span.gap)]
        most = max((span.rank for _, span in pairs), default=0)
        pairs = [(layer, span) for layer, span in pairs if span.rank == most]
        least = _BLURRED * max((span.gap for _, span in pairs), default=0.0)
        pairs = [(layer, span) for layer, span in pairs if span.gap >= least][:CONTEXTUAL]
        return ([layer for layer, _ in pairs], [span for _, span in pairs]) if pairs else None

    def _open_spans(self, layers: Sequence[Layer]) -> tuple[list[Layer], list[Span]]:
        """Return those layers whose subspaces leave something out, and the subspaces."""
        kept, spans = [], []
        for layer in layers:
            try:
                span = self._span_of([layer])
            except BractError:
                continue
            if not span.full:
                kept.append(layer)
                spans.append(span)
        return kept, spans

    def _ends(self, given: Candidates) -> Tensor:
        """Return the lengths at which a special token may end a sequence, or the longest one."""
        longest = max((i + 1 for i, t in enumerate(given.tokens) if len(t)), default=0)
        special = torch.tensor(self.schema.special or (-1,))
        ends = [
            i + 1
            for i, tokens in enumerate(given.tokens[:longest])
            if i > 0 and bool(torch.isin(tokens, special).any())
        ]
        return torch.tensor(ends or [longest])

    def _pursued(self, count: int) -> list[Tensor]:
        """Return the texts of an adapter's gradient; of several texts, separated by slopes."""
        local, length = self.stages.local, self.schema.length
        rows = {layer: self._rows_of_rounds(layer) for layer in local}
        span = span_of_rounds(list(rows.values()))
        found = pursue(
            self.model,
            local[0],
            span,
            self.tokens,
            length=length,
            most=min(count * length + _SPARE, span.basis.shape[1] - 1),
            each=count,
            stop=self.stop,
        )
        tokens, positions = found.tokens, found.positions
        if count == 1:
            text = torch.full((length,), self.schema.padding)
            text[positions] = tokens
            return [text]
        special = torch.tensor(self.schema.special, dtype=torch.int64)
        distinct = tokens.unique()
        bags = bags_of(
            distinct,
            embeddings(self.model, local[0], distinct, length),
            rows[max(local, key=lambda one: float(self.gradients[one.name].norm()))],
            count=count,
            special=special,
            generator=self.generator,
        )
        texts = []
        for bag in bags:
            text = torch.full((length,), self.schema.padding)
            mine = torch.isin(tokens, torch.cat([bag.tokens, special])) & (positions < bag.length)
            # Earlier choices are surer, so they are placed last.
            text[positions[mine].flip(0)] = tokens[mine].flip(0)
            lacking = bag.tokens[~torch.isin(bag.tokens, text)]
            free = (text[: bag.length] == self.schema.padding).nonzero().flatten()
            text[free[: len(lacking)]] = lacking[: len(free)]
            texts.append(text)
        return texts

    def _rows_of_rounds(self, layer: Layer) -> Tensor:
        """Return a layer's gradient, below those of earlier rounds where these have the same texts.

        What enters a layer below which nothing is trained is the same in every round.
        """
        declared = self.case.observation.declaration
        rows = [layer.rows(self.gradients[layer.name])]
        batch, examples = declared.batch_size, declared.num_examples
        if batch is not None and examples is not None and batch >= examples:
            for seen in self.case.known.history if not declared.defenses else ():
                earlier = seen.gradient().get(layer.name)
                if earlier is not None and bool(earlier.any()):
                    rows.append(layer.rows(earlier.detach().cpu().float()))
        return torch.cat([one / one.norm().clamp_min(1e-30) for one in rows])


def _apart(given: Candidates, count: int) -> list[Tensor]:
    """Return the tokens nearest to the span at each position, one sequence below the other."""
    longest = next((i for i, t in enumerate(given.tokens) if not len(t)), len(given.tokens))
    return [
        torch.stack([tokens[min(row, len(tokens) - 1)] for tokens in given.tokens[:longest]])
        for row in range(count)
        if longest
    ]


def _with_parameters(model: nn.Module, own: Tensors) -> nn.Module:
    """Return a copy of the network with these parameters."""
    found = copy.deepcopy(model).cpu().float().eval()
    with torch.no_grad():
        for name, value in found.named_parameters():
            value.copy_(own[name])
    return found
