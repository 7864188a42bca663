"""An audit's exit code for continuous integration: 3 a leak, 4 nothing was attacked."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bract.audit.questions import QUESTIONS, Question
from bract.audit.questions.reconstruction import ReconstructionQuestion
from bract.audit.questions.reconstruction.decide import LeakRule
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
from bract.registry import unknown
from bract.report.words.misdescribed import Checked
from bract.rundir import RunDirectory
from bract.schema import Answer, AuditResult

_LEAKED = "leaked"
_METRICS = ReconstructionQuestion.gates
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

        Of membership a rate of false positives may follow ``@``: ``membership>0.05@1%``.

        Raises
        ------
        BractError
            If the text is not of that form, or names no tier.
        """
        found = re.fullmatch(
            r"\s*([\w.-]+?)\s*(>=|<=|>|<)\s*([0-9.eE+-]+)\s*(?:@\s*([\w.]+%?))?\s*", text
        )
        try:
            if found is None or found[1] not in _known():
                raise ValueError
            gate = cls(found[1], found[2], float(found[3]), found[4])
            if gate.tier is not None and gate.tier not in TIERS and gate.kind is not None:
                gate = replace(gate, tier=None, at=gate.tier)
        except ValueError:
            raise BractError(
                f"--fail-on {shown(text)}: expected METRIC>VALUE or METRIC>VALUE@TIER with a "
                f"metric of {', '.join(_known())}, such as ssim>0.5@adaptive",
                code="usage",
            ) from None
        if gate.tier is not None and gate.tier not in TIERS:
            raise BractError(
                f"--fail-on {shown(text)}: {unknown('tier', gate.tier, TIERS)}", code="unknown-name"
            )
        if gate.kind is not None:
            try:
                gate.kind.check_gate(gate.at)
            except BractError as error:
                raise BractError(f"--fail-on {shown(text)}: {error}", code=error.code) from None
        return gate

    @property
    def kind(self) -> type[Question[Any]] | None:
        """The question whose numbers are compared; None for images of reconstruction."""
        name = self.metric.partition(".")[0]
        return None if self.metric in (*_METRICS, _LEAKED) else QUESTIONS.get(name)

    def __str__(self) -> str:
        tier = f"@{self.tier or self.at}" if self.tier or self.at else ""
        return f"{self.metric}{self.comparison}{self.threshold:g}{tier}"

    def judge(self, answers: Sequence[Answer], rule: LeakRule) -> Judgement:
        """Hold what the audit wrote for each observation against the threshold."""
        if self.kind is not None:
            name = self.kind.name
            return self._judge_answers(
                [a for a in answers if a.question == name and self.tier in (None, a.tier)],
                self.kind,
            )
        results = [answer for answer in answers if isinstance(answer, AuditResult)]
        mine = [r for r in results if self.tier is None or r.tier == self.tier]
        scored = [(r, i, i.scores) for r in mine for i in r.images if i.scores]
        if self.metric == _LEAKED:
            lines, judged = self._leaks(results, rule)
        else:
            values = [(r, i, getattr(scores, self.metric)) for r, i, scores in scored]
            known = [(r, i, value) for r, i, value in values if value is not None]
            judged = len(known)
            lines = [
                f"{_where(r)}, image {i.index}: {self.metric} {value:.3f}"
                for r, i, value in known
                if _OPERATORS[self.comparison](value, self.threshold)
            ]
        refused = [r.refused for r in mine if r.refused]
        unscored = [r for r in mine if not r.refused and not any(i.scores for i in r.images)]
        return Judgement(
            gate=self,
            crossed=lines,
            judged=judged,
            refused=len(refused),
            unscored=len(unscored),
            lacking=len(scored) - judged,
            reason=refused[0] if refused else None,
        )

    def _judge_answers(self, answers: Sequence[Answer], kind: type[Question[Any]]) -> Judgement:
        """Hold the numbers of answers to another question against the threshold."""
        field = self.metric.partition(".")[2] or kind.gate
        each = [kind.gated(a, field, self.at) for a in answers if not a.refused]
        values = [pair for pairs in each for pair in pairs]
        known = [(where, value) for where, value in values if value is not None]
        refused = [a.refused for a in answers if a.refused]
        return Judgement(
            gate=self,
            crossed=[
                f"{where}: {field} {value:.3f}"
                for where, value in known
                if _OPERATORS[self.comparison](value, self.threshold)
            ],
            judged=len(known),
            refused=len(refused),
            unscored=0,
            lacking=len(values) - len(known),
            noun="values",
            without=kind.lacks(field, self.at),
            reason=refused[0] if refused else None,
        )

    def _leaks(self, results: Sequence[AuditResult], rule: LeakRule) -> tuple[list[str], int]:
        """Return which images of the tier leaked, and of how many that could be decided.

        The rule sees the results of every tier: what it corrects for is all that was attacked.
        """
        found = [
            (result, image, decision)
            for result, decisions in zip(results, rule.decide(results), strict=True)
            for image, decision in zip(result.images, decisions, strict=True)
            if image.scores and decision.decided and self.tier in (None, result.tier)
        ]
        lines = [
            f"{_where(result)}, image {image.index}: leaked by {decision.reason}"
            for result, image, decision in found
            if decision.reason is not None
        ]
        crossed = _OPERATORS[self.comparison](len(lines), self.threshold)
        return ((lines or ["no image leaked"]) if crossed else []), len(found)


