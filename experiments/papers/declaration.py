"""What a table or figure of a paper claims, and how it is run here: configuration, not code."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Scale = Literal["smoke", "laptop", "gpu"]
SCALES: tuple[Scale, ...] = ("smoke", "laptop", "gpu")

Kind = Literal[
    "reconstruction",
    "generator",
    "sampled",
    "federation",
    "text",
    "sentences",
    "gaussians",
    "guardian-steps",
    "defense-time",
    "locked-features",
    "diagram",
]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Published(_Part):
    """Figures of one row as they are printed.

    Attributes
    ----------
    of
        What the paper says it measured: model, data set.
    data
        The data set here under which ours compares, where it is the paper's own.
    values
        Printed figures by metric; None where the paper prints that it failed.
    """

    of: str
    data: str | None = None
    values: dict[str, float | None]


class Row(_Part):
    """One row: what is varied, and what the paper prints for it.

    Attributes
    ----------
    settings
        Over those of the scale and the experiment.
    at
        Over its settings, at one scale: the paper's own data set at ``gpu``.
    beyond
        Whether the paper has no such row: an attacker that it did not try, for example.
    """

    name: str
    settings: dict[str, Any] = Field(default={}, alias="set")
    at: dict[Scale, dict[str, Any]] = {}
    published: tuple[Published, ...] = ()
    beyond: bool = False

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Order(_Part):
    """One row has more of a metric than another.

    Attributes
    ----------
    by
        The least difference, or with ``times`` the least ratio; below 0 the largest loss allowed.
    """

    kind: Literal["order"]
    says: str
    metric: str
    more: str
    less: str
    by: float | None = None
    times: bool = False


class Bound(_Part):
    """A row's metric is at least, or at most, a figure."""

    kind: Literal["at least", "at most"]
    says: str
    metric: str
    row: str
    value: float


class Near(_Part):
    """A row's metric is within a tolerance of the published figure, or of another row's.

    Against the published figure it counts only where the row runs on the paper's own data.
    """

    kind: Literal["near"]
    says: str
    metric: str
    row: str
    to: str | None = None
    tolerance: Annotated[float, Field(gt=0.0)]


class Claim(_Part):
    """One thing that a paper states, as data: a rule must cover it, or it counts as untested.

    Attributes
    ----------
    kind, quantity, rows, size, times
        As the rule's kind, metric, rows (those of an order: more, less), figure (the value of a
        bound, the tolerance of nearness, the least difference or ratio of an order) and ``times``.
    untested
        Why no rule covers it; then it has no other fields, and the verdict cannot be reproduced.
    """

    says: str
    kind: Literal["order", "at least", "at most", "near"] | None = None
    quantity: str | None = None
    rows: tuple[str, ...] = ()
    size: float | None = None
    times: bool = False
    untested: str | None = None

    def covered_by(self, rule: Order | Bound | Near) -> bool:
        """Return whether a rule tests as much as this states, or more."""
        if (rule.kind, rule.metric) != (self.kind, self.quantity):
            return False
        if isinstance(rule, Order):
            least = rule.by if rule.by is not None else (1.0 if rule.times else 0.0)
            stated = self.size if self.size is not None else (1.0 if self.times else 0.0)
            alike = (rule.more, rule.less, rule.times) == (*self.rows, self.times)
            return alike and least >= stated
        named = (rule.row,) if isinstance(rule, Bound) or rule.to is None else (rule.row, rule.to)
        if named != self.rows:
            return False
        if isinstance(rule, Near):
            return self.size is None or rule.tolerance <= self.size
        if self.size is None:
            return True
        return rule.value >= self.size if rule.kind == "at least" else rule.value <= self.size


Rule = Annotated[Order | Bound | Near, Field(discriminator="kind")]


