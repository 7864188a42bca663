"""What an audit asks: each question plans, runs its attackers, and decides by one rule."""

from bract.audit.questions import epsilon, membership, reconstruction
from bract.audit.questions.base import QUESTIONS, Decision, Need, Question
from bract.audit.results import Batch

__all__ = [
    "QUESTIONS",
    "Batch",
    "Decision",
    "Need",
    "Question",
    "epsilon",
    "membership",
    "reconstruction",
]