@dataclass(frozen=True)
class Judgement:
    """The result of one gate.

    Attributes
    ----------
    crossed
        Which image of which observation crosses the threshold, in words.
    judged, lacking
        Images that have the score, and scored images that lack it.
    refused, unscored
        Attacked observations of which nothing could be judged: no attack applied, or the client
        kept no truth.
    noun, without
        What is judged, and what those are that lack it.
    reason
        Why the first of the refused was refused.
    """

    gate: Gate
    crossed: list[str]
    judged: int
    refused: int
    unscored: int
    lacking: int
    noun: str = "images"
    without: str = "images without this score"
    reason: str | None = None

    def __str__(self) -> str:
        left = [
            f"{count} {what}"
            for count, what in (
                (self.refused, "attacks refused"),
                (self.unscored, "attacks without the client's truth"),
                (
                    self.lacking,
                    "images with too few reference images of their class to decide"
                    if self.gate.metric == _LEAKED
                    else self.without,
                ),
            )
            if count
        ]
        text = f"--fail-on {self.gate}: {self.judged} {self.noun} judged"
        text += f", {len(self.crossed)} crossed it" if self.crossed else ""
        text += f"; not judged: {', '.join(left)}" if left else ""
        return f"{text}; first refusal: {self.reason}" if self.reason else text

    @property
    def complete(self) -> bool:
        """Whether everything that was attacked could be judged."""
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
    failed = [j for j in judgements if j.crossed or not j.judged]
    for judgement in judgements:
        if judgement not in failed and not judgement.complete:
            say(f"warning: {judgement}")
    if failed:
        raise LeakageError("\n".join(_failure(judgement) for judgement in failed))
    mine = [a for a in answers if isinstance(a, AuditResult)]
    tiers = {g.tier for g in gates if g.kind is None}
    checked = Checked.of([a for a in mine if a.tier in tiers or None in tiers])
    if tiers and (checked.contradicted or checked.unconfirmed):
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
        if (found := QUESTIONS[name].alarm(mine)) is not None:
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
    found: list[Answer] = [r for r in results if isinstance(r, AuditResult)]
    attacks = found or list(results)
    failed = [r for r in attacks if r.refused and not _expected(r)]
    if failed and all(r.refused for r in attacks):
        raise NothingAttackedError(
            f"nothing was attacked: {len(attacks)} of {len(attacks)} attacks refused; first "
            f"refusal: {_where(failed[0])}: {one_line(failed[0].refused or '', 1000)}; what they "
            f"say is kept, bract report {run} shows it"
        )


def _expected(result: Answer) -> bool:
    """Whether a refusal is what was to be shown: ciphertexts, to an attacker without a key."""
    encrypted = isinstance(result, AuditResult) and result.encryption != "none"
    return encrypted and result.tier != "colluding"


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
    others = [QUESTIONS[name] for name in QUESTIONS if name != ReconstructionQuestion.name]
    whole = [kind.name for kind in others if kind.gate]
    fields = [f"{kind.name}.{field}" for kind in others for field in kind.gates]
    return [*_METRICS, *whole, *fields]


def _where(answer: Answer) -> str:
    name = answer.attack if isinstance(answer, AuditResult) else answer.question
    where = "the run" if answer.round is None else f"round {answer.round}, {answer.client}"
    return f"{name} ({answer.tier}), {where}"