class Size(_Part):
    """One scale of an experiment.

    Attributes
    ----------
    settings
        Over those of the experiment.
    over
        Over all others, the rows' own too.
    rows
        Names of the rows that run; without any all of them, at smoke the first two.
    reduced
        How this is smaller than the paper's own, in words; None where it is the paper's own.
    stand_in
        Whether a model, data set or task stands for the paper's.
    """

    settings: dict[str, Any] = Field(default={}, alias="set")
    over: dict[str, Any] = {}
    rows: tuple[str, ...] = ()
    reduced: str | None = None
    stand_in: bool = False

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Experiment(_Part):
    """A table or figure.

    Attributes
    ----------
    paper, item
        ``paper/item`` is its name.
    number, title
        As printed, and what it shows.
    claim
        What the paper says that it shows.
    kind
        Which runner runs it; ``diagram`` has nothing to run.
    conversion
        ``rmse-255``: the printed MSE is a root mean squared error of 0-255 pixels, and the printed
        PSNR was computed from it; the true PSNR is ``20 log10(255 / rmse)``.
    metrics
        Shown in tables, the first one decides what the list shows.
    rows, scales, rules
        What is run, at which sizes, and what decides. Rules are written before the first run; one
        that comes later is named in ``notes``.
    claims
        What the paper states, each covered by a rule or untested.
    controls
        Bounds that show that an attack works at all at this budget: until they hold, nothing is
        decided about a defense.
    floor
        Fewest iterations of a row's attack, by the attack's name, from which on a result counts.
    needs
        What it would take to run what is not run here.
    """

    paper: str
    item: str
    number: str
    title: str
    claim: str = ""
    kind: Kind
    conversion: Literal["none", "rmse-255"] = "none"
    metrics: tuple[str, ...] = ()
    settings: dict[str, Any] = Field(default={}, alias="set")
    rows: tuple[Row, ...] = ()
    scales: dict[Scale, Size] = {}
    rules: tuple[Rule, ...] = ()
    claims: tuple[Claim, ...] = ()
    controls: tuple[Bound, ...] = ()
    floor: dict[str, int] = {}
    needs: str | None = None
    notes: str = ""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    @property
    def name(self) -> str:
        """Return ``paper/item``."""
        return f"{self.paper}/{self.item}"

    def rows_at(self, scale: Scale) -> list[Row]:
        """Return the rows that run at a scale."""
        named = self.scales[scale].rows
        rows = [row for row in self.rows if row.name in named] if named else list(self.rows)
        return rows[:2] if scale == "smoke" and not named else rows

    def settings_at(self, scale: Scale, row: Row) -> dict[str, Any]:
        """Return a row's settings: the experiment's, the scale's, its own, what the scale fixes."""
        size = self.scales[scale]
        own = {**row.settings, **row.at.get(scale, {})}
        return {**self.settings, **size.settings, **own, **size.over}

    @property
    def untested(self) -> list[Claim]:
        """Return the claims that no rule covers."""
        return [claim for claim in self.claims if claim.untested is not None]

    @model_validator(mode="after")
    def _covered(self) -> Experiment:
        for claim in self.claims:
            if claim.untested is None and not any(claim.covered_by(r) for r in self.rules):
                raise ValueError(
                    f"no rule covers the claim {claim.says!r} in quantity, direction, rows and "
                    "size; add one, or state why it is untested"
                )
        return self

    @model_validator(mode="after")
    def _whole(self) -> Experiment:
        names = [row.name for row in self.rows]
        if len(set(names)) < len(names):
            raise ValueError("two rows have one name")
        for rule in (*self.rules, *self.controls):
            wanted = (rule.more, rule.less) if isinstance(rule, Order) else (rule.row,)
            if isinstance(rule, Near) and rule.to is not None:
                wanted = (*wanted, rule.to)
            for name in wanted:
                if name not in names:
                    raise ValueError(f"rule {rule.says!r} names row {name!r}; rows: {names}")
        if self.kind == "diagram":
            if self.rows or self.scales:
                raise ValueError("a diagram has no rows and no scales")
        elif not self.scales and self.needs is None:
            raise ValueError("has neither scales nor needs")
        elif self.scales and not self.rows:
            raise ValueError("has scales but no rows")
        if self.scales and not self.rules:
            raise ValueError("has scales but no rule that decides")
        if "laptop" in self.scales and self.scales["laptop"].reduced is None:
            raise ValueError("does not say how laptop is reduced")
        return self

    def converted(self, printed: Published) -> dict[str, float | None]:
        """Return printed figures with those that follow from them by the conversion."""
        values = dict(printed.values)
        rmse = values.get("rmse")
        if self.conversion == "rmse-255" and rmse is not None:
            values["psnr"] = 20.0 * math.log10(255.0 / rmse)
        return values
