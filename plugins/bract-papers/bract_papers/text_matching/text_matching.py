"""Attacks of the papers on texts that descend over embeddings, and LAMP's reordering."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks import (
    Attack,
    Case,
    FirstOrder,
    FirstOrderSettings,
    Objective,
    Outcome,
    Problem,
    Run,
    hard_labels,
    minimise,
    noise,
)
from bract.attacks.base import Batches, Cost
from bract.attacks.options import Count, Rate, Weight
from bract.attacks.problem.case import text_schema
from bract.attacks.solve.regularizers import Prior
from bract.config.text import TextSchema
from bract.data.tokens import as_example
from bract.errors import BractError
from bract_papers.text_matching.embedded import (
    EmbeddedProblem,
    EmbeddingSearch,
    embedded,
    token_embedding,
)
from bract_papers.text_matching.objectives import LayerCosine, SquaredAndAbsolute
from bract_papers.text_matching.orders import another_order


@dataclass(frozen=True, kw_only=True)
class TextMatching(Attack):
    """Descend over the embeddings of all tokens, and take the nearest token of each.

    Adam minimises the distance of simulated gradients from the captured ones, all but that of the
    token embedding. Starts are normal with the mean length of the vocabulary's embeddings. Labels
    come from the last layer, the length of the longest text from the gradient of positions; where
    texts of a batch are shorter, what is found at their padding is wrong. Restarts are compared by
    the loss of the tokens, the token embedding's gradient included.

    Attributes
    ----------
    lr
        Step of Adam, in root mean squares of an embedding's numbers.
    objective
        The matching loss.
    """

    inputs: ClassVar[tuple[str, ...]] = ("text",)
    family: ClassVar[str] = "gradient matching over embeddings"
    batches: ClassVar[Batches] = "few"
    cost: ClassVar[Cost] = "tens of seconds"
    iterations: ClassVar[int] = 1000

    lr: Rate = 0.3
    objective: Objective = field(default_factory=LayerCosine)

    def require_model(self, case: Case) -> None:
        """Refuse a declaration without a schema of texts, and a model without an embedding."""
        schema = text_schema(case)
        try:
            token_embedding(case.target_model.model, schema)
        except BractError as error:
            raise BractError(
                f"{case.observation.key}: {self.name}: {error}", code=error.code
            ) from None
        super().require_model(case)

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Descend, then take the nearest tokens."""
        schema = text_schema(problem.cases[0])
        given = embedded(problem, schema)
        labels = hard_labels(problem)
        found = self._search(given, _start(given), labels, run)
        return self._tokens(problem, given, found, schema)

    def _search(self, given: EmbeddedProblem, start: Tensor, labels: Tensor, run: Run) -> Outcome:
        """Return embeddings."""
        return self._descend(given, start, labels, run)

    def _descend(
        self,
        given: EmbeddedProblem,
        start: Tensor,
        labels: Tensor,
        run: Run,
        priors: tuple[Prior, ...] = (),
    ) -> Outcome:
        search = EmbeddingSearch(start, labels)
        unknowns = given.problem.unknowns()
        optimizer = FirstOrder(
            search.variables | unknowns,
            FirstOrderSettings(
                kind="adam",
                lr=self.lr * float(given.table.square().mean().sqrt()),
                schedule="cosine",
            ),
        )
        return minimise(
            given.problem,
            search,
            optimizer,
            run,
            objective=self.objective,
            priors=priors,
            unknowns=unknowns,
        )

    def _tokens(
        self, problem: Problem, given: EmbeddedProblem, found: Outcome, schema: TextSchema
    ) -> Outcome:
        """Return the nearest tokens, with the loss that they have themselves."""
        shape = (*problem.image_shape[:1], schema.length)
        ids = torch.full((problem.trials, *shape), schema.padding, device=problem.device)
        nearest = given.nearest(found.images.squeeze(-1), schema)
        ids[..., : nearest.shape[-1]] = nearest
        texts = as_example(ids, schema).to(problem.dtype)
        simulated = problem.simulate(texts, found.labels, found.unknowns)
        losses = problem.distance(self.objective, simulated).detach()
        return replace(found, images=texts, losses=losses)


def _start(given: EmbeddedProblem) -> Tensor:
    """Return normal embeddings with the vocabulary's root mean square."""
    count, width = given.problem.image_shape[0], given.table.shape[-1]
    scale = given.table.square().mean(dim=(1, 2)).sqrt()
    return noise(given.problem, count, given.length, width) * scale[:, None, None, None]


