"""TabLeak: rows of a table by matching, from a pooled ensemble with a certainty of each cell."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.base import Attack, Cost
from bract.attacks.methods.tableak.pooling import pooled
from bract.attacks.methods.tableak.row_search import RowSearch
from bract.attacks.options import Count, Rate, Weight
from bract.attacks.problem.case import Case
from bract.attacks.problem.objectives import Cosine, NoObjective, Objective
from bract.attacks.problem.problem import Problem
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Run
from bract.attacks.solve.matching import hard_labels, minimise
from bract.attacks.solve.optimizers import FirstOrder, FirstOrderSettings
from bract.config.table import TableSchema
from bract.data.rows import project
from bract.errors import BractError
from bract.seeds import derive_seed


@ATTACKS.register("tableak")
@dataclass(frozen=True, kw_only=True)
class TabLeak(Attack):
    """TabLeak (Vero et al., ICML 2023), with the schema's ranges and a choice among the pool.

    Every one-hot group is the softmax of free logits; the cosine to the captured gradient is
    minimised by Adam from several starts; the ensemble's rows are paired with those of its best
    member and pooled, numbers by their median and categories by their mean (section 4.2). How far
    the members disagree is the attacker's own trust in each cell (section 4.3): the entropy of
    their values. Rows are projected onto the schema at last.

    Other than there: numbers are clipped to the schema's ranges; the worse half of the members, by
    their loss, is left out of the pool; and where the best member alone matches better than the
    pool, its rows are returned.

    Attributes
    ----------
    members
        Size of the ensemble; 30 there.
    lr
        Step of Adam in standardised units, and of logits; 0.06 there.
    spread
        Standard deviation of starts.
    objective
        The matching loss.
    """

    name: ClassVar[str] = "tableak"
    title: ClassVar[str] = "TabLeak"
    family: ClassVar[str] = "gradient matching over rows"
    inputs: ClassVar[tuple[str, ...]] = ("table",)
    cost: ClassVar[Cost] = "seconds"
    competes: ClassVar[bool] = True
    iterations: ClassVar[int] = 1500

    members: Count = 16
    lr: Rate = 0.06
    spread: Weight = 0.5
    objective: Objective = field(default_factory=Cosine)

    def require_model(self, case: Case) -> None:
        """Refuse a declaration without a schema."""
        super().require_model(case)
        schema_of(case)

    def solve(self, problem: Problem, run: Run) -> Outcome:
        """Search with every member of every trial side by side, and pool each trial's."""
        schema = schema_of(problem.cases[0])
        each = self.members
        whole = problem.select([t for t in range(problem.trials) for _ in range(each)])
        whole = replace(
            whole,
            seeds=tuple(
                derive_seed(seed, "member", m) for seed in problem.seeds for m in range(each)
            ),
        )
        values = problem.target_model.loss.values
        count = problem.image_shape[0]
        labels = hard_labels(problem).repeat_interleave(each, dim=0)
        search = RowSearch(
            whole,
            schema,
            self._start(whole, schema),
            labels,
            free=count > 1 and values,
            values=values,
        )
        optimizer = FirstOrder(
            search.variables,
            FirstOrderSettings(kind="adam", lr=self.lr, schedule="cosine"),
            project=search.box,
        )
        found = minimise(
            whole, search, optimizer, run, objective=self.objective, unknowns=whole.unknowns()
        )
        return self._pooled(problem, found, schema)

    def _start(self, problem: Problem, schema: TableSchema) -> Tensor:
        """Return features near the column's mean, and small logits."""
        mean, std = (torch.tensor(values) for values in schema.feature_moments())
        count = problem.image_shape[0]
        drawn = [torch.randn(count, schema.width, generator=g) for g in problem.generators()]
        spread = self.spread * torch.stack(drawn)
        hot = torch.tensor([c.one_hot for c in schema.columns for _ in range(c.width)])
        start = torch.where(hot, spread, mean + std * spread)
        return start.to(problem.device, problem.dtype)

    def _pooled(self, problem: Problem, found: Outcome, schema: TableSchema) -> Outcome:
        """Return one result a trial: the pool, or the best member where that matches better."""
        rows = found.images.flatten(3).squeeze(-1)
        images, labels, certainty, best = [], [], [], []
        for trial in range(problem.trials):
            part = slice(trial * self.members, (trial + 1) * self.members)
            pool = pooled(schema, rows[part], found.labels[part], found.losses[part])
            images.append(pool.rows)
            labels.append(pool.labels)
            certainty.append(pool.certainty)
            best.append(trial * self.members + pool.best)
        pools = (torch.stack(images)[..., None, None], torch.stack(labels))
        alone = (found.images[best], found.labels[best])
        losses = [self._losses(problem, found, best, *each) for each in (pools, alone)]
        take = losses[0] < losses[1]
        chosen = torch.where(take[:, None, None, None, None], pools[0], alone[0])
        exact = project(schema, chosen.flatten(3).squeeze(-1))[..., None, None]
        return Outcome(
            images=exact,
            labels=torch.where(take[:, None, None], pools[1], alone[1]),
            losses=torch.where(take, losses[0], losses[1]),
            unknowns={name: value[best] for name, value in found.unknowns.items()},
            curves=[found.curves[i] for i in best],
            iterations=found.iterations,
            recipes=[found.recipes[i] for i in best],
            certainty=torch.stack(certainty),
        ).made_by("", f"ensemble of {self.members}", "projection onto the schema")

    def _losses(
        self, problem: Problem, found: Outcome, best: list[int], images: Tensor, labels: Tensor
    ) -> Tensor:
        if isinstance(self.objective, NoObjective):
            return found.losses[best]
        unknowns = {name: value[best] for name, value in found.unknowns.items()}
        with torch.no_grad():
            return problem.residuals(images, labels, unknowns).double()


def schema_of(case: Case) -> TableSchema:
    """Return the declared schema of the rows."""
    schema = case.observation.declaration.table
    if schema is None:
        raise BractError(
            f"{case.observation.key}: no schema is declared; rows have columns and categories "
            "only by a schema (data.table)",
            code="declaration-lacks",
        )
    return schema
