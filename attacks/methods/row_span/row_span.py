"""Rows of a batch, one by one, by the span of the gradients of linear layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bract.attacks.base import Batches, Cost
from bract.attacks.methods.inverting import InvertingAttack
from bract.attacks.methods.row_span.row_search import SpanSearch
from bract.attacks.methods.row_span.spans import Spans, read_layers
from bract.attacks.methods.tableak.tableak import schema_of
from bract.attacks.problem.case import Case
from bract.attacks.problem.client_model import images_in
from bract.attacks.problem.problem import Problem
from bract.attacks.reading.entered import Entered
from bract.attacks.reading.errors import require_exact, require_one_gradient
from bract.attacks.reading.reading import ReadingBudget
from bract.attacks.registry import ATTACKS
from bract.attacks.solve.descent import Outcome, Recipe, Run
from bract.attacks.solve.labels import last_layer
from bract.attacks.solve.matching import hard_labels
from bract.data.rows import project
from bract.errors import BractError
from bract.process import clock

_UNBOUNDED = 1 << 31

DRIFTED = 4e-3
"""Loss below which a row is taken as one of the batch after several local steps, during which the
features drift. On five clients that score nothing true rows were at 3e-3 at most, others at 0.1."""

_APART = 0.5
"""Standardised difference of two copies of a row then, and under noise."""

_DEVIATIONS = 6.0
"""Under noise the squared residuals of a true row are a chi-square of `Spans.room` degrees; by so
many of its deviations a row may be above its mean."""

_WHOLE = 0.02
"""Distance from whole numbers up to which a row's counts are believed."""


@ATTACKS.register("row-span")
@dataclass(frozen=True, kw_only=True)
class RowSpan(InvertingAttack):
    """Find each row of a batch alone: what it sends into a layer lies in the gradient's row space.

    The weight gradient of ``y = W h + b`` is ``L^T H``, so the features h of every example of the
    batch lie in its row space, of as many dimensions as there are examples. DAGER (Petrov et al.,
    NeurIPS 2024) checks discrete tokens by that; here every linear layer that is wider than the
    batch gives equations for a row, more in all than it has columns, whatever the activation. They
    are solved for one row at a time, from many starts: numbers by Levenberg-Marquardt, categories
    by sweeps. With all rows known the last layer's gradient is linear in the slopes of the loss,
    which give labels and targets.

    Noise of a known deviation (`Evidence.likelihood`) tilts the row spaces; the tilt that it makes
    is the unit of a row's residual (`Span.residual`), and a row counts whose residuals are as large
    as noise leaves them. Layers count whose gradient shows as many dimensions above the noise as
    there are rows.

    After several steps of SGD the features drift, and the rows are near the batch's rather than
    equal to them. Rows that are not found within the budget stay at the columns' means; an attack
    that finds none refuses. An iteration is one round of starts.
    """

    name: ClassVar[str] = "row-span"
    title: ClassVar[str] = "Row span"
    family: ClassVar[str] = "closed-form reconstruction"
    closed_form: ClassVar[bool] = True
    batches: ClassVar[Batches] = "any"
    inputs: ClassVar[tuple[str, ...]] = ("table",)
    cost: ClassVar[Cost] = "seconds"
    iterations: ClassVar[int] = 24

    def require_model(self, case: Case) -> None:
        """Refuse models without a linear output layer, and rows without a schema."""
        super().require_model(case)
        schema_of(case)
        last_layer(case.target_model)

    def prepare(self, case: Case) -> Case:
        """Refuse other optimizers, what defenses leave open, and layers that tell no row."""
        schema_of(case)
        require_sgd(case, self.name)
        names = [n for n in last_layer(case.target_model) if n is not None]
        require_exact(case, names, self.name, under_noise=True)
        rows = images_in(case.observation.declaration, _UNBOUNDED)
        case = case.simulating(unroll=self.unroll, max_images=rows)
        if case.evidence.noisy:
            require_one_gradient(case, self.name)
        self.entered(case, ReadingBudget())
        return case

    def entered(self, case: Case, budget: ReadingBudget) -> Entered:
        """Return the spans of what entered linear layers, with more equations than columns."""
        del budget
        read, columns = read_layers(case), len(schema_of(case).columns)
        equations = sum(one.certificate.equations for one in read)
        if equations <= columns:
            noted = " above the noise" if case.evidence.noisy else ""
            raise BractError(
                f"{case.observation.key}: the gradients of the linear layers leave {equations} "
                f"equations{noted} for a row of {columns} columns ({case.images} rows in the "
                "batch); row-span needs more equations than columns",
                code="attack-unsuited",
            )
        first, *others = read
        certificate = replace(first.certificate, equations=equations)
        return replace(first, certificate=certificate, others=tuple(others))

    def inverted(self, problem: Problem, run: Run, read: Sequence[Entered]) -> Outcome:
        """Search the rows of every trial."""
        begun = clock.now()
        images, labels, recipes, certainty = [], [], [], []
        for trial, generator in enumerate(problem.generators()):
            case = problem.cases[trial]
            schema = schema_of(case)
            mean, std = (torch.tensor(v, dtype=torch.float64) for v in _moments(case))
            spans = Spans(case, read[trial])
            search = SpanSearch(spans, schema, mean, std, generator)
            if spans.noisy:
                search.solved = 1.0 + _DEVIATIONS * math.sqrt(2.0 / spans.room)
                search.same = _APART
            elif not case.law.one_step:
                search.solved, search.same = DRIFTED, _APART
            deadline = None
            if run.seconds is not None:
                deadline = begun + run.seconds * (trial + 1) / problem.trials
            search.run(spans.rank, run.iterations or self.iterations, deadline)
            run.advance((trial + 1) / problem.trials, 1.0 - len(search.found) / case.images)
            if not search.found:
                raise BractError(
                    f"{case.observation.key}: no row found in {search.rounds_done} rounds; raise "
                    "the budget",
                    code="budget-spent",
                )
            inputs = torch.stack(search.found)[: case.images]
            named, repeats = _labels(problem, trial, case, spans, inputs)
            inputs = inputs.repeat_interleave(repeats, dim=0)[: case.images]
            rows = project(schema, inputs * std + mean)
            known = torch.zeros(case.images, dtype=torch.bool)
            known[: len(rows)] = True
            whole = mean.repeat(case.images, 1)
            whole[: len(rows)] = rows
            images.append(project(schema, whole)[:, :, None, None])
            labels.append(named)
            certainty.append(known.double()[:, None].expand(-1, len(schema.columns)))
            parts = ("closed form", "row span", f"{len(rows)} of {case.images} rows found")
            recipes.append(Recipe("", (*parts, "labels from the last layer")))
        problem.target_model.model.to(problem.device, problem.dtype)
        exact = problem.to(torch.float64)
        stacked, named = torch.stack(images).to(problem.device), torch.stack(labels)
        named = named.to(problem.device, torch.float64)
        return Outcome(
            images=stacked,
            labels=named,
            losses=exact.residuals(stacked, named),
            recipes=recipes,
            certainty=torch.stack(certainty),
        )


