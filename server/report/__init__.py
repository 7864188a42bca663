"""The one-page leakage report."""

from bract.server.report.facts import REPORT_SCHEMA, gather
from bract.server.report.render import write_report

__all__ = ["REPORT_SCHEMA", "gather", "write_report"]
