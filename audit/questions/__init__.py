"""Questions of an audit: each plans, runs its attackers, and decides by one rule.

The names below are imported when they are first used: a page needs the rules alone
(`bract.audit.questions.rules`), and the questions import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bract.audit.questions.base import QUESTIONS, Question
    from bract.audit.questions.rule import Decision, Need, Rule
    from bract.audit.results import Batch

__all__ = ["QUESTIONS", "Batch", "Decision", "Need", "Question", "Rule"]

_PLACES = {
    "QUESTIONS": "bract.audit.questions.base",
    "Batch": "bract.audit.results",
    "Decision": "bract.audit.questions.rule",
    "Need": "bract.audit.questions.rule",
    "Question": "bract.audit.questions.base",
    "Rule": "bract.audit.questions.rule",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
