"""The one-page leakage report."""

from bract.report.outcome import QuestionOutcome, RunOutcome, run_outcome
from bract.report.page.render import write_report

__all__ = ["QuestionOutcome", "RunOutcome", "run_outcome", "write_report"]
