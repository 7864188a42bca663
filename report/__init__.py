"""The one-page leakage report."""

from bract.report.page.render import write_report

__all__ = ["write_report"]
