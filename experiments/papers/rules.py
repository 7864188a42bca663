"""Figures of rows with their intervals, and the verdict that declared rules come to.

A verdict is never written by hand. Each rule holds, is contradicted, or stays open where the
interval does not tell. All hold: reproduced; one is contradicted: not reproduced; else undecided.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bract.audit.intervals import share_interval
from bract.schema.audit import EXACT_DB
from experiments.harness.crossed import crossed_interval, spread_over
from experiments.papers.declaration import Bound, Experiment, Near, Order, Rule, Scale
from experiments.papers.results import PaperResult, RowResult

Answer = Literal["holds", "contradicted", "open"]
State = Literal["reproduced", "not reproduced", "undecided", "not run", "needs", "nothing to run"]

_SHARE = re.compile(r"(?P<metric>[\w.@ -]+?)(?P<side>>=|<=)(?P<value>-?[\d.]+)")
_SHARES = ("recognisable", "label_accuracy", "top1", "top5", "reidentified")
"""Metrics that are 0 or 1 for each image, or a share of few."""

_BOUNDS = {
    "ssim": (-1.0, 1.0),
    "accuracy": (0.0, 1.0),
    "cosine": (-1.0, 1.0),
    "psnr": (0.0, EXACT_DB),
}
"""What means cannot leave."""


@dataclass(frozen=True)
class Figure:
    """A mean with its 95 % interval.

    ``low`` and ``high`` are None where nothing spreads: one group, or all alike. ``over`` says what
    the interval is over.
    """

    mean: float
    low: float | None
    high: float | None
    groups: int
    values: int
    over: str = "groups"

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the interval, or the mean twice."""
        low = self.mean if self.low is None else self.low
        return low, self.mean if self.high is None else self.high


@dataclass(frozen=True)
class Drawn:
    """What each value was drawn with; ``networks`` is None where a row does not tell them.

    A federation's seed draws its examples and its network alike: it is both.
    """

    groups: list[int]
    images: list[int]
    networks: list[int] | None

    @property
    def over(self) -> str:
        """Return what an interval is over, in words."""
        if self.networks is None:
            return "groups"
        return spread_over(self.images, self.networks)

    def fewest(self) -> list[int]:
        """Return the coarser labels: those of fewer groups."""
        if self.networks is not None and len(set(self.networks)) < len(set(self.images)):
            return self.networks
        return self.images


def values_of(row: RowResult, metric: str) -> tuple[list[float], Drawn]:
    """Return a metric's values and their labels; ``ssim>=0.2`` is a share of 0 and 1."""
    share = _SHARE.fullmatch(metric)
    name = metric if share is None else share["metric"]
    values, groups, images, networks = [], [], [], []
    for sample in row.samples():
        value = sample.values.get(name)
        if value is None:
            continue
        if share is not None:
            limit = float(share["value"])
            value = float(value >= limit if share["side"] == ">=" else value <= limit)
        values.append(value)
        groups.append(sample.group)
        images.append(sample.group if sample.image is None else sample.image)
        networks.append(sample.network)
    known = [network for network in networks if network is not None]
    whole = len(known) == len(networks) and bool(known)
    return values, Drawn(groups, images, known if whole else None)


def figure(row: RowResult | None, metric: str) -> Figure | None:
    """Return a row's figure; None where it has no such values."""
    if row is None:
        return None
    values, drawn = values_of(row, metric)
    if not values:
        return None
    if _is_share(metric):
        # No two-way bounds are known for shares: those over the coarser grouping are wider.
        interval = share_interval(values, groups=drawn.fewest())
    else:
        bounds = _BOUNDS.get(metric.partition("@")[0])
        interval = crossed_interval(values, drawn.images, drawn.networks, bounds=bounds)
    return _figure(values, drawn, interval)


def _figure(values: Sequence[float], drawn: Drawn, interval: tuple[float, float] | None) -> Figure:
    low, high = interval or (None, None)
    groups = len(set(drawn.groups))
    return Figure(statistics.fmean(values), low, high, groups, len(values), drawn.over)


def _is_share(metric: str) -> bool:
    return bool(_SHARE.fullmatch(metric)) or metric.startswith(_SHARES)


def difference(one: RowResult | None, other: RowResult | None, metric: str) -> Figure | None:
    """Return the difference of two rows' means.

    Paired where both rows have the same groups with as many values each: then they are of the same
    images or seeds. Elsewhere its interval is the sum of both intervals' halves, which is wide.
    """
    if one is None or other is None:
        return None
    (a, where), (b, there) = values_of(one, metric), values_of(other, metric)
    if not a or not b:
        return None
    if where == there:
        each = [x - y for x, y in zip(a, b, strict=True)]
        return _figure(each, where, crossed_interval(each, where.images, where.networks))
    first, second = figure(one, metric), figure(other, metric)
    assert first is not None and second is not None
    return Figure(
        first.mean - second.mean,
        first.bounds[0] - second.bounds[1],
        first.bounds[1] - second.bounds[0],
        min(first.groups, second.groups),
        min(first.values, second.values),
    )


def ratio(one: RowResult | None, other: RowResult | None, metric: str) -> Figure | None:
    """Return how many times as much one row has: the geometric mean of paired or crossed ratios.

    None where a value is not positive.
    """
    if one is None or other is None:
        return None
    found = difference(_logarithms(one, metric), _logarithms(other, metric), metric)
    if found is None:
        return None
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Figure(math.exp(found.mean), low, high, found.groups, found.values)


