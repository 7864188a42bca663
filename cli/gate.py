"""An audit's exit code for continuous integration: 3 a leak, 4 nothing was attacked."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bract.audit.questions.reconstruction.rule import ReconstructionRule
from bract.audit.questions.rule import Rule
from bract.audit.questions.rules import RULES
from bract.cli.console import say
from bract.config.audit import TIERS
from bract.errors import (
    BractError,
    LeakageError,
    NothingAttackedError,
    PrivacyAlarmError,
    one_line,
    shown,
)
from bract.report.words.formatting import plural
from bract.report.words.reach import KNOWS
from bract.rundir import RunDirectory
from bract.schema import Answer
from bract.scores.judging import Checked
from bract.scores.leaks import LeakRule

_METRICS = ReconstructionRule.gates
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass(frozen=True)
class Gate:
    """One threshold on the blind score of any single image, or on the number of leaked ones.

    Attributes
    ----------
    metric
        ``ssim``, ``psnr`` (dB), ``mse`` or an LPIPS of an image; ``leaked`` counts the images that
        leaked by the configuration's rule, over all the results that are judged together.
        ``QUESTION`` or ``QUESTION.FIELD`` is a number of another question's answers.
    tier
        Only results of this tier count; None counts every tier.
    at
        What else followed ``@``, for a question that takes it: ``1%`` of membership.
    """

    metric: str
    comparison: str
    threshold: float
    tier: str | None = None
    at: str | None = None

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Read ``METRIC>VALUE`` or ``METRIC>VALUE@TIER``, such as ``ssim>0.5@adaptive``.

        Of membership a rate of false positives may follow ``@``, with or without a tier:
        ``membership>0.05@1%``, ``membership>0.05@1%@adaptive``.

        Raises
        ------
        BractError
            If the text is not of that form, or names no tier.
        """
        found = re.fullmatch(
            r"\s*([\w.-]+?)\s*(>=|<=|>|<)\s*([0-9.eE+-]+)\s*"
            r"(?:@\s*([\w.]+%?))?\s*(?:@\s*([\w.]+%?))?\s*",
            text,
        )
        try:
            if found is None or found[1] not in _known():
                raise ValueError
            said = [part for part in found.group(4, 5) if part is not None]
            tiers = [part for part in said if part in TIERS]
            others = [part for part in said if part not in TIERS]
            if len(tiers) > 1 or len(others) > 1:
                raise ValueError
            gate = cls(
                found[1],
                found[2],
                float(found[3]),
                next(iter(tiers), None),
                next(iter(others), None),
            )
        except ValueError:
            raise BractError(
                f"--fail-on {shown(text)}: expected METRIC>VALUE or METRIC>VALUE@TIER with a "
                f"metric of {', '.join(_known())}, such as ssim>0.5@adaptive",
                code="usage",
            ) from None
        try:
            gate.kind.check_gate(gate.at)
        except BractError as error:
            raise BractError(f"--fail-on {shown(text)}: {error}", code=error.code) from None
        return gate

    @property
    def kind(self) -> type[Rule[Any]]:
        """The question whose numbers are compared."""
        name = ReconstructionRule.name if self.metric in _METRICS else self.metric
        return RULES[name.partition(".")[0]]

    @property
    def field(self) -> str:
        """The number that is compared; empty for the question's own choice."""
        return self.metric if self.metric in _METRICS else self.metric.partition(".")[2]

    def __str__(self) -> str:
        said = "".join(f"@{part}" for part in (self.at, self.tier) if part)
        return f"{self.metric}{self.comparison}{self.threshold:g}{said}"

    def in_words(self) -> str:
        """Return the limit as a sentence for readers who know no metric."""
        whom = f" to an attacker who {KNOWS[self.tier]}" if self.tier in KNOWS else ""
        if self.metric == "leaked" and self.comparison == ">":
            count = math.floor(self.threshold)
            most = f"At most {plural(count, 'example')}" if count > 0 else "No example"
            return f"{most} may leak{whom}"
        at = f" at {self.at} false alarms" if self.at else ""
        side = {">": "above", ">=": "at or above", "<": "below", "<=": "at or below"}
        name = self.metric.replace("_", " ").replace(".", ": ")
        return f"{name} may not be {side[self.comparison]} {self.threshold:g}{at}{whom}"

    def judge(self, answers: Sequence[Answer], rule: LeakRule) -> Judgement:
        """Hold what the audit wrote for each observation against the threshold."""
        mine = [answer for answer in answers if answer.question == self.kind.name]
        held = self.kind.held(mine, self.field, tier=self.tier, at=self.at, rule=rule)
        known = [(where, value) for where, value in held.values if value is not None]
        crosses = _OPERATORS[self.comparison]
        if held.counted is None:
            name = self.field or self.kind.gate
            crossed = [
                f"{where}: {name} {value:.3f}"
                for where, value in known
                if crosses(value, self.threshold)
            ]
        else:
            over = crosses(len(held.counted), self.threshold)
            crossed = (held.counted or [held.none]) if over else []
        refused = [a.refused for a in mine if a.refused and self.tier in (None, a.tier)]
        return Judgement(
            gate=self,
            crossed=crossed,
            judged=len(known),
            refused=len(refused),
            unscored=held.unscored,
            lacking=len(held.values) - len(known),
            noun=held.noun,
            without=held.without,
            reason=refused[0] if refused else None,
        )


