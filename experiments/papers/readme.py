"""Write this folder's README, every table and figure: ``python -m experiments.papers.readme``."""

from __future__ import annotations

import sys
from pathlib import Path

from bract.disk import write_text
from experiments.papers.catalog import HERE, PAPERS
from experiments.papers.page import count, metric_name, number, shown, stand_ins
from experiments.papers.summary import RowFigures, Standing, stand_all

README = HERE / "README.md"

RUN = "python -m experiments.papers run"

_HEAD = """# The papers, table by table

Every table and figure of five works. What can be run here is declared in
`experiments/papers/PAPER/EXPERIMENT.yaml`: rows, sizes, printed figures, and the rules that decide,
written before the first run unless the notes name one. A rule is held against the 95 % interval of
its figure. All hold: reproduced. One is contradicted: not reproduced. Else undecided. No verdict is
written by hand. A verdict at `laptop` is one on the reduced size that its declaration states.

What a paper claims is in the declaration as data: quantity, direction, rows and size. A rule that
covers less than its claim is refused; a claim without a rule is named as untested, and keeps the
verdict from *reproduced*. Where a positive control (the attack on the undefended update) does not
hold, or an attack has fewer iterations than its floor, nothing is decided.

```sh
python -m experiments.papers list
python -m experiments.papers run adadefense/table-4 --scale smoke   # seconds, decides nothing
# two cores, a reduced size that is stated
python -m experiments.papers run adadefense/table-4 --scale laptop
# the paper's own size
python -m experiments.papers run adadefense/table-4 --scale gpu --device cuda --data DIR
# papers.html: their figures and ours
python -m experiments.papers report
```

`python -m experiments.papers.readme` writes this page from the declarations and from
[results](results); a test holds it to them. PSNR of AdaDefense and FedKL are converted: their
printed MSE is a root mean squared error of 0-255 pixels and their PSNR was computed from it. Ours
and theirs are of the row that is named; the link has all rows.
"""


def readme(standings: list[Standing]) -> str:
    """Return the page's text."""
    decided = [one for one in standings if one.state in ("reproduced", "not reproduced")]
    own = [one for one in decided if not one.stand_in]
    parts = [_HEAD, f"{_counts(count(standings))}.\n"]
    parts.append(
        f"So {len(decided)} tables and figures are decided, {len(own)} of them with a model of the "
        "paper's kind on its data.\n"
    )
    parts.append(
        "Of these, with a model, data set or task that stands for the paper's, which shows the "
        f"method and not the paper's figures: {_counts(stand_ins(standings))}.\n"
    )
    two_ways, others = _intervals(standings)
    parts.append(
        "Intervals of attacks' scores are over images and networks at once where a result tells "
        f"both ({two_ways} results); of {others}, measured before networks were kept, over images "
        "alone. A federation's are over seeds, each of which draws its examples and its network.\n"
    )
    for key, title in PAPERS.items():
        parts.append(f"\n## {title}\n")
        parts.append("| | what it shows | state | row | ours | theirs |")
        parts.append("| --- | --- | --- | --- | --- | --- |")
        parts += [_line(one) for one in standings if one.experiment.paper == key]
    here = [one for one in standings if one.state == "not run"]
    if here:
        parts.append("\n## Not run at this size\n")
        parts.append(
            "Budgets or controls changed after their last run, whose results were withdrawn."
        )
        parts.append("\n```sh")
        parts += [f"{RUN} {one.experiment.name} --scale laptop" for one in here]
        parts.append("```\n")
    ready = [one for one in standings if "gpu" in one.experiment.scales and one.scale != "gpu"]
    parts.append("\n## Commands that wait for a GPU\n")
    parts.append("These were not run on a GPU. Each goes on where it was interrupted.\n\n```sh")
    parts += [f"{RUN} {one.experiment.name} --scale gpu --device cuda --data DIR" for one in ready]
    parts.append("```\n")
    return "\n".join(parts)


_CROSSED = ("reconstruction", "generator", "sampled", "guardian-steps")
"""Kinds whose rows have images and networks of their own."""


def _intervals(standings: list[Standing]) -> tuple[int, int]:
    """Count results whose intervals are over images and networks, and over images alone."""
    found = [
        any(sample.network is not None for row in one.result.rows for sample in row.samples())
        for one in standings
        if one.result is not None and one.experiment.kind in _CROSSED
    ]
    return sum(found), len(found) - sum(found)


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{number} {state}" for state, number in found.items())


def _line(one: Standing) -> str:
    experiment = one.experiment
    state = one.state if one.scale is None else f"[{one.state} at {one.scale}]({_link(one)})"
    if one.stand_in:
        state += ", stand-in"
    if one.state == "not reproduced":
        against = [j.rule.says for j in one.judged if j.answer == "contradicted"]
        state += f": not that {'; not that '.join(against)}"
    elif one.obstacles:
        state += f": {'; '.join(one.obstacles)}"
    elif one.state == "undecided":
        still = [j.rule.says for j in one.judged if j.answer == "open"]
        state += f": open whether {'; '.join(still)}"
    elif experiment.needs and one.scale is None:
        state += f": {experiment.needs}"
    row, ours, theirs = _shown_row(one)
    cells = [experiment.number, experiment.title, state, row, ours, theirs]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _link(one: Standing) -> str:
    return f"results/{one.experiment.paper}/{one.experiment.item}-{one.scale}.json"


def _shown_row(one: Standing) -> tuple[str, str, str]:
    """Return the row whose figure stands in the table: the first that both sides have."""
    for row in one.rows:
        for metric in one.metrics:
            if metric in row.ours and any(
                values.get(metric) is not None for _, values in row.theirs
            ):
                return (
                    row.row.name,
                    f"{metric_name(metric)} {shown(row.ours[metric])}",
                    _theirs(row, metric),
                )
    for row in one.rows:
        for metric in one.metrics:
            if metric in row.ours:
                return row.row.name, f"{metric_name(metric)} {shown(row.ours[metric])}", "no figure"
    for row in one.rows:
        for printed, values in row.theirs:
            for metric, value in values.items():
                if value is not None:
                    return (
                        row.row.name,
                        "-",
                        f"{metric_name(metric)} {number(value)} ({printed.of})",
                    )
    return "-", "-", "-"


def _theirs(row: RowFigures, metric: str) -> str:
    found = [(p, v[metric]) for p, v in row.theirs if v.get(metric) is not None]
    found.sort(key=lambda one: one[0].data is None)  # the paper's line on data that are run here
    printed, value = found[0]
    return f"{number(value)} ({printed.of})"


if __name__ == "__main__":
    write_text(Path(sys.argv[1]) if len(sys.argv) > 1 else README, readme(stand_all()))
