"""The one-page leakage report."""

from bract.report.facts import gather
from bract.report.page.render import write_report
from bract.schema import REPORT_SCHEMA

__all__ = ["REPORT_SCHEMA", "gather", "write_report"]