def _logarithms(row: RowResult, metric: str) -> RowResult | None:
    units = {}
    for number, unit in row.units.items():
        samples = []
        for sample in unit.samples:
            value = sample.values.get(metric)
            if value is None or value <= 0.0:
                return None
            samples.append(sample.model_copy(update={"values": {metric: math.log(value)}}))
        units[number] = unit.model_copy(update={"samples": tuple(samples)})
    return row.model_copy(update={"units": units})


@dataclass(frozen=True)
class Judged:
    """What a rule came to, and the figure that decided."""

    rule: Rule
    answer: Answer
    figure: Figure | None
    against: float | None = None

    @property
    def words(self) -> str:
        """Describe the outcome."""
        if self.figure is None:
            return f"{self.rule.says}: not measured"
        found = f"{self.figure.mean:.3g}"
        if self.figure.low is not None and self.figure.high is not None:
            found += f" ({self.figure.low:.3g} to {self.figure.high:.3g})"
        name = self.rule.metric
        if isinstance(self.rule, Order):
            what = "ratio of" if self.rule.times else "difference in"
            found = f"{what} {name} {found}"
            if self.rule.by is not None:
                found += f", at least {self.rule.by:g} expected"
        elif isinstance(self.rule, Bound):
            found = f"{name} {found}, {self.rule.kind} {self.rule.value:g} expected"
        else:
            found = f"{name} off by {found}, at most {self.rule.tolerance:g} expected"
        return f"{self.rule.says}: {self.answer} ({found})"


def judge(
    experiment: Experiment, rule: Rule, result: PaperResult, data: str | None
) -> Judged | None:
    """Hold one rule against a result; None where it does not apply at this scale."""
    if isinstance(rule, Order):
        more, less = result.row(rule.more), result.row(rule.less)
        found = (ratio if rule.times else difference)(more, less, rule.metric)
        least = rule.by if rule.by is not None else (1.0 if rule.times else 0.0)
        return Judged(rule, _above(found, least, strict=rule.by is None), found)
    if isinstance(rule, Bound):
        found = figure(result.row(rule.row), rule.metric)
        sign = 1.0 if rule.kind == "at least" else -1.0
        return Judged(rule, _above(found, rule.value, sign, strict=False), found)
    if rule.to is not None:
        return _close(rule, difference(result.row(rule.row), result.row(rule.to), rule.metric))
    row = next(row for row in experiment.rows if row.name == rule.row)
    same = [p for p in row.published if p.data is not None and p.data == data]
    printed = experiment.converted(same[0]).get(rule.metric) if same else None
    if printed is None:
        return None
    found = figure(result.row(rule.row), rule.metric)
    if found is not None:
        low, high = (None if v is None else v - printed for v in (found.low, found.high))
        found = Figure(found.mean - printed, low, high, found.groups, found.values, found.over)
    return _close(rule, found)


def _above(found: Figure | None, value: float, sign: float = 1.0, *, strict: bool = True) -> Answer:
    if found is None:
        return "open"
    low, high = sorted(sign * (bound - value) for bound in found.bounds)
    if low > 0.0 or (low == 0.0 and not strict):
        return "holds"
    # Without a spread and without a difference there is none.
    return "contradicted" if high < 0.0 or (strict and low == high == 0.0) else "open"


def _close(rule: Near, found: Figure | None) -> Judged:
    if found is None:
        return Judged(rule, "open", None)
    low, high = found.bounds
    if max(abs(low), abs(high)) <= rule.tolerance:
        return Judged(rule, "holds", found)
    apart = low > rule.tolerance or high < -rule.tolerance
    return Judged(rule, "contradicted" if apart else "open", found)


def verdict(judged: Sequence[Judged], obstacles: Sequence[str] = ()) -> State:
    """Return what the rules come to together.

    Parameters
    ----------
    obstacles
        Why nothing is decided, whatever the rules come to; see `obstacles_of`.
    """
    if obstacles:
        return "undecided"
    answers = {one.answer for one in judged}
    if "contradicted" in answers:
        return "not reproduced"
    return "reproduced" if answers == {"holds"} else "undecided"


def obstacles_of(
    experiment: Experiment, scale: Scale, result: PaperResult, judged: Sequence[Judged]
) -> list[str]:
    """Return why a result decides nothing: a control that fails, too small a budget, open claims.

    Claims without a rule keep a verdict from *reproduced* alone: a contradicted rule contradicts
    the paper whatever else it states.
    """
    found = []
    rows = {row.name: row for row in experiment.rows_at(scale)}
    for control in experiment.controls:
        shown = figure(result.row(control.row), control.metric)
        if _above(shown, control.value, 1.0 if control.kind == "at least" else -1.0) != "holds":
            found.append(f"positive control: {Judged(control, 'open', shown).words}")
    for row in rows.values():
        settings = experiment.settings_at(scale, row)
        least = experiment.floor.get(str(settings.get("attack")), 0)
        if int(settings.get("iterations", least)) < least:
            found.append(f"{row.name}: {settings['iterations']} iterations, its floor is {least}")
    if not any(one.answer == "contradicted" for one in judged):
        found += [f"untested: {one.says} ({one.untested})" for one in experiment.untested]
    return found
