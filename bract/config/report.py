"""The section ``report``: what the pages say beside what was found."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bract.config.work import Section

Months = Annotated[int, Field(ge=1, le=120)]


class ReportConfig(Section):
    """Settings of a run's pages.

    Attributes
    ----------
    examine_again_months
        Months from the oldest result of an audit to the day by which the run is to be examined
        again. A change of what the page rests on makes it stale earlier.
    """

    examine_again_months: Months = 12