@dataclass(frozen=True)
class Judgement:
    """The result of one gate.

    Attributes
    ----------
    crossed
        Which image of which observation crosses the threshold, in words.
    judged, lacking
        Values that could be compared, and those that lack a number.
    refused, unscored
        Attacked observations of which nothing could be judged: no attack applied, or the client
        kept no truth.
    noun, without
        What is judged, in the singular, and what those lack that were not.
    reason
        Why the first of the refused was refused.
    """

    gate: Gate
    crossed: list[str]
    judged: int
    refused: int
    unscored: int
    lacking: int
    noun: str = "value"
    without: str = "without this score"
    reason: str | None = None

    def __str__(self) -> str:
        left = [
            f"{plural(count, noun)} {what}"
            for count, noun, what in (
                (self.refused, "attack", "refused"),
                (self.unscored, "attack", "without the client's truth"),
                (self.lacking, self.noun, self.without),
            )
            if count
        ]
        text = f"--fail-on {self.gate}: {plural(self.judged, self.noun)} judged"
        text += f", {len(self.crossed)} crossed it" if self.crossed else ""
        text += f"; not judged: {', '.join(left)}" if left else ""
        return f"{text}; first refusal: {self.reason}" if self.reason else text

    @property
    def passed(self) -> bool:
        """Return whether something was judged, and nothing crossed."""
        return bool(self.judged) and not self.crossed

    @property
    def complete(self) -> bool:
        """Return whether everything that was attacked could be judged."""
        return not (self.refused or self.unscored or self.lacking)


def check_tiers(gates: Iterable[Gate], tiers: Sequence[str]) -> None:
    """See before any attack that each gate's tier is among those that will run."""
    for gate in gates:
        if gate.tier is not None and gate.tier not in tiers:
            raise BractError(
                f"--fail-on {gate}: this audit runs the tier{'s' * (len(tiers) > 1)} "
                f"{', '.join(tiers)}, and the gate would check nothing; adaptive needs a declared "
                "defense, colluding an encrypted run and a key, and --tier must not leave it out",
                code="usage",
            )


def hold(gates: Iterable[Gate], answers: Sequence[Answer], rule: LeakRule) -> None:
    """Fail where a result crosses a gate, or where a gate had nothing to judge.

    What was refused or unscored besides judged images is counted in a line to the person: it does
    not fail the gate.

    Raises
    ------
    LeakageError
        Naming the images, or what could not be judged.
    NothingAttackedError
        Where nothing crosses a gate, and an upload is not what its description says.
    """
    gates = list(gates)
    judgements = [gate.judge(answers, rule) for gate in gates]
    tiers = {gate.tier for gate in gates}
    checked = Checked.of(a for a in answers if a.tier in tiers or None in tiers)
    failed = [j for j in judgements if j.crossed or not (j.judged or checked.level)]
    for judgement in judgements:
        if judgement not in failed and not judgement.complete:
            say(f"warning: {judgement}")
    if failed:
        raise LeakageError("\n".join(_failure(judgement) for judgement in failed))
    if checked.level is not None:
        raise NothingAttackedError(
            f"{checked.sentence()} {checked.reason} No gate passes on that: correct bract.yaml, "
            "or the declaration in the app, and audit again",
            code="declaration-wrong",
        )


def check_alarms(answers: Sequence[Answer]) -> None:
    """Fail where an answer shows that a promised protection does not hold.

    Raises
    ------
    PrivacyAlarmError
        Before any gate is held: a broken protection is no matter of a threshold.
    """
    for name in dict.fromkeys(answer.question for answer in answers):
        mine = [answer for answer in answers if answer.question == name]
        if (found := RULES[name].alarm(mine)) is not None:
            raise PrivacyAlarmError(found)


def check_attacked(results: Sequence[Answer], run: Path) -> None:
    """Fail where every attack was refused: an upload is not safe because it was not attacked.

    Ciphertexts without a key are an answer and no failure; so is any refusal next to an attack that
    ran, of whatever tier.

    Raises
    ------
    NothingAttackedError
        With the number of refusals and the first reason that is none of these.
    """
    attacks = [r for r in results if r.question == ReconstructionRule.name] or list(results)
    failed = [r for r in attacks if r.refused and not _expected(r)]
    if failed and all(r.refused for r in attacks):
        raise NothingAttackedError(
            f"nothing was attacked: {len(attacks)} of {len(attacks)} attacks refused; first "
            f"refusal: {failed[0].where}: {one_line(failed[0].refused or '', 1000)}; what they "
            f"say is kept, bract report {run} shows it"
        )


def _expected(result: Answer) -> bool:
    """Return whether a refusal is what was to be shown: ciphertexts, to an attacker without a
    key.
    """
    return result.encrypted and result.tier != "colluding"


def _failure(judgement: Judgement) -> str:
    if not judgement.judged:
        return f"{judgement}; a gate that judged nothing does not pass"
    lines = judgement.crossed
    more = [f"and {len(lines) - 20} more"] if len(lines) > 20 else []
    return "\n".join([f"leakage: {judgement}", *lines[:20], *more])


def rule_of(run: Path) -> LeakRule:
    """Return the rule of a run's configuration."""
    return LeakRule.of(RunDirectory.open(run).config())


def _known() -> list[str]:
    """Return the metrics that a gate can compare."""
    others = [RULES[name] for name in RULES if name != ReconstructionRule.name]
    whole = [kind.name for kind in others if kind.gate]
    fields = [f"{kind.name}.{field}" for kind in others for field in kind.gates]
    return [*_METRICS, *whole, *fields]
