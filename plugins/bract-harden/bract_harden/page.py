"""What a search leaves: ``harden.html`` and ``.json``, the recommended files, the paragraph."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bract import __version__
from bract.config import FederationConfig
from bract.disk import write_text
from bract.report.page.axis import Axis, dot
from bract.report.page.render import render_worst, style
from bract_harden.measure import quiet
from bract_harden.records import Candidate
from bract_harden.records import Hardening as HardeningFacts
from bract_harden.search import Hardening, from_first_uploads
from bract_harden.work import seeded

PAGE, FACTS = "harden.html", "harden.json"
RECOMMENDED, POLICY = "recommended.yaml", "policy.yaml"


def write_hardening(search: Hardening, *, redact: bool = False) -> tuple[HardeningFacts, Path]:
    """Write the page, the facts, and the recommended configuration with its site policy."""
    facts = gather_hardening(search)
    if redact:
        facts = facts.redact()
    root = search.root
    chosen = _chosen(facts, search.candidates)
    if chosen is not None and facts.recommended is not None:
        config = search.config(chosen)
        write_text(root / RECOMMENDED, recommended_yaml(search, config))
        write_text(root / POLICY, site_policy(config))
    else:
        for name in (RECOMMENDED, POLICY):
            (root / name).unlink(missing_ok=True)
    write_text(root / FACTS, facts.to_text(ascii_only=False) + "\n")
    return facts, write_text(root / PAGE, render(search, facts, redact=redact))


def gather_hardening(search: Hardening) -> HardeningFacts:
    """Return the facts of a search."""
    control = search.control
    front = sorted(search.frontier(full=True), key=lambda c: (c.leak or 0.0, -(c.accuracy or 0.0)))
    keeping = [c for c in front if not c.violated]
    best = max(keeping, key=_worth, default=None)
    nearest = min(
        front, key=lambda c: (len(c.violated), c.leak or 0.0, -(c.accuracy or 0.0)), default=None
    )
    measured = [c for c in search.candidates if c.measures]
    facts = HardeningFacts(
        bract=__version__,
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        name=search.space.base.name,
        sentence=_sentence(best, nearest, control, len(front)),
        control=control.name if control else None,
        frontier=[c.name for c in front],
        recommended=best.name if best else None,
        nearest=nearest.name if nearest else None,
        candidates=search.candidates,
        importance=search.importance,
        constraints=search.space.file.constraints.model_dump(exclude_none=True),
        searched={
            "space": {k: _values(v) for k, v in search.space.keys.items()},
            "defenses": search.space.chains,
            **search.settings.model_dump(),
        },
        federations=sum(len(c.measures) for c in measured),
        cpu_seconds=sum(c.cpu_seconds or 0.0 for c in measured),
        wall_seconds=search.wall_seconds,
        notes=list(dict.fromkeys([*search.notes, *_limits(control)])),
    )
    return facts.model_copy(update={"paragraph": paragraph(facts, best, control)})


def recommended_yaml(search: Hardening, config: FederationConfig) -> str:
    """Return the recommended configuration, with the audit that it was held to."""
    name = f"{search.space.base.name}-hardened"
    content = seeded(config, 0).model_dump(mode="json") | {"name": name[:64]}
    content["audit"] |= from_first_uploads(dict(search.settings.full), config)
    text = yaml.safe_dump(content, sort_keys=False)
    return (
        f"# Recommended by `bract harden` {__version__}; harden.html has the evidence.\n"
        f"# bract run {RECOMMENDED} && bract audit runs/{name[:64]}\n{text}"
    )


def site_policy(config: FederationConfig) -> str:
    """Return the policy with which a site takes no part in a weaker federation."""
    require: list[dict[str, Any]] = []
    for entry in config.defenses:
        equal = {k: v for k, v in entry.items() if k != "name" and v is not None}
        require.append({"name": entry["name"], **({"equal": equal} if equal else {})})
    content: dict[str, Any] = {
        "batch_size": {"minimum": config.training.batch_size},
        "models": [config.model.name],
    }
    if require:
        content["require"] = require
    if config.training.local_steps is not None:
        content["local_steps"] = {"minimum": config.training.local_steps}
    else:
        content["local_epochs"] = {"minimum": config.training.local_epochs}
    if config.encryption.enabled:
        content["plain_updates"] = False
    return (
        "# A site that holds this policy takes no part in a weaker federation than recommended.\n"
        + yaml.safe_dump(content, sort_keys=False)
    )


def paragraph(facts: HardeningFacts, best: Candidate | None, control: Candidate | None) -> str:
    """Return a paragraph for the data-protection impact assessment."""
    tried = (
        f"{sum(bool(c.measures) for c in facts.candidates)} configurations of the federation "
        f"{facts.name} were trained and attacked, {facts.federations} federations in all. "
        "Attackers were an honest-but-curious server that knows the defenses and their settings, "
        "and, where uploads are encrypted, one with a client's key."
    )
    if best is None or control is None:
        return (
            f"{tried} None kept the accuracy that was asked for without a leak that these "
            "attackers find: the risk of reconstruction stays, and other measures are needed."
        )
    return (
        f"{tried} The recommended configuration ({best.title}) was attacked in "
        f"{len(best.measures)} federations with different examples. No question's rule found a "
        f"leak, {_missed(best)}. Test accuracy was {_accuracy(best)}, of the configuration as it "
        f"was {_accuracy(control)}. This bounds these attackers at these budgets; it does not show "
        "that no other attacker gets more."
    )


def render(search: Hardening, facts: HardeningFacts, *, redact: bool = False) -> str:
    """Return the page."""
    named = {c.name: c for c in facts.candidates}
    front = [named[name] for name in facts.frontier]
    policy, config = search.root / POLICY, search.root / RECOMMENDED
    return (
        _environment()
        .get_template("harden.html.j2")
        .render(
            facts=facts,
            front=front,
            control=named.get(facts.control or ""),
            best=named.get(facts.recommended or ""),
            dropped=[c for c in facts.candidates if c.dropped and c.name not in facts.frontier],
            crashed=[c for c in facts.candidates if c.error],
            chart=_chart([c for c in facts.candidates if c.leak is not None], set(facts.frontier)),
            cases={}
            if redact
            else {c.name: render_worst(search.run_of(c), key=c.name) for c in front},
            css=style("report.css"),
            settings={c.name: _setting(c) for c in facts.candidates},
            config=config.read_text(encoding="utf-8") if config.is_file() else "",
            policy=policy.read_text(encoding="utf-8") if policy.is_file() else "",
            accuracy=_accuracy,
            missed=_missed,
        )
    )


def _sentence(
    best: Candidate | None, nearest: Candidate | None, control: Candidate | None, points: int
) -> str:
    if best is not None and control is not None:
        return (
            f"Recommended: {best.title}, with accuracy {_accuracy(best)}, as configured "
            f"{_accuracy(control)}, and no leak by the page's rule under the full attack; "
            f"{_missed(best)}. "
            f"It is one of {points} points of the frontier."
        )
    if nearest is None:
        return "No candidate could be trained and attacked."
    return (
        f"None was found within the space that keeps every constraint. The nearest of {points} "
        f"points is {nearest.title}, with accuracy {_accuracy(nearest)}: "
        f"{'; '.join(nearest.violated) or 'all constraints kept'}."
    )


def _worth(one: Candidate) -> tuple[float, float, float]:
    return one.accuracy or 0.0, -(one.leak or 0.0), -(one.seconds or 0.0)


def _accuracy(one: Candidate) -> str:
    if one.accuracy is None:
        return "unknown"
    if one.accuracy_low is None or one.accuracy_high is None:
        return f"{one.accuracy:.3f}"
    return f"{one.accuracy:.3f} ({one.accuracy_low:.3f} to {one.accuracy_high:.3f})"


def _missed(one: Candidate) -> str:
    said = [f"{leak.question}: {leak.missed}" for leak in one.leaks if leak.missed]
    return "; ".join(said) or "and how much could have been missed is not known"


def _limits(control: Candidate | None) -> list[str]:
    unranked = []
    if control is not None and quiet(control, encrypted=True):
        unranked = [
            "Even the configuration as it was leaked nothing by the page's rule: these attackers "
            "cannot rank the defenses. Give search.full more iterations or stronger attacks."
        ]
    return [
        *unranked,
        "Each figure is that of the strongest of several attackers, chosen with the originals; its "
        "interval is over the federations' seeds and does not cover that choice, nor the choice of "
        "the best of many candidates.",
        "Seconds are CPU time in one process, which other work on the machine lengthens.",
    ]


def _chosen(facts: HardeningFacts, candidates: Sequence[Candidate]) -> Candidate | None:
    return next((c for c in candidates if c.name == facts.recommended), None)


def _values(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value


def _setting(one: Candidate) -> str:
    return ", ".join(
        f"{key.split('].', 1)[-1]} {value}"
        for key, value in one.setting.items()
        if key != "defenses" and value is not None
    )


HEIGHT = 240
"""Height of the chart, in pixels."""

LEAKAGE = Axis.even(0.0, 1.0, steps=5)


def _chart(found: Sequence[Candidate], front: set[str]) -> dict[str, Any]:
    """Return the drawing of leakage (to the right) and accuracy (upwards), and its description."""
    known = [one.accuracy for one in found if one.accuracy is not None]
    accuracy = Axis.around(known, most=6, least=2e-4)
    parts = [accuracy.rows(HEIGHT), LEAKAGE.columns(HEIGHT, lines=True)]
    for one in sorted(found, key=lambda c: c.name in front):
        leaks = "a leak, or no decision, by the rule of the page" in one.violated
        kind = ("leaking" if leaks else "tight") if one.name in front else "beaten"
        parts.append(
            dot(
                LEAKAGE.across(one.leak or 0.0),
                accuracy.down(one.accuracy or 0.0, HEIGHT),  # an unknown one is at the lowest
                7 if one.name in front else 3,
                kind,
                f"{one.title}: leakage {one.leak or 0.0:.2f}, accuracy {_accuracy(one)} "
                f"({one.stage})",
            )
        )
    return {
        "drawn": Markup("").join(parts),
        "height": HEIGHT,
        "text": f"{len(found)} attacked candidates, of which {len(front)} are the frontier; "
        "the table below has its figures.",
    }


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("bract_harden", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
