"""One update of texts: gradients, the layers that they show, and what these span."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from bract.attacks.methods.token_span.noise import rows_that_stand_out
from bract.attacks.methods.token_span.sequences import (
    Candidates,
    Checked,
    candidates_of,
    local_distances,
)
from bract.attacks.methods.token_span.stages import CONTEXTUAL, Stages, find_stages
from bract.attacks.methods.token_span.tied_rows import tokens_of_tied_rows
from bract.attacks.methods.token_span.token_positions import positions_of
from bract.attacks.problem.case import Case, text_schema
from bract.attacks.problem.site import Site
from bract.attacks.reading.errors import deviations_of
from bract.attacks.reading.span import Span, span_of
from bract.config.text import TextSchema
from bract.errors import BractError
from bract.updates.update import Tensors

PROBE = 12
"""Tokens of a probe, at most."""

_BLURRED = 0.01
"""Share of the sharpest subspace's gap below which another one counts as blurred; chosen on texts
that score nothing."""


@dataclass(frozen=True, kw_only=True)
class TextUpdate:
    """Gradients of one update's texts, and what they tell before any text is sought.

    Attributes
    ----------
    model
        A copy of the network with the captured parameters.
    gradients, deviations
        By parameter: the update as a gradient, and the noise in its coordinates as far as it is
        known (`deviations_of`).
    stages
        Layers by what enters them.
    """

    case: Case
    schema: TextSchema
    model: nn.Module
    gradients: Tensors
    deviations: Tensors
    stages: Stages

    @classmethod
    def of(cls, case: Case) -> TextUpdate:
        """Read an update.

        Raises
        ------
        BractError
            If no schema of texts is declared, or no trained layer sees single tokens.
        """
        schema, seen = text_schema(case), case.observation
        own = {n: seen.parameters[n].cpu().float() for n in case.target_model.parameter_names}
        target = {n: v.detach().cpu().float() for n, v in case.evidence.target.items()}
        model = _with_parameters(case.target_model.model, own)
        gradients = {name: value for name, value in target.items() if name in own}
        length, vocabulary = min(PROBE, schema.length), schema.vocabulary
        try:
            stages = find_stages(model, list(gradients), vocabulary=vocabulary, length=length)
        except BractError as error:
            raise BractError(f"{seen.key}: {error}", code=error.code) from None
        return cls(
            case=case,
            schema=schema,
            model=model,
            gradients=gradients,
            deviations=deviations_of(case, own),
            stages=stages,
        )

    def without(self, gradients: Tensors) -> TextUpdate:
        """Return the update of which these gradients are left."""
        return replace(self, gradients=gradients)

    @property
    def key(self) -> str:
        """Name of the observation, for errors."""
        return self.case.observation.key

    @property
    def special(self) -> Tensor:
        """Ids that begin and end texts, int64."""
        return torch.tensor(self.schema.special, dtype=torch.int64)

    def rows(self, site: Site) -> Tensor:
        """Return a layer's gradient ``(outputs, inputs)``."""
        return site.turned(self.gradients[site.weight])

    @property
    def strongest(self) -> Site:
        """The first layer whose gradient is the largest."""
        local = self.stages.local
        return max(local, key=lambda one: float(self.gradients[one.weight].norm()))

    @property
    def low_rank(self) -> bool:
        """Return whether a first layer is an adapter, whose gradient has few rows."""
        shapes = [self.rows(site).shape for site in self.stages.local]
        return min(rows for rows, _ in shapes) < shapes[0][1] // 4

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

    @property
    def followed(self) -> bool:
        """Return whether texts are followed from token to token by the output layer's rows.

        It shares the embedding, and later layers tell no text.
        """
        return self.stages.causal and self.output is not None and self.saturated

    @cached_property
    def tied_tokens(self) -> Tensor:
        """Token ids that an embedding shows which the output layer shares, int64.

        Raises
        ------
        BractError
            If none does.
        """
        assert self.embedding is not None
        tokens = tokens_of_tied_rows(self.gradients[self.embedding][: self.schema.vocabulary])
        tokens = tokens[tokens != self.schema.padding]
        if not len(tokens):
            raise BractError(
                f"{self.key}: no row of the gradient of {self.embedding}, which the output "
                "layer shares, stands out from the others, so no token is known: noise, a defense, "
                "or no text",
                code="attack-unsolved",
            )
        return tokens

    def no_token(self) -> BractError:
        """Return the error of an update that tells no token."""
        return BractError(
            f"{self.key}: no token stands out of the span of the first layers: noise, a "
            "defense, or more tokens than dimensions",
            code="attack-unsolved",
        )

    @property
    def tokens_known(self) -> bool:
        """Return whether rows of the embedding leave most tokens out."""
        return len(self.tokens) < self.schema.vocabulary // 2

    @property
    def places(self) -> dict[int, int]:
        """Positions of tokens that occur once, by `positions_of`."""
        if self.embedding is None:
            return {}
        weight = self.model.get_parameter(self.embedding)
        gradient = self.gradients[self.embedding]
        return positions_of(self.model, weight, gradient, self.tokens, self.schema.length)

    @property
    def inverted(self) -> bool:
        """Return whether the gradients are a defense's, inverted as far as float32 resolves it."""
        return (self.case.read or self.case.evidence).weights is not None

    @cached_property
    def span(self) -> Span:
        """Span of the first layers' inputs."""
        return self.span_of(self.stages.local)

    def span_of(self, sites: Sequence[Site]) -> Span:
        """Return the span of what entered layers with one common input.

        Raises
        ------
        BractError
            If their gradients do not show one (`bract.attacks.reading.span.span_of`).
        """
        try:
            return span_of(
                [self.rows(site) for site in sites],
                [self._deviation(site) for site in sites],
                relative=self.inverted,
            )
        except BractError as error:
            raise BractError(f"{self.key}: {error}", code=error.code) from None

    def _deviation(self, site: Site) -> Tensor | None:
        """Return the noise in each row of a layer's gradient."""
        each = self.deviations.get(site.weight)
        return None if each is None else site.turned(each).double().square().mean(dim=1).sqrt()

    @cached_property
    def saturated(self) -> bool:
        """Return whether later layers' gradients have as many dimensions as they can have.

        A normalisation takes one of them. Where the last values of one layer fall too slowly to
        tell rounding from noise, the next layer tells.
        """
        for site in self.stages.contextual[:CONTEXTUAL]:
            try:
                span = self.span_of([site])
            except BractError:
                return True
            if span.clean:
                return span.rank >= min(self.rows(site).shape) - 1
        return False

    def distances(self) -> Tensor:
        """Return the distance of each token at each position from the first layers' span."""
        first, length = self.stages.local[0], self.schema.length
        return local_distances(self.model, first, self.span, self.tokens, length)

    def candidates(self) -> Candidates | None:
        """Return the tokens at each position that the first layers admit; None if they do all."""
        try:
            span = self.span
        except BractError:
            return None
        if not span.clean and self.tokens_known:
            return None  # which tokens are there is known better than what noise leaves of a span
        return candidates_of(self.distances(), self.tokens, span.rank)

    def checked(self, among: Sequence[Site] | None = None) -> Checked | None:
        """Return the later layers that sequences are checked against; None if none tells."""
        given = self.stages.contextual if among is None else among
        sharpest = self._sharpest(given) if self.inverted else None
        pairs = sharpest or self._open_spans(given[:CONTEXTUAL])
        if not self.stages.causal and any(span.clean for _, span in pairs):
            # A span that noise cuts short leaves every text outside of it.
            pairs = [(site, span) for site, span in pairs if span.clean]
        # Inputs that hardly differ from token to token, as those of even attention, leave a span of
        # fewer dimensions, in which no text lies.
        most = max((span.rank for _, span in pairs), default=0)
        kept = [(site, span) for site, span in pairs if span.rank == most or not span.clean]
        return Checked(*zip(*kept, strict=True)) if kept else None

    def _sharpest(self, sites: Sequence[Site]) -> list[tuple[Site, Span]]:
        """Return the layers whose subspaces stand out most of what an inversion left unknown.

        It resolves small coordinates, as those of keys and queries are, in whichever block; none
        if no layer has enough of them.
        """
        pairs = self._open_spans(sites)
        pairs = [(site, span) for site, span in pairs if span.clean and math.isfinite(span.gap)]
        most = max((span.rank for _, span in pairs), default=0)
        pairs = [(site, span) for site, span in pairs if span.rank == most]
        least = _BLURRED * max((span.gap for _, span in pairs), default=0.0)
        return [(site, span) for site, span in pairs if span.gap >= least][:CONTEXTUAL]

    def _open_spans(self, sites: Sequence[Site]) -> list[tuple[Site, Span]]:
        """Return those layers whose subspaces leave something out, and the subspaces."""
        kept = []
        for site in sites:
            try:
                span = self.span_of([site])
            except BractError:
                continue
            if not span.full:
                kept.append((site, span))
        return kept


def _with_parameters(model: nn.Module, own: Tensors) -> nn.Module:
    """Return a copy of the network with these parameters."""
    found = copy.deepcopy(model).cpu().float().eval()
    with torch.no_grad():
        for name, value in found.named_parameters():
            value.copy_(own[name])
    return found