def require_sgd(case: Case, attack: str) -> None:
    """Refuse local steps of another optimizer than SGD, whose update is no sum of gradients."""
    law = case.law
    if law.averaging and law.optimizer != "sgd":
        raise BractError(
            f"{case.observation.key}: {attack} needs steps of SGD, the client declares "
            f"{law.optimizer}; tableak matches any update",
            code="attack-unsuited",
        )


def _moments(case: Case) -> tuple[tuple[float, ...], tuple[float, ...]]:
    declaration = case.observation.declaration
    usual = schema_of(case).feature_moments()
    return declaration.mean or usual[0], declaration.std or usual[1]


def _labels(
    problem: Problem, trial: int, case: Case, spans: Spans, inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return labels ``(B, K)``, and how often each row ``(N, D)`` is in the batch.

    Where all different rows are known their slopes give both; else labels are those of the last
    layer's gradient, in no order.
    """
    count, loss = case.images, case.target_model.loss
    once = torch.ones(len(inputs), dtype=torch.int64)
    if len(inputs) < spans.rank or not loss.is_plain or (loss.values and len(inputs) < count):
        return hard_labels(problem.select([trial]))[0].double().cpu(), once
    outputs, slopes = spans.outputs(inputs), spans.slopes(case, inputs)
    if loss.values:
        return (outputs if loss.label is None else loss.label(outputs, slopes)), once
    counts = torch.stack(
        [
            class_counts(shares, slope, 1 + count - len(inputs))
            for shares, slope in zip(outputs.softmax(dim=-1), slopes, strict=True)
        ]
    )
    labels = torch.arange(counts.shape[1]).repeat(len(counts)).repeat_interleave(counts.flatten())
    missing = count - len(labels)
    if missing > 0:
        labels = torch.cat([labels, labels.new_zeros(missing)])
    return torch.nn.functional.one_hot(labels[:count], counts.shape[1]).double(), counts.sum(dim=1)


def class_counts(shares: Tensor, slope: Tensor, most: int) -> Tensor:
    """Return how often a row is in the batch with each label, int64 ``(K,)``.

    A row that is there n_c times with label c has the slope ``s = p sum(n) - n`` under cross
    entropy, with the predicted shares p. Of the totals up to ``most`` that make n whole numbers the
    least is taken.
    """
    for total in range(1, most + 1):
        found = total * shares - slope
        whole = found.round().clamp_min(0.0)
        if int(whole.sum()) == total and float((found - whole).abs().max()) < _WHOLE:
            return whole.to(torch.int64)
    single = torch.zeros_like(shares, dtype=torch.int64)
    single[int((shares - slope).argmax())] = 1
    return single
