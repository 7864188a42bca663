"""The rules of all questions: bract's own without what asks them, those of other packages whole."""

from __future__ import annotations

from typing import Any

from bract.audit.questions.epsilon.rule import EpsilonRule
from bract.audit.questions.membership.rule import MembershipRule
from bract.audit.questions.reconstruction.rule import ReconstructionRule
from bract.audit.questions.rule import Rule
from bract.registry import Outlines

RULES: Outlines[Rule[Any]] = Outlines(
    ReconstructionRule,
    MembershipRule,
    EpsilonRule,
    group="bract.questions",
    place="bract.audit.questions.base:QUESTIONS",
)
