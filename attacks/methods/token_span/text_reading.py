"""Read the space of what entered a language model's first layers, or the rows of its embedding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bract.attacks.methods.token_span.pursuit import rows_of_rounds
from bract.attacks.methods.token_span.text_update import TextUpdate
from bract.attacks.problem.case import Case
from bract.attacks.problem.site import Site
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.errors import Errors
from bract.attacks.reading.span import Span, span_of_rounds
from bract.attacks.result import Determined
from bract.errors import BractError


@dataclass(frozen=True, kw_only=True)
class EnteredTexts(Entered):
    """Inputs of the first layers of a language model.

    Its `space` is that of the tokens' embeddings. Where the update shows which rows of the
    embedding were used, and no such space, `values` are their token ids ``(N, 1)``, each once.

    Attributes
    ----------
    update
        The gradients that were read.
    """

    update: TextUpdate


def read_texts(case: Case) -> EnteredTexts:
    """Read the space of what entered the first layers, or the tokens where there is none.

    Raises
    ------
    BractError
        If the update shows neither.
    """
    update = TextUpdate.of(case)
    if update.low_rank:
        rows = [rows_of_rounds(update, site) for site in update.stages.local]
        return _in_space(update, span_of_rounds(rows))
    if update.followed:
        return _of_tokens(update, update.tied_tokens)
    try:
        return _in_space(update, update.span)
    except BractError:
        if update.stages.causal and (update.output is not None or not update.tokens_known):
            raise
    if not update.tokens_known:
        raise update.no_token()
    return _of_tokens(update, update.tokens)


def _in_space(update: TextUpdate, span: Span) -> EnteredTexts:
    sites = update.stages.local
    return EnteredTexts(
        site=sites[0],
        space=span,
        errors=Errors.of(update.case, [site.weight for site in sites]),
        certificate=span.certificate,
        component="span of the first layers",
        update=update,
    )


def _of_tokens(update: TextUpdate, tokens: Tensor) -> EnteredTexts:
    """Return tokens that are known by their rows of the embedding's gradient."""
    assert update.embedding is not None
    site = Site(update.embedding.removesuffix("weight").removesuffix("."))
    gradient = update.gradients[site.weight].double()
    rest = gradient.clone()
    rest[tokens] = 0.0
    left = float(rest.norm() / gradient.norm().clamp_min(1e-300))
    errors = Errors.of(update.case, site.names)
    return EnteredTexts(
        site=site,
        values=tokens.double()[:, None],
        errors=errors,
        certificate=Determined(len(gradient) - len(tokens), left, errors.rounding),
        component="rows of the embedding",
        update=update,
    )
