"""All words of the page of a whole run, in one file that a change of words changes with it."""

from __future__ import annotations

import re
from typing import Any

from golden import check_words

import bract
from bract.report import write_report


def test_the_words_of_the_page_are_those_of_the_golden_file(make_run: Any, parse: Any) -> None:
    text = parse(write_report(make_run()).read_text()).text
    text = re.sub(r"written [\d-]+ [\d:]+ UTC", "written", text)
    text = text.replace(f"by bract {bract.__version__}", "by bract VERSION")
    # The configuration is shown as it is: its keys are no words of the page.
    text = re.sub(r"SHA-256 [0-9a-f]{64}", "SHA-256", text)
    text = re.sub(r"Configuration name: .* (?=What the words mean)", "Configuration ", text)
    check_words("pages", "a whole run", text)