@dataclass(frozen=True, kw_only=True)
class Sim(TextMatching):
    """SIM: iGLA with the cosine in the place of the squared error (Fan et al., WSDM 2024, 5.4).

    Labels are read first, as in iDLG. The paper does not name over what the cosine is taken: here
    it is the mean over layers, as in LAMP; of one cosine over all of them the output layer, which
    knows no token, has nearly the whole.
    """

    name: ClassVar[str] = "sim"
    title: ClassVar[str] = "SIM"


@dataclass(frozen=True, kw_only=True)
class Tag(TextMatching):
    """TAG (Deng et al., EMNLP Findings 2021): squared and absolute differences of gradients."""

    name: ClassVar[str] = "tag"
    title: ClassVar[str] = "TAG"

    objective: Objective = field(default_factory=SquaredAndAbsolute)


@dataclass(frozen=True, kw_only=True)
class Lamp(TextMatching):
    """LAMP (Balunovic et al., NeurIPS 2022) without a language model.

    Descents on the mean cosine of layers plus the embeddings' length (eq. 4) alternate with trials
    of other orders of what was found (section 4.2): tokens or runs of tokens change places, and a
    change that lowers the loss is kept. The perplexity of a language model, which LAMP adds to
    that loss, is left out: none is public offline.

    Attributes
    ----------
    rounds
        Descents, each followed by orders.
    orders
        Orders tried after each.
    length_weight
        Weight of the difference of the embeddings' mean length from the vocabulary's.
    """

    name: ClassVar[str] = "lamp"
    title: ClassVar[str] = "LAMP"

    rounds: Count = 5
    orders: Count = 40
    length_weight: Weight = 0.1

    def _search(self, given: EmbeddedProblem, start: Tensor, labels: Tensor, run: Run) -> Outcome:
        prior = EmbeddingLength(weight=self.length_weight, table=given.table)
        generators = given.problem.generators()
        each = None if run.iterations is None else max(1, run.iterations // self.rounds)
        found: Outcome | None = None
        for number in range(self.rounds):
            part = run.part(f"{number}", number / self.rounds, (number + 1) / self.rounds, each)
            begun = start if found is None else found.images.squeeze(-1)
            later = self._descend(given, begun, labels, part, (prior,))
            found = later if found is None else later.after(found)
            found = self._reordered(given, found, generators)
        assert found is not None
        return found

    @torch.no_grad()
    def _reordered(
        self, given: EmbeddedProblem, found: Outcome, generators: list[torch.Generator]
    ) -> Outcome:
        """Return the embeddings in the order of those tried that has the least loss."""
        problem, best = given.problem, found.images
        losses = self._loss(problem, best, found)
        for _ in range(self.orders):
            orders = torch.stack(
                [
                    torch.stack([another_order(given.length, one) for _ in range(best.shape[1])])
                    for one in generators
                ]
            ).to(best.device)
            moved = best.gather(2, orders[..., None, None].expand_as(best))
            tried = self._loss(problem, moved, found)
            better = (tried < losses).view(-1, 1, 1, 1, 1)
            best, losses = torch.where(better, moved, best), torch.minimum(tried, losses)
        return replace(found, images=best)

    def _loss(self, problem: Problem, embeddings: Tensor, found: Outcome) -> Tensor:
        with torch.enable_grad():
            simulated = problem.simulate(embeddings, found.labels, found.unknowns)
        return problem.distance(self.objective, simulated).detach()


@dataclass(frozen=True, kw_only=True)
class EmbeddingLength:
    """Squared difference of the mean length of embeddings from the vocabulary's (LAMP, eq. 4).

    Attributes
    ----------
    table
        ``(L, V, width)``.
    """

    weight: float
    table: Tensor

    def component(self, problem: Problem) -> str | None:
        """The prior applies to every problem."""
        del problem
        return "length of embeddings"

    def __call__(self, problem: Problem, images: Tensor) -> Tensor:
        """Return the penalty ``(L,)`` of embeddings ``(L, B, T, width, 1)``."""
        del problem
        usual = self.table.norm(dim=-1).mean(dim=1)
        own = images.squeeze(-1).norm(dim=-1).mean(dim=(1, 2))
        penalty: Tensor = self.weight * (own / usual - 1.0).square()
        return penalty
